"""Workers that hang without dying: their roles move, and what they say later is ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import WAIT_S, disturbed, holder, num_actors, owners, record_of
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, see

pytestmark = pytest.mark.timeout(150)

#: Where the machine is so busy that a worker looks hung, its roles move too.
LIMITS = md.Limits(silent_s=3.0, lead_steps=1)


@contextmanager
def awake_afterwards(*pids: int) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def news(service: md.Service, kind: str) -> list[str]:
    return [one["worker"] for one in service.stats()["events"] if one["event"] == kind]


def num_loaders(dask_worker: Any) -> int:
    return len(dask_worker.plugins["megadask-loader-host"]._hosted)


def held(service: md.Service, client: Client, worker: str) -> tuple[int, int]:
    """Return the actors and the loaders that are alive on a worker, whoever knows of them."""
    counts = [client.run(count, workers=[worker])[worker] for count in (num_actors, num_loaders)]
    return counts[0], counts[1]


@pytest.mark.parametrize("role", ["loader", "constructor", "planner", "shadow"])
def test_a_worker_that_hangs_and_wakes(
    cluster: LocalCluster,
    client: Client,
    name: str,
    pids: dict[str, int],
    whole: list[list[Seen]],
    role: str,
) -> None:
    """It is stopped while both ranks train, and continued before they end."""
    made = make(shadows=int(role == "shadow"))
    with md.serve(made, client, name=name, limits=LIMITS) as service:
        record = record_of(cluster, name)
        if role == "shadow":
            asleep = record.shadows["a", (0, 1, 2)][0].address
        else:
            asleep = holder(service, role)
        before = owners(record)

        def body(loader: md.Loader) -> list[Seen]:
            seen = []
            for number, batch in enumerate(loader):
                if loader.rank == 0 and number == 4:
                    os.kill(pids[asleep], signal.SIGSTOP)
                if loader.rank == 0 and number == 10:
                    assert wait_until(lambda: asleep in news(service, "worker silent"), WAIT_S)
                    assert wait_until(lambda: not holds_anything(asleep), WAIT_S)
                    os.kill(pids[asleep], signal.SIGCONT)
                    assert wait_until(lambda: asleep in news(service, "worker awake"), WAIT_S)
                seen.append(see(batch))
            return seen

        def holds_anything(worker: str) -> bool:
            standbys = [one for own in record.shadows.values() for one in own]
            return any(one.address == worker for one in [*owners(record).values(), *standbys])

        with awake_afterwards(pids[asleep]):
            assert run(service, body, seconds=2 * WAIT_S, timeout=WAIT_S) == whole
        now = owners(record)
        assert all(now[one] != own for one, own in before.items() if own.address == asleep)
        # Nothing of its earlier life is left on it; at most shadows that it was given since.
        assert wait_until(lambda: held(service, client, asleep)[0] == 0, WAIT_S)
        standbys = [one for own in record.shadows.values() for one in own]
        assert held(service, client, asleep)[1] == sum(one.address == asleep for one in standbys)
        assert service.audit()["ok"]


def test_the_only_worker_hangs_and_is_used_again(name: str, whole: list[list[Seen]]) -> None:
    """Its roles begin a new life where they were."""
    with (
        make_cluster(processes=True, n_workers=1) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(make(), client, name=name, limits=LIMITS) as service,
    ):
        [(worker, pid)] = client.run(os.getpid).items()
        record = record_of(cluster, name)
        before = owners(record)

        def stop() -> None:
            os.kill(pid, signal.SIGSTOP)
            assert wait_until(lambda: worker in news(service, "worker silent"), WAIT_S)
            os.kill(pid, signal.SIGCONT)

        with awake_afterwards(pid):
            assert disturbed(service, 5, stop) == whole
        # What was built before may have been all that was left to deliver.
        assert wait_until(lambda: not set(before.values()) & set(owners(record).values()), WAIT_S)
        assert {one.address for one in owners(record).values()} == {worker}
        assert wait_until(lambda: held(service, client, worker) == (2, 3), WAIT_S)
        assert service.audit()["ok"]


def test_a_service_starts_beside_a_worker_that_hangs(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    """What cannot be started there is started elsewhere, and the hung one does not delay an end."""
    with md.serve(make(), client, name=f"{name}-first", limits=LIMITS) as first:
        asleep = holder(first, "planner")
        with awake_afterwards(pids[asleep]):
            os.kill(pids[asleep], signal.SIGSTOP)
            assert wait_until(lambda: asleep in news(first, "worker silent"), WAIT_S)
            assert run(first, drain, seconds=WAIT_S, timeout=WAIT_S) == whole
            assert first.audit()["ok"]
            first.close()
    assert wait_until(lambda: not sum(held(first, client, asleep)), WAIT_S)
