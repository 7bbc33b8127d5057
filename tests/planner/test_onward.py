"""Laws of a run whose sources end before the stage that gives weight to others."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.draw import DrawRules, Stop
from megadask.planner.ids import Verdict
from megadask.planner.schedule import Schedule, StepSchedule
from megadask.planner.state import MixtureEvent
from megadask.planner.stream import Stream
from tests.fakes import Driver, MemorySource, Record, readable, restored, spans

BATCHING = Packed(seq_len=4, global_batch=4)
NAMES = ("a", "b", "c")


def made(counts: list[int], tail: int = 0) -> list[MemorySource]:
    """Return sources of records that fill a pack, and a tail of records that are filtered."""
    filtered = [Record(0, Verdict.FILTERED)] * tail
    return [
        MemorySource(name, index, [[*[Record(4)] * count, *filtered]], BATCHING)
        for index, (name, count) in enumerate(zip(NAMES, counts, strict=True))
    ]


def rules(stop: Stop = "all", epochs: int | None = 1) -> DrawRules:
    return DrawRules(batching=BATCHING, epochs=epochs, stop=stop)


def late(names: str, weights: dict[str, float], start: int) -> StepSchedule:
    return Schedule.stages({0: dict.fromkeys(names, 1.0), start: weights})


@given(
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    st.integers(0, 70),  # some more than are fetched at a time
    st.permutations(NAMES),
    st.tuples(st.integers(0, 30), st.integers(0, 30)),
    st.integers(1, 2),
)
def test_with_stop_all_nothing_is_left_unread(
    counts: list[int], tail: int, order: list[str], spare: tuple[int, int], epochs: int
) -> None:
    """However long after the end of its sources a stage ends."""
    size = dict(zip(NAMES, counts, strict=True))
    second, third = (
        -(-size[name] * epochs // 4) + steps for name, steps in zip(order, spare, strict=False)
    )
    schedule = Schedule.stages(
        {0: {order[0]: 1.0}, second: {order[1]: 1.0}, second + third: {order[2]: 1.0}}
    )
    sources = made(counts, tail)
    driver = Driver(sources, rules(epochs=epochs), schedule)
    seen, passed = [], Counter[int]()
    for drawn in driver.draws():
        driver.state = restored(driver.state)  # the rule knows nothing but the state
        seen += spans(drawn.table)
        passed.update(drawn.passed["source"].tolist())
    last = driver.state
    assert sorted(seen) == sorted(s for source in sources for s in readable(source, epochs))
    # What is filtered is passed over once, but for the last one's tail: END has it.
    assert all(count <= tail * epochs for count in passed.values())
    assert sum(passed.values()) >= tail * epochs * 2
    assert all(source.ended or not source.outstanding.num_rows for source in last.sources.values())


def test_the_step_is_drawn_by_the_weights_of_the_next_stage_with_data() -> None:
    schedule = Schedule.stages({0: {"a": 1}, 50: {"a": 1}, 60: {"b": 3, "c": 1}, 90: {"c": 1}})
    driver = Driver(made([8, 40, 40]), rules(), schedule)
    drawn = list(itertools.islice(driver.draws(), 4))
    assert [Counter(d.table["source"].tolist()) for d in drawn] == [
        {0: 4},
        {0: 4},
        {1: 3, 2: 1},
        {1: 3, 2: 1},
    ]
    assert [d.step for d in drawn] == [0, 1, 2, 3]
    assert driver.mixture == {"b": 0.75, "c": 0.25}


def test_what_was_passed_over_does_not_get_a_step_of_its_own() -> None:
    """In the place of the ended a, b is drawn as it would be in its own stage."""
    lengths = [3, 4, 2, 1, 3, 3, 2, 4, 1, 1, 3, 2] * 6
    b = MemorySource("b", 1, [[Record(tokens) for tokens in lengths]], BATCHING)
    early = [MemorySource("a", 0, [[Record(4)] * 8], BATCHING), b]
    runs = [
        [spans(d.table) for d in Driver(early, rules(), late("a", {"b": 1}, start)).draws()]
        for start in (2, 1000)
    ]
    assert runs[0] == runs[1]


def test_weights_that_an_event_will_set_count_and_those_that_it_replaces_do_not() -> None:
    schedule = Schedule.stages({0: {"a": 1}, 20: {"b": 1}, 40: {"c": 1}})
    driver = Driver(made([4, 4, 4]), rules(), schedule)
    driver.state = driver.state.with_event(MixtureEvent(step=10, weights={"c": 1.0}))
    assert [set(d.table["source"].tolist()) for d in driver.draws()] == [{0}, {2}]
    assert not driver.state.sources["b"].ended  # nothing would ever read it


@pytest.mark.parametrize("start", [2, 3, 5, 8])
def test_sources_repeat_until_those_of_all_stages_have_ended(start: int) -> None:
    """With "repeat" the stage of b comes when a has ended once, or before that."""
    driver = Driver(made([12, 8, 8]), rules("repeat"), late("a", {"a": 1, "b": 1}, start))
    seen = [span for drawn in driver.draws(50) for span in spans(drawn.table)]
    counts = Counter(span[0] for span in seen)
    assert counts[1] == 8
    assert counts[0] >= 12
    assert counts[2] == 0
    assert len(set(seen)) == len(seen)


def test_the_first_source_that_has_ended_may_end_the_run() -> None:
    driver = Driver(made([8, 8, 8]), rules("first"), late("a", {"b": 1}, 10))
    assert [set(d.table["source"].tolist()) for d in driver.draws()] == [{0}, {0}]


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule.linear({"a": 1}, {"b": 1}, 10, 20),
        Schedule.cosine({"a": 1}, {"a": 1, "b": 1}, 10, 20),
        Schedule.function(lambda step: {"a": 1} if step < 5000 else {"b": 1}),
    ],
)
def test_other_schedules_go_on_too(schedule: StepSchedule) -> None:
    driver = Driver(made([8, 8, 0]), rules(), schedule)
    counts = Counter(s for d in driver.draws() for s in d.table["source"].tolist())
    assert counts == {0: 8, 1: 8}


def test_a_stream_goes_on_as_a_run_does() -> None:
    stream = Stream(
        {"a": [4] * 8, "b": [4] * 8},
        batching=BATCHING,
        strategy=lambda graph: graph.mix(Schedule.stages({0: {"a": 1}, 30: {"b": 1}})),
        epochs=1,
    )
    drawn = list(stream.draws())
    assert [set(d.draw.table["source"].tolist()) for d in drawn] == [{0}, {0}, {1}, {1}]
    assert [d.share_S.tolist() for d in drawn] == [[2**32, 0]] * 2 + [[0, 2**32]] * 2
