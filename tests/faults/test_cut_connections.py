"""TCP connections that are cut while both of their ends live."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.conftest import make_cluster
from tests.faults.helpers import WAIT_S, disturbed, holder, owners, record_of
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, see

pytestmark = pytest.mark.timeout(150)


def cut(comms: Iterable[Any]) -> int:
    """Shut connections down as a network would; return how many."""
    sockets = [comm.stream.socket for comm in list(comms) if not comm.closed()]
    for one in sockets:
        one.shutdown(socket.SHUT_RDWR)
    return len(sockets)


def pooled(rpc: Any) -> list[Any]:
    """Return the connections that a pool has made, idle or not."""
    return [comm for pool in (rpc.available, rpc.occupied) for own in pool.values() for comm in own]


def cut_calls(dask_worker: Any) -> int:
    return cut(pooled(dask_worker.rpc))


def cut_stream(dask_worker: Any) -> int:
    return cut([dask_worker.batched_stream.comm])


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Three workers; who is cut off is gone, as Dask ends it and its nanny."""
    with make_cluster(processes=False, n_workers=3) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as made:
        yield made


@pytest.mark.parametrize("role", ["planner", "loader", "constructor"])
def test_calls_of_a_worker_are_cut_off(
    cluster: LocalCluster,
    client: Client,
    name: str,
    whole: list[list[Seen]],
    role: str,
) -> None:
    """They are made again; nothing moves."""
    with md.serve(make(loaders=2), client, name=name, limits=md.Limits(lead_steps=1)) as service:
        record, worker = record_of(cluster, name), holder(service, role)
        before = owners(record)

        def cut_them() -> None:
            [count] = client.run(cut_calls, workers=[worker]).values()
            assert count > 0

        assert disturbed(service, 4, cut_them) == whole
        assert owners(record) == before
        assert service.audit()["ok"]


@pytest.mark.parametrize("role", ["planner", "loader", "constructor"])
def test_a_worker_is_cut_off_from_the_scheduler(
    cluster: LocalCluster,
    client: Client,
    name: str,
    whole: list[list[Seen]],
    role: str,
) -> None:
    """Dask takes it for lost; what it held moves."""
    with md.serve(make(loaders=2), client, name=name, limits=md.Limits(lead_steps=1)) as service:
        record, worker = record_of(cluster, name), holder(service, role)
        before = owners(record)

        def cut_it() -> None:
            assert client.run(cut_stream, workers=[worker]) == {worker: 1}

        assert disturbed(service, 4, cut_it) == whole
        now = owners(record)
        assert all(now[one] != own for one, own in before.items() if own.address == worker)
        assert service.audit()["ok"]


@pytest.mark.parametrize("stream", [False, True], ids=["calls", "stream"])
def test_a_trainer_is_cut_off(
    client: Client, name: str, whole: list[list[Seen]], stream: bool
) -> None:
    """It connects again by itself, and goes on where it was."""
    with md.serve(make(loaders=2), client, name=name, limits=md.Limits(lead_steps=1)) as service:

        def body(loader: md.Loader) -> list[Seen]:
            own = loader._link._desk.client
            seen = []
            for number, batch in enumerate(loader):
                if loader.rank == 0 and number == 4:
                    assert cut([own.scheduler_comm.comm] if stream else pooled(own.rpc)) > 0
                seen.append(see(batch))
            return seen

        assert run(service, body, seconds=2 * WAIT_S, timeout=WAIT_S) == whole
        assert service.audit()["ok"]


def test_a_driver_is_cut_off(client: Client, name: str, whole: list[list[Seen]]) -> None:
    """Its service lives on."""
    with md.serve(make(loaders=2), client, name=name, limits=md.Limits(lead_steps=1)) as service:

        def cut_it() -> None:
            assert cut([client.scheduler_comm.comm, *pooled(client.rpc)]) > 1

        assert disturbed(service, 4, cut_it) == whole
        assert service.audit()["ok"]
