"""Laws of points: what a trainer saves is small, the same on every rank, and says what is left."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.draw import DrawRules
from megadask.planner.errors import StateError
from megadask.planner.ids import Verdict
from megadask.planner.state import MixtureEvent, events_in
from megadask.scheduling.point import Point, verdicts_of
from tests.fakes import Driver, MemorySource, Record, ok
from tests.strategies import laws

names = st.text(min_size=1, max_size=5)
numbers = st.integers(0, 2**40)


@st.composite
def points(draw: st.DrawFn) -> Point:
    microbatches = draw(st.lists(st.integers(-1, 5), max_size=40))
    return Point.of(
        step=draw(numbers),
        state=draw(st.text()),
        microbatch=draw(st.integers(0, 6)),
        microbatch_N=np.array(microbatches, np.int64),
        draw_digest=draw(names),
        assignment_digest=draw(names),
        verdicts=draw(st.lists(st.tuples(names, numbers, numbers, numbers, st.integers(1, 3)))),
        events=draw(
            st.lists(
                st.tuples(numbers, st.dictionaries(names, st.floats(0.1, 1.0), max_size=3)),
                max_size=3,
            )
        ),
    )


@laws
@given(points())
def test_a_point_survives_json(point: Point) -> None:
    read = Point.from_json(point.to_json())
    assert read == point
    assert hash(read) == hash(point)
    assert read.digest == point.digest
    assert Point.unpack(point.packed) == point


@laws
@given(points(), points())
def test_unlike_points_have_unlike_digests(one: Point, other: Point) -> None:
    assert (one == other) == (one.digest == other.digest)


@laws
@given(st.lists(st.integers(-1, 5), max_size=70), st.integers(0, 6))
def test_the_bitmap_says_what_was_consumed(microbatches: list[int], microbatch: int) -> None:
    """Spans of microbatch -1 were delivered before: they are consumed at every point."""
    microbatch_N = np.array(microbatches, np.int64)
    point = Point.of(
        step=0,
        state="",
        microbatch=microbatch,
        microbatch_N=microbatch_N,
        draw_digest="",
        assignment_digest="",
        verdicts=(),
        events=(),
    )
    read = Point.from_json(point.to_json())
    assert read.consumed_N(len(microbatches)).tolist() == (microbatch_N < microbatch).tolist()
    assert len(read.consumed) <= len(microbatches) / 4 + 2


def test_a_point_inside_a_plan_says_what_it_passed_over() -> None:
    batching = Packed(seq_len=4, global_batch=2)
    lane = [Record(4), Record(0, Verdict.FILTERED), Record(0, Verdict.SKIPPED), *ok(4, 4)]
    source = MemorySource("a", 0, [lane], batching)
    driver = Driver([source], DrawRules(batching=batching))
    state = driver.state.to_json()
    plan = driver.plan()
    point = Point.inside(plan, state, 1)
    assert point.verdicts == verdicts_of(plan) == (("a", 0, 0, 1, 1), ("a", 0, 0, 2, 2))
    assert point.consumed_N(2).sum() == 1
    assert (point.step, point.microbatch, point.state) == (0, 1, state)
    assert (point.draw_digest, point.assignment_digest) == (
        plan.draw_digest,
        plan.assignment_digest,
    )
    # The same from the plan as it travels.
    assert Point.inside(type(plan).from_arrow(plan.to_arrow()), state, 1) == point


def test_a_point_inside_a_plan_says_which_mixtures_were_set_when_it_was_drawn() -> None:
    """The state before it may lack them; sources may have any name."""
    batching = Packed(seq_len=4, global_batch=2)
    names = ("events", '"events":[', "b")
    sources = [MemorySource(name, k, [ok(4, 4, 4)], batching) for k, name in enumerate(names)]
    driver = Driver(sources, DrawRules(batching=batching))
    driver.draw()
    before = driver.state.to_json()
    assert events_in(before) == []
    event = MixtureEvent(step=1, weights={"b": 0.25})
    later = MixtureEvent(step=7, weights={"events": 1.0, "b": 3})
    driver.state = driver.state.with_event(event).with_event(later)
    point = Point.inside(driver.plan(), before, 1)
    assert point.mixture_events() == (event, later)
    assert Point.from_json(point.to_json()).mixture_events() == (event, later)


def test_a_point_of_the_first_version_is_read() -> None:
    """It had no events."""
    point = Point(step=3, state="state", microbatch=1, verdicts=(("a", 0, 0, 1, 1),))
    data = {**json.loads(point.to_json()), "version": 1}
    del data["events"]
    assert Point.from_json(json.dumps(data)) == point


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        '"text"',
        "{}",
        '{"version": 1}',
        '{"version": 1, "verdicts": []}',
        '{"version": 1, "step": 0, "state": "", "verdicts": [], "more": 1}',
        '{"version": 2, "step": 0, "state": "", "verdicts": [], "events": [[1, [[1]]]]}',
    ],
)
def test_a_text_that_is_no_point_is_refused(text: str) -> None:
    with pytest.raises(StateError):
        Point.from_json(text)


def test_a_point_of_another_version_is_refused() -> None:
    text = json.dumps({**json.loads(Point(step=0, state="").to_json()), "version": 3})
    with pytest.raises(StateError, match=r"version.*3.*2"):
        Point.from_json(text)
