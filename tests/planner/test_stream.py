"""The Planner alone: a stream draws what a run would, and reports what placing it comes to."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner import costs
from megadask.planner.batching import Packed
from megadask.planner.draw import DrawRules
from megadask.planner.drift import drift
from megadask.planner.errors import ConfigError
from megadask.planner.graph import DGraph
from megadask.planner.lengths import ImageText, Lognormal, mix
from megadask.planner.metadata import Metadata, Ragged
from megadask.planner.place import place
from megadask.planner.schedule import Schedule
from megadask.planner.simulating import simulate
from megadask.planner.simulation import Trainer
from megadask.planner.stream import Stream
from megadask.planner.topology import ClientPlaceTree
from tests.fakes import Driver, MemorySource, ok, spans
from tests.strategies import batchings, few_laws, laws

WEB = Lognormal(300, 1.0)
PACKED = Packed(1024, global_batch=8, overflow="truncate")


def weigh(graph: DGraph) -> None:
    graph.mix({"a": 0.7, "b": 0.3}).cost(costs.Transformer(hidden=64))


def two_laws(**options: Any) -> Stream:
    given_ = {"strategy": weigh, "topology": ClientPlaceTree(dp=4), "steps": 5, **options}
    return Stream({"a": WEB, "b": Lognormal(900, 0.5)}, batching=PACKED, **given_)


def keys(stream: Stream) -> list[Any]:
    return [spans(drawn.draw.table) for drawn in stream.draws()]


# What is drawn -----------------------------------------------------------------------------------


@laws
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=9), min_size=1, max_size=3),
    batchings(),
    st.sampled_from(["samples", "tokens"]),
    st.integers(1, 3),
    st.sampled_from(["first", "all", "repeat"]),
)
def test_a_stream_of_lengths_is_drawn_like_a_run_over_such_records(
    lengths: list[list[int]], batching: Packed, by: Any, epochs: int, stop: Any
) -> None:
    names = [f"source{index}" for index in range(len(lengths))]
    lengths = [[*each, 1] for each in lengths]  # of each something fits
    weights = {name: 1.0 + index for index, name in enumerate(names)}
    stream = Stream(
        dict(zip(names, map(np.array, lengths), strict=True)),
        strategy=lambda graph: graph.mix(weights, by=by),
        batching=Packed(
            batching.seq_len,
            batching.global_batch,
            overflow=batching.overflow,
            pad_to_multiple=batching.pad_to_multiple,
            max_documents=batching.max_documents,
        ),
        steps=40,
        epochs=epochs,
        stop=stop,
    )
    rules = DrawRules(batching=stream.batching, mix_by=by, epochs=epochs, stop=stop)
    sources = [
        MemorySource(name, index, [ok(*each)], stream.batching)
        for index, (name, each) in enumerate(zip(names, lengths, strict=True))
    ]
    driver = Driver(sources, rules, weights)
    run = list(driver.draws(40))
    drawn = [step.draw for step in stream.draws()]
    assert [spans(step.table) for step in drawn] == [spans(step.table) for step in run]
    for mine, other in zip(drawn, run, strict=True):
        assert mine.canonical_pack_N.tolist() == other.canonical_pack_N.tolist()
        for name in ("length", "loss_tokens", "verdict"):
            assert mine.table[name].tolist() == other.table[name].tolist()


def test_a_law_gives_the_same_to_every_stream_that_asks() -> None:
    long, short = keys(two_laws(steps=8)), keys(two_laws(steps=3))
    assert long[:3] == short
    assert keys(two_laws(steps=3, topology=ClientPlaceTree(dp=2))) == short
    assert keys(two_laws(steps=3, seed=1)) != short


def test_what_a_law_gives_does_not_depend_on_the_other_sources() -> None:
    def lengths(stream: Stream) -> dict[int, int]:
        table = next(stream.draws()).draw.table
        pairs = zip(table["position"].tolist(), table["tokens"].tolist(), strict=True)
        return {p: t for (p, t), s in zip(pairs, table["source"].tolist(), strict=True) if s == 0}

    alone = lengths(Stream({"a": WEB}, batching=PACKED))
    beside = lengths(Stream({"a": WEB, "b": WEB}, batching=PACKED))
    other = lengths(Stream({"c": WEB}, batching=PACKED))
    assert len(alone.keys() & beside.keys()) > 5
    assert alone | beside == beside | alone
    assert alone | other != other | alone


def test_a_law_does_not_repeat_itself() -> None:
    lengths: dict[int, int] = {}
    for drawn in Stream({"a": WEB}, batching=PACKED, steps=40).draws():
        table = drawn.draw.table
        lengths.update(zip(table["position"].tolist(), table["tokens"].tolist(), strict=True))
    (first, second) = ([lengths[n + start] for n in range(200)] for start in (0, 256))
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_items_and_scalars_go_with_the_start_of_their_document() -> None:
    items = Ragged(np.array([3, 4, 5]), np.array([0, 2, 3]))
    table = Metadata(
        {"tokens": np.array([30, 5]), "quality": np.array([0.5, 1.0])}, {"image": items}
    )
    stream = Stream({"a": table}, batching=Packed(16, global_batch=3), epochs=1)
    (step,) = [drawn.draw for drawn in stream.draws()]
    rows = [
        (
            position,
            start,
            quality,
            step.table.ragged["image"].take(np.array([n])).lengths_I.tolist(),
        )
        for n, (position, start, quality) in enumerate(
            zip(
                *(step.table[name].tolist() for name in ("position", "start", "quality")),
                strict=True,
            )
        )
    ]
    assert sorted(rows) == [(0, 0, 0.5, [3, 4]), (0, 16, 0.5, []), (1, 0, 1.0, [5])]


def test_sources_without_images_stand_beside_those_with() -> None:
    stream = Stream({"pairs": ImageText(clip=1024), "text": WEB}, batching=PACKED, steps=2)
    for drawn in stream.draws():
        table = drawn.draw.table
        count_N = np.diff(table.ragged["image"].offsets)
        assert count_N[table["source"] == 0].any()
        assert not count_N[table["source"] == 1].any()


def test_without_a_mixture_sources_end_together() -> None:
    stream = Stream(
        {"a": np.full(60, 8), "b": np.full(20, 8)}, batching=Packed(16, global_batch=4), epochs=1
    )
    shares = [np.bincount(drawn.draw.table["source"]).tolist() for drawn in stream.draws()]
    assert shares == [[6, 2]] * 10


def test_a_weight_of_zero_is_not_drawn_and_stages_change_the_mixture() -> None:
    stages = Schedule.stages({0: {"a": 1.0, "b": 0.0}, 2: {"a": 0.0, "b": 1.0}})
    stream = two_laws(strategy=lambda graph: graph.mix(stages), steps=4)
    seen = [set(drawn.draw.table["source"].tolist()) for drawn in stream.draws()]
    assert seen == [{0}, {0}, {1}, {1}]


def test_a_graph_does_as_well_as_a_function() -> None:
    graph = DGraph(["a", "b"], ClientPlaceTree(dp=4))
    weigh(graph)
    assert keys(two_laws(strategy=graph)) == keys(two_laws())
    with pytest.raises(ConfigError, match="that of the graph"):
        two_laws(strategy=graph, topology=ClientPlaceTree(dp=2))


def test_memory_does_not_grow_with_the_steps() -> None:
    stream = Stream({"a": WEB, "b": np.arange(1, 400)}, batching=PACKED, steps=300)
    sizes = {}
    tracemalloc.start()
    for step, _ in enumerate(stream.draws()):
        if step in (99, 299):
            gc.collect()
            sizes[step] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert sizes[299] - sizes[99] < 50_000


# What is reported --------------------------------------------------------------------------------


@few_laws
@given(
    st.sampled_from(["web", "mixed", "vl"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["step", "microbatch"]),
    st.integers(1, 3),
    st.sampled_from(["samples", "tokens"]),
    st.integers(0, 3),
)
def test_times_lie_above_their_bounds_and_the_mixture_is_exact(
    name: str, dp: int, micros: int, sync: Any, pp: int, by: Any, seed: int
) -> None:
    sources, weights = mix(name, context=2048)
    stream = Stream(
        sources,
        strategy=lambda g: g.mix(weights, by=by).cost(costs.Transformer(hidden=256)),
        topology=ClientPlaceTree(dp=dp),
        batching=Packed(2048, global_batch=dp * micros),
        steps=4,
        seed=seed,
    )
    report = simulate(stream, sync=sync, pp=pp, against=("none", "greedy"))
    assert list(report.placed) == ["none", "greedy", "assignment"]
    slack = 1 + 1e-12
    for placed in report.placed.values():
        assert (placed.step_time_T * slack >= report.bound_T).all()
        assert (placed.imbalance_T >= 1).all()
    assert (report.bound_T * slack >= report.ideal_T).all()
    # The largest sample, where tokens are counted.
    assert report.mixture_error <= (1 if by == "samples" else 2048)
    assert report.tokens_T.sum() <= dp * micros * 2048 * 4
    assert report.length_counts_L.sum() == report.spans_T.sum()
    if sync == "step" and pp == 1:
        assert report.step_time() <= report.step_time("none") * slack
        assert report.speedup() >= 1 / slack


def test_the_report_adds_up_the_simulations_of_its_plans() -> None:
    stream = two_laws()
    report = simulate(stream, sync="microbatch", pp=2)
    trainer = Trainer(sync="microbatch", pp=2)
    strategy = stream.frozen_strategy
    for step, drawn in enumerate(stream.draws()):
        plan = place(drawn.draw, strategy, stream.batching, stream.topology, {})
        done = trainer.run(plan.loads * plan.unit)
        placed = report.placed["assignment"]
        assert placed.step_time_T[step] == done.step_time
        assert placed.bubble_T[step] == done.bubble
        assert placed.imbalance_T[step] == plan.imbalance
        assert report.ideal_T[step] == done.ideal
        assert report.tokens_T[step] == drawn.draw.table["tokens"].sum()
    total = report.placed["assignment"].step_time_T.sum()
    assert report.throughput() == pytest.approx(report.tokens_T.sum() / total)
    assert report.throughput() <= report.best_throughput
    assert report.efficiency() == pytest.approx(report.ideal_T.sum() / total)


def test_a_stream_has_the_stages_of_its_topology() -> None:
    staged = two_laws(topology=ClientPlaceTree(dp=4, pp=2))
    assert simulate(staged).trainer.pp == 2
    assert simulate(staged, pp=1).trainer.pp == 1
    assert simulate(two_laws()).placed["assignment"].bubble_T.tolist() == [0] * 5


def test_parts_are_bounded_one_by_one() -> None:
    stream = Stream(
        {"pairs": ImageText(clip=1024)},
        strategy=lambda g: g.cost(
            costs.Parts(costs.VisionEncoder("image", 64), costs.Transformer(64))
        ),
        topology=ClientPlaceTree(dp=8),
        batching=PACKED,
        steps=3,
    )
    report = simulate(stream)
    assert (report.bound_T <= report.placed["assignment"].step_time_T).all()
    for step, drawn in enumerate(stream.draws()):
        cost_NP = costs.evaluate(stream.frozen_strategy.cost, drawn.draw.table)
        part_P = np.maximum(cost_NP.sum(axis=0) / 8, cost_NP.max(axis=0))
        assert report.bound_T[step] == pytest.approx(
            part_P.sum() * costs.unit_of(stream.frozen_strategy.cost)
        )


def test_planning_is_timed_by_the_clock_that_is_given() -> None:
    ticks = itertools.count()
    report = simulate(two_laws(), clock=lambda: float(next(ticks)))
    assert report.draw_seconds_T.tolist() == [1] * 5
    assert report.placed["none"].seconds_T.tolist() == [1] * 5
    assert report.planning_seconds() == 2
    assert simulate(two_laws()).planning_seconds() == 0


def test_a_declared_way_of_placing_comes_last_with_its_options() -> None:
    def strategy(graph: DGraph) -> None:
        graph.balance("assignment", rounds=0)

    report = simulate(two_laws(strategy=strategy), against=("assignment", "none"))
    assert list(report.placed) == ["none", "assignment"]
    assert report.method == "assignment"
    only = simulate(two_laws(strategy=lambda g: g.balance("none")))
    assert list(only.placed) == ["none"]
    assert only.speedup() == 1


def test_plans_are_simulated_as_they_are() -> None:
    graph = DGraph.from_metadata({"tokens": [1, 2, 3, 4]}, ClientPlaceTree(dp=2))
    table_plan = graph.distribute("dp", microbatches=2).balance("none").plan()
    assert simulate(table_plan).step_time == table_plan.loads.sum(axis=1).max()
    stream = two_laws()
    plan = place(next(stream.draws()).draw, stream.frozen_strategy, PACKED, stream.topology, {})
    assert simulate(plan, sync="microbatch").step_time == plan.times.max(axis=0).sum()
    assert simulate(plan, pp=2).trainer.pp == 2


def test_it_prints_a_line_for_each_way_of_placing() -> None:
    assert repr(two_laws()).startswith("Stream of a, b: 5 steps over 4 buckets; Packed(")
    report = simulate(two_laws(), against=("none", "greedy"))
    lines = repr(report).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["none", "greedy", "assignment"]
    assert "placed by" in report._repr_html_()
    data = report.to_dict()
    assert data["placed"]["none"]["speedup"] == 1
    assert sum(data["length_counts"].values()) == report.spans_T.sum()


# Deferral ----------------------------------------------------------------------------------------


def deferring(graph: DGraph) -> None:
    weigh(graph)
    graph.defer(steps=3, ways=4)


def test_a_stream_defers_as_its_graph_declares() -> None:
    sources, weights = mix("mixed", context=8192)
    stream = Stream(
        sources,
        strategy=lambda g: g.mix(weights).cost(costs.Transformer(hidden=512)).defer(4, ways=16),
        topology=ClientPlaceTree(dp=16),
        batching=Packed(8192, global_batch=16 * 8, max_documents=1),
        steps=12,
    )
    deferred, plain = simulate(stream), simulate(stream.undeferred)
    assert plain.drift is None
    assert deferred.bound < plain.bound
    assert deferred.efficiency() > plain.efficiency()
    assert deferred.mixture_error <= 1
    assert deferred.drift is not None
    assert 0 < deferred.drift.max_delay <= 4
    tables = [[d.draw.table for d in s.draws()] for s in (stream, stream.undeferred)]
    expected = drift(*tables)
    assert deferred.drift.length_T.tolist() == expected.length_T.tolist()
    assert deferred.drift.delayed == expected.delayed
    assert repr(deferred).splitlines()[-1].startswith(f"deferred: {expected.delayed:.1%}")
    assert deferred.to_dict()["drift"]["max_delay"] == expected.max_delay


def test_an_undeferred_stream_draws_what_it_drew_before() -> None:
    deferred = two_laws(strategy=deferring)
    assert keys(deferred.undeferred) == keys(two_laws())
    assert simulate(deferred, against=()).placed.keys() == {"assignment"}


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "options", "said"),
    [
        ({}, {}, r"Stream\(sources\)"),
        ([1, 2], {}, r"Stream\(sources\)"),
        ({"a": [1.5]}, {}, "source 'a': lengths; got float64"),
        ({"a": [[1, 2]]}, {}, "source 'a'; got list of shape"),
        ({"a": 7}, {}, "source 'a'; got int"),
        ({"a": np.array([], int)}, {}, "source 'a': lengths; got none"),
        ({"a": [3, 0]}, {}, "source 'a': lengths; got 0"),
        ({"a": Metadata({"size": np.array([1])})}, {}, r"got columns \['size'\]"),
        ({"a": [1]}, {"steps": 0}, r"Stream\(steps=\)"),
        ({"a": [1]}, {"seed": -1}, r"Stream\(seed=\)"),
        ({"a": [1]}, {"epochs": 0}, "epochs="),
        ({"a": [1]}, {"stop": "never"}, "stop="),
        ({"a": [1]}, {"topology": ClientPlaceTree(dp=3)}, "global_batch"),
        ({"a": [1]}, {"strategy": lambda g: g.mix({"b": 1.0})}, "unknown source"),
        ({"a": [1]}, {"strategy": lambda g: g.distribute("dp", microbatches=2)}, "microbatches"),
        (
            {"a": [1], "b": Metadata({"tokens": np.array([1]), "quality": np.array([1.0])})},
            {},
            "differ in their columns",
        ),
    ],
    ids=range(16),
)
def test_a_stream_that_cannot_be_is_refused(
    sources: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Stream(sources, **{"batching": PACKED, **options})


def test_sources_of_which_nothing_fits_are_named() -> None:
    short = Packed(4, global_batch=1, overflow="drop")
    for source in (np.array([5, 6]), Lognormal(9, 0)):
        stream = Stream({"tall": source}, batching=short)
        with pytest.raises(ConfigError, match="'tall' has nothing to plan"):
            next(stream.draws())
    with pytest.raises(ConfigError, match="longer than the sequence"):
        next(Stream({"a": [5]}, batching=Packed(4, 1, overflow="error")).draws())
    once = Stream({"tall": [5]}, batching=short, epochs=1)
    with pytest.raises(ConfigError, match="no step"):
        simulate(once)


def test_unknown_ways_of_placing_are_named() -> None:
    with pytest.raises(ConfigError, match="method="):
        simulate(two_laws(), against=("best",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sync="):
        simulate(two_laws(), sync="never")  # type: ignore[call-overload]


def test_what_is_neither_plan_nor_stream_is_named() -> None:
    with pytest.raises(ConfigError, match="a plan or a Stream"):
        simulate(DGraph(["a"]))  # type: ignore[call-overload]


def test_encoders_and_uneven_speeds_take_their_time() -> None:
    columns = {"tokens": [8, 8, 8, 8], "image": [[6], [1, 1], [], []]}
    graph = DGraph.from_metadata(columns, ClientPlaceTree(dp=2))
    plan = graph.balance(equal_counts=False, speeds={1: 0.5}).plan()
    # A cost of 32 at a speed of 1.5 in all; bucket 0 takes three of four documents.
    assert simulate(plan).ideal == pytest.approx(32 / 1.5)
    assert simulate(plan).step_time == 24
    graph.select("image").cost(costs.Tokens())
    encoded = simulate(graph.plan())
    assert encoded.step_time == 24 + 6
    assert encoded.ideal == pytest.approx(32 / 1.5 + 4)
    assert encoded.imbalance == pytest.approx(24 + 6 - 32 / 1.5 - 4)


def test_a_stream_of_images_counts_the_encoder() -> None:
    def strategy(graph: DGraph) -> None:
        graph.mix(weights).select("image").cost(costs.Tokens())

    sources, weights = mix("vl", 4096)
    batching = Packed(4096, 64, max_documents=1)
    options: dict[str, Any] = {"topology": ClientPlaceTree(dp=4, tp=2), "batching": batching}
    plain = Stream(sources, strategy=lambda graph: graph.mix(weights), steps=3, **options)
    encoding = Stream(sources, strategy=strategy, steps=3, **options)
    report, without = simulate(encoding), simulate(plain)
    images = [d.draw.table.ragged["image"].lengths_I.sum() / 8 for d in encoding.draws()]
    np.testing.assert_allclose(report.ideal_T - without.ideal_T, images)
    assert (report.bound_T * (1 - 1e-12) <= report.placed["assignment"].step_time_T).all()
    assert (report.bound_T > without.bound_T).all()
