"""Columns come as people have them; what cannot be a table is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megadask.planner import costs
from megadask.planner.errors import ConfigError
from megadask.planner.graph import DGraph
from megadask.planner.metadata import Metadata, Ragged
from megadask.planner.tables import table_of
from megadask.planner.topology import ClientPlaceTree

IMAGES = [[5, 7], [], [3]]


class Frame:
    """Has columns by name, as data frames do."""

    columns = ("tokens", "quality")

    def __getitem__(self, name: str) -> Any:
        return Series([4, 5, 6]) if name == "tokens" else Series([0.5, 0.25, 1.0])


class Series:
    """A column whose labels are not positions, as of a filtered data frame."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, label: int) -> Any:
        raise KeyError(label)

    def to_numpy(self) -> np.ndarray:
        return np.array(self._values)


@pytest.mark.parametrize(
    "columns",
    [
        {"tokens": [1, 2, 3], "image": IMAGES},
        {"tokens": (1, 2, 3), "image": [tuple(row) for row in IMAGES]},
        {"tokens": np.array([1, 2, 3], np.uint8), "image": [np.array(row, int) for row in IMAGES]},
        {"tokens": pa.array([1, 2, 3]), "image": pa.array(IMAGES)},
        {"tokens": pa.chunked_array([[1], [2, 3]]), "image": pa.chunked_array([IMAGES])},
        {"tokens": [1, 2, 3], "image": [[5, 7], None, [3]]},
        pa.table({"tokens": [1, 2, 3], "image": IMAGES}),
        Metadata({"tokens": np.array([1, 2, 3])}, {"image": Ragged.of(IMAGES)}),
    ],
    ids=range(8),
)
def test_lists_arrays_and_tables_are_alike(columns: Any) -> None:
    table = table_of(columns)
    assert table["tokens"].dtype == np.int64
    assert table["tokens"].tolist() == [1, 2, 3]
    assert table.ragged["image"].lengths_I.tolist() == [5, 7, 3]
    assert table.ragged["image"].offsets.tolist() == [0, 2, 2, 3]


def test_a_frame_is_read_by_position() -> None:
    table = table_of(Frame())
    assert table["tokens"].tolist() == [4, 5, 6]
    assert table["quality"].tolist() == [0.5, 0.25, 1.0]


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (None, "NoneType.*a mapping"),
        ({"tokens": 5}, "'tokens'.*got 5"),
        ({"tokens": "abc"}, "'tokens'.*'abc'"),
        ({"tokens": [2**50]}, "1125899906842624"),
        ({"tokens": [[1], [2]]}, r"columns \[\]"),
        ({"tokens": [1, 2], "image": [[1.5], [2]]}, "'image'.*float64"),
        ({"tokens": [1, 2], "image": [[-1], [2]]}, "'image'.*-1"),
        ({"tokens": [1, 2], "image": [["a"], []]}, "'image'.*<U1"),
        ({"tokens": [1, 2], "image": [[True], []]}, "'image'.*bool"),
        ({"tokens": [1], "image": [[[1, 2]]]}, "'image'.*2 dimensions"),
    ],
    ids=range(10),
)
def test_what_is_no_table_is_named(columns: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        table_of(columns)


def test_a_cost_cannot_write_to_its_table() -> None:
    def greedy(table: Metadata) -> np.ndarray:
        tokens = table["tokens"]
        tokens *= 2
        return tokens

    graph = DGraph.from_metadata({"tokens": [3, 4]}, ClientPlaceTree(dp=2)).cost(greedy)
    with pytest.raises(ValueError, match="read-only"):
        graph.plan()
    assert graph.cost(costs.Tokens()).plan().loads.sum() == 7


@pytest.mark.parametrize(
    "words", [{"transfer": lambda t, b: np.full((2, b), 1000.0)}, {"speeds": {0: 0.9}}]
)
def test_the_bound_is_one_with_transfers_and_speeds(words: dict[str, Any]) -> None:
    graph = DGraph.from_metadata({"tokens": [819, 6]}, ClientPlaceTree(dp=4))
    plan = graph.balance("assignment", **words).plan()
    assert plan.bound <= plan.imbalance


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: DGraph(None, 3), "topology.*3"),
        (lambda: DGraph().distribute(None), "axis.*None"),
        (lambda: DGraph().balance(["greedy"]), "method"),
        (lambda: DGraph().balance(speeds=[0.5]), "speeds"),
        (lambda: DGraph().balance(speeds={True: 0.5}), "rank.*True"),
        (lambda: ClientPlaceTree(dp=10**12), "1048576"),
        (lambda: DGraph().select("image").balance(max_tokens=3), "max_tokens.*'image'"),
        (
            lambda: DGraph().select("image").distribute("world", microbatches=3),
            "microbatches.*'image'",
        ),
    ],
    ids=range(8),
)
def test_wrong_kinds_are_named(call: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        call()


def test_numpy_integers_are_integers() -> None:
    tree = ClientPlaceTree(dp=np.int64(4))  # type: ignore[arg-type]
    assert tree == ClientPlaceTree(dp=4)
    graph = DGraph(None, tree).distribute("dp", np.int64(2), microbatches=np.int64(3))  # type: ignore[arg-type]
    assert graph.freeze() == DGraph(None, tree).distribute("dp", 2, microbatches=3).freeze()
