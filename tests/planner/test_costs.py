"""Laws of costs: integers that depend on the row alone, and errors that name cost and row."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner import costs
from megadask.planner.errors import ConfigError, CostError
from megadask.planner.metadata import Metadata, Ragged

lengths = st.lists(st.integers(0, 200_000), max_size=30)


def seconds(table: Metadata) -> np.ndarray:
    return table["tokens"] * 1e-4


def table_of(tokens: list[int], image: list[list[int]] | None = None) -> Metadata:
    items = {}
    if image is not None:
        counts = np.cumsum([0, *map(len, image)])
        items["image"] = Ragged(np.array([n for row in image for n in row], np.int64), counts)
    return Metadata({"tokens": np.array(tokens, np.int64)}, items)


MODELS = [
    costs.Tokens(),
    costs.Transformer(hidden=5120, layers=40),
    costs.Transformer(hidden=64, kv_fraction=0.125, active_experts=2, vocab=1000),
    costs.VisionEncoder("image", hidden=1024, layers=24),
    costs.Parts(costs.VisionEncoder("image", 1024, 24), costs.Transformer(5120, 40)),
    costs.Measured.from_coefficients(1e-3, 1e-7, 1e-11),
    costs.Measured.from_coefficients(0, 1e-7, 1e-11, modality="image"),
    costs.InUnits(seconds, 1e-6),
    seconds,
]


@given(lengths, st.data())
@pytest.mark.parametrize(
    "cost", MODELS, ids=[f"{type(cost).__name__}-{n}" for n, cost in enumerate(MODELS)]
)
def test_cost_of_a_row_depends_on_the_row_alone(
    cost: costs.Cost, tokens: list[int], data: st.DataObject
) -> None:
    image = [[n % 300, n % 7] for n in tokens]
    table = table_of(tokens, image)
    cost_NP = costs.evaluate(cost, table)
    assert cost_NP.dtype == np.int64
    assert cost_NP.shape == (len(tokens), 2 if isinstance(cost, costs.Parts) else 1)
    rows = np.array(data.draw(st.permutations(range(len(tokens)))), np.int64)
    rows = rows[: len(rows) // 2 + 1]
    np.testing.assert_array_equal(costs.evaluate(cost, table.take(rows)), cost_NP[rows])


def test_transformer_has_the_shape_of_attention() -> None:
    cost = costs.Transformer(hidden=5120, layers=40)
    length_N = np.array([1, 1000, 30_720, 1_000_000])
    expected = length_N + length_N**2 / (6 * 5120)
    value_N = np.asarray(cost(table_of(length_N.tolist())))
    np.testing.assert_allclose(value_N / cost.flops_per_token, expected)
    assert costs.evaluate(cost, table_of([1]))[0, 0] == 2**12
    assert cost.flops_per_token == 40 * 24 * 5120**2


def counted_flops(length: int, heads: int, model: costs.Transformer) -> tuple[int, int]:
    """Return the FLOPs of linear layers and of attention that torch counts in a forward pass."""
    hidden, ffn = model.hidden, int(model.ffn_multiplier * model.hidden)
    kv_heads = int(heads * model.kv_fraction)
    size = hidden // heads

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device="meta")

    x = weight(length, hidden)
    with FlopCounterMode(display=False) as counter:
        for _ in range(int(model.layers)):
            q = (x @ weight(hidden, hidden)).view(length, heads, size).transpose(0, 1)
            k, v = (
                (x @ weight(hidden, kv_heads * size))
                .view(length, kv_heads, size)
                .transpose(0, 1)
                .repeat_interleave(heads // kv_heads, 0)
                for _ in range(2)
            )
            mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            x = mixed.transpose(0, 1).reshape(length, hidden) @ weight(hidden, hidden)
            outs = [
                torch.relu(x @ weight(hidden, ffn)) @ weight(ffn, hidden)
                for _ in range(int(model.active_experts))
            ]
            x = sum(outs, start=torch.zeros_like(x))
        if model.vocab:
            x @ weight(hidden, int(model.vocab))
    counts = counter.get_flop_counts()["Global"]
    linear = counts.pop(torch.ops.aten.mm)
    return linear, sum(counts.values())


@pytest.mark.parametrize("length", [1, 64, 1000])
@pytest.mark.parametrize(
    "model",
    [
        costs.Transformer(hidden=64, layers=3, attention_slowdown=1),
        costs.Transformer(hidden=64, layers=2, kv_fraction=0.25, attention_slowdown=1),
        costs.Transformer(hidden=64, active_experts=3, ffn_multiplier=1.5, attention_slowdown=1),
        costs.Transformer(hidden=128, layers=2, vocab=5000, attention_slowdown=1, causal=False),
    ],
    ids=["plain", "gqa", "moe", "vocab"],
)
def test_transformer_counts_what_torch_counts(model: costs.Transformer, length: int) -> None:
    linear, attention = counted_flops(length, 4, model)
    # torch counts all pairs of tokens, those that a causal mask leaves out too
    expected = linear + (attention / 2 if model.causal else attention)
    assert np.asarray(model(table_of([length])))[0] == pytest.approx(expected, rel=1e-12)


def test_vision_encoder_counts_what_torch_counts() -> None:
    encoder = costs.VisionEncoder("image", hidden=64, layers=2)
    same = costs.Transformer(hidden=64, layers=2)
    expected = sum(sum(counted_flops(length, 4, same)) for length in (196, 64, 500))
    value = np.asarray(encoder(table_of([1], [[196, 64, 500]])))[0]
    assert value == pytest.approx(expected, rel=1e-12)


def test_moe_gqa_and_vocabulary_change_the_linear_part() -> None:
    base = costs.Transformer(hidden=64).flops_per_token
    assert costs.Transformer(hidden=64, kv_fraction=0.5).flops_per_token == base - 2 * 64**2
    assert costs.Transformer(hidden=64, active_experts=2).flops_per_token == base + 16 * 64**2
    assert costs.Transformer(hidden=64, vocab=100).flops_per_token == base + 2 * 64 * 100


def test_vision_encoder_attends_within_items() -> None:
    cost = costs.VisionEncoder("image", hidden=8)
    value_N = np.asarray(cost(table_of([1, 1, 1], [[10], [5, 5], []])))
    linear = cost.flops_per_token
    np.testing.assert_allclose(value_N, [10 * linear + 4 * 8 * 100, 10 * linear + 4 * 8 * 50, 0])
    with pytest.raises(CostError, match="'image'; expected among"):
        cost(table_of([1]))


def test_positive_costs_never_vanish() -> None:
    cost_NP = costs.evaluate(lambda table: table["tokens"] * 1e-30, table_of([0, 1]))
    assert cost_NP.ravel().tolist() == [0, 1]


def name_me(values: object) -> costs.Cost:
    def bad_cost(table: Metadata) -> object:
        return values

    return bad_cost  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([1.0, -1.0, -2.0], "row 1"),
        ([1.0, np.nan, 3.0], "row 1"),
        ([[1, 1], [1, 2], [np.inf, 1]], "row 2"),
        ([1.0], r"float64 \(1,\); expected numbers of shape \(3,\)"),
        (7.0, r"float64 \(\)"),
        (np.ones((3, 0)), r"\(3, 0\)"),
        (np.ones((3, 1, 1)), r"\(3, 1, 1\)"),
        (["a", "b", "c"], "expected numbers"),
        ([True, True, True], "bool"),
        ([1e14, 1.0, 1.0], "InUnits"),
    ],
)
def test_bad_costs_are_named(values: object, match: str) -> None:
    with pytest.raises(CostError, match=match) as caught:
        costs.evaluate(name_me(values), table_of([1, 2, 3]))
    assert "bad_cost" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_models_pickle_and_are_told_apart() -> None:
    for cost in MODELS:
        again = pickle.loads(pickle.dumps(cost))
        assert again == cost
        assert fingerprint(again) == fingerprint(cost)
    assert len(set(map(fingerprint, MODELS))) == len(MODELS)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: costs.Transformer(hidden=0), "hidden"),
        (lambda: costs.Transformer(hidden=8, layers="4x"), "layers"),
        (lambda: costs.Transformer(hidden=8, kv_fraction=-1), "kv_fraction"),
        (lambda: costs.Transformer(hidden=8, causal=2), "causal.*a bool"),
        (lambda: costs.VisionEncoder("image", hidden=-8), "hidden.*-8"),
        (lambda: costs.Parts(costs.Tokens()), "two or more"),
        (lambda: costs.InUnits(seconds, 0.0), "above 0"),
    ],
)
def test_bad_models_are_named(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()  # type: ignore[operator]
