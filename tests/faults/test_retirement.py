"""Workers that are retired, and those that come in their place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import WAIT_S, disturbed, num_actors, owners, record_of
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, take

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Two workers, which come and go."""
    with make_cluster(processes=False) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as made:
        yield made


def holders(service: md.Service) -> set[str]:
    stats = service.stats()
    parts = [*stats["loaders"], *stats["shadows"], *stats["constructors"]]
    return {stats["planner"], *(part["worker"] for part in parts)}


@pytest.mark.parametrize("shadows", [0, 1])
def test_all_workers_are_replaced_one_by_one(
    cluster: LocalCluster, client: Client, name: str, whole: list[list[Seen]], shadows: int
) -> None:
    """Both ranks train meanwhile, and see nothing of it."""
    old = set(client.nthreads())
    with md.serve(make(loaders=2, shadows=shadows), client, name=name) as service:

        def replace() -> None:
            cluster.scale(4)
            client.wait_for_workers(4, timeout=WAIT_S)
            for worker in sorted(old):
                assert service.retire(worker) == worker
                assert worker not in holders(service)
                assert client.run(num_actors, workers=[worker]) == {worker: 0}
                client.retire_workers([worker])
                assert worker not in client.nthreads()

        assert disturbed(service, 5, replace) == whole
        assert not holders(service) & old
        audit = service.audit()
        assert audit["ok"]
        assert audit["total"]["samples"]["repeated"] == 0


def test_a_retired_worker_gets_nothing_new_and_its_reads_are_not_lost(
    cluster: LocalCluster, client: Client, name: str, whole: list[list[Seen]]
) -> None:
    with (
        md.serve(make(), client, name=name) as service,
        md.serve({"other": make()}, client, name=f"{name}-other") as other,
    ):
        first, second = sorted(client.nthreads())
        service.retire(first)  # those of all services
        assert holders(service) == {second}
        assert {one["worker"] for one in other.stats("other")["loaders"]} == {second}
        with md.serve(make(), client, name=f"{name}-later") as later:
            assert holders(later) == {second}
        assert run(service, drain) == whole


def test_a_worker_is_retired_by_its_name(cluster: LocalCluster, client: Client, name: str) -> None:
    with md.serve(make(), client, name=name) as service:
        address = cluster.workers[0].address
        assert service.retire(0) == address
        assert address not in holders(service)


def test_the_last_worker_is_not_retired(
    cluster: LocalCluster, client: Client, name: str, whole: list[list[Seen]]
) -> None:
    first, second = sorted(client.nthreads())
    with md.serve(make(), client, name=name) as service:
        service.retire(first)
        before = owners(record_of(cluster, name))
        with pytest.raises(md.errors.ServiceError, match="no other worker"):
            service.retire(second)
        with pytest.raises(md.errors.ServiceError, match="no such worker"):
            service.retire("tcp://127.0.0.1:1")
        assert owners(record_of(cluster, name)) == before
        assert run(service, drain) == whole


def test_adaptive_scaling_closes_idle_workers_only(
    cluster: LocalCluster, client: Client, name: str, whole: list[list[Seen]]
) -> None:
    with md.serve(make(), client, name=name) as service:
        run(service, lambda loader: take(loader, 3))
        held = holders(service)
        cluster.scale(4)
        client.wait_for_workers(4, timeout=WAIT_S)
        cluster.adapt(minimum=0, maximum=4, interval="50ms", wait_count=1)
        assert wait_until(lambda: set(client.nthreads()) == held, WAIT_S)
        assert [see for rank in run(service, drain) for see in rank] == [
            see for rank in whole for see in rank[3:]
        ]
        assert set(client.nthreads()) == held
    assert wait_until(lambda: not client.nthreads(), WAIT_S)
