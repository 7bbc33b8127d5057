"""Laws of the planner's state: it survives JSON, and fits pipelines that have grown."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.draw import DrawRules
from megadask.planner.errors import StateError
from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata, concat, empty_spans
from megadask.planner.state import (
    LaneCursor,
    MixtureEvent,
    PlannerState,
    SourceState,
    check_lanes,
    table_from_json,
    table_to_json,
)
from tests.fakes import Driver, MemorySource, ok, restored, spans
from tests.strategies import World, chunks, laws, span_tables, worlds


def with_outstanding() -> PlannerState:
    """Return a state of source a in which it has passed over its second record."""
    batching = Packed(seq_len=4, global_batch=1)
    source = MemorySource("a", 0, [ok(3, 3, 1, 3)], batching)
    return Driver([source], DrawRules(batching=batching)).draw().state


@laws
@given(worlds(), chunks, st.integers(0, 6))
def test_a_state_survives_json(world: World, chunk: object, steps: int) -> None:
    driver = world.driver(chunk=chunk)
    for _ in range(steps):
        driver.draw()
    state = driver.state.with_event(MixtureEvent(step=99, weights={"source0": 0.1}))
    text = state.to_json()
    assert restored(state).to_json() == text
    assert restored(state).events == state.events
    for name, source in restored(state).sources.items():
        was = state.sources[name]
        assert (source.cursor, source.lanes, source.lengths, source.ended) == (
            was.cursor,
            was.lanes,
            was.lengths,
            was.ended,
        )
        assert spans(source.outstanding) == spans(was.outstanding)
    assert "NaN" not in text


@laws
@given(span_tables())
def test_a_table_survives_json(table: Metadata) -> None:
    read = table_from_json(json.loads(json.dumps(table_to_json(table))))
    assert list(read) == list(table)
    for name in table:
        assert read[name].dtype == table[name].dtype
        np.testing.assert_array_equal(read[name], table[name])
    np.testing.assert_array_equal(read.ragged["image"].offsets, table.ragged["image"].offsets)
    np.testing.assert_array_equal(read.ragged["image"].lengths_I, table.ragged["image"].lengths_I)


@laws
@given(span_tables(), st.data())
def test_packing_taking_and_joining_tables_are_inverse(
    table: Metadata, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, table.num_rows))
    rows = np.arange(table.num_rows)
    joined = concat([table.take(rows[:cut]), empty_spans(), table.take(rows >= cut)])
    read = Metadata.unpack(joined.pack())
    assert read.num_rows == table.num_rows
    for name in table:
        np.testing.assert_array_equal(read[name], table[name])
    np.testing.assert_array_equal(read.ragged["image"].sum(2), table.ragged["image"].sum(2))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '"text"', "{}", '{"version": 2}', '{"version": 2, "sources": {"a": 3}}'],
)
def test_a_text_that_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(StateError):
        PlannerState.from_json(text)


def test_a_state_of_another_version_is_refused() -> None:
    text = json.dumps({**json.loads(with_outstanding().to_json()), "version": 7})
    with pytest.raises(StateError, match=r"version.*7.*2"):
        PlannerState.from_json(text)


# Events ---------------------------------------------------------------------------------------


def event(step: int, weight: float = 1.0) -> MixtureEvent:
    return MixtureEvent(step=step, weights={"a": weight})


def test_an_event_holds_until_the_next_one() -> None:
    state = PlannerState.initial({"a": 1}).with_event(event(5, 0.5)).with_event(event(2, 0.2))
    held = [state.weights_at(step) for step in (0, 1, 2, 4, 5, 100)]
    assert held == [None, None, {"a": 0.2}, {"a": 0.2}, {"a": 0.5}, {"a": 0.5}]


def test_the_later_of_two_events_for_one_step_holds() -> None:
    state = PlannerState.initial({"a": 1}).with_event(event(2, 0.1)).with_event(event(2, 0.9))
    assert state.weights_at(2) == {"a": 0.9}
    assert len(state.events) == 1


@laws
@given(st.lists(st.integers(0, 20), max_size=30), st.integers(0, 20))
def test_only_events_that_can_still_hold_are_kept(steps: list[int], now: int) -> None:
    everything = replace(PlannerState.initial({"a": 1}), step=0)
    state = replace(PlannerState.initial({"a": 1}), step=now)
    for number, step in enumerate(steps):
        everything = everything.with_event(event(step, number + 1))
        state = state.with_event(event(step, number + 1))
    assert sum(kept.step <= now for kept in state.events) <= 1
    for step in range(now, 25):
        assert state.weights_at(step) == everything.weights_at(step)
    # A planner that takes over applies all events of the generation again.
    again = state
    for number, step in enumerate(steps):
        again = again.with_event(event(step, number + 1))
    assert again.events == state.events


# Pipelines that changed -----------------------------------------------------------------------


def test_an_added_source_starts_from_its_beginning() -> None:
    state = with_outstanding()
    grown = check_lanes(state, {"new": 3, "a": 1})
    assert list(grown.sources) == list(grown.deficits) == ["new", "a"]
    assert grown.sources["new"].lanes == (LaneCursor(),) * 3
    assert grown.deficits == {"new": 0, **state.deficits}
    assert grown.sources["a"].cursor == state.sources["a"].cursor
    assert grown.step == state.step


def test_spans_that_were_passed_over_stay_those_of_their_source() -> None:
    grown = check_lanes(with_outstanding(), {"new": 3, "a": 1})
    assert grown.sources["a"].outstanding["source"].tolist() == [1]
    batching = Packed(seq_len=4, global_batch=1)
    sources = [
        MemorySource("new", 0, [[], [], ok(4)], batching),
        MemorySource("a", 1, [ok(3, 3, 1, 3)], batching),
    ]
    rules = DrawRules(batching=batching, epochs=1)
    drawn = [
        span for draw in Driver(sources, rules, state=grown).draws() for span in spans(draw.table)
    ]
    assert sorted(drawn) == [(0, 0, 2, 0, 0, 4), (1, 0, 0, 1, 0, 3), (1, 0, 0, 3, 0, 3)]


def test_a_source_that_is_gone_is_named() -> None:
    with pytest.raises(StateError, match=r"\['a'\].*weight 0"):
        check_lanes(with_outstanding(), {"b": 1})


def test_another_number_of_lanes_is_named() -> None:
    with pytest.raises(StateError, match=r"'a'.*got 2; expected 1"):
        check_lanes(with_outstanding(), {"a": 2})


def test_columns_that_only_some_tables_have_do_not_matter_where_there_are_no_rows() -> None:
    """A source that has ended is restored without the scalars that the others report."""
    scalar = with_outstanding().sources["a"].outstanding.with_columns(quality=np.array([0.5]))
    for tables in ([scalar, empty_spans()], [empty_spans(), scalar]):
        assert concat(tables)["quality"].tolist() == [0.5]


@pytest.mark.parametrize(
    ("verdict", "after"),
    [
        (Verdict.OK, LaneCursor(position=8, shard=2, row=4)),
        (Verdict.FILTERED, LaneCursor(position=8, shard=2, row=4)),
        (Verdict.SKIPPED, LaneCursor(position=8, shard=2, row=4)),
        (Verdict.TOMBSTONE, LaneCursor(position=8, shard=3, row=0)),
    ],
)
def test_nothing_of_its_shard_is_behind_a_tombstone(verdict: Verdict, after: LaneCursor) -> None:
    assert LaneCursor.after(7, 2, 3, verdict) == after


def test_a_fresh_source_has_nothing_outstanding() -> None:
    assert SourceState(lanes=(LaneCursor(),)).outstanding.num_rows == 0
