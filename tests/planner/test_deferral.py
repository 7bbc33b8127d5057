"""Laws of deferral: what costs too much waits, not for long, and nothing else changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.batching import Packed
from megadask.planner.behind import is_before
from megadask.planner.costs import Parts, Tokens, Transformer
from megadask.planner.deferral import NO_LIMIT, Deferral, Limit
from megadask.planner.draw import Draw, DrawRules
from megadask.planner.errors import ConfigError
from megadask.planner.graph import DGraph
from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata
from megadask.planner.schedule import Schedule
from megadask.planner.state import MixtureEvent
from megadask.planner.weights import TOTAL_SHARE
from tests.fakes import Driver, MemorySource, SpanKey, ok, readable, restored, spans
from tests.strategies import ChunkSizes, World, chunks, few_laws, laws, worlds

MANY = 10_000


def squares(table: Metadata) -> NDArray[np.int64]:
    return np.asarray(table["tokens"] ** 2, np.int64)


deferrals = st.builds(
    Deferral,
    steps=st.integers(1, 6),
    ways=st.integers(1, 6),
    cost=st.sampled_from([Tokens(), squares]),
)


@st.composite
def deferred_worlds(draw: st.DrawFn, **fixed: object) -> World:
    return draw(worlds(deferral=draw(deferrals), **fixed))


def work(table: Metadata) -> NDArray[np.int64]:
    """At 500 tokens, as much attention as all the rest."""
    return np.asarray(table["tokens"] * (500 + table["tokens"]), np.int64)


def tailed_driver(
    seed: int, deferral: Deferral | None, steps: int, chunk: int = 200, **rules: object
) -> Driver:
    """Return a driver over sources of mostly short documents, one to a pack, 64 to a step."""
    rng = np.random.default_rng(seed)
    batching = Packed(seq_len=500, global_batch=64, max_documents=1)
    laws_of = {"short": (1.5, 1.0, 0.6), "middle": (2.0, 1.0, 0.25), "long": (4.0, 1.5, 0.15)}
    sources = []
    for index, (name, (log_median, sigma, share)) in enumerate(laws_of.items()):
        num_records = int(64 * share * steps * 1.5) + 50
        lengths = np.minimum(rng.lognormal(log_median, sigma, num_records) + 1, 500).astype(int)
        sources.append(MemorySource(name, index, [ok(*lengths.tolist())], batching))
    own = DrawRules(batching=batching, deferral=deferral, **rules)  # type: ignore[arg-type]
    weights = {name: share for name, (*_, share) in laws_of.items()}
    return Driver(sources, own, weights, chunk=lambda: chunk)


def costs(drawn: Draw, rules: DrawRules) -> NDArray[np.int64]:
    assert rules.deferral is not None
    return rules.deferral.costs(drawn.table, rules.batching)


# Nothing else changes -------------------------------------------------------------------------


@laws
@given(deferred_worlds(), chunks)
def test_every_span_comes_once_all_the_same(world: World, chunk: ChunkSizes) -> None:
    draws = list(world.driver(chunk=chunk).draws(MANY))
    drawn = [span for one in draws for span in spans(one.table)]
    epochs = world.rules.epochs or 0
    assert sorted(drawn) == sorted(s for x in world.sources for s in readable(x, epochs))
    assert all(own.ended for own in draws[-1].state.sources.values())
    assert not any(own.outstanding.num_rows for own in draws[-1].state.sources.values())


@laws
@given(deferred_worlds(), st.sampled_from(["first", "repeat"]), chunks)
def test_pools_flush_before_any_end(world: World, stop: str, chunk: ChunkSizes) -> None:
    rules = replace(world.rules, stop=stop)  # type: ignore[arg-type]
    driver = replace(world, rules=rules).driver(chunk=chunk)
    seen = Counter(span for drawn in driver.draws(MANY) for span in spans(drawn.table))
    assert max(seen.values()) == 1
    for source in world.sources:
        own = driver.state.sources[source.name]
        assert not own.outstanding.num_rows
        for epoch in range(own.cursor[0] + 1):
            table = source.epoch(epoch)
            before = (table["verdict"] == Verdict.OK) & is_before(table, own.cursor)
            assert set(spans(table.take(before))) <= set(seen)
    assert not driver.draw().table.num_rows


@laws
@given(deferred_worlds(), chunks, chunks)
def test_membership_does_not_depend_on_how_metadata_was_fetched(
    world: World, chunk: ChunkSizes, other: ChunkSizes
) -> None:
    drivers = [world.driver(chunk=c) for c in (chunk, other, lambda: MANY)]
    for _ in range(40):
        one, *others = [driver.draw() for driver in drivers]
        for drawn in others:
            assert spans(drawn.table) == spans(one.table)
            assert drawn.state.to_json() == one.state.to_json()


@few_laws
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 8))
def test_membership_of_long_tails_does_not_depend_on_how_metadata_was_fetched(
    seed: int, chunk: int, window: int
) -> None:
    deferral = Deferral(steps=3, ways=4, cost=work)
    one = tailed_driver(seed, deferral, 6, window=window)
    other = tailed_driver(seed, deferral, 6, window=window, chunk=chunk)
    for _ in range(6):
        assert spans(one.draw().table) == spans(other.draw().table)
    assert one.state.to_json() == other.state.to_json()


@laws
@given(deferred_worlds(), chunks, chunks, st.data())
def test_a_state_that_was_saved_at_any_step_goes_on_alike(
    world: World, chunk: ChunkSizes, other: ChunkSizes, data: st.DataObject
) -> None:
    driver = world.driver(chunk=chunk)
    for _ in range(data.draw(st.integers(0, 12))):
        driver.draw()
    resumed = world.driver(chunk=other, state=restored(driver.state))
    for _ in range(10):
        one, two = driver.draw(), resumed.draw()
        assert spans(one.table) == spans(two.table)
        assert one.state.to_json() == two.state.to_json()


@laws
@given(deferred_worlds(epochs=None), chunks, st.integers(1, 6))
def test_the_mixture_is_exact_at_every_moment(world: World, chunk: ChunkSizes, steps: int) -> None:
    driver = world.driver(chunk=chunk)
    by_tokens = world.rules.mix_by == "tokens"
    share_S = Schedule.constant(world.weights).weights_at(0, [s.name for s in world.sources])
    largest = max(s.rows["tokens"].max() for s in world.sources) if by_tokens else 1
    received_S = np.zeros(len(share_S), np.int64)
    for _ in range(steps):
        table = driver.draw().table
        sizes = table["tokens"] if by_tokens else np.ones(table.num_rows, np.int64)
        for source, size in zip(table["source"].tolist(), sizes.tolist(), strict=True):
            received_S[source] += size
            deficit_S = share_S * received_S.sum() - received_S * TOTAL_SHARE
            assert (np.abs(deficit_S) < TOTAL_SHARE * largest).all()


@laws
@given(worlds(), chunks, st.integers(1, 5))
def test_steps_over_one_rank_are_as_without(world: World, chunk: ChunkSizes, steps: int) -> None:
    """No span costs more than the whole step."""
    rules = replace(world.rules, deferral=Deferral(steps=steps, ways=1, cost=squares))
    pairs = zip(
        world.driver(chunk=chunk).draws(MANY),
        replace(world, rules=rules).driver(chunk=chunk).draws(MANY),
        strict=True,
    )
    for plain, deferred in pairs:
        assert spans(plain.table) == spans(deferred.table)
        assert plain.state.to_json() == deferred.state.to_json()


@laws
@given(deferred_worlds(), chunks)
def test_an_epoch_begins_when_the_one_before_is_drawn(world: World, chunk: ChunkSizes) -> None:
    epochs = defaultdict(list)
    for drawn in world.driver(chunk=chunk).draws(MANY):
        for span in spans(drawn.table):
            epochs[span[0]].append(span[1])
    assert all(seen == sorted(seen) for seen in epochs.values())


# Long ones meet long ones ---------------------------------------------------------------------


def test_long_documents_meet_long_documents() -> None:
    batching = Packed(seq_len=8, global_batch=8, max_documents=1)
    # Every step of 8 has one of cost 8, more than half of 15; two together do not exceed half.
    source = MemorySource("a", 0, [ok(*[8, 1, 1, 1, 1, 1, 1, 1] * 12)], batching)
    rules = DrawRules(batching=batching, deferral=Deferral(steps=4, ways=2))
    driver = Driver([source], rules, chunk=lambda: 96)
    steps = [driver.draw().table["tokens"].tolist() for _ in range(6)]
    assert [step.count(8) for step in steps] == [0, 2, 0, 2, 0, 2]
    assert steps[1][:2] == [8, 8]  # what waited goes first


@few_laws
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(2, 5))
def test_no_span_costs_more_than_its_share_of_the_step_unless_one_could_wait_no_longer(
    seed: int, steps: int, ways: int
) -> None:
    driver = tailed_driver(seed, Deferral(steps=steps, ways=ways, cost=work), 10)
    for _ in range(10):
        overdue = {
            span
            for own in driver.state.sources.values()
            for span, held in zip(
                spans(own.outstanding), own.outstanding["held"].tolist(), strict=True
            )
            if held <= driver.state.step - steps
        }
        drawn = driver.draw()
        cost_N = costs(drawn, driver.rules)
        due_N = np.array([span in overdue for span in spans(drawn.table)])
        bearable = max(cost_N.sum() // ways, cost_N[due_N].max(initial=0))
        assert cost_N[~due_N].max(initial=0) <= bearable


def test_a_stream_of_long_tails_can_be_balanced() -> None:
    """The slowest of W ranks does no less than the costliest span, nor than the mean."""

    def slowest(deferral: Deferral | None) -> float:
        driver = tailed_driver(3, deferral, 24)
        at_least, mean = 0.0, 0.0
        for _ in range(24):
            cost_N = work(driver.draw().table)
            at_least += max(cost_N.max(), cost_N.sum() / 4)
            mean += cost_N.sum() / 4
        return at_least / mean

    assert slowest(None) > 1.2
    assert slowest(Deferral(steps=4, ways=4, cost=work)) < 1.03


# Bounded delay --------------------------------------------------------------------------------


@few_laws
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 9))
def test_no_span_comes_more_than_k_steps_after_its_turn(seed: int, steps: int, ways: int) -> None:
    num_steps = 14
    plain = tailed_driver(seed, None, num_steps)
    deferred = tailed_driver(seed, Deferral(steps=steps, ways=ways, cost=work), num_steps)
    turn = {s: n for n in range(num_steps) for s in spans(plain.draw().table)}
    came = {s: n for n in range(num_steps) for s in spans(deferred.draw().table)}
    for span, step in turn.items():
        # A source may have one turn more in one step than in another.
        assert came.get(span, num_steps) <= step + steps + 1 or step + steps + 1 >= num_steps


@laws
@given(deferred_worlds(), chunks)
def test_what_waited_long_enough_goes_before_what_follows_it(
    world: World, chunk: ChunkSizes
) -> None:
    deferral = world.rules.deferral
    assert deferral is not None
    driver = world.driver(chunk=chunk)
    state = driver.state
    for drawn in driver.draws(MANY):
        order = {span: place for place, span in enumerate(spans(drawn.table))}
        for own in state.sources.values():
            for span, held in zip(
                spans(own.outstanding), own.outstanding["held"].tolist(), strict=True
            ):
                if held > drawn.step - deferral.steps:
                    continue
                for later, place in order.items():
                    if later[0] == span[0] and _canonical(later) > _canonical(span):
                        assert order.get(span, MANY) < place
        state = drawn.state


def _canonical(span: SpanKey) -> tuple[int, ...]:
    _, epoch, lane, position, start, _ = span
    return (epoch, position, lane, start)


@few_laws
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 9), st.integers(1, 8))
def test_a_source_lets_no_more_spans_wait_in_a_step_than_it_gives_and_a_window(
    seed: int, steps: int, ways: int, window: int
) -> None:
    deferral = Deferral(steps=steps, ways=ways, cost=work)
    driver = tailed_driver(seed, deferral, 8, window=window)
    for _ in range(8):
        drawn = driver.draw()
        given_S = np.bincount(drawn.table["source"], minlength=3)
        for own, count in zip(drawn.state.sources.values(), given_S.tolist(), strict=True):
            assert (own.outstanding["held"] == drawn.step).sum() <= count + window


def waiting_driver(steps: int = 3) -> Driver:
    """Return a driver behind a step for which a span of source a was too costly."""
    batching = Packed(seq_len=9, global_batch=4, max_documents=1)
    sources = [
        MemorySource("a", 0, [ok(9, *[1] * 30)], batching),
        MemorySource("b", 1, [ok(*[1] * 60)], batching),
    ]
    rules = DrawRules(batching=batching, epochs=1, deferral=Deferral(steps=steps, ways=2))
    driver = Driver(sources, rules, {"a": 1.0}, chunk=lambda: 99)
    assert driver.draw().table["tokens"].tolist() == [1, 1, 1, 1]
    assert spans(driver.state.sources["a"].outstanding) == [(0, 0, 0, 0, 0, 9)]
    assert driver.state.sources["a"].outstanding["held"].tolist() == [0]
    return driver


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_span_waits_k_steps(steps: int) -> None:
    driver = waiting_driver(steps)
    came = [9 in driver.draw().table["tokens"] for _ in range(6)]
    assert came == [step == steps for step in range(1, 7)]


def test_a_waiting_span_meets_its_bound_though_its_source_lost_its_weight() -> None:
    driver = waiting_driver()
    driver.state = driver.state.with_event(MixtureEvent(step=1, weights={"b": 1.0}))
    came = [9 in driver.draw().table["tokens"] for _ in range(4)]
    assert came == [False, False, True, False]


def test_waiting_spans_come_before_the_end() -> None:
    driver = waiting_driver(steps=1000)
    driver.state = driver.state.with_event(MixtureEvent(step=1, weights={"b": 1.0}))
    *_, last = driver.draws()
    assert last.table["tokens"].tolist() == [9]
    assert not driver.draw().table.num_rows


def test_a_source_that_has_nothing_cheap_gives_what_it_has() -> None:
    """Its share is kept; and no more of it than a window has to be known."""
    batching = Packed(seq_len=50, global_batch=8, max_documents=1)
    sources = [
        MemorySource("a", 0, [ok(*[1] * 900)], batching),
        MemorySource("b", 1, [ok(*[50] * 900)], batching),
    ]
    rules = DrawRules(batching=batching, window=4, deferral=Deferral(steps=3, ways=4))
    driver = Driver(sources, rules, {"a": 7.0, "b": 1.0}, chunk=lambda: 7)
    for _ in range(10):
        table = driver.draw().table
        assert (table["source"] == 1).sum() == 1
        assert driver.state.sources["b"].outstanding.num_rows <= 3 * (4 + 1)
        assert driver.known("b") <= 3 * (4 + 1) + 4 + 2 * 7


# Declaring it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["steps", "ways"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_numbers_are_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"defer\({name}=\).*>= 1"):
        DGraph().defer(**{"steps": 4, "ways": 8, name: value})  # type: ignore[arg-type]


def test_a_graph_defers_by_its_cost_wherever_that_is_set() -> None:
    cost = Transformer(64)
    for graph in (DGraph().defer(4, 8).cost(cost), DGraph().cost(cost).defer(4, 8)):
        assert graph.freeze().deferral == Deferral(steps=4, ways=8, cost=cost)
    assert DGraph().freeze().deferral is None
    assert fingerprint(DGraph().defer(4, 8).freeze()) != fingerprint(DGraph().freeze())


def test_costs_count_padded_tokens_of_all_parts() -> None:
    table = Metadata({"tokens": np.array([1, 4, 5])})
    batching = Packed(seq_len=8, global_batch=1, pad_to_multiple=4)
    both = Deferral(steps=1, ways=1, cost=Parts(Tokens(), squares))
    assert both.costs(table, batching).tolist() == [4 + 16, 4 + 16, 8 + 64]


def test_a_limit_falls_until_it_helps_no_more() -> None:
    free_m, held_m = np.zeros(4, bool), np.array([True, False, False, False])
    cost_m = np.array([9, 2, 2, 2])
    limit = Limit(None, 2)
    assert limit.lowered(cost_m, free_m, 1) is limit
    assert limit.lowered(cost_m, free_m, 2) == Limit(7, 2)
    assert limit.lowered(cost_m, held_m, 2) is limit
    assert limit.lowered(np.array([9, 1, 9, 1]), held_m, 9) is limit  # as costly as what must go
    assert limit.lowered(cost_m, free_m, 9) is NO_LIMIT
    assert NO_LIMIT.lowered(cost_m, free_m, 9) is NO_LIMIT
