"""Karmarkar and Karp's method against a plain version of it, and what it promises."""

from __future__ import annotations

import numpy as np
import pytest

from megadask.planner.balance import Problem, balance, bucket_loads


def plain(cost_N: np.ndarray, num_buckets: int, equal_counts: bool) -> list[int]:
    """Merge the two partial placements of the largest spread, over and over."""
    falling = sorted(cost_N.tolist(), reverse=True)
    step = num_buckets if equal_counts else 1
    rows = [falling[at : at + step] for at in range(0, len(falling), step)]
    partial = [sorted([*row, *[0] * (num_buckets - len(row))]) for row in rows]
    while len(partial) > 1:
        partial.sort(key=lambda loads: loads[-1] - loads[0])
        first, second = partial.pop(), partial.pop()
        partial.append(sorted(a + b for a, b in zip(first, reversed(second), strict=True)))
    return partial[0]


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("num_buckets", [2, 3, 7, 40])
@pytest.mark.parametrize("num_items", [1, 5, 39, 200])
def test_it_is_differencing(num_items: int, num_buckets: int, equal_counts: bool) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        cost_NP = (rng.lognormal(0, 1.3, (num_items, 1)) * 2**30).astype(np.int64)
        problem = Problem(cost_NP=cost_NP, num_buckets=num_buckets, equal_counts=equal_counts)
        bin_N = balance(problem, "karmarkar_karp")
        load_B = bucket_loads(problem, bin_N)[:, 0, 0]
        expected = plain(cost_NP[:, 0], num_buckets, equal_counts)
        assert sorted(load_B.tolist()) == expected
        if equal_counts:
            assert np.ptp(np.bincount(bin_N, minlength=num_buckets)) <= 1


def test_the_textbook_example() -> None:
    problem = Problem(cost_NP=np.array([[8], [7], [6], [5], [4]]), num_buckets=2)
    load_B = bucket_loads(problem, balance(problem, "karmarkar_karp"))[:, 0, 0]
    assert sorted(load_B.tolist()) == [14, 16]


def test_it_sets_heavy_items_apart_better_than_longest_first() -> None:
    cost_NP = np.array([[8], [7], [6], [5], [4], [3], [3]])
    problem = Problem(cost_NP=cost_NP, num_buckets=2)
    spread = {
        method: np.ptp(bucket_loads(problem, balance(problem, method))[:, 0, 0])  # type: ignore[arg-type]
        for method in ("greedy", "karmarkar_karp")
    }
    assert spread["karmarkar_karp"] <= spread["greedy"]


def test_the_heaviest_bucket_is_the_fastest() -> None:
    problem = Problem(
        cost_NP=np.array([[100], [9], [8], [7]]), num_buckets=4, speed_B=np.array([1, 1, 3, 2])
    )
    load_B = bucket_loads(problem, balance(problem, "karmarkar_karp"))[:, 0, 0]
    assert load_B.tolist() == [8, 7, 100, 9]


def test_it_keeps_to_a_capacity() -> None:
    rng = np.random.default_rng(0)
    size_N = rng.integers(1, 60, 60)
    for equal_counts in (False, True):
        problem = Problem(
            cost_NP=size_N[:, None] ** 2,
            num_buckets=6,
            num_microbatches=3,
            size_N=size_N,
            capacity=150,
            equal_counts=equal_counts,
        )
        bin_N = balance(problem, "karmarkar_karp")
        assert np.bincount(bin_N, size_N).max() <= 150
