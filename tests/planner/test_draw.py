"""Laws of the draw: what a step consists of, and on what that depends."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.behind import is_before
from megadask.planner.draw import Draw, DrawRules
from megadask.planner.errors import ConfigError
from megadask.planner.ids import Verdict
from megadask.planner.schedule import Schedule
from megadask.planner.state import MixtureEvent, PlannerState
from megadask.planner.weights import TOTAL_SHARE
from tests.fakes import Driver, MemorySource, Record, SpanKey, ok, readable, restored, spans
from tests.strategies import ChunkSizes, World, chunks, few_laws, laws, weights, worlds

MANY = 10_000


def drawn_spans(draws: list[Draw]) -> list[SpanKey]:
    return [span for drawn in draws for span in spans(drawn.table)]


def canonical(span: SpanKey) -> tuple[int, ...]:
    _, epoch, lane, position, start, _ = span
    return (epoch, position, lane, start)


def assert_same(one: Draw, other: Draw) -> None:
    assert spans(one.table) == spans(other.table)
    assert one.canonical_pack_N.tolist() == other.canonical_pack_N.tolist()
    assert spans(one.passed) == spans(other.passed)
    assert one.state.to_json() == other.state.to_json()


def assert_accounts(world: World, state: PlannerState, seen: Counter[SpanKey]) -> None:
    """Every span before a cursor was drawn once or is outstanding; nothing behind it was drawn."""
    for source in world.sources:
        own = state.sources[source.name]
        outstanding = spans(own.outstanding)
        expected = []
        for epoch in range(own.cursor[0] + 1):
            table = source.epoch(epoch)
            good = (table["verdict"] == Verdict.OK) & is_before(table, own.cursor)
            expected.extend(spans(table.take(good)))
        mine = [span for span in seen.elements() if span[0] == source.index]
        assert sorted(mine + outstanding) == sorted(expected)
        assert outstanding == sorted(outstanding, key=canonical)
        assert len(outstanding) < world.rules.window


# Everything once ------------------------------------------------------------------------------


@laws
@given(worlds(), chunks)
def test_every_span_comes_once_in_each_epoch(world: World, chunk: ChunkSizes) -> None:
    driver = world.driver(chunk=chunk)
    draws = list(driver.draws(MANY))
    epochs = world.rules.epochs
    assert epochs is not None
    expected = [span for source in world.sources for span in readable(source, epochs)]
    assert sorted(drawn_spans(draws)) == sorted(expected)
    for source in world.sources:
        own = driver.state.sources[source.name]
        assert own.ended
        assert own.cursor == (epochs, 0, 0, 0)
        assert own.lengths == tuple(map(len, source.lanes))
        assert not own.outstanding.num_rows


@laws
@given(worlds(), chunks)
def test_every_unreadable_record_is_passed_over_once(world: World, chunk: ChunkSizes) -> None:
    driver = world.driver(chunk=chunk)
    gone: list[SpanKey] = []
    while not all(own.ended for own in driver.state.sources.values()):
        gone.extend(spans(driver.draw().passed))
    expected = []
    for source in world.sources:
        bad = source.rows["verdict"] != Verdict.OK
        for epoch in range(world.rules.epochs or 0):
            expected.extend(spans(source.epoch(epoch).take(bad)))
    assert sorted(gone) == sorted(expected)


@laws
@given(worlds(), chunks)
def test_the_state_accounts_for_every_span_at_every_step(world: World, chunk: ChunkSizes) -> None:
    driver = world.driver(chunk=chunk)
    seen: Counter[SpanKey] = Counter()
    for drawn in driver.draws(MANY):
        seen.update(spans(drawn.table))
        assert_accounts(world, drawn.state, seen)


@laws
@given(worlds(), chunks)
def test_an_epoch_begins_when_the_one_before_is_drawn(world: World, chunk: ChunkSizes) -> None:
    driver = world.driver(chunk=chunk)
    epochs = defaultdict(list)
    for span in drawn_spans(list(driver.draws(MANY))):
        epochs[span[0]].append(span[1])
    assert all(seen == sorted(seen) for seen in epochs.values())


@pytest.mark.parametrize("chunk", [1, 3])
def test_an_epoch_that_is_known_ahead_fills_no_gap_of_the_one_before(chunk: int) -> None:
    batching = Packed(seq_len=4, global_batch=1)
    source = MemorySource("a", 0, [ok(1, 2, 3)], batching)
    driver = Driver([source], DrawRules(batching=batching, epochs=3), chunk=lambda: chunk)
    steps = [[(span[1], span[3]) for span in spans(drawn.table)] for drawn in driver.draws()]
    assert steps == [
        [(0, 0), (0, 1)],
        [(0, 2), (1, 0)],
        [(1, 1)],
        [(1, 2), (2, 0)],
        [(2, 1)],
        [(2, 2)],
    ]


# What membership depends on -------------------------------------------------------------------


@laws
@given(worlds(), chunks, chunks)
def test_membership_does_not_depend_on_how_metadata_was_fetched(
    world: World, chunk: ChunkSizes, other: ChunkSizes
) -> None:
    one, two, all_at_once = (world.driver(chunk=c) for c in (chunk, other, lambda: MANY))
    for _ in range(60):
        drawn = one.draw()
        assert_same(drawn, two.draw())
        assert_same(drawn, all_at_once.draw())
        if not drawn.table.num_rows:
            break


@laws
@given(worlds(), chunks, chunks, st.data())
def test_a_state_that_was_saved_at_any_step_goes_on_alike(
    world: World, chunk: ChunkSizes, other: ChunkSizes, data: st.DataObject
) -> None:
    driver = world.driver(chunk=chunk)
    for _ in range(data.draw(st.integers(0, 12))):
        driver.draw()
    resumed = world.driver(chunk=other, state=restored(driver.state))
    for _ in range(10):
        assert_same(driver.draw(), resumed.draw())


@few_laws
@given(worlds(epochs=None, window=3), chunks)
def test_only_the_window_is_looked_at(world: World, chunk: ChunkSizes) -> None:
    """A span is drawn from among the next K readable ones of its source that are not yet drawn."""
    driver = world.driver(chunk=chunk)
    order = {source.index: readable(source, 8) for source in world.sources}
    for _ in range(8):
        for span in spans(driver.draw().table):
            left = order[span[0]]
            if span[1] > 6:
                return
            assert span in left[: world.rules.window]
            assert span[1] == left[0][1]
            left.remove(span)


# The canonical packing ------------------------------------------------------------------------


@laws
@given(worlds(), chunks)
def test_the_canonical_packing_fits(world: World, chunk: ChunkSizes) -> None:
    batching = world.rules.batching
    for drawn in world.driver(chunk=chunk).draws(MANY):
        pack_N = drawn.canonical_pack_N
        used = np.bincount(pack_N, batching.padded(drawn.table["tokens"]))
        assert drawn.num_packs == batching.global_batch
        assert len(used) <= drawn.num_packs
        assert used.max() <= batching.seq_len
        assert used.min() > 0  # packs are filled from the first on
        assert np.bincount(pack_N).max() <= batching.documents_limit


def test_a_step_has_the_packs_that_the_schedule_says() -> None:
    schedule = Schedule.stages({0: 1, 2: 3})
    batching = Packed(seq_len=4, global_batch=schedule)
    source = MemorySource("a", 0, [ok(*[4] * 20)], batching)
    driver = Driver([source], DrawRules(batching=batching, epochs=1))
    assert [drawn.table.num_rows for drawn in driver.draws()] == [1, 1, 3, 3, 3, 3, 3, 3]


# Bounded delay --------------------------------------------------------------------------------


@laws
@given(worlds(), chunks)
def test_what_was_passed_over_too_long_goes_before_what_follows_it(
    world: World, chunk: ChunkSizes
) -> None:
    driver = world.driver(chunk=chunk)
    state = driver.state
    for drawn in driver.draws(MANY):
        order = {span: place for place, span in enumerate(spans(drawn.table))}
        for own in state.sources.values():
            since = own.outstanding["since"] if own.outstanding.num_rows else np.empty(0)
            for span, first in zip(spans(own.outstanding), since.tolist(), strict=True):
                assert first < drawn.step
                if first > drawn.step - world.rules.patience:
                    continue
                for later, place in order.items():
                    if later[0] == span[0] and canonical(later) > canonical(span):
                        assert order.get(span, MANY) < place
        state = drawn.state


@laws
@given(worlds(max_sources=1), chunks)
def test_no_span_of_a_source_that_is_drawn_from_starves(world: World, chunk: ChunkSizes) -> None:
    limit = world.rules.patience + world.rules.window
    for drawn in world.driver(chunk=chunk).draws(MANY):
        for own in drawn.state.sources.values():
            since = own.outstanding.columns["since"]
            assert (drawn.step - since < limit).all()


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_a_step_ends_rather_than_pass_over_a_span_once_more(patience: int) -> None:
    """Where another source fills each step first, so that only smaller spans fit behind it."""
    batching = Packed(seq_len=4, global_batch=1)
    sources = [
        MemorySource("a", 0, [ok(*[3] * 40)], batching),
        MemorySource("b", 1, [ok(2, *[1] * 40)], batching),
    ]
    driver = Driver(sources, DrawRules(batching=batching, patience=patience))
    steps = [[span[:1] + span[3:4] for span in spans(driver.draw().table)] for _ in range(8)]
    assert steps[:patience] == [[(0, k), (1, k + 1)] for k in range(patience)]
    assert steps[patience] == [(0, patience)]
    assert steps[patience + 1] == [(1, 0)]
    assert len(steps[patience + 2]) == 2


def passed_over() -> Driver:
    """Return a driver behind a step that passed over a span of source a: one pack of 4 tokens."""
    batching = Packed(seq_len=4, global_batch=1)
    sources = [
        MemorySource("a", 0, [ok(3, 3, 1, 3, 3)], batching),
        MemorySource("b", 1, [ok(*[4] * 30)], batching),
    ]
    rules = DrawRules(batching=batching, epochs=1, patience=3)
    driver = Driver(sources, rules, {"a": 1.0})
    assert [span[3] for span in spans(driver.draw().table)] == [0, 2]
    assert spans(driver.state.sources["a"].outstanding) == [(0, 0, 0, 1, 0, 3)]
    return driver


def test_a_span_that_was_passed_over_meets_its_bound_though_its_source_lost_its_weight() -> None:
    driver = passed_over()
    driver.state = driver.state.with_event(MixtureEvent(step=1, weights={"b": 1.0}))
    steps = [spans(drawn.table) for drawn in driver.draws(6)]
    assert [any(span[0] == 0 for span in step) for step in steps] == [False, False, True] + [
        False
    ] * 3
    assert steps[2] == [(0, 0, 0, 1, 0, 3)]
    assert driver.state.sources["a"].cursor == (0, 2, 1, 0)
    assert not driver.state.sources["a"].outstanding.num_rows


def test_spans_that_were_passed_over_come_before_the_end() -> None:
    driver = passed_over()
    driver.rules = replace(driver.rules, patience=1000)
    driver.state = driver.state.with_event(MixtureEvent(step=1, weights={"b": 1.0}))
    *_, last = driver.draws()
    assert spans(last.table) == [(0, 0, 0, 1, 0, 3)]
    assert not driver.draw().table.num_rows


# Ends -----------------------------------------------------------------------------------------


@laws
@given(worlds(stop="first"), chunks)
def test_stop_first_ends_with_the_first_source(world: World, chunk: ChunkSizes) -> None:
    driver = world.driver(chunk=chunk)
    draws = list(driver.draws(MANY))
    seen = Counter(drawn_spans(draws))
    assert max(seen.values()) == 1
    assert_accounts(world, driver.state, seen)
    epochs = world.rules.epochs or 0
    complete = [s for s in world.sources if set(readable(s, epochs)) <= set(seen)]
    assert complete
    for own in driver.state.sources.values():
        assert not own.outstanding.num_rows  # holes are filled before the end
    # It ends at once: only what had been passed over comes behind the last span of that source.
    last = max(
        max(k for k, d in enumerate(draws) if (d.table["source"] == s.index).any())
        for s in complete
    )
    for drawn in draws[last + 1 :]:
        before = draws[drawn.step - 1].state
        held = [span for own in before.sources.values() for span in spans(own.outstanding)]
        assert set(spans(drawn.table)) <= set(held)


@laws
@given(worlds(stop="repeat"), chunks)
def test_stop_repeat_ends_when_every_source_has_been_read(world: World, chunk: ChunkSizes) -> None:
    driver = world.driver(chunk=chunk)
    seen = Counter(drawn_spans(list(driver.draws(MANY))))
    epochs = world.rules.epochs or 0
    assert max(seen.values()) == 1
    for source in world.sources:
        assert set(readable(source, epochs)) <= set(seen)
    assert_accounts(world, driver.state, seen)
    # The last source to end has not begun again, or not by more than the step that it ended in.
    assert min(own.cursor[0] for own in driver.state.sources.values()) <= epochs


@laws
@given(worlds(), st.sampled_from(["first", "all", "repeat"]), chunks)
def test_the_end_is_stable(world: World, stop: str, chunk: ChunkSizes) -> None:
    driver = replace_rules(world, stop=stop).driver(chunk=chunk)
    steps = [drawn.step for drawn in driver.draws(MANY)]
    assert steps == list(range(len(steps)))
    first = driver.draw()
    assert not first.table.num_rows
    ended = replace(first.state, step=0).to_json()
    for _ in range(3):
        drawn = driver.draw()
        assert not drawn.table.num_rows
        assert not drawn.passed.num_rows
        assert replace(drawn.state, step=0).to_json() == ended


def replace_rules(world: World, **rules: object) -> World:
    return replace(world, rules=replace(world.rules, **rules))  # type: ignore[arg-type]


def test_sources_without_weight_are_not_waited_for() -> None:
    batching = Packed(seq_len=4, global_batch=1)
    sources = [
        MemorySource("a", 0, [ok(4, 4)], batching),
        MemorySource("b", 1, [ok(4, 4)], batching),
    ]
    driver = Driver(sources, DrawRules(batching=batching, epochs=1, stop="first"), {"a": 1.0})
    assert [spans(drawn.table)[0][0] for drawn in driver.draws()] == [0, 0]
    assert not driver.state.sources["b"].ended


# The mixture ----------------------------------------------------------------------------------


@laws
@given(worlds(epochs=None), chunks, st.integers(1, 6))
def test_the_mixture_is_exact_at_every_moment(world: World, chunk: ChunkSizes, steps: int) -> None:
    """By samples within one, by tokens within the largest span: within a step and over steps."""
    driver = world.driver(chunk=chunk)
    by_tokens = world.rules.mix_by == "tokens"
    names = [source.name for source in world.sources]
    share_S = Schedule.constant(world.weights).weights_at(0, names)
    largest = max(s.rows["tokens"].max() for s in world.sources) if by_tokens else 1
    received_S = np.zeros(len(names), np.int64)
    for _ in range(steps):
        drawn = driver.draw()
        sizes = drawn.table["tokens"] if by_tokens else np.ones(drawn.table.num_rows, np.int64)
        for source, size in zip(drawn.table["source"].tolist(), sizes.tolist(), strict=True):
            received_S[source] += size
            deficit_S = share_S * received_S.sum() - received_S * TOTAL_SHARE
            assert (np.abs(deficit_S) < TOTAL_SHARE * largest).all()
        assert list(drawn.state.deficits.values()) == deficit_S.tolist()


@laws
@given(worlds(), chunks, st.data())
def test_a_change_of_weights_repeats_and_skips_nothing(
    world: World, chunk: ChunkSizes, data: st.DataObject
) -> None:
    driver = world.driver(chunk=chunk)
    names = [source.name for source in world.sources]
    changes = st.dictionaries(st.sampled_from(names), weights, min_size=1)
    seen: Counter[SpanKey] = Counter()
    for _ in range(10):
        if data.draw(st.booleans()):
            step = driver.state.step + data.draw(st.integers(0, 2))
            event = MixtureEvent(step=step, weights=data.draw(changes))
            driver.state = driver.state.with_event(event)
        drawn = driver.draw()
        in_force = drawn.state.weights_at(drawn.step)
        for source in np.unique(drawn.table["source"]).tolist():
            held = spans(driver.state.sources[names[source]].outstanding)
            if in_force is not None and not in_force.get(names[source]):
                continue  # what had been passed over
            assert in_force is None or in_force[names[source]] > 0
            assert len(held) < world.rules.window
        seen.update(spans(drawn.table))
        assert_accounts(world, drawn.state, seen)
    equal = MixtureEvent(step=driver.state.step, weights=dict.fromkeys(names, 1.0))
    driver.state = replace(driver.state, events=(equal,))  # nothing is left without weight
    for drawn in driver.draws(MANY):
        seen.update(spans(drawn.table))
    expected = [s for source in world.sources for s in readable(source, world.rules.epochs or 0)]
    assert sorted(seen.elements()) == sorted(expected)


def test_sources_that_ended_leave_their_share_to_the_others() -> None:
    batching = Packed(seq_len=1, global_batch=1)
    sources = [
        MemorySource("large", 0, [ok(*[1] * 98)], batching),
        MemorySource("b", 1, [ok(*[1] * 30)], batching),
        MemorySource("c", 2, [ok(*[1] * 30)], batching),
    ]
    driver = Driver(
        sources, DrawRules(batching=batching, epochs=1), {"large": 0.98, "b": 0.01, "c": 0.01}
    )
    order = [spans(drawn.table)[0][0] for drawn in driver.draws()]
    last = max(place for place, source in enumerate(order) if source == 0)
    tail = order[last + 1 :]
    assert len(tail) > 40
    assert all(abs(tail[:k].count(1) - tail[:k].count(2)) <= 2 for k in range(len(tail) - 4))


# Particular sources ---------------------------------------------------------------------------


def test_lanes_are_interleaved_and_ended_lanes_leave_the_rotation() -> None:
    batching = Packed(seq_len=1, global_batch=1, max_documents=1)
    source = MemorySource("a", 0, [ok(1, 1, 1), [], ok(1)], batching)
    driver = Driver([source], DrawRules(batching=batching, epochs=2), chunk=lambda: 1)
    places = [
        (epoch, lane, position)
        for _, epoch, lane, position, *_ in drawn_spans(list(driver.draws()))
    ]
    one = [(0, 0), (2, 0), (0, 1), (0, 2)]
    assert places == [(epoch, lane, position) for epoch in (0, 1) for lane, position in one]


def test_records_behind_a_tombstone_lie_in_the_next_shard() -> None:
    batching = Packed(seq_len=1, global_batch=1)
    lane = [Record(1), Record(0, Verdict.TOMBSTONE), Record(0, Verdict.TOMBSTONE), Record(1)]
    source = MemorySource("a", 0, [lane], batching)
    driver = Driver([source], DrawRules(batching=batching, epochs=2, window=1), chunk=lambda: 1)
    assert len(drawn_spans(list(driver.draws()))) == 4  # the feed checks every lane cursor


def test_a_split_document_may_begin_in_one_step_and_end_in_another() -> None:
    batching = Packed(seq_len=4, global_batch=1)
    source = MemorySource("a", 0, [ok(10)], batching)
    driver = Driver([source], DrawRules(batching=batching, epochs=1))
    drawn = driver.draw()
    assert spans(drawn.table) == [(0, 0, 0, 0, 0, 4)]
    assert drawn.state.sources["a"].cursor == (0, 0, 0, 4)
    assert drawn.state.sources["a"].lanes[0].position == 0
    assert [spans(d.table)[0][4:] for d in driver.draws()] == [(4, 8), (8, 10)]


@pytest.mark.parametrize("name", ["window", "patience", "epochs"])
def test_rules_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*0"):
        DrawRules(batching=Packed(seq_len=4, global_batch=1), **{name: 0})


@pytest.mark.parametrize("name", ["mix_by", "stop"])
def test_words_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'bytes'.*one of"):
        DrawRules(batching=Packed(seq_len=4, global_batch=1), **{name: "bytes"})
