"""Laws of the audit: what is proven delivered, repeated or lost, from any state on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.draw import DrawRules
from megadask.planner.ids import Verdict
from megadask.planner.ledger import COUNTS, Ledger, unread_records
from megadask.planner.metadata import Metadata, concat
from megadask.planner.plan import Plan
from megadask.planner.runs import Runs
from megadask.planner.state import LaneCursor, PlannerState, SourcesIn, SourceState, with_waits
from tests.fakes import Driver, MemorySource, Record, ok, restored, span_table, without
from tests.strategies import World, chunks, laws, worlds

# Runs -----------------------------------------------------------------------------------------

intervals = st.tuples(st.integers(0, 30), st.integers(0, 30))


@laws
@given(st.lists(st.tuples(st.booleans(), intervals), max_size=20), st.integers(0, 35), intervals)
def test_runs_are_a_set_of_integers(
    changes: list[tuple[bool, tuple[int, int]]], end: int, part: tuple[int, int]
) -> None:
    runs, model = Runs(), set[int]()
    for adds, (start, stop) in changes:
        if adds:
            assert runs.add(start, stop) == len(model & set(range(start, stop)))
            model |= set(range(start, stop))
        else:
            runs.remove(start, stop)
            model -= set(range(start, stop))
        assert len(runs) == len(model)
        assert {k for k in range(40) if k in runs} == model
        assert runs.overlaps(*part) == bool(model & set(range(*part)))
        assert runs.missing_below(end) == sorted(set(range(end)) - model)
        assert runs.covers(end) == (set(range(end)) <= model)


def test_consecutive_integers_take_no_more_room() -> None:
    runs = Runs()
    for number in [*range(0, 100, 2), *range(1, 100, 2)]:
        runs.add(number, number + 1)
    assert runs._starts == [0]
    assert runs._stops == [100]


# Whole runs -----------------------------------------------------------------------------------


class Audited:
    """A ledger that follows plans, each delivered when the next one has been entered."""

    def __init__(self, state: PlannerState) -> None:
        self.ledger = Ledger(state)
        self.pending: list[Metadata] = []

    def plan(self, plan: Plan) -> None:
        fresh_N = plan.bucket_N >= 0
        self.ledger.plan(plan.table, plan.passed, fresh_N, SourcesIn(plan.state))
        self.pending.append(plan.table.take(fresh_N))

    def deliver(self) -> None:
        table = self.pending.pop(0)
        self.ledger.deliver(table, np.arange(table.num_rows))

    def follow(self, plan: Plan) -> None:
        self.plan(plan)
        if len(self.pending) > 1:
            self.deliver()

    def report(self) -> dict[str, Any]:
        return self.ledger.report(self.pending)


def started(world: World, chunk: object, steps: int) -> Driver:
    """Return a driver that goes on from a state saved after so many steps."""
    driver = world.driver(chunk=chunk)
    for _ in range(steps):
        driver.draw()
    return world.driver(chunk=chunk, state=restored(driver.state))


@laws
@given(worlds(), chunks, st.integers(0, 5))
def test_a_clean_run_is_clean_at_every_moment_from_any_state(
    world: World, chunk: object, steps: int
) -> None:
    driver = started(world, chunk, steps)
    audited = Audited(driver.state)
    tables, passed = [], []
    for plan in driver.plans():
        audited.follow(plan)
        tables.append(plan.table)
        passed.append(plan.passed)
        report = audited.report()
        assert report["ok"], report
        assert report["total"]["samples"]["lost"] == 0
    while audited.pending:
        audited.deliver()
        assert audited.report()["ok"]
    table, gone = concat(tables), concat(passed)
    for source in world.sources:
        counts = audited.report()["sources"][source.name]
        mine, bad = (t.take(t["source"] == source.index) for t in (table, gone))
        expected = {
            "samples": int((mine["start"] == 0).sum()),
            "spans": mine.num_rows,
            "tokens": int(mine["tokens"].sum()),
        }
        for unit, count in expected.items():
            assert counts[unit]["planned"] == counts[unit]["delivered"] == count
            assert counts[unit]["repeated"] == 0
        num_filtered = int((bad["verdict"] == Verdict.FILTERED).sum())
        assert counts["samples"]["filtered"] == num_filtered
        assert counts["samples"]["skipped"] == bad.num_rows - num_filtered
    total = audited.report()["total"]["spans"]
    assert total["delivered"] == table.num_rows


@laws
@given(worlds(), chunks, st.integers(0, 3), st.data())
def test_a_span_that_a_plan_left_out_is_lost(
    world: World, chunk: object, steps: int, data: st.DataObject
) -> None:
    driver = started(world, chunk, steps)
    audited = Audited(driver.state)
    plans = list(driver.plans())
    full = [number for number, plan in enumerate(plans) if plan.table.num_rows]
    if not full:
        return
    victim = data.draw(st.sampled_from(full))
    row = data.draw(st.integers(0, plans[victim].table.num_rows - 1))
    for number, plan in enumerate(plans):
        audited.follow(without(plan, np.array([row])) if number == victim else plan)
    while audited.pending:
        audited.deliver()
    report = audited.report()
    assert not report["ok"]
    assert report["total"]["samples"]["lost"] == 1
    lost = world.sources[int(plans[victim].table["source"][row])].name
    assert report["sources"][lost]["samples"]["lost"] == 1


@laws
@given(worlds(), chunks, st.integers(0, 3), st.integers(0, 3), st.data())
def test_a_span_that_comes_twice_is_repeated(
    world: World, chunk: object, steps: int, later: int, data: st.DataObject
) -> None:
    """However much later: also in an epoch that was delivered in full and forgotten."""
    driver = started(world, chunk, steps)
    audited = Audited(driver.state)
    plan = driver.plan()
    if plan.end:
        return
    audited.plan(plan)
    audited.deliver()
    for _, other in zip(range(later), driver.plans(), strict=False):
        audited.plan(other)
        audited.deliver()
    row = data.draw(st.integers(0, plan.table.num_rows - 1))
    audited.ledger.deliver(plan.table, np.array([row]))
    report = audited.report()
    assert not report["ok"]
    assert report["total"]["spans"]["repeated"] == 1
    assert report["total"]["tokens"]["repeated"] == plan.table["tokens"][row]
    assert report["total"]["samples"]["repeated"] == int(plan.table["start"][row] == 0)
    assert report["total"]["samples"]["lost"] == 0


def test_the_ledger_does_not_grow_with_epochs() -> None:
    batching = Packed(seq_len=4, global_batch=1)
    sources = [MemorySource("a", 0, [ok(4, 3), [Record(0, Verdict.FILTERED)], ok(2)], batching)]
    audited = Audited(Driver(sources, DrawRules(batching=batching)).state)
    for plan in Driver(sources, DrawRules(batching=batching)).plans(most=100):
        audited.follow(plan)
    assert len(audited.ledger._delivered["a"]._lanes) <= 2 * len(sources[0].lanes)
    assert audited.report()["ok"]


# Small cases ----------------------------------------------------------------------------------


def span(position: int, start: int, stop: int, length: int, lane: int = 0) -> tuple[int, ...]:
    return (0, 0, lane, position, 0, position, start, stop, 0, stop - start, length, 0, 0, 0)


def state(
    cursor: tuple[int, int, int, int], positions: list[int], *held: tuple[int, ...]
) -> PlannerState:
    own = SourceState(
        cursor=cursor,
        lanes=tuple(LaneCursor(position=p, row=p) for p in positions),
        outstanding=with_waits(span_table(held), 0),
    )
    return PlannerState(sources={"a": own}, deficits={"a": 0})


def audit(origin: PlannerState, after: PlannerState, *delivered: tuple[int, ...]) -> dict[str, Any]:
    ledger = Ledger(origin)
    table = span_table(delivered)
    ledger.plan(table, span_table([]), np.ones(table.num_rows, bool), after.sources)
    ledger.deliver(table, np.arange(table.num_rows))
    report: dict[str, Any] = ledger.report([])
    return report


@laws
@given(
    st.lists(
        st.builds(
            lambda lane, position, start, size: span(
                position, start, min(4, start + size), 4, lane
            ),
            st.integers(0, 1),
            st.integers(0, 6),
            st.sampled_from([0, 0, 0, 1, 3]),
            st.sampled_from([4, 4, 4, 1, 2]),
        ),
        max_size=30,
    )
)
def test_spans_count_alike_together_and_one_by_one(rows: list[tuple[int, ...]]) -> None:
    """Also where some are delivered again, in one piece or several."""
    ledgers = [Ledger(state((0, 0, 0, 0), [0, 0])) for _ in range(2)]
    table = span_table(rows)
    after = state((0, 7, 0, 0), [7, 7]).sources
    for ledger in ledgers:
        ledger.plan(table, span_table([]), np.ones(table.num_rows, bool), after)
    ledgers[0].deliver(table, np.arange(table.num_rows))
    for row in range(table.num_rows):
        ledgers[1].deliver(table, np.array([row]))
    together, apart = (ledger.report([]) for ledger in ledgers)
    assert together == apart


START = state((0, 0, 0, 0), [0])
#: A document of 12 tokens in three spans, of which the last fitted before the others.
HOLED = state((0, 1, 0, 0), [1], span(0, 0, 5, 12), span(0, 5, 10, 12))


def test_pieces_make_up_a_sample() -> None:
    pieces = [span(0, 4, 8, 10), span(0, 0, 4, 10), span(0, 8, 10, 10)]
    assert audit(START, state((0, 1, 0, 0), [1]), *pieces)["ok"]
    report = audit(START, state((0, 1, 0, 0), [1]), *pieces[:2])
    assert report["total"]["samples"]["lost"] == 1
    assert report["total"]["tokens"]["delivered"] == 8


def test_a_state_with_holes_in_a_sample_expects_what_is_missing_only() -> None:
    after = state((0, 1, 0, 0), [1])
    report = audit(HOLED, after, span(0, 0, 5, 12), span(0, 5, 10, 12))
    assert report["ok"]
    assert report["total"]["tokens"]["repeated"] == 0
    assert audit(HOLED, after, span(0, 0, 5, 12))["total"]["samples"]["lost"] == 1
    again = audit(HOLED, after, span(0, 0, 5, 12), span(0, 5, 10, 12), span(0, 10, 12, 12))
    assert again["total"]["tokens"]["repeated"] == 2


def test_what_a_state_holds_back_is_not_lost() -> None:
    assert audit(HOLED, HOLED)["ok"]
    assert audit(HOLED, state((0, 1, 0, 0), [1], span(0, 5, 10, 12)), span(0, 0, 5, 12))["ok"]


def test_a_state_in_the_middle_of_a_sample_expects_its_rest() -> None:
    middle = state((0, 0, 0, 4), [0])
    assert audit(START, middle, span(0, 0, 4, 10))["ok"]
    after = state((0, 1, 0, 0), [1])
    assert audit(middle, after, span(0, 4, 8, 10), span(0, 8, 10, 10))["ok"]
    assert not audit(middle, after, span(0, 8, 10, 10))["ok"]
    again = audit(middle, after, span(0, 0, 8, 10), span(0, 8, 10, 10))
    assert again["total"]["tokens"]["repeated"] == 4


def test_a_lane_of_which_nothing_came_is_missed() -> None:
    """Also in an epoch of which the ledger had not heard, where each lane holds one record."""
    ended = SourceState(cursor=(1, 0, 0, 0), lanes=(LaneCursor(),) * 2, lengths=(1, 1))
    after = PlannerState(sources={"a": ended}, deficits={"a": 0})
    origin = state((0, 0, 0, 0), [0, 0])
    assert audit(origin, after, span(0, 0, 4, 4), span(0, 0, 4, 4, lane=1))["ok"]
    assert audit(origin, after, span(0, 0, 4, 4))["total"]["samples"]["lost"] == 1


def test_what_was_delivered_before_the_generation_counts_neither_way() -> None:
    ledger = Ledger(START)
    table = span_table([span(0, 0, 4, 4), span(1, 0, 4, 4)])
    ledger.plan(table, span_table([]), np.array([False, True]), state((0, 2, 0, 0), [2]).sources)
    assert ledger.report([table.take(np.array([1]))])["ok"]
    ledger.deliver(table, np.array([1]))
    report = ledger.report([])
    assert report["ok"]
    assert report["total"]["samples"] == dict.fromkeys(COUNTS, 0) | {"planned": 1, "delivered": 1}
    ledger.deliver(table, np.array([0]))
    assert ledger.report([])["total"]["samples"]["repeated"] == 1


def test_unread_records_are_reported_where_they_are_known() -> None:
    ledger = Ledger(START)
    assert ledger.report([], {"a": 3})["sources"]["a"]["samples"]["unread"] == 3
    unknown = ledger.report([], {"a": None})
    assert unknown["sources"]["a"]["samples"]["unread"] == -1
    assert unknown["total"]["samples"]["unread"] == 0


@pytest.mark.parametrize(
    ("origin", "lane_rows", "epochs", "unread"),
    [
        (START, [10], 1, 10),
        (START, [10], 3, 30),
        (START, None, 3, None),
        (START, [10], None, None),
        (state((0, 4, 0, 0), [4]), [10], 2, 16),
        (state((0, 4, 0, 3), [4]), [10], 1, 6),
        (HOLED, [10], 1, 10),
        (state((2, 0, 0, 0), [0]), [10], 2, 0),
    ],
)
def test_unread_records_are_counted(
    origin: PlannerState, lane_rows: list[int] | None, epochs: int | None, unread: int | None
) -> None:
    assert unread_records(origin.sources["a"], lane_rows, epochs) == unread


@laws
@given(worlds(stop="first"), chunks)
def test_what_is_drawn_and_what_is_unread_add_up(world: World, chunk: object) -> None:
    driver = world.driver(chunk=chunk)
    samples: set[tuple[int, ...]] = set()
    for plan in driver.plans():
        for table in (plan.table, plan.passed):
            names = ("source", "epoch", "lane", "position")
            samples.update(zip(*(table[n].tolist() for n in names), strict=True))
    for source in world.sources:
        rows = [len(lane) for lane in source.lanes]
        own = driver.state.sources[source.name]
        left = unread_records(own, rows, world.rules.epochs)
        assert left is not None
        seen = sum(sample[0] == source.index for sample in samples)
        # A sample of which some spans were drawn counts on both sides.
        assert seen + left - bool(own.cursor[3]) == (world.rules.epochs or 0) * sum(rows)
