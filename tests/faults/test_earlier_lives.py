"""Parties of an earlier life that speak up again: they are refused, and change nothing."""

from __future__ import annotations

import gc
import os
import signal
from functools import partial
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from megadask.scheduling.wire import LOADER_HOST
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import (
    WAIT_S,
    ask_supervisor,
    disturbed,
    holder,
    owners,
    record_of,
)
from tests.megadask.helpers.ranks import Ranks, connect, run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, take

pytestmark = pytest.mark.timeout(150)


def refused(client: Client, name: str, role: str, incarnation: str, **now: Any) -> None:
    """What a planner or a constructor asks for is refused."""
    asked = {
        "planner": {
            "pull": {"next_step": now["step"], "wait_s": 1.0},
            "commit": {"step": now["step"], "num_events": 0, "plan": b"a plan", "unread": {}},
        },
        "constructor": {"plans": {"from_step": 0, "newer_than": -1, "wait_s": 1.0}},
    }
    for call, arguments in asked[role].items():
        with pytest.raises(md.errors.StaleError):
            ask_supervisor(
                client,
                name,
                call,
                incarnation=incarnation,
                generation=now["generation"],
                **arguments,
            )


def test_earlier_lives_are_ignored(
    cluster: LocalCluster,
    client: Client,
    name: str,
    pids: dict[str, int],
    whole: list[list[Seen]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the old planner, constructor and loaders say after their successors came is refused."""
    unseen: list[Any] = []  # what asyncio tells of errors that nobody has asked for
    loop = cluster.loop.asyncio_loop
    monkeypatch.setattr(loop, "_exception_handler", lambda _, context: unseen.append(context))
    with md.serve(make(), client, name=name) as service:
        record = record_of(cluster, name)
        loaders = [connect(service, rank) for rank in range(2)]
        begun = Ranks([partial(take, loader, 3) for loader in loaders]).results()
        # Then the planner waits in a call, which is answered when nobody is there to listen.
        assert wait_until(lambda: record.next_step - record.low[0] > md.Limits().lead_steps, WAIT_S)
        before = owners(record)
        victims = {before["planner"].address, before["constructor 0"].address}
        assert len(victims) == 2
        for worker in victims:
            os.kill(pids[worker], signal.SIGKILL)
        lost = {one: own for one, own in before.items() if own.address in victims}
        assert any(one.startswith("loader") for one in lost)
        assert wait_until(
            lambda: all(owners(record)[one] != owner for one, owner in lost.items()), WAIT_S
        )
        now = {"generation": record.generation, "step": record.next_step}
        for one, owner in lost.items():
            role = one.split()[0]
            if role == "loader":
                for worker in client.nthreads():
                    with pytest.raises(md.errors.StaleError):
                        client.sync(
                            getattr(client.rpc(worker), LOADER_HOST),
                            call="status",
                            incarnation=owner.incarnation,
                        )
            else:
                refused(client, name, role, owner.incarnation, **now)
        ask_supervisor(
            client, name, "fail", incarnation=before["planner"].incarnation, error=b"nonsense"
        )
        rest = Ranks([partial(drain, loader) for loader in loaders]).results()
        assert [[*a, *b] for a, b in zip(begun, rest, strict=True)] == whole
        for loader in loaders:
            loader.close()
        assert service.audit()["ok"]
    gc.collect()
    assert unseen == []


@pytest.mark.parametrize("role", ["planner", "constructor"])
def test_a_worker_that_was_only_asleep(name: str, whole: list[list[Seen]], role: str) -> None:
    """Dask gives a stopped worker up; it wakes when its roles have moved, and is ignored."""
    with (
        make_cluster(processes=True) as cluster,  # of its own: Dask does not take it back
        Client(cluster, set_as_default=False) as client,
        md.serve(make(), client, name=name) as service,
    ):
        asleep = holder(service, role)
        pid = client.run(os.getpid)[asleep]

        def stop() -> None:
            os.kill(pid, signal.SIGSTOP)
            cluster.sync(cluster.scheduler.remove_worker, asleep, stimulus_id="test", close=False)
            assert wait_until(lambda: holder(service, role) != asleep, WAIT_S)

        try:
            ranks = disturbed(service, 5, stop)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert ranks == whole
        # What it asks for and answers now is of an earlier life.
        assert run(service, drain) == [[], []]
        assert service.audit()["ok"]
        assert holder(service, role) != asleep
