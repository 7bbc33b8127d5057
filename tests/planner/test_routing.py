"""Laws of the routing of a modality: every item is encoded once, for who uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner import costs
from megadask.planner.errors import ConfigError, CostError, StateError
from megadask.planner.graph import DGraph
from megadask.planner.metadata import Metadata
from megadask.planner.plan import Plan
from megadask.planner.routing import Routing, route
from megadask.planner.strategy import Selection
from megadask.planner.tableplan import TablePlan
from megadask.planner.topology import ClientPlaceTree
from tests.strategies import laws

ENCODER = costs.VisionEncoder("image", hidden=64, layers=2)
encodes = st.sampled_from(["step", "microbatch"])
trees = st.builds(ClientPlaceTree, dp=st.integers(1, 4), tp=st.integers(1, 3))


def a_table(images: list[list[int]]) -> dict[str, Any]:
    return {"tokens": [10 + sum(row) for row in images], "image": images}


def a_plan(images: list[list[int]], tree: ClientPlaceTree, encode: str, **words: Any) -> TablePlan:
    graph = DGraph.from_metadata(a_table(images), tree).distribute("dp", microbatches=2)
    graph.select("image", encode).cost(ENCODER).balance(**words)  # type: ignore[arg-type]
    return graph.plan()


tables = st.lists(st.lists(st.integers(1, 4096), max_size=4), min_size=1, max_size=20)


@laws
@given(tables, trees, encodes, st.sampled_from(["assignment", "greedy", "none"]))
def test_every_item_is_encoded_once_for_its_microbatch(
    images: list[list[int]], tree: ClientPlaceTree, encode: str, method: str
) -> None:
    plan = a_plan(images, tree, encode, method=method)
    routing = plan.routing["image"]
    found = sorted(zip(routing.span_I.tolist(), routing.item_I.tolist(), strict=True))
    assert found == [(span, item) for span, row in enumerate(images) for item in range(len(row))]
    for at, (span, item) in enumerate(zip(routing.span_I, routing.item_I, strict=True)):
        assert routing.length_I[at] == images[span][item]
        assert routing.bucket_I[at] == plan.assignment[span]
        assert routing.microbatch_I[at] == plan.microbatch[span]
    turns = 1 if encode == "step" else 2
    assert routing.loads.shape == (tree.world_size, turns, 1)
    expected = np.zeros(routing.loads.shape)
    length_I = routing.length_I.astype(float)
    cost_I = (
        ENCODER(
            Metadata(
                {"tokens": routing.length_I},
                DGraph.from_metadata(
                    {"tokens": routing.length_I, "image": [[x] for x in routing.length_I.tolist()]}
                ).table.ragged,
            )  # type: ignore[union-attr]
        )
        if len(length_I)
        else length_I
    )
    np.add.at(expected[:, :, 0], (routing.encoder_I, routing.turn_I), cost_I)
    np.testing.assert_allclose(routing.loads, expected, rtol=1e-3)
    if encode == "microbatch":
        np.testing.assert_array_equal(routing.turn_I, routing.microbatch_I)
    assert routing.imbalance >= routing.bound * (1 - 1e-12)


@laws
@given(tables, trees, encodes)
def test_every_rank_enters_the_encoder_in_every_turn(
    images: list[list[int]], tree: ClientPlaceTree, encode: str
) -> None:
    routing = a_plan(images, tree, encode).routing["image"]
    idle = {tuple(pair) for pair in routing.placeholders.tolist()}
    for encoder in range(tree.world_size):
        for turn in range(routing.loads.shape[1]):
            assert (len(routing.items_of(encoder, turn)) == 0) == ((encoder, turn) in idle)
    assert routing.placeholder == "image:placeholder"


@laws
@given(tables, trees, encodes)
def test_a_routing_is_a_function_of_the_table_and_survives_arrow(
    images: list[list[int]], tree: ClientPlaceTree, encode: str
) -> None:
    plan = a_plan(images, tree, encode)
    assert a_plan(images, tree, encode).digest == plan.digest
    read = TablePlan.from_arrow(plan.to_arrow())
    assert read.digest == plan.digest
    assert read.to_arrow() == plan.to_arrow()
    assert repr(read) == repr(plan)
    with pytest.raises(StateError, match="plan"):
        Plan.from_arrow(plan.to_arrow())


def test_spans_that_were_delivered_bring_no_items() -> None:
    table = DGraph.from_metadata(a_table([[5], [6, 7], [8]])).table
    assert table is not None
    placed = (np.array([0, -1, 1]), np.array([0, -1, 0]))
    routing = route("image", Selection(), ClientPlaceTree(dp=2), table, *placed, 1)
    assert routing.length_I.tolist() == [5, 8]
    assert routing.span_I.tolist() == [0, 2]


def test_encoder_work_spreads_over_the_world_while_spans_stay_on_dp() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1, (512, 2)), 64, 4096).astype(int)
    images = [row[:n].tolist() for row, n in zip(lengths, rng.integers(0, 3, 512), strict=True)]
    tree = ClientPlaceTree(dp=8, tp=4)
    at_home = DGraph.from_metadata(a_table(images), tree).distribute("dp").plan()
    plan = a_plan(images, tree, "step")
    routing = plan.routing["image"]
    assert plan.num_buckets == 8
    assert len(routing.loads) == 32
    assert routing.imbalance <= 1.002 * routing.bound
    # Encoded where they are used, by one rank of four, the slowest would take much longer.
    load_B = np.zeros(8)
    np.add.at(load_B, at_home.assignment[routing.span_I], routing.length_I.astype(float))
    assert load_B.max() / routing.length_I.sum() * 32 > 4


def test_turns_even_out_over_the_step() -> None:
    """Two turns with one item each go to different ranks."""
    table = DGraph.from_metadata(a_table([[100], [100]])).table
    assert table is not None
    placed = (table, np.array([0, 1]), np.array([0, 1]), 2)
    selection = Selection(axis="world", encode="microbatch")
    routing = route("image", selection, ClientPlaceTree(dp=2), *placed)
    assert sorted(routing.encoder_I.tolist()) == [0, 1]
    assert routing.imbalance == routing.bound == 2.0  # each turn waits for its only item


@pytest.mark.parametrize(
    ("record", "error", "match"),
    [
        (lambda graph: graph.select("video"), ConfigError, r"'video'.*\['image'\]"),
        (lambda graph: graph.select(""), ConfigError, "select"),
        (lambda graph: graph.select("image", "late"), ConfigError, "'late'"),
        (lambda graph: graph.select("image").distribute("ddp"), ConfigError, "'ddp'"),
        (lambda graph: graph.select("image").balance("fair"), ConfigError, "'fair'"),
        (lambda graph: graph.select("image").cost(3), ConfigError, r"cost\(fn\)"),
        (lambda graph: graph.select("image").balance(max_tokens=9), ConfigError, "max_tokens"),
        (
            lambda graph: graph.select("image").distribute("dp", microbatches=2),
            ConfigError,
            r"microbatches=.*'image'.*encode",
        ),
        (
            lambda graph: (graph.select("image").cost(lambda t: -t["tokens"]), graph.plan()),
            CostError,
            "lambda",
        ),
    ],
    ids=range(9),
)
def test_bad_words_are_named(record: Any, error: type[Exception], match: str) -> None:
    graph = DGraph.from_metadata(a_table([[5], [6]]), ClientPlaceTree(dp=2))
    with pytest.raises(error, match=match):
        record(graph)


def test_a_table_without_the_modality_is_named() -> None:
    table = Metadata({"tokens": np.array([3])})
    zeros = np.zeros(1, np.int64)
    with pytest.raises(ConfigError, match="'image'"):
        route("image", Selection(), ClientPlaceTree(), table, zeros, zeros, 1)


def test_routing_reads_only_its_own_kind() -> None:
    plan = a_plan([[5]], ClientPlaceTree(), "step")
    with pytest.raises(StateError, match="routing"):
        Routing.from_arrow(plan.to_arrow())
