"""Laws of what the journal keeps: replayed, it is the record, whatever happened to the run."""

from __future__ import annotations

import asyncio
import errno
import json
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.draw import DrawRules
from megadask.planner.errors import ConfigError
from megadask.planner.plan import Plan
from megadask.planner.state import MixtureEvent, PlannerState
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling import checkpoint as checkpoint_module
from megadask.scheduling.checkpoint import Checkpoint
from megadask.scheduling.errors import JournalError, StaleError
from megadask.scheduling.journal import Entry, Journal
from megadask.scheduling.kept import Kept, last, replay
from megadask.scheduling.life import Owner
from megadask.scheduling.point import Point
from megadask.scheduling.retention import Retention
from megadask.scheduling.run import Run, new_run
from tests.fakes import Driver, MemorySource, initial_state, ok
from tests.strategies import laws

BATCHING = Packed(seq_len=4, global_batch=8)
RULES = DrawRules(batching=BATCHING, epochs=None)
SOURCES = [
    MemorySource("a", 0, [ok(4, 3, 4), ok(4)], BATCHING),
    MemorySource("b", 1, [ok(2, 6, 9, 1)], BATCHING),
]
ORIGIN = Point(step=0, state=initial_state(SOURCES).to_json())
PLANNER = Owner("tcp://one", "planner-1")


@pytest.fixture
def path() -> Iterator[str]:
    root = f"/{uuid.uuid4().hex}"
    yield f"memory:/{root}"
    if fsspec.filesystem("memory").exists(root):
        fsspec.filesystem("memory").rm(root, recursive=True)


def header(path: str, origin: Point = ORIGIN, *, resumed: bool = False) -> dict[str, Any]:
    return {
        "topology": ClientPlaceTree(dp=2).to_dict(),
        "axis": "dp",
        "lanes": {source.name: len(source.lanes) for source in SOURCES},
        "origin": origin.to_json(),
        "checkpoint": path,
        "components": {"seed": "0"},
        "resumed": resumed,
        "restart": False,
        "journal_s": 30.0,
    }


class Life:
    """A run with a driver in the place of its planner, and with all states that it came by."""

    def __init__(self, path: str, origin: Point = ORIGIN, *, resumed: bool = False) -> None:
        self.path = path
        self.run = new_run("main", header(path, origin, resumed=resumed), "client")
        assert self.run.checkpoint is not None
        self.run.checkpoint._full_every_steps = 3
        self.run.record.planner = PLANNER

    def plan(self) -> Plan:
        record = self.run.record
        state = PlannerState.from_json(record.planner_point.state)
        driver = Driver(SOURCES, RULES, state=state, num_buckets=2)
        for event in record.events:
            driver.state = driver.state.with_event(event)
        return driver.plan()

    async def step(self) -> None:
        await self.run.commit(PLANNER.incarnation, self.plan().to_arrow(), {})

    async def acknowledge(self, low: int, high: int) -> None:
        """Acknowledge whole steps: on rank 0 up to ``low``, on rank 1 up to ``high``."""
        record = self.run.record
        record.acknowledge(record.generation, {0: (low, 0), 1: (high, 0)})
        await self.run.note_low()

    async def event(self, weight: float) -> None:
        await self.run.add_event({"a": weight, "b": 0.5}, self.run.record.next_step)

    @property
    def kept(self) -> Kept:
        found = last(Journal(self.path).head())
        assert found is not None
        return found

    def check(self) -> None:
        """Compare what the journal holds with the record."""
        record, kept = self.run.record, self.kept
        expected = Kept.of(record, self.run.header["components"], self.run.mixtures)
        for name in ("run", "components", "generation", "origin", "step", "state", "events"):
            assert getattr(kept, name) == getattr(expected, name), name
        assert kept.draw_digest == record.draw_digest
        assert kept.assignment_digest == record.assignment_digest
        assert kept.low[0] == record.low[0]
        *_, again = replay(Journal(self.path).read(record.generation))
        assert again.kept() == kept, "from the first object that is kept on it is not the same"


@laws
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step"] * 6 + ["acknowledge"] * 4 + ["event", "back", "anew"]),
            st.floats(0.1, 1.0),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_the_journal_replays_to_the_record(ops: list[tuple[str, float]]) -> None:
    path = f"memory://{uuid.uuid4().hex}"

    async def live() -> None:
        life, points = Life(path), [ORIGIN]
        for op, amount in ops:
            record = life.run.record
            if op == "step":
                await life.step()
                points.append(record.planner_point)
            elif op == "acknowledge":
                low = record.low[0]
                await life.acknowledge(low + round(amount * (record.next_step - low)), low + 1)
            elif op == "event":
                await life.event(amount)
            elif op == "back":
                await life.run.open_generation(points[int(amount * (len(points) - 1))])
            else:
                life = Life(path, points[int(amount * (len(points) - 1))], resumed=True)
            life.check()

    asyncio.run(live())
    fsspec.filesystem("memory").rm(path.removeprefix("memory:/"), recursive=True)


