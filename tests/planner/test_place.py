"""Laws of the placement: it changes nothing of what was drawn, wherever the spans go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.balance import Method
from megadask.planner.batching import Packed
from megadask.planner.costs import Transformer
from megadask.planner.draw import Draw, DrawRules
from megadask.planner.place import place_rest
from megadask.planner.plan import Plan
from megadask.planner.strategy import Strategy
from megadask.planner.topology import ClientPlaceTree
from tests.fakes import Driver, MemorySource, ok, spans
from tests.strategies import World, few_laws, laws, worlds

strategies = st.builds(
    Strategy,
    method=st.sampled_from(get_args(Method)),
    cost=st.sampled_from([Strategy().cost, Transformer(hidden=64)]),
)
buckets = st.integers(1, 5)


def assert_fits(plan: Plan, batching: Packed) -> None:
    """Every placed span has a place of its own within the caps."""
    placed = plan.bucket_N >= 0
    assert (plan.bucket_N < plan.num_buckets).all()
    for column in (plan.microbatch_N, plan.pack_N, plan.offset_N):
        assert ((column >= 0) == placed).all()
    assert (plan.microbatch_N[placed] >= plan.first_microbatch).all()
    assert (plan.microbatch_N < plan.num_microbatches).all()
    assert (plan.pack_N < batching.micro_batch).all()
    size_N = batching.padded(plan.table["tokens"])
    packs: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    columns = (plan.bucket_N, plan.microbatch_N, plan.pack_N, plan.offset_N, size_N)
    for *pack, offset, size in np.stack(columns, axis=1)[placed].tolist():
        packs.setdefault(tuple(pack), []).append((offset, offset + size))
    for pieces in packs.values():
        pieces.sort()
        assert pieces[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(pieces))
        assert pieces[-1][1] <= batching.seq_len
        assert len(pieces) <= batching.documents_limit


def assert_loads(plan: Plan, strategy: Strategy, batching: Packed) -> None:
    """The loads are the summed costs of what each microbatch holds, and no more."""
    padded = plan.table.with_columns(tokens=batching.padded(plan.table["tokens"]))
    cost_N = np.asarray(strategy.cost(padded), np.float64)
    expected = np.zeros(plan.loads_BMP.shape[:2])
    placed = plan.bucket_N >= 0
    np.add.at(expected, (plan.bucket_N[placed], plan.microbatch_N[placed]), cost_N[placed])
    unit = getattr(strategy.cost, "unit", 1.0)
    np.testing.assert_allclose(plan.loads_BMP[:, :, 0] * unit, expected, rtol=1e-3)


@laws
@given(worlds(), buckets, strategies)
def test_every_span_has_a_place_within_the_caps(
    world: World, num_buckets: int, strategy: Strategy
) -> None:
    batching = world.rules.batching
    driver = world.driver(num_buckets=num_buckets, strategy=strategy)
    for _ in range(4):
        drawn = driver.draw()
        plan = driver.place(drawn)
        assert plan.end == (drawn.table.num_rows == 0)
        if plan.end:
            assert plan.num_microbatches == 0
            break
        assert (plan.bucket_N >= 0).all()
        assert spans(plan.table) == spans(drawn.table)
        assert plan.num_buckets == num_buckets
        assert_fits(plan, batching)
        assert_loads(plan, strategy, batching)
        assert plan.num_loss_tokens == plan.table["loss_tokens"].sum()
        assert plan.state == drawn.state.to_json()
        # As few microbatches as the packs of the draw need, the same for all.
        used = int(drawn.canonical_pack_N.max()) + 1
        assert plan.num_microbatches == -(-used // (num_buckets * batching.micro_batch))


@laws
@given(worlds(), buckets, buckets, strategies, strategies)
def test_membership_does_not_depend_on_the_placement(
    world: World, one: int, other: int, strategy: Strategy, different: Strategy
) -> None:
    here = world.driver(num_buckets=one, strategy=strategy)
    there = world.driver(num_buckets=other, strategy=different)
    for _ in range(4):
        mine, theirs = here.plan(), there.plan()
        assert mine.draw_digest == theirs.draw_digest
        assert mine.state == theirs.state
        assert (mine.num_loss_tokens, mine.end) == (theirs.num_loss_tokens, theirs.end)


@few_laws
@given(worlds(), buckets, strategies)
def test_a_placement_is_a_function_of_the_draw(
    world: World, num_buckets: int, strategy: Strategy
) -> None:
    driver = world.driver(num_buckets=num_buckets, strategy=strategy)
    drawn = driver.draw()
    assert driver.place(drawn).to_arrow() == driver.place(drawn).to_arrow()


@dataclass(frozen=True)
class Interrupted:
    """A step that was drawn and placed, and then left at one of its microbatches."""

    driver: Driver
    drawn: Draw
    plan: Plan

    @classmethod
    def of(cls, driver: Driver) -> Interrupted:
        drawn = driver.draw()
        return cls(driver, drawn, driver.place(drawn))

    def rest(self, plan: Plan, microbatch: int, num_buckets: int, strategy: Strategy) -> Plan:
        """Place what ``plan`` leaves at a microbatch."""
        return place_rest(
            self.drawn,
            strategy,
            self.driver.rules.batching,
            ClientPlaceTree(dp=num_buckets),
            self.driver.mixture,
            consumed_N=plan.microbatch_N < microbatch,
            first_microbatch=microbatch,
            assignment_digest=plan.assignment_digest,
        )


def many_packs(world: World, num_packs: int) -> World:
    batching = replace(world.rules.batching, global_batch=num_packs)
    sources = [replace(source, batching=batching) for source in world.sources]
    return replace(world, sources=sources, rules=replace(world.rules, batching=batching))


many_pack_worlds = st.builds(many_packs, worlds(), st.integers(2, 8))


@laws
@given(many_pack_worlds, buckets, strategies, st.data())
def test_the_rest_of_a_step_stays_where_it_was(
    world: World, num_buckets: int, strategy: Strategy, data: st.DataObject
) -> None:
    step = Interrupted.of(world.driver(num_buckets=num_buckets, strategy=strategy))
    plan = step.plan
    microbatch = data.draw(st.integers(0, plan.num_microbatches))
    rest = step.rest(plan, microbatch, num_buckets, strategy)
    left = plan.microbatch_N >= microbatch
    for name in ("bucket_N", "microbatch_N", "pack_N", "offset_N"):
        np.testing.assert_array_equal(
            getattr(rest, name), np.where(left, getattr(plan, name), -1), err_msg=name
        )
    assert rest.assignment_digest == plan.assignment_digest
    assert rest.first_microbatch == microbatch
    assert rest.num_microbatches == plan.num_microbatches
    assert_loads(rest, strategy, world.rules.batching)
    # Interrupted again, it still stays: the concatenation is the uninterrupted step.
    later = data.draw(st.integers(microbatch, plan.num_microbatches))
    again = step.rest(rest, later, num_buckets, strategy)
    direct = step.rest(plan, later, num_buckets, strategy)
    assert again.to_arrow() == direct.to_arrow()


@laws
@given(many_pack_worlds, buckets, buckets, strategies, strategies, st.data())
def test_elsewhere_the_rest_of_a_step_is_delivered_exactly(
    world: World,
    before: int,
    now: int,
    strategy: Strategy,
    different: Strategy,
    data: st.DataObject,
) -> None:
    step = Interrupted.of(world.driver(num_buckets=before, strategy=strategy))
    plan = step.plan
    microbatch = data.draw(st.integers(0, plan.num_microbatches))
    rest = step.rest(plan, microbatch, now, different)
    left = plan.microbatch_N >= microbatch
    assert ((rest.bucket_N >= 0) == left).all()
    assert_fits(rest, world.rules.batching)
    assert_loads(rest, different, world.rules.batching)
    assert (rest.draw_digest, rest.state) == (plan.draw_digest, plan.state)
    assert rest.num_loss_tokens == plan.num_loss_tokens
    assert rest.num_buckets == now
    assert not rest.end
    # And once more, from the middle of the rest.
    later = data.draw(st.integers(microbatch, rest.num_microbatches))
    last = step.rest(rest, later, before, strategy)
    assert ((last.bucket_N >= 0) == (rest.microbatch_N >= later)).all()
    assert_fits(last, world.rules.batching)


def test_a_step_that_is_done_leaves_no_microbatch() -> None:
    batching = Packed(seq_len=4, global_batch=2)
    source = MemorySource("a", 0, [ok(4, 4, 4)], batching)
    step = Interrupted.of(Driver([source], DrawRules(batching=batching)))
    rest = step.rest(step.plan, 2, 2, Strategy())
    assert rest.num_microbatches == rest.first_microbatch == 2
    assert (rest.bucket_N == -1).all()
    assert not rest.end
    assert rest.imbalance == 1.0


@pytest.mark.parametrize("num_buckets", [1, 2, 4])
def test_the_tail_has_fewer_microbatches(num_buckets: int) -> None:
    batching = Packed(seq_len=4, global_batch=8)
    source = MemorySource("a", 0, [ok(*[4] * 11)], batching)
    rules = DrawRules(batching=batching, epochs=1)
    driver = Driver([source], rules, num_buckets=num_buckets)
    counts = [plan.num_microbatches for plan in driver.plans()]
    assert counts == [8 // num_buckets, -(-3 // num_buckets), 0]
