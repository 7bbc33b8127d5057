"""Laws of every balance method: what is placed, where it may go, and how even it comes out."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from random import Random
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadask.planner.balance import (
    Method,
    Problem,
    Sync,
    balance,
    bucket_loads,
    imbalance,
    lower_bound,
    slowest,
)
from megadask.planner.errors import ConfigError, PlanError

METHODS = get_args(Method)
costs = st.one_of(
    st.integers(0, 20), st.integers(0, 10**6), st.sampled_from([0, 1, 7, 7 << 20, 2**40])
)


@st.composite
def free_problems(draw: st.DrawFn, max_items: int = 40) -> Problem:
    """Problems without capacity: free or equal counts, or few items a pack; with any option."""
    shape = [draw(st.integers(1, most)) for most in (6, 4, 3)]
    limit = draw(st.none() | st.integers(1, 3))
    most = max_items if limit is None else min(max_items, limit * int(np.prod(shape)))
    parts = draw(st.integers(1, 3))
    rows = draw(st.lists(st.tuples(*[costs] * parts), max_size=most))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        speeds = st.lists(st.integers(1, 100), min_size=shape[0], max_size=shape[0])
        options["speed_B"] = np.array(draw(speeds), np.int64)
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        options["transfer_NB"] = rng.integers(0, 2 ** rng.integers(1, 20), (len(rows), shape[0]))
    if draw(st.booleans()):
        options["group_size"] = draw(st.sampled_from([n for n in (1, 2, 3) if not shape[0] % n]))
    return Problem(
        cost_NP=np.array(rows, np.int64).reshape(-1, parts),
        num_buckets=shape[0],
        num_microbatches=shape[1],
        num_packs=shape[2],
        max_items=limit,
        equal_counts=draw(st.booleans()),
        sync=draw(st.sampled_from(get_args(Sync))),
        **options,
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
laws = settings(max_examples=40, deadline=None)
methods = pytest.mark.parametrize("method", METHODS)


def microbatch_counts(problem: Problem, bin_N: np.ndarray) -> np.ndarray:
    number = problem.num_buckets * problem.num_microbatches
    counts = np.bincount(bin_N // problem.num_packs, minlength=number)
    return counts.reshape(problem.num_buckets, -1)


@methods
@laws
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
    total_P = problem.cost_NP.sum(axis=0)
    if problem.transfer_NB is not None:
        bucket_N = bin_N // problem.packs_per_bucket
        total_P[0] += problem.transfer_NB[np.arange(problem.num_items), bucket_N].sum()
    np.testing.assert_array_equal(bucket_loads(problem, bin_N).sum(axis=(0, 1)), total_P)


@methods
@laws
@given(problems)
def test_counts_are_as_asked_and_nothing_is_empty(method: Method, problem: Problem) -> None:
    counts_BM = microbatch_counts(problem, balance(problem, method))
    if problem.equal_counts:
        assert np.ptp(counts_BM.sum(axis=1)) <= 1
    if problem.num_items >= problem.num_buckets:
        assert counts_BM.sum(axis=1).min() > 0
    if problem.num_items >= counts_BM.size:
        assert counts_BM.min() > 0


@laws
@given(problems)
def test_assignment_is_never_worse_than_the_others(problem: Problem) -> None:
    best = slowest(problem, balance(problem, "assignment"))
    for method in METHODS:
        assert best <= slowest(problem, balance(problem, method))


@laws
@given(problems)
def test_each_way_to_synchronise_is_best_at_its_own_goal(problem: Problem) -> None:
    ways = [replace(problem, sync=sync) for sync in get_args(Sync)]
    placed = [balance(way) for way in ways]
    for way, own_N in zip(ways, placed, strict=True):
        assert all(slowest(way, own_N) <= slowest(way, other_N) for other_N in placed)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "none"])
@laws
@given(problems, st.randoms(use_true_random=False))
def test_the_order_of_the_items_does_not_count(
    method: Method, problem: Problem, random: Random
) -> None:
    """The loads are the same. With transfers, alike items are not; "none" is in order."""
    problem = replace(problem, transfer_NB=None)
    order = np.array(random.sample(range(problem.num_items), problem.num_items), np.int64)
    shuffled = problem.take(order)
    here, there = balance(problem, method), balance(shuffled, method)
    none = min(slowest(p, balance(p, "none")) for p in (problem, shuffled))
    if method == "assignment" and slowest(problem, here) >= none:
        return
    np.testing.assert_array_equal(bucket_loads(problem, here), bucket_loads(shuffled, there))


@methods
@laws
@given(problems)
def test_result_depends_on_the_arguments_alone(method: Method, problem: Problem) -> None:
    before = problem.cost_NP.copy()
    first = balance(problem, method)
    np.random.default_rng().random(3)
    again = balance(pickle.loads(pickle.dumps(problem)), method)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(problem.cost_NP, before)


@methods
@laws
@given(problems)
def test_no_placement_beats_the_bound(method: Method, problem: Problem) -> None:
    assert imbalance(problem, balance(problem, method)) >= lower_bound(problem) * (1 - 1e-12)


def best_of_all(problem: Problem) -> tuple[int, float]:
    """Try all ways: the least time of the slowest bucket, and the least imbalance."""
    each = itertools.product(range(problem.num_buckets), repeat=problem.num_items)
    ways = [
        way
        for way in map(np.array, each)
        if microbatch_counts(problem, way).min() >= problem.least_items
        and np.ptp(microbatch_counts(problem, way)) <= (1 if problem.equal_counts else 9)
    ]
    return min(slowest(problem, way) for way in ways), min(imbalance(problem, way) for way in ways)


def small_problem(
    rows: list[tuple[int, int]], num_buckets: int, random: Random, equal_counts: bool
) -> Problem:
    cost_NP = np.array(rows, np.int64)[:, : random.randint(1, 2)]
    speeds = [random.choice([1, 2, 3]) for _ in range(num_buckets)]
    transfer_NB = [[random.randint(0, 9) for _ in range(num_buckets)] for _ in rows]
    return Problem(
        cost_NP=cost_NP,
        num_buckets=num_buckets,
        equal_counts=equal_counts,
        sync=random.choice(get_args(Sync)),
        speed_B=random.choice([None, np.array(speeds, np.int64)]),
        transfer_NB=random.choice([None, np.array(transfer_NB, np.int64)]),
    )


pairs = st.tuples(costs, costs)
randoms = st.randoms(use_true_random=False)


@laws
@given(st.lists(pairs, min_size=6, max_size=6), st.booleans(), randoms)
def test_two_buckets_of_few_items_are_best_possible(
    rows: list[tuple[int, int]], equal_counts: bool, random: Random
) -> None:
    problem = small_problem(rows, 2, random, equal_counts)
    best, ratio = best_of_all(problem)
    found = slowest(problem, balance(problem, "assignment"))
    assert best <= found <= best + (best >> 13)
    assert lower_bound(problem) <= ratio * (1 + 1e-12)


@laws
@given(st.lists(pairs, min_size=6, max_size=6), st.booleans(), randoms)
def test_bound_holds_for_three_buckets(
    rows: list[tuple[int, int]], equal_counts: bool, random: Random
) -> None:
    problem = small_problem(rows, 3, random, equal_counts)
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
    assert (load_BP.max(axis=0) <= 1.005 * load_BP.mean(axis=0)).all()
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


@laws
@given(problems, st.integers(0, 20))
def test_any_number_of_rounds_will_do(problem: Problem, rounds: int) -> None:
    found = slowest(problem, balance(problem, "assignment", rounds=rounds))
    assert found <= slowest(problem, balance(problem, "greedy"))
