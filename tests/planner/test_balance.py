"""Laws of every balance method: what is placed, where it may go, and how even it comes out."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadask.planner.balance import Method, Problem, balance, bucket_loads, lower_bound
from megadask.planner.errors import ConfigError, PlanError

METHODS = get_args(Method)
costs = st.one_of(
    st.integers(0, 20), st.integers(0, 10**6), st.sampled_from([0, 1, 7, 7 << 20, 2**40])
)


@st.composite
def free_problems(draw: st.DrawFn, max_items: int = 40) -> Problem:
    """Problems without capacity: free or equal counts, or few items a pack."""
    shape = [draw(st.integers(1, most)) for most in (6, 4, 3)]
    limit = draw(st.none() | st.integers(1, 3))
    most = max_items if limit is None else min(max_items, limit * int(np.prod(shape)))
    parts = draw(st.integers(1, 3))
    rows = draw(st.lists(st.tuples(*[costs] * parts), max_size=most))
    return Problem(
        cost_NP=np.array(rows, np.int64).reshape(-1, parts),
        num_buckets=shape[0],
        num_microbatches=shape[1],
        num_packs=shape[2],
        max_items=limit,
        equal_counts=draw(st.booleans()),
    )


@st.composite
def packed_problems(draw: st.DrawFn) -> Problem:
    """Problems with a capacity, and a placement that fits as tightly as can be."""
    problem = replace(draw(free_problems()), max_items=None, equal_counts=False)
    bins = st.integers(0, problem.num_bins - 1)
    start_N = np.array([draw(bins) for _ in range(problem.num_items)], np.int64)
    size_N = np.array([draw(st.integers(0, 100)) for _ in range(problem.num_items)], np.int64)
    used = np.bincount(start_N, size_N, problem.num_bins).max()
    counts = np.bincount(start_N, minlength=problem.num_bins).max()
    return replace(
        problem,
        size_N=size_N,
        capacity=max(1, int(used) + draw(st.sampled_from([0, 0, 10]))),
        max_items=draw(st.sampled_from([None, max(1, int(counts))])),
        start_N=start_N,
    )


problems = free_problems() | packed_problems()
methods = pytest.mark.parametrize("method", METHODS)


def slowest(problem: Problem, bin_N: np.ndarray) -> int:
    return int(bucket_loads(problem, bin_N).sum(axis=1).max(axis=0).sum())


def microbatch_counts(problem: Problem, bin_N: np.ndarray) -> np.ndarray:
    number = problem.num_buckets * problem.num_microbatches
    counts = np.bincount(bin_N // problem.num_packs, minlength=number)
    return counts.reshape(problem.num_buckets, -1)


@methods
@given(problems)
def test_every_item_is_placed_within_the_caps(method: Method, problem: Problem) -> None:
    bin_N = balance(problem, method)
    assert bin_N.dtype == np.int64
    assert bin_N.shape == (problem.num_items,)
    assert ((bin_N >= 0) & (bin_N < problem.num_bins)).all()
    if problem.capacity is not None:
        used = np.bincount(bin_N, problem.size_N, problem.num_bins)
        assert used.max() <= problem.capacity
    if problem.max_items is not None:
        assert np.bincount(bin_N, minlength=problem.num_bins).max() <= problem.max_items
    np.testing.assert_array_equal(
        bucket_loads(problem, bin_N).sum(axis=(0, 1)), problem.cost_NP.sum(axis=0)
    )


@methods
@given(problems)
def test_counts_are_as_asked_and_nothing_is_empty(method: Method, problem: Problem) -> None:
    counts_BM = microbatch_counts(problem, balance(problem, method))
    if problem.equal_counts:
        assert np.ptp(counts_BM.sum(axis=1)) <= 1
    if problem.num_items >= problem.num_buckets:
        assert counts_BM.sum(axis=1).min() > 0
    if problem.num_items >= counts_BM.size:
        assert counts_BM.min() > 0


@given(problems)
def test_assignment_is_never_worse_than_greedy_and_none(problem: Problem) -> None:
    best = slowest(problem, balance(problem, "assignment"))
    assert best <= slowest(problem, balance(problem, "greedy"))
    assert best <= slowest(problem, balance(problem, "none"))


@methods
@given(problems)
def test_result_depends_on_the_arguments_alone(method: Method, problem: Problem) -> None:
    before = problem.cost_NP.copy()
    first = balance(problem, method)
    np.random.default_rng().random(3)
    again = balance(pickle.loads(pickle.dumps(problem)), method)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(problem.cost_NP, before)


@given(free_problems())
def test_no_placement_beats_the_bound(problem: Problem) -> None:
    load_BP = bucket_loads(problem, balance(problem, "assignment")).sum(axis=1)
    mean_P = load_BP.mean(axis=0)
    worst = max((load_BP.max(axis=0)[mean_P > 0] / mean_P[mean_P > 0]).tolist(), default=1.0)
    assert worst >= lower_bound(problem) * (1 - 1e-12)


def best_of_all(problem: Problem) -> tuple[int, float]:
    """Try all ways: the least slowest bucket, and the least max / mean of part 0."""
    ways = (np.array(way) for way in itertools.product(range(problem.num_buckets), repeat=6))
    allowed = [
        slowest(problem, way)
        for way in (way[: problem.num_items] for way in ways)
        if microbatch_counts(problem, way).min() >= problem.least_items
        and microbatch_counts(problem, way).max() <= problem.most_items
    ]
    mean = problem.cost_NP[:, 0].sum() / problem.num_buckets
    return min(allowed), min(allowed) / mean if mean else 1.0


@settings(max_examples=60)
@given(st.lists(st.tuples(costs, costs), min_size=6, max_size=6), st.booleans(), st.booleans())
def test_two_buckets_of_few_items_are_best_possible(
    rows: list[tuple[int, int]], equal_counts: bool, one_part: bool
) -> None:
    cost_NP = np.array(rows, np.int64)[:, : 1 if one_part else 2]
    problem = Problem(cost_NP=cost_NP, num_buckets=2, equal_counts=equal_counts)
    best, ratio = best_of_all(problem)
    found = slowest(problem, balance(problem, "assignment"))
    assert best <= found <= best + (best >> 13)
    if one_part:
        assert lower_bound(problem) <= ratio * (1 + 1e-12)


@settings(max_examples=30)
@given(st.lists(costs, min_size=6, max_size=6), st.booleans())
def test_bound_holds_for_three_buckets(costs_N: list[int], equal_counts: bool) -> None:
    cost_NP = np.array(costs_N, np.int64)[:, None]
    problem = Problem(cost_NP=cost_NP, num_buckets=3, equal_counts=equal_counts)
    _, ratio = best_of_all(problem)
    assert lower_bound(problem) <= ratio * (1 + 1e-12)


def transformer_costs(count: int, seed: int) -> np.ndarray:
    """Quantised costs of documents of lognormal lengths, cut at 8k."""
    rng = np.random.default_rng(seed)
    length_N = np.minimum(rng.lognormal(6.5, 1.3, count).astype(np.int64) + 1, 8192)
    return np.rint((length_N + length_N**2 / 30720) * 2**12).astype(np.int64)[:, None]


@pytest.mark.parametrize("equal_counts", [True, False])
@pytest.mark.parametrize(("buckets", "each", "within"), [(64, 8, 1e-3), (288, 16, 5e-4)])
def test_reaches_the_bound_at_scale(
    buckets: int, each: int, within: float, equal_counts: bool
) -> None:
    for seed in range(3):
        problem = Problem(
            cost_NP=transformer_costs(buckets * each, seed),
            num_buckets=buckets,
            equal_counts=equal_counts,
        )
        mean = problem.cost_NP.sum() / buckets
        found = slowest(problem, balance(problem, "assignment")) / mean
        assert found <= lower_bound(problem) + within


def test_several_parts_are_balanced_at_once() -> None:
    rng = np.random.default_rng(0)
    encoder_N = rng.integers(0, 2**22, 512) * (rng.random(512) < 0.6)
    cost_NP = np.column_stack([transformer_costs(512, 0)[:, 0], encoder_N])
    problem = Problem(cost_NP=cost_NP, num_buckets=32, equal_counts=True)
    load_BP = bucket_loads(problem, balance(problem, "assignment")).sum(axis=1)
    assert (load_BP.max(axis=0) <= 1.002 * load_BP.mean(axis=0)).all()
    summed_BP = bucket_loads(problem, balance(problem, "karmarkar_karp")).sum(axis=1)
    assert (summed_BP.max(axis=0) > 1.1 * summed_BP.mean(axis=0)).any()


def test_exchanging_packs_and_items_evens_out_a_tight_packing() -> None:
    rng = np.random.default_rng(1)
    shape, capacity = (8, 4, 2), 8192
    size, start = [], []
    for place in range(64):
        left = capacity
        while left > 64:
            size.append(min(left, int(rng.lognormal(6.5, 1.3)) + 1))
            start.append(place)
            left -= size[-1]
    size_N = np.array(size, np.int64)
    problem = Problem(
        cost_NP=np.rint((size_N + size_N**2 / 30720) * 2**12).astype(np.int64)[:, None],
        num_buckets=shape[0],
        num_microbatches=shape[1],
        num_packs=shape[2],
        size_N=size_N,
        capacity=capacity,
        start_N=np.array(start, np.int64),
    )
    mean = problem.cost_NP.sum() / 8
    assert slowest(problem, balance(problem, "none")) > 1.01 * mean
    assert slowest(problem, balance(problem, "assignment")) < 1.001 * mean


@methods
def test_nine_samples_over_four_ranks(method: Method) -> None:
    cost_NP = np.arange(1, 10)[:, None]
    problem = Problem(cost_NP=cost_NP, num_buckets=4, equal_counts=True)
    counts = np.bincount(balance(problem, method), minlength=4)
    assert sorted(counts.tolist()) == [2, 2, 2, 3]


@methods
def test_capped_without_a_start(method: Method) -> None:
    size_N = np.array([1000] * 8 + [100] * 8)
    problem = Problem(
        cost_NP=size_N[:, None],
        num_buckets=2,
        num_microbatches=3,
        size_N=size_N,
        capacity=2048,
        equal_counts=True,
    )
    bin_N = balance(problem, method)
    assert np.bincount(bin_N, size_N, 6).max() <= 2048
    assert np.bincount(bin_N // 3).tolist() == [8, 8]


@methods
def test_where_only_the_start_fits(method: Method) -> None:
    size_N = np.array([6, 4, 5, 5, 7, 3])
    start_N = np.array([0, 0, 1, 1, 2, 2])
    cost_NP = np.array([9, 9, 1, 1, 5, 5])[:, None]
    problem = Problem(cost_NP=cost_NP, num_buckets=3, size_N=size_N, capacity=10, start_N=start_N)
    bin_N = balance(problem, method)
    assert np.bincount(bin_N, size_N).tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"size_N": [5, 11], "capacity": 10}, "item 1 fits into no pack; got 11 tokens"),
        ({"size_N": [10, 10], "capacity": 10, "num_buckets": 1}, "too many tokens.*20"),
        ({"max_items": 1, "num_buckets": 1}, "too many items.*got 2"),
        ({"capacity": 10}, "no size_N"),
        ({"size_N": [5], "capacity": 10}, "size_N"),
        ({"start_N": [0, 2]}, "bin 2"),
        ({"start_N": [0, 0], "max_items": 1}, "a pack of 2 items"),
        ({"start_N": [1, 1], "size_N": [6, 6], "capacity": 10}, "a pack of 12 tokens"),
        ({"start_N": [1, 1], "equal_counts": True}, "buckets of 0 to 2"),
        ({"num_buckets": 0}, "num_buckets"),
        ({"cost_NP": [[1], [-1]]}, "cost_NP"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_bad_problems_are_named(fields: dict[str, object], match: str) -> None:
    arrays = {k: np.array(v, np.int64) if k[-2:] in ("_N", "NP") else v for k, v in fields.items()}
    with pytest.raises(PlanError, match=match) as caught:
        Problem(**{"cost_NP": np.ones((2, 1), np.int64), "num_buckets": 2, **arrays})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@methods
def test_no_placement_is_an_error_with_a_remedy(method: Method) -> None:
    size_N = np.array([6, 6, 6])
    problem = Problem(cost_NP=size_N[:, None], num_buckets=2, size_N=size_N, capacity=10)
    with pytest.raises(PlanError, match="3 items of 18 tokens; expected 2 packs of 10 tokens"):
        balance(problem, method)


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("karmarkar", {}, "'karmarkar'; expected one of"),
        ("greedy", {"rounds": 3}, "'rounds'; expected no options"),
        ("assignment", {"steps": 3}, "'steps'; expected one of"),
        ("assignment", {"rounds": -1}, "rounds.*-1"),
        ("assignment", {"rounds": 1.5}, "rounds.*1.5"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_unknown_words_are_named(method: str, options: dict[str, object], match: str) -> None:
    problem = Problem(cost_NP=np.ones((2, 1), np.int64), num_buckets=2)
    with pytest.raises(ConfigError, match=match):
        balance(problem, method, **options)  # type: ignore[arg-type]


@given(problems, st.integers(0, 20))
def test_any_number_of_rounds_will_do(problem: Problem, rounds: int) -> None:
    found = slowest(problem, balance(problem, "assignment", rounds=rounds))
    assert found <= slowest(problem, balance(problem, "greedy"))
