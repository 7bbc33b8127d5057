"""Laws of the three ways to make batches: what they draw, place, and refuse."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megadask as md
from megadask.planner.balance import Method
from megadask.planner.batching import Batching, Fixed, Packed, Padded
from megadask.planner.deferral import Deferral
from megadask.planner.draw import Draw, DrawRules
from megadask.planner.errors import ConfigError
from megadask.planner.ids import Verdict
from megadask.planner.ledger import Ledger
from megadask.planner.mesh import check_mesh
from megadask.planner.metadata import Ragged
from megadask.planner.place import place, place_rest
from megadask.planner.plan import Plan
from megadask.planner.pouring import parts
from megadask.planner.schedule import Schedule
from megadask.planner.state import MixtureEvent
from megadask.planner.strategy import Strategy
from megadask.planner.topology import ClientPlaceTree
from megadask.planner.weights import TOTAL_SHARE
from tests.fakes import Driver, MemorySource, ok, restored, spans
from tests.strategies import (
    ChunkSizes,
    World,
    batchings,
    chunks,
    few_laws,
    fixed_batchings,
    laws,
    padded_batchings,
    worlds,
)

MANY = 10_000
KINDS = (Packed, Padded, Fixed)
any_batching = batchings() | padded_batchings() | fixed_batchings()
#: (source, epoch, lane, position)
Sample = tuple[int, int, int, int]


def pieces_of(draws: list[Draw]) -> dict[Sample, list[tuple[int, int]]]:
    """Return the spans of every sample, in the order drawn."""
    found = defaultdict(list)
    for drawn in draws:
        for *sample, start, stop in spans(drawn.table):
            found[tuple(sample)].append((start, stop))
    return found  # type: ignore[return-value]


def samples_of(world: World) -> dict[Sample, int]:
    """Return the samples that are to be drawn, and how many tokens of each."""
    lengths = {}
    for source in world.sources:
        good = source.rows.take(source.rows["verdict"] == Verdict.OK)
        columns = (good[name].tolist() for name in ("lane", "position", "length"))
        for lane, position, length in zip(*columns, strict=True):
            for epoch in range(world.rules.epochs or 0):
                lengths[source.index, epoch, lane, position] = length
    return lengths


# The draw ---------------------------------------------------------------------------------------


@laws
@given(worlds(batching=any_batching), chunks)
def test_the_spans_of_a_sample_tile_it(world: World, chunk: ChunkSizes) -> None:
    """Nothing is lost and nothing comes twice, and l tokens have l - 1 targets."""
    draws = list(world.driver(chunk=chunk).draws(MANY))
    expected, found = samples_of(world), pieces_of(draws)
    assert found.keys() == expected.keys()
    for sample, pieces in found.items():
        pieces.sort()
        assert pieces[0][0] == 0
        assert pieces[-1][1] == expected[sample]
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in pairwise(pieces))
    targets = sum(int(drawn.table["loss_tokens"].sum()) for drawn in draws)
    assert targets == sum(length - 1 for length in expected.values())
    for drawn in draws:
        table = drawn.table
        assert (table["tokens"] == table["stop"] - table["start"]).all()


@laws
@given(worlds(batching=any_batching), chunks)
def test_packs_hold_what_they_have_room_for(world: World, chunk: ChunkSizes) -> None:
    batching = world.rules.batching
    for drawn in world.driver(chunk=chunk).draws(MANY):
        pack_N = drawn.canonical_pack_N
        used = np.bincount(pack_N, batching.padded(drawn.table["tokens"]))
        assert len(used) <= drawn.num_packs == batching.global_batch
        assert 0 < used.min() <= used.max() <= batching.seq_len
        assert np.bincount(pack_N).max() <= batching.documents_limit


@laws
@given(worlds(batching=any_batching), chunks, chunks)
def test_what_is_drawn_does_not_depend_on_how_much_is_known(
    world: World, chunk: ChunkSizes, other: ChunkSizes
) -> None:
    one, two, all_at_once = (world.driver(chunk=c) for c in (chunk, other, lambda: MANY))
    for _ in range(40):
        drawn = one.draw()
        assert_same(drawn, two.draw())
        assert_same(drawn, all_at_once.draw())
        if not drawn.table.num_rows:
            break


@laws
@given(worlds(batching=any_batching, epochs=2), chunks, chunks)
def test_a_run_that_resumes_before_every_step_is_the_uninterrupted_one(
    world: World, chunk: ChunkSizes, other: ChunkSizes
) -> None:
    driver = world.driver(chunk=chunk)
    for _ in range(25):
        resumed = world.driver(chunk=other, state=restored(driver.state))
        assert_same(driver.draw(), resumed.draw())


def assert_same(one: Draw, other: Draw) -> None:
    assert spans(one.table) == spans(other.table)
    assert one.table["loss_tokens"].tolist() == other.table["loss_tokens"].tolist()
    assert one.canonical_pack_N.tolist() == other.canonical_pack_N.tolist()
    assert one.taken_S.tolist() == other.taken_S.tolist()
    assert spans(one.passed) == spans(other.passed)
    assert one.state.to_json() == other.state.to_json()


@laws
@given(worlds(batching=any_batching), chunks, st.data())
def test_the_audit_of_a_resumed_run_is_clean(
    world: World, chunk: ChunkSizes, data: st.DataObject
) -> None:
    driver = world.driver(chunk=chunk)
    for _ in range(data.draw(st.integers(0, 12))):
        driver.draw()
    before = restored(driver.state)
    resumed = world.driver(chunk=chunk, state=before)
    ledger = Ledger(before)
    for drawn in resumed.draws(MANY):
        num_rows = drawn.table.num_rows
        ledger.plan(drawn.table, drawn.passed, np.ones(num_rows, bool), drawn.state.sources)
        assert ledger.report([drawn.table])["ok"]
        ledger.deliver(drawn.table, np.arange(num_rows))
        report = ledger.report([])
        assert report["ok"], report
    assert all(own.ended for own in resumed.state.sources.values())


@laws
@given(worlds(batching=any_batching), chunks)
def test_unreadable_records_are_passed_over_once(world: World, chunk: ChunkSizes) -> None:
    driver = world.driver(chunk=chunk)
    gone: list[Any] = []
    while not all(own.ended for own in driver.state.sources.values()):
        gone.extend(spans(driver.draw().passed))
    for source in world.sources:
        bad = source.rows.take(source.rows["verdict"] != Verdict.OK)
        mine = [span for span in gone if span[0] == source.index]
        assert len(mine) == len(set(mine)) == bad.num_rows * (world.rules.epochs or 0)


@pytest.mark.parametrize("stop", ["first", "all", "repeat"])
@few_laws
@given(worlds(batching=fixed_batchings()), chunks)
def test_what_is_left_of_a_document_comes_before_the_end(
    stop: Any, world: World, chunk: ChunkSizes
) -> None:
    driver = replace(world, rules=replace(world.rules, stop=stop)).driver(chunk=chunk)
    draws = list(driver.draws(MANY))
    for pieces in pieces_of(draws).values():
        assert sum(b - a for a, b in pieces) == max(b for _, b in pieces)
    assert not any(own.outstanding.num_rows for own in driver.state.sources.values())
    assert not driver.draw().table.num_rows
    if stop == "first":
        assert any(own.ended for own in driver.state.sources.values())


# Fixed ------------------------------------------------------------------------------------------


@laws
@given(worlds(batching=fixed_batchings()), chunks)
def test_fixed_packs_are_full_but_the_last_one(world: World, chunk: ChunkSizes) -> None:
    batching = world.rules.batching
    draws = list(world.driver(chunk=chunk).draws(MANY))
    for drawn in draws:
        pack_N = drawn.canonical_pack_N
        used = np.bincount(pack_N, batching.padded(drawn.table["tokens"]))
        count = np.bincount(pack_N)
        closed = (used == batching.seq_len) | (count == batching.documents_limit)
        if drawn is not draws[-1]:
            assert len(used) == drawn.num_packs
            assert closed.all()
        assert closed[:-1].all()
        assert (np.diff(pack_N) >= 0).all()


@laws
@given(worlds(batching=fixed_batchings()), chunks)
def test_fixed_puts_documents_one_after_the_other(world: World, chunk: ChunkSizes) -> None:
    """All pieces of a document follow each other, over packs and steps."""
    ended: set[Sample] = set()
    at: tuple[Sample, int] | None = None
    lengths = samples_of(world)
    for drawn in world.driver(chunk=chunk).draws(MANY):
        for *key, start, stop in spans(drawn.table):
            sample: Sample = tuple(key)  # type: ignore[assignment]
            if at is not None and at[1] < lengths[at[0]]:
                assert (sample, start) == at
            else:
                assert start == 0
                assert sample not in ended
                ended.add(sample)
            at = (sample, stop)


@laws
@given(worlds(batching=fixed_batchings(), epochs=None), chunks, st.integers(1, 6))
def test_the_mixture_of_fixed_counts_whole_documents(
    world: World, chunk: ChunkSizes, steps: int
) -> None:
    """When they begin: exact within one document, or within the tokens of the longest."""
    driver = world.driver(chunk=chunk)
    by_tokens = world.rules.mix_by == "tokens"
    share_S = Schedule.constant(world.weights).weights_at(0, [s.name for s in world.sources])
    largest = max(source.rows["length"].max() for source in world.sources) if by_tokens else 1
    received_S = np.zeros(len(share_S), np.int64)
    for _ in range(steps):
        drawn = driver.draw()
        begun = drawn.table.take(drawn.table["start"] == 0)
        sizes = begun["length"] if by_tokens else np.ones(begun.num_rows, np.int64)
        deficit_S = share_S * received_S.sum() - received_S * TOTAL_SHARE
        for source, size in zip(begun["source"].tolist(), sizes.tolist(), strict=True):
            received_S[source] += size
            deficit_S = share_S * received_S.sum() - received_S * TOTAL_SHARE
            assert (np.abs(deficit_S) < TOTAL_SHARE * largest).all()
        assert list(drawn.state.deficits.values()) == deficit_S.tolist()


def test_a_document_longer_than_several_steps_goes_on_though_its_source_lost_its_weight() -> None:
    batching = Fixed(seq_len=4, global_batch=2)
    sources = [
        MemorySource("a", 0, [ok(3, 20)], batching),
        MemorySource("b", 1, [ok(*[2] * 8)], batching),
    ]
    driver = Driver(sources, DrawRules(batching=batching, epochs=1), {"a": 1.0})
    assert [s[3:] for s in spans(driver.draw().table)] == [(0, 0, 3), (1, 0, 1), (1, 1, 5)]
    assert not driver.state.sources["a"].ended
    assert driver.state.sources["a"].cursor == (0, 1, 1, 0)
    driver.state = driver.state.with_event(MixtureEvent(step=1, weights={"b": 1.0}))
    steps = [[s[:1] + s[3:] for s in spans(d.table)] for d in driver.draws()]
    assert steps[:2] == [
        [(0, 1, 5, 9), (0, 1, 9, 13)],
        [(0, 1, 13, 17), (0, 1, 17, 20), (1, 0, 0, 1)],
    ]
    assert steps[2][0] == (1, 0, 1, 2)
    assert sum(b - a for step in steps[1:] for source, _, a, b in step if source) == 16


def test_a_pack_of_many_documents_is_closed_early() -> None:
    batching = Fixed(seq_len=8, global_batch=2, max_documents=2)
    source = MemorySource("a", 0, [ok(1, 1, 5, 5, 1)], batching)
    driver = Driver([source], DrawRules(batching=batching, epochs=1))
    first, second = driver.draws()
    assert first.canonical_pack_N.tolist() == [0, 0, 1, 1]
    assert first.table["tokens"].tolist() == [1, 1, 5, 3]
    assert second.table["tokens"].tolist() == [2, 1]


def test_items_go_with_the_beginning_of_their_span() -> None:
    batching = Fixed(seq_len=4, global_batch=1)
    table = MemorySource("a", 0, [ok(6, 3)], batching).rows
    table = type(table)(table.columns, {"image": Ragged.of([[7, 8], [9]])})
    cut = parts(table, np.array([0, 0, 1]), np.array([0, 4, 0]), np.array([4, 6, 3]))
    assert cut.ragged["image"].lengths_I.tolist() == [7, 8, 9]
    assert np.diff(cut.ragged["image"].offsets).tolist() == [2, 0, 1]
    assert cut["loss_tokens"].tolist() == [4, 1, 2]


# The placement ----------------------------------------------------------------------------------

strategies = st.builds(
    Strategy,
    method=st.sampled_from(get_args(Method)),
    cost=st.sampled_from([Strategy().cost, md.costs.Transformer(hidden=8)]),
)
buckets = st.integers(1, 4)


def packs_of(plan: Plan) -> Counter[tuple[tuple[Any, ...], ...]]:
    """Return what each pack holds, spans by offset, and how often."""
    packs = defaultdict(list)
    columns = (plan.bucket_N, plan.microbatch_N, plan.pack_N, plan.offset_N)
    for span, (*pack, offset) in zip(spans(plan.table), np.stack(columns, 1).tolist(), strict=True):
        if pack[0] >= 0:
            packs[tuple(pack)].append((offset, span))
    return Counter(tuple(span for _, span in sorted(pack)) for pack in packs.values())


def canonical_packs(drawn: Draw) -> Counter[tuple[tuple[Any, ...], ...]]:
    packs = defaultdict(list)
    for span, pack in zip(spans(drawn.table), drawn.canonical_pack_N.tolist(), strict=True):
        packs[pack].append(span)
    return Counter(map(tuple, packs.values()))


@laws
@given(worlds(batching=fixed_batchings() | padded_batchings()), buckets, strategies)
def test_packs_stay_whole_wherever_they_go(
    world: World, num_buckets: int, strategy: Strategy
) -> None:
    batching = world.rules.batching
    driver = world.driver(num_buckets=num_buckets, strategy=strategy)
    for drawn in driver.draws(6):
        plan = driver.place(drawn)
        assert packs_of(plan) == canonical_packs(drawn)
        slots = num_buckets * batching.micro_batch
        used = int(drawn.canonical_pack_N.max()) + 1
        assert plan.num_microbatches == -(-used // slots)
        padded = drawn.table.with_columns(tokens=batching.padded(drawn.table["tokens"]))
        unit = getattr(strategy.cost, "unit", 1.0)
        total = np.asarray(strategy.cost(padded), np.float64).sum()
        np.testing.assert_allclose(plan.loads_BMP.sum() * unit, total, rtol=1e-3)
        assert 1.0 <= plan.bound <= plan.imbalance + 1e-9
        assert_efficiency(plan, batching)


def assert_efficiency(plan: Plan, batching: Batching) -> None:
    """Real tokens over the sizes of the arrays that trainers get."""
    capacity = 0
    for bucket in range(plan.num_buckets):
        for microbatch in range(plan.first_microbatch, plan.num_microbatches):
            size_n = batching.padded(plan.table["tokens"][plan.rows_of(bucket, microbatch)])
            width = batching.seq_len
            if isinstance(batching, Padded) and batching.pad_to == "longest":
                width = max(batching.pad_to_multiple, *size_n.tolist(), 0)
            capacity += batching.micro_batch * width
    placed = plan.table["tokens"][plan.bucket_N >= 0].sum()
    assert plan.capacity_tokens == capacity
    assert plan.efficiency == pytest.approx(placed / capacity)
    assert 0 < plan.efficiency <= 1


@laws
@given(worlds(batching=any_batching), buckets, buckets, strategies, st.data())
def test_the_rest_of_a_step_is_placed_once_on_any_topology(
    world: World, one: int, other: int, strategy: Strategy, data: st.DataObject
) -> None:
    batching = world.rules.batching
    driver = world.driver(num_buckets=one, strategy=strategy)
    drawn = driver.draw()
    whole = driver.place(drawn)
    if not whole.num_microbatches:
        return
    first = data.draw(st.integers(0, whole.num_microbatches - 1))
    consumed_N = whole.microbatch_N < first
    rest = place_rest(
        drawn,
        strategy,
        batching,
        ClientPlaceTree(dp=other),
        {},
        consumed_N=consumed_N,
        first_microbatch=first,
        assignment_digest=whole.assignment_digest,
    )
    assert ((rest.bucket_N < 0) == consumed_N).all()
    assert rest.table is drawn.table
    assert_efficiency(rest, batching)
    if not isinstance(batching, Packed):
        assert packs_of(rest) <= canonical_packs(drawn)
    if one == other:
        assert (rest.bucket_N[~consumed_N] == whole.bucket_N[~consumed_N]).all()
        assert (rest.offset_N[~consumed_N] == whole.offset_N[~consumed_N]).all()


@pytest.mark.parametrize("dp", [1, 4])
def test_what_is_left_of_a_step_of_fixed_keeps_its_packs(dp: int) -> None:
    batching = Fixed(seq_len=16, global_batch=8)
    source = MemorySource("a", 0, [ok(3, 9, 30, 5, 2, 2, 17, 1, 8, 40, 11)], batching)
    driver = Driver([source], DrawRules(batching=batching, epochs=1), num_buckets=2)
    drawn = driver.draw()
    whole = driver.place(drawn)
    rest = place_rest(
        drawn,
        Strategy(),
        batching,
        ClientPlaceTree(dp=dp),
        {},
        consumed_N=whole.microbatch_N < 2,
        first_microbatch=2,
        assignment_digest=whole.assignment_digest,
    )
    assert whole.num_microbatches == 4
    assert rest.num_microbatches == 2 + 4 // dp
    assert len(packs_of(rest)) == 4
    assert packs_of(rest) <= canonical_packs(drawn)
    assert rest.efficiency == 1.0


def test_an_epoch_is_not_over_before_the_rest_of_its_last_document_is_drawn() -> None:
    batching = Fixed(seq_len=4, global_batch=1)
    source = MemorySource("a", 0, [ok(2, 5)], batching)
    driver = Driver([source], DrawRules(batching=batching, epochs=2))
    driver.draw()
    own = driver.state.sources["a"]
    assert own.cursor == (0, 1, 1, 0)
    assert spans(own.outstanding) == [(0, 0, 0, 1, 2, 5)]
    assert not own.ended
    drawn = driver.draw()
    assert [span[1:] for span in spans(drawn.table)] == [(0, 0, 1, 2, 5), (1, 0, 0, 0, 1)]
    assert driver.state.sources["a"].cursor == (1, 0, 1, 0)
    assert driver.state.sources["a"].lengths == (2,)


def test_fixed_balances_by_what_the_documents_of_a_pack_cost() -> None:
    """Packs of one long document cost more than packs of many short ones."""
    batching = Fixed(seq_len=64, global_batch=8)
    lengths = ([64] * 2 + [8] * 16) * 2
    source = MemorySource("a", 0, [ok(*lengths)], batching)
    by = {}
    for method in ("none", "assignment"):
        strategy = Strategy(method=method, cost=md.costs.Transformer(hidden=4))  # type: ignore[arg-type]
        rules = DrawRules(batching=batching, epochs=1)
        by[method] = Driver([source], rules, num_buckets=4, strategy=strategy).plan()
    assert by["none"].imbalance > 1.4
    assert by["assignment"].imbalance == pytest.approx(1.0)
    assert by["assignment"].draw_digest == by["none"].draw_digest


@few_laws
@given(worlds(batching=padded_batchings()), buckets, strategies)
def test_ranks_get_equally_many_rows_where_that_is_asked_for(
    world: World, num_buckets: int, strategy: Strategy
) -> None:
    strategy = replace(strategy, equal_counts=True)
    driver = world.driver(num_buckets=num_buckets, strategy=strategy)
    for drawn in driver.draws(6):
        plan = driver.place(drawn)
        assert np.ptp(np.bincount(plan.bucket_N, minlength=num_buckets)) <= 1
        assert packs_of(plan) == canonical_packs(drawn)


def test_rows_of_padded_can_be_counted_out_evenly() -> None:
    """Nine samples of uneven lengths over four ranks: 3, 2, 2, 2, none empty."""
    batching = Padded(seq_len=64, global_batch=12)
    source = MemorySource("a", 0, [ok(60, 50, 40, 5, 5, 5, 4, 3, 2)], batching)
    strategy = Strategy(equal_counts=True)
    check_mesh(ClientPlaceTree(dp=4), strategy, batching, [])
    rules = DrawRules(batching=batching, epochs=1)
    plan = Driver([source], rules, num_buckets=4, strategy=strategy).plan()
    assert sorted(np.bincount(plan.bucket_N, minlength=4).tolist()) == [2, 2, 2, 3]
    assert plan.num_microbatches == 3
    with pytest.raises(ConfigError, match=r"equal_counts=.*Fixed"):
        check_mesh(ClientPlaceTree(dp=4), strategy, Fixed(64, 12), [])


# What is refused --------------------------------------------------------------------------------


BAD = [
    ("seq_len", 0),
    ("seq_len", True),
    ("seq_len", 8.0),
    ("global_batch", 0),
    ("global_batch", True),
    ("global_batch", "8"),
    ("micro_batch", -1),
    ("pad_to_multiple", True),
    ("pad_to_multiple", 3),
    ("max_documents", 0),
    ("max_documents", True),
    ("max_documents", 2.5),
    ("overflow", "cut"),
    ("pad_to", "max"),
]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(kind, *bad) for kind in KINDS for bad in BAD if bad[0] in kind.__dataclass_fields__],
)
def test_a_parameter_that_makes_no_sense_is_named(
    kind: type[Batching], field: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\({field}=\)") as caught:
        kind(**{"seq_len": 8, "global_batch": 4, field: value})
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mesh_names_the_way_of_batching(kind: type[Batching]) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\(global_batch=\)"):
        check_mesh(ClientPlaceTree(dp=3), Strategy(), kind(8, 4), [])
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\(pad_to_multiple=\)"):
        check_mesh(ClientPlaceTree(dp=2, cp=2), Strategy(), kind(8, 4), [])


def test_rows_as_long_as_the_longest_are_cut_by_a_multiple() -> None:
    graph = md.DGraph(topology=ClientPlaceTree(dp=2, cp=2))
    strategy = graph.context(layout="sequence").freeze()
    topology = ClientPlaceTree(dp=2, cp=2)
    check_mesh(topology, strategy, Padded(8, 4), [])
    check_mesh(topology, strategy, Padded(8, 4, pad_to_multiple=4, pad_to="longest"), [])
    with pytest.raises(ConfigError, match=r"Padded\(pad_to_multiple=\)"):
        check_mesh(topology, strategy, Padded(8, 4, pad_to="longest"), [])


def test_fixed_does_not_defer() -> None:
    with pytest.raises(ConfigError, match=r"defer\(\) of Fixed"):
        DrawRules(batching=Fixed(8, 4), deferral=Deferral(steps=2, ways=2))
    with pytest.raises(ConfigError, match=r"batching="):
        DrawRules(batching=8)  # type: ignore[arg-type]


def test_batching_itself_is_no_way_of_batching() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Batching(8, 4)  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("batching", "cuts"),
    [
        (Packed(4, 1), [(0, 4), (4, 8), (8, 10)]),
        (Padded(4, 1, overflow="split"), [(0, 4), (4, 8), (8, 10)]),
        (Padded(4, 1), [(0, 4)]),
        (Padded(4, 1, overflow="drop"), []),
        (Fixed(4, 1), [(0, 10)]),
    ],
)
def test_how_a_long_document_is_cut_before_the_draw(
    batching: Batching, cuts: list[tuple[int, int]]
) -> None:
    assert batching.cut(10) == cuts


def test_a_long_document_is_an_error_where_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"10 tokens.*Padded\(overflow="):
        Padded(4, 1, overflow="error").cut(10)


# Streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batching", [Packed(512, 8), Padded(512, 8, overflow="split"), Fixed(512, 8)]
)
def test_a_stream_draws_every_token_once(batching: Batching) -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 300)
    stream = md.Stream(
        {"a": lengths[:200], "b": lengths[200:]},
        topology=ClientPlaceTree(dp=2),
        batching=batching,
        epochs=1,
        steps=MANY,
    )
    report = md.simulate(stream)
    assert report.tokens_T.sum() == lengths.sum()
    if isinstance(batching, Fixed):
        # All steps but the last are full.
        assert set(report.tokens_T[:-1].tolist()) == {8 * 512}
        assert report.packing_T[:-1].min() == 1.0
    else:
        assert 0 < report.packing < 1
    plans = [place(d.draw, Strategy(), batching, stream.topology, {}) for d in stream.draws()]
    capacity = sum(plan.capacity_tokens for plan in plans)
    assert report.packing == pytest.approx(lengths.sum() / capacity)