def test_full_objects_come_now_and_then_and_old_ones_go(path: str) -> None:
    async def live() -> Life:
        life = Life(path)
        for step in range(30):
            await life.step()
            await life.acknowledge(step + 1, step + 1)
        return life

    life = asyncio.run(live())
    entries = Journal(path).read(1)
    fulls = [entry for entry in entries if entry.kind == "full"]
    # The last one is not passed yet, two others are.
    assert [Kept.from_bytes(entry.body).step for entry in fulls] == [24, 27, 30]
    assert entries[0] is fulls[0]
    assert {kept.step for kept in replay(entries)} == set(range(24, 31))
    life.check()


def test_what_was_not_acknowledged_is_never_pruned(path: str) -> None:
    async def live() -> None:
        life = Life(path)
        for _ in range(30):
            await life.step()
        assert {kept.step for kept in replay(Journal(path).read(1))} == set(range(31))
        await life.acknowledge(8, 30)
        for _ in range(3):
            await life.step()
        assert min(kept.step for kept in replay(Journal(path).read(1))) == 3

    asyncio.run(live())


def test_passes_that_are_short_leave_few_generations(path: str) -> None:
    """A pipeline that restarts opens a generation with every pass."""

    async def live() -> None:
        life = Life(path)
        for _ in range(8):
            await life.step()
            await life.acknowledge(1, 1)
            await life.run.open_generation(ORIGIN)
        assert len(Journal(path).generations()) <= 4
        life.check()

    asyncio.run(live())


def test_a_mixture_outlives_going_forward_and_back(path: str) -> None:
    """Set at step 2; the run then goes on from step 5, and later back to step 1."""

    async def live() -> None:
        life, points = Life(path), [ORIGIN]
        for step in range(6):
            if step == 2:
                await life.event(0.25)
            await life.step()
            points.append(life.run.record.planner_point)
        event = MixtureEvent(step=2, weights={"a": 0.25, "b": 0.5})
        for number in range(2):
            if number:
                life = Life(path, points[5], resumed=True)
            await life.run.open_generation(points[5])
            assert life.run.record.events == []
            await life.run.open_generation(points[1])
            assert life.run.record.events == [event]
        assert Life(path, points[1], resumed=True).run.record.events == [event]

    asyncio.run(live())


