"""Workers that die: the run goes on, with the same batches."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.conftest import wait_until
from tests.faults.helpers import (
    WAIT_S,
    assert_nothing_is_left_on,
    disturbed,
    holder,
    owners,
    record_of,
)
from tests.megadask.helpers.ranks import Ranks, connect, run
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import Seen, drain, take

pytestmark = pytest.mark.timeout(150)

ROWS = [row for rows in DATA.values() for row in rows]


@pytest.mark.parametrize("role", ["planner", "loader", "constructor"])
@pytest.mark.parametrize("at", [0, 9])
def test_a_worker_that_is_killed(
    cluster: LocalCluster,
    client: Client,
    name: str,
    pids: dict[str, int],
    whole: list[list[Seen]],
    role: str,
    at: int,
) -> None:
    """What it held moves and begins a new life; the rest stays where it is."""
    # So that the planner has most of its work still to do.
    limits = md.Limits(lead_steps=1)
    with md.serve(make(loaders=2), client, name=name, limits=limits) as service:
        record = record_of(cluster, name)
        before, lost = owners(record), holder(service, role)
        ranks = disturbed(service, at, lambda: os.kill(pids[lost], signal.SIGKILL))
        now, audit = owners(record), service.audit()
    assert ranks == whole
    assert audit["ok"]
    assert audit["total"]["samples"]["delivered"] == 2 * len(ROWS)
    assert audit["total"]["samples"]["repeated"] == audit["total"]["samples"]["lost"] == 0
    moved = [one for one, owner in before.items() if owner.address == lost]
    assert any(one.startswith(role) for one in moved)
    for one in moved:
        assert now[one].address != lost
        assert now[one].incarnation != before[one].incarnation
    kept = [one for one in before if one not in moved]
    assert [now[one] for one in kept] == [before[one] for one in kept]


def test_all_workers_are_killed_at_once(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    def kill_all() -> None:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)

    with md.serve(make(loaders=2), client, name=name) as service:
        assert disturbed(service, 6, kill_all) == whole
        assert service.audit()["ok"]


def test_workers_that_die_one_after_the_other(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    """The next one as soon as it holds what the first one held."""

    def kill_both() -> None:
        first = holder(service, "constructor")
        os.kill(pids[first], signal.SIGKILL)
        assert wait_until(lambda: holder(service, "constructor") != first, WAIT_S)
        second = holder(service, "constructor")
        os.kill(client.run(os.getpid, workers=[second])[second], signal.SIGKILL)

    with md.serve(make(), client, name=name) as service:
        assert disturbed(service, 5, kill_both) == whole
        assert service.audit()["ok"]


def test_a_worker_that_dies_between_steps_of_an_idle_service(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    """Nobody is iterating: trainers that come afterwards see nothing of it."""
    with md.serve(make(), client, name=name) as service:
        loaders = [connect(service, rank) for rank in range(2)]
        begun = Ranks([partial(take, loader, 4) for loader in loaders]).results()
        lost = holder(service, "constructor")
        os.kill(pids[lost], signal.SIGKILL)
        assert wait_until(lambda: holder(service, "constructor") != lost, WAIT_S)
        rest = Ranks([partial(drain, loader) for loader in loaders]).results()
        assert [[*a, *b] for a, b in zip(begun, rest, strict=True)] == whole
        for loader in loaders:
            loader.close()
        assert service.audit()["ok"]


def test_a_state_is_loaded_after_a_worker_died(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    with md.serve(make(), client, name=name) as service:
        loaders = [connect(service, rank) for rank in range(2)]

        def begin(loader: md.Loader) -> Any:
            take(loader, 5)
            state = loader.state_dict()
            take(loader, 5)
            return state

        states = Ranks([partial(begin, loader) for loader in loaders]).results()
        os.kill(pids[holder(service, "planner")], signal.SIGKILL)

        def go_back(loader: md.Loader) -> list[Seen]:
            loader.load_state_dict(states[0])
            return drain(loader)

        rest = Ranks([partial(go_back, loader) for loader in loaders]).results()
        assert rest == [seen[5:] for seen in whole]
        for loader in loaders:
            loader.close()
        assert service.audit()["ok"]


def test_a_worker_that_is_killed_when_the_service_closes(
    client: Client, name: str, pids: dict[str, int]
) -> None:
    service = md.serve(make(), client, name=name)
    run(service, lambda loader: take(loader, 2))
    lost = holder(service, "constructor")
    os.kill(pids[lost], signal.SIGKILL)
    Ranks([service.close]).results(20)
    assert wait_until(lambda: lost not in client.nthreads(), WAIT_S)
    assert_nothing_is_left_on(client)
