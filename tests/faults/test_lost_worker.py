"""Processes that are killed in the middle of a run: every sample once, in the steps as planned."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from megadask.scheduling.record import Owner, RunRecord
from megadask.scheduling.wire import LOADER_HOST, SUPERVISOR
from megadask.service import Service
from tests.conftest import make_cluster, wait_until
from tests.megadask.helpers.data import corpus, pipeline
from tests.megadask.helpers.processes import module
from tests.megadask.helpers.ranks import connect, run, start
from tests.megadask.helpers.seen import (
    Seen,
    drain,
    every_token,
    see,
    spans_by_step,
    take,
    tokens_delivered,
)

pytestmark = pytest.mark.timeout(90)

NUM_WORKERS = 3
WAIT_S = 30.0
DATA = corpus({"a": 60, "b": 60, "c": 60}, longest=300)
ROWS = [row for rows in DATA.values() for row in rows]
#: So that the planner has most of its work still to do when something is killed.
LIMITS = md.Limits(lead_steps=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three workers; nannies start a new one for each that is killed."""
    with make_cluster(processes=True, n_workers=NUM_WORKERS) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as made:
        made.wait_for_workers(NUM_WORKERS, timeout=WAIT_S)
        yield made


@pytest.fixture(scope="module")
def whole(cluster: LocalCluster) -> dict[int, Any]:
    """Spans by step of a run that nothing disturbs."""
    with (
        Client(cluster, set_as_default=False) as client,
        md.serve(pipeline(DATA), client, name="whole", limits=LIMITS) as service,
    ):
        return spans_by_step(run(service, drain))


def record_of(cluster: LocalCluster, name: str) -> RunRecord:
    record: RunRecord = cluster.scheduler.plugins["megadask-supervisor"]._runs[name].record
    return record


def owners(record: RunRecord) -> dict[str, Owner]:
    """Return who holds what now, by role."""
    assert record.planner is not None
    loaders = {f"loader {source}": owner for (source, _), owner in record.loaders.items()}
    constructors = {f"constructor {n}": o for n, o in enumerate(record.constructors.values())}
    return {**loaders, **constructors, "planner": record.planner}


def holder(service: Service, role: str) -> str:
    """Return the worker that holds a role, by what the service says."""
    stats = service.stats()
    actors = {stats["planner"], *(one["worker"] for one in stats["constructors"])}
    if role == "planner":
        return str(stats["planner"])
    if role == "constructor":
        return str(stats["constructors"][0]["worker"])
    alone = [one["worker"] for one in stats["loaders"] if one["worker"] not in actors]
    assert alone, "no worker holds a loader alone"
    return str(alone[0])


def kill_worker(client: Client, address: str) -> None:
    """Kill a worker's process, and wait until the scheduler knows."""
    pid = client.run(os.getpid, workers=[address])[address]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: address not in client.scheduler_info(n_workers=-1)["workers"], WAIT_S)


def disturbed(service: Service, disturb: Callable[[], None]) -> list[list[Seen]]:
    """Disturb a run when rank 0 has taken five batches and rank 1 three; return what both saw."""
    reached = [threading.Event(), threading.Event()]
    go_on = threading.Event()

    def body(loader: md.Loader) -> list[Seen]:
        seen = take(loader, 5 if loader.rank == 0 else 3)
        reached[loader.rank].set()
        assert go_on.wait(WAIT_S)
        return [*seen, *drain(loader)]

    ranks = start(service, body)
    try:
        for event in reached:
            assert event.wait(WAIT_S)
        disturb()
    finally:
        go_on.set()
    results: list[list[Seen]] = ranks.results()
    return results


async def loader_status(incarnation: str, dask_worker: Any) -> Any:
    return await dask_worker.handlers[LOADER_HOST](call="status", incarnation=incarnation)


def ask_supervisor(client: Client, name: str, call: str, **arguments: Any) -> Any:
    handler = getattr(client.scheduler, SUPERVISOR)
    return client.sync(handler, call=call, run=name, **arguments, callback_timeout=WAIT_S)