def test_what_is_written_is_committed_though_the_planner_is_replaced(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next planner's step would follow itself in the journal."""

    async def live() -> None:
        life = Life(path)
        plan, write = life.plan().to_arrow(), Checkpoint.step

        def replaced(self: Checkpoint, before: str, data: bytes) -> None:
            write(self, before, data)
            life.run.record.planner = Owner("tcp://two", "planner-2")

        monkeypatch.setattr(Checkpoint, "step", replaced)
        await life.run.commit(PLANNER.incarnation, plan, {})
        assert life.run.record.next_step == 1
        life.check()
        with pytest.raises(StaleError):
            life.run.record.check_planner(PLANNER.incarnation)

    asyncio.run(live())


class Store:
    """Fails whenever something is written, for as long as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.failed = asyncio.Event()  # more than once since it began
        self.num_failures = 0
        self.works = True
        self._error = error
        self._put = Journal._put
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(Journal, "_put", lambda *arguments: self._write(*arguments))

    def _write(self, journal: Journal, name: str, data: bytes) -> None:
        if self.works:
            return self._put(journal, name, data)
        self.num_failures += 1
        if self.num_failures > 1:
            self._loop.call_soon_threadsafe(self.failed.set)
        raise self._error


class Unreachable(Exception):
    """Stores have errors of their own."""


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, TimeoutError("slow"), Unreachable("no route")])
@pytest.mark.parametrize("what", ["step", "full", "event", "marks", "begin"])
def test_storage_that_fails_for_a_while_is_waited_for(
    path: str, monkeypatch: pytest.MonkeyPatch, error: Exception, what: str
) -> None:
    """Whatever is written; nothing of it is committed before, and all of it afterwards."""

    async def live() -> None:
        life = Life(path)
        record = life.run.record
        for _ in range(2 if what == "full" else 1):
            await life.step()
        store = Store(monkeypatch, error)
        writes = {
            "step": life.step,
            "full": life.step,  # every third
            "event": lambda: life.event(0.25),
            "marks": lambda: life.acknowledge(1, 1),
            "begin": lambda: life.run.open_generation(ORIGIN),
        }
        store.works = False
        steps, events = record.next_step, list(record.events)
        task = asyncio.create_task(writes[what]())
        async with asyncio.timeout(30):
            await store.failed.wait()
            assert not life.run.over
            if what != "begin":
                assert (record.next_step, record.events) == (steps, events)
            store.works = True
            await task
        assert [one["event"] for one in record.news] == ["journal fails", "journal works again"]
        life.check()
        await life.step()
        life.check()

    asyncio.run(live())


def test_storage_that_fails_for_too_long_ends_the_run(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live() -> Run:
        life = Life(path)
        await life.step()
        store = Store(monkeypatch, FULL)
        store.works = False
        life.run.header = {**life.run.header, "journal_s": 0.3}
        with pytest.raises(JournalError, match=r"No space left.*within 0.3 s"):
            await life.step()
        assert store.num_failures > 1
        assert life.run.record.next_step == 1
        assert last(Journal(path).head()).step == 1  # type: ignore[union-attr]
        return life.run

    run = asyncio.run(live())
    assert run.over
    assert run.error is not None


def test_storage_that_refuses_is_not_asked_again(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live() -> None:
        life = Life(path)
        store = Store(monkeypatch, PermissionError("not yours"))
        store.works = False
        with pytest.raises(JournalError, match="not yours"):
            await life.step()
        assert store.num_failures == 1
        assert life.run.over

    asyncio.run(live())


def test_a_run_that_is_closed_does_not_wait_for_its_storage(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live() -> None:
        life = Life(path)
        store = Store(monkeypatch, FULL)
        store.works = False
        life.run.header = {**life.run.header, "journal_s": 1e6}
        task = asyncio.create_task(life.step())
        async with asyncio.timeout(30):
            await store.failed.wait()
            life.run.close("the driver closed it")
            with pytest.raises(JournalError):
                await task
        assert life.run.closed == "the driver closed it"
        assert life.run.error is None

    asyncio.run(live())


def test_a_run_that_nobody_accounts_for_is_an_error(path: str) -> None:
    async def live() -> Point:
        life = Life(path)
        await life.step()
        life = Life(path)  # nothing was acknowledged
        await life.run.open_generation(ORIGIN)
        await life.step()
        await life.acknowledge(1, 1)
        return life.run.record.planner_point

    point = asyncio.run(live())
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"up to 1.*resume=state"):
            Life(path)
        Life(path, point, resumed=True)  # acknowledges nothing itself


def test_an_object_that_does_not_follow_is_an_error(path: str) -> None:
    asyncio.run(Life(path).step())
    journal = Journal(path)
    entries = journal.head()
    twice = [*entries, entries[-1]]
    with pytest.raises(JournalError, match=r"replayed.*does not follow"):
        list(replay(twice))
    body = json.loads(entries[-1].body)
    del body["draw"]
    with pytest.raises(JournalError, match="replayed"):
        list(replay([entries[0], Entry(1, 1, "step", json.dumps(body).encode())]))


def test_full_objects_are_rare() -> None:
    assert checkpoint_module.FULL_EVERY_STEPS >= 50


# Retention --------------------------------------------------------------------------------------


def test_two_passed_full_objects_are_kept() -> None:
    keeps = Retention()
    keeps.wrote((1, 0), (0, 0), begins=True)
    keeps.acknowledged((0, 0))
    keeps.wrote((1, 10), (3, 0), begins=False)
    keeps.acknowledged((2, 1))
    assert keeps.floor is None
    keeps.acknowledged((3, 0))
    assert keeps.floor == (1, 0)
    keeps.wrote((1, 20), (6, 0), begins=False)
    assert keeps.floor == (1, 0)
    keeps.acknowledged((6, 0))
    assert keeps.floor == (1, 10)


def test_what_a_generation_had_not_passed_is_void() -> None:
    keeps = Retention()
    keeps.wrote((1, 0), (0, 0), begins=True)
    keeps.wrote((1, 10), (3, 0), begins=False)
    keeps.acknowledged((1, 0))
    keeps.wrote((2, 0), (1, 0), begins=True)
    keeps.acknowledged((9, 0))
    assert keeps.floor == (1, 0)