def assert_refused(client: Client, name: str, role: str, before: Owner, now: Owner) -> None:
    """The life that was lost has no say any more; the present one answers."""
    if role.startswith("loader"):
        with pytest.raises(md.errors.StaleError):
            client.run(loader_status, before.incarnation, workers=[now.address])
        answers = client.run(loader_status, now.incarnation, workers=[now.address])
        assert answers[now.address]["source"] == role.split()[1]
        return
    call: dict[str, Any] = {"call": "pull", "generation": 1, "next_step": 0, "wait_s": 0.1}
    if role.startswith("constructor"):
        call = {"call": "plans", "generation": 1, "from_step": 0, "newer_than": -1, "wait_s": 0.1}
    with pytest.raises(md.errors.StaleError):
        ask_supervisor(client, name, **call, incarnation=before.incarnation)
    assert ask_supervisor(client, name, **call, incarnation=now.incarnation)["status"] in (
        "plan",
        "plans",
        "wait",
    )


@pytest.mark.parametrize("role", ["loader", "constructor", "planner"])
def test_a_lost_worker_changes_nothing(
    cluster: LocalCluster, client: Client, name: str, whole: dict[int, Any], role: str
) -> None:
    with md.serve(pipeline(DATA), client, name=name, limits=LIMITS) as service:
        record = record_of(cluster, name)
        before = owners(record)
        victim = holder(service, role)
        lost = [one for one, owner in before.items() if owner.address == victim]
        assert any(one.startswith(role) for one in lost)
        ranks = disturbed(service, lambda: kill_worker(client, victim))
        audit = service.audit()
        now = owners(record)
        for one in lost:
            assert now[one].incarnation != before[one].incarnation
            assert now[one].address != victim
            assert_refused(client, name, one, before[one], now[one])
        kept = [one for one in before if one not in lost]
        assert [now[one] for one in kept] == [before[one] for one in kept]
    assert spans_by_step(ranks) == whole
    assert tokens_delivered(ranks) == every_token(ROWS)
    assert audit["ok"], audit["total"]


def test_a_lost_planner_cannot_commit(cluster: LocalCluster, client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name, limits=LIMITS) as service:
        record = record_of(cluster, name)
        before = owners(record)["planner"]
        kill_worker(client, before.address)
        assert wait_until(lambda: owners(record)["planner"] != before, WAIT_S)
        step = {"generation": record.generation, "step": record.next_step, "num_events": 0}
        with pytest.raises(md.errors.StaleError):
            ask_supervisor(
                client,
                name,
                "commit",
                incarnation=before.incarnation,
                plan=b"",
                unread={},
                **step,
            )
        assert tokens_delivered(run(service, drain)) == every_token(ROWS)


def test_a_new_trainer_goes_on_behind_what_was_acknowledged(
    client: Client, name: str, whole: dict[int, Any]
) -> None:
    with md.serve(pipeline(DATA), client, name=name, limits=LIMITS) as service:
        with (
            connect(service, 1) as other,
            module("trainer", service.address, name, "0", "gated") as trainer,
        ):
            mine: list[tuple[int, int]] = []
            for number in range(3):
                if number:
                    trainer.say()
                _, step, microbatch = trainer.wait_for("batch").split()
                mine.append((int(step), int(microbatch)))
            # The third is with the trainer, and was never acknowledged.
            due = mine[2]
            assert wait_until(lambda: tuple(service.stats()["watermarks"]["0"]) == due, WAIT_S)
            trainer.kill()
            assert wait_until(lambda: "0" not in service.stats()["trainers"], WAIT_S)
            theirs = take(other, 2)
            ranks = start(service, drain, ranks=[0])
            theirs += drain(other)
            [rest] = ranks.results()
        audit = service.audit()
    assert (rest[0].step, rest[0].microbatch) == mine[2]
    got = spans_by_step([rest, theirs])
    assert {step: got[step] for step in got if step > mine[2][0]} == {
        step: spans for step, spans in whole.items() if step > mine[2][0]
    }
    first = sum(len(spans) for step, spans in whole.items() if step <= mine[2][0])
    assert sum(len(spans) for step, spans in got.items() if step <= mine[2][0]) < first
    assert audit["ok"], audit["total"]


def test_trainers_of_a_killed_driver_are_told(cluster: LocalCluster, name: str) -> None:
    with module("driver", cluster.scheduler_address, name) as driver:
        driver.wait_for("serving")
        with md.connect(cluster.scheduler_address, name, rank=0, timeout=WAIT_S) as loader:
            batches = iter(loader)
            see(next(batches))
            driver.kill()
            # Rank 1 reads nothing, so this ends by the service or by its deadline.
            with pytest.raises(md.errors.ClosedError, match="driver"):
                list(map(see, batches))
