"""What the options of a balance do: speeds, transfers, groups of buckets, microbatches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadask.planner.balance import (
    Problem,
    balance,
    bucket_loads,
    imbalance,
    lower_bound,
    slowest,
)
from megadask.planner.dealing import deal, divide
from megadask.planner.errors import PlanError
from megadask.planner.microbatches import slowest_microbatches
from megadask.planner.refine import Exchange, Room
from megadask.planner.swaps import swap

laws = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def documents(count: int, seed: int) -> np.ndarray:
    """Quantised costs of documents of lognormal lengths, cut at 8k."""
    rng = np.random.default_rng(seed)
    length_N = np.minimum(rng.lognormal(6.5, 1.3, count).astype(np.int64) + 1, 8192)
    return np.rint((length_N + length_N**2 / 30720) * 2**12).astype(np.int64)[:, None]


@pytest.mark.parametrize("method", ["assignment", "greedy"])
def test_a_bucket_twice_as_fast_gets_twice_the_load(method: str) -> None:
    speed_B = np.array([200, 100, 100, 100, 50, 100, 200, 100])
    problem = Problem(cost_NP=documents(512, 0), num_buckets=8, speed_B=speed_B)
    bin_N = balance(problem, method)  # type: ignore[arg-type]
    load_B = bucket_loads(problem, bin_N).sum(axis=(1, 2))
    np.testing.assert_allclose(load_B / load_B.sum(), speed_B / speed_B.sum(), rtol=1e-2)
    assert imbalance(problem, bin_N) <= (1.0005 if method == "assignment" else 1.02)


def test_equal_counts_hold_with_uneven_speeds() -> None:
    speed_B = np.array([4, 4, 4, 4, 4, 4, 4, 3])
    problem = Problem(cost_NP=documents(128, 1), num_buckets=8, speed_B=speed_B, equal_counts=True)
    bin_N = balance(problem)
    assert np.bincount(bin_N).tolist() == [16] * 8
    assert imbalance(problem, bin_N) <= 1.002


@laws
@given(seeds, st.integers(1, 1000))
def test_only_the_ratios_of_speeds_count(seed: int, factor: int) -> None:
    rng = np.random.default_rng(seed)
    speed_B = rng.integers(1, 5, 4)
    problem = Problem(cost_NP=rng.integers(0, 1000, (20, 2)), num_buckets=4, speed_B=speed_B)
    faster = replace(problem, speed_B=speed_B * factor)
    np.testing.assert_array_equal(balance(problem), balance(faster))
    assert lower_bound(problem) == lower_bound(faster)
    alike = replace(problem, speed_B=np.full(4, factor))
    np.testing.assert_array_equal(balance(alike), balance(replace(problem, speed_B=None)))


@laws
@given(seeds, st.booleans())
def test_no_transfer_cost_is_as_none(seed: int, equal_counts: bool) -> None:
    rng = np.random.default_rng(seed)
    problem = Problem(
        cost_NP=rng.integers(0, 1000, (24, 2)), num_buckets=4, equal_counts=equal_counts
    )
    free = replace(problem, transfer_NB=np.zeros((24, 4), np.int64))
    assert slowest(free, balance(problem)) == slowest(problem, balance(problem))
    assert lower_bound(free) == lower_bound(problem)


@laws
@given(seeds, st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_huge_transfer_costs_keep_items_at_home(
    seed: int, buckets: int, each: int, equal_counts: bool
) -> None:
    rng = np.random.default_rng(seed)
    home_N = rng.permutation(np.arange(buckets * each) % buckets)
    transfer_NB = np.where(home_N[:, None] == np.arange(buckets), 0, 10**9)
    problem = Problem(
        cost_NP=rng.integers(0, 1000, (len(home_N), 1)),
        num_buckets=buckets,
        transfer_NB=transfer_NB,
        equal_counts=equal_counts,
    )
    np.testing.assert_array_equal(balance(problem), home_N)


def test_transfers_are_weighed_against_balance() -> None:
    home_N = np.arange(256) % 8
    cost_NP = documents(256, 2)
    transfer_NB = np.where(home_N[:, None] == np.arange(8), 0, 2**18)
    problem = Problem(cost_NP=cost_NP, num_buckets=8, transfer_NB=transfer_NB)
    assert slowest(problem, balance(problem)) < 0.8 * slowest(problem, home_N)
    anywhere_N = balance(replace(problem, transfer_NB=None))
    assert slowest(problem, balance(problem)) < slowest(problem, anywhere_N)


@pytest.mark.parametrize("capacity", [None, 16_384])
def test_groups_of_buckets_are_evened_out_and_then_their_buckets(capacity: int | None) -> None:
    cost_NP = documents(1024, 3)
    problem = Problem(
        cost_NP=cost_NP,
        num_buckets=128,
        group_size=8,
        size_N=cost_NP[:, 0] // 2**12,
        capacity=capacity,
        equal_counts=capacity is None,
    )
    bin_N = balance(problem)
    assert imbalance(problem, bin_N) <= lower_bound(problem) + 0.01
    assert slowest(problem, bin_N) <= slowest(problem, balance(problem, "greedy"))


def test_microbatches_follow_a_common_profile() -> None:
    """Where documents are heavier than a microbatch, even microbatches leave ranks waiting."""
    problem = Problem(
        cost_NP=documents(2048, 4), num_buckets=64, num_microbatches=16, equal_counts=True
    )
    bin_N = balance(problem)
    even = problem.cost_NP.sum() / 64
    assert slowest(problem, bin_N) <= 1.001 * even
    assert slowest_microbatches(problem, balance(problem, "greedy")) > 1.07 * even
    assert slowest_microbatches(problem, bin_N) < 1.05 * even


@laws
@given(seeds, st.integers(1, 40), st.integers(1, 5), st.integers(0, 1), st.integers(0, 9))
def test_dealing_at_once_is_dealing_one_by_one(
    seed: int, groups: int, ways: int, least: int, based: int
) -> None:
    rng = np.random.default_rng(seed)
    count_F = rng.integers(ways if least else 0, 3 * ways + 1, groups)
    group_N = rng.permutation(np.repeat(np.arange(groups), count_F))
    weight_N = rng.integers(0, 20, len(group_N))
    base_GW = rng.integers(0, based + 1, (groups, ways))
    flat_N = divide(group_N, weight_N, ways, most=4, base_GW=base_GW)
    for group in range(groups):
        mine = np.flatnonzero(group_N == group)
        mine = mine[np.argsort(-weight_N[mine], kind="stable")]
        expected = deal(
            weight_N[mine].tolist(),
            ways,
            least=int(len(mine) >= ways),
            most=4,
            base=base_GW[group].tolist(),
        )
        assert (flat_N[mine] - group * ways).tolist() == expected


@pytest.mark.parametrize("equal_counts", [False, True])
def test_several_parts_keep_to_the_numbers_of_items(equal_counts: bool) -> None:
    rng = np.random.default_rng(0)
    for num_items in range(4, 40):
        problem = Problem(
            cost_NP=rng.lognormal(9, 2, (num_items, 2)).astype(np.int64),
            num_buckets=4,
            num_microbatches=3,
            equal_counts=equal_counts,
        )
        count_B = np.bincount(balance(problem, "greedy") // 3, minlength=4)
        assert count_B.min() >= problem.least_items
        assert count_B.max() <= problem.most_items


def test_items_of_no_cost_are_spread_by_number() -> None:
    cost_NP = np.array([[5], [4], [3], *[[0]] * 21])
    for method in ("assignment", "greedy"):
        bin_N = balance(Problem(cost_NP=cost_NP, num_buckets=4), method)  # type: ignore[arg-type]
        assert np.bincount(bin_N).tolist() == [6, 6, 6, 6]


@laws
@given(seeds, st.integers(1, 4), st.integers(2, 5), st.booleans(), st.integers(1, 3))
def test_swaps_keep_the_books_and_never_lose(
    seed: int, problems: int, groups: int, packed: bool, parts: int
) -> None:
    rng = np.random.default_rng(seed)
    shape, bins = (problems, groups), 2
    cost_UP = rng.integers(0, 1000, (rng.integers(1, 7) * problems * groups, parts))
    bin_U = rng.integers(0, problems * groups * bins, len(cost_UP))
    bin_U[: problems * groups] = np.arange(problems * groups) * bins
    size_U = rng.integers(0, 50, len(cost_UP))
    used = np.bincount(bin_U, size_U, problems * groups * bins).astype(np.int64)
    room = Room(
        size_U=size_U,
        bin_U=bin_U.copy(),
        free_FS=(used.max() - used).reshape(-1, bins),
        spots_FS=np.full((problems * groups, bins), 9),
    )
    exchange = Exchange(
        cost_UP, bin_U // bins, shape, least=1, most=99, room=room if packed else None
    )
    before = exchange.slowest_R(exchange.time_FP).sum()
    swap(exchange, 20)
    after = exchange.slowest_R(exchange.time_FP).sum()
    assert after <= before
    group_U = exchange.group_U
    np.testing.assert_array_equal(group_U // groups, bin_U // bins // groups)
    count_F = np.bincount(group_U, minlength=problems * groups)
    np.testing.assert_array_equal(count_F, exchange.count_F)
    assert count_F.min() >= 1
    load_FP = np.zeros_like(exchange.load_FP)
    np.add.at(load_FP, group_U, cost_UP)
    np.testing.assert_array_equal(load_FP, exchange.load_FP)
    if exchange.room is not None:
        np.testing.assert_array_equal(exchange.room.bin_U // bins, group_U)
        now = np.bincount(exchange.room.bin_U, size_U, len(used))
        assert now.max() <= used.max()
        np.testing.assert_array_equal(used.max() - now, exchange.room.free_FS.reshape(-1))


def test_swaps_even_out_several_parts() -> None:
    rng = np.random.default_rng(5)
    image_N = documents(1152, 6)[:, 0] // 2 * (rng.random(1152) < 0.5)
    problem = Problem(
        cost_NP=np.column_stack([documents(1152, 5)[:, 0], image_N]),
        num_buckets=72,
        equal_counts=True,
    )
    load_BP = bucket_loads(problem, balance(problem)).sum(axis=1)
    assert (load_BP.max(axis=0) <= 1.005 * load_BP.mean(axis=0)).all()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sync": "microbatch"}, r"sync=.*'microbatch'.*'part', 'step'"),
        ({"speed_B": np.array([1, 1, 1])}, r"speed_B=.*\(3,\).*\(2,\)"),
        ({"speed_B": np.array([0.5, 1.0])}, "speed_B=.*float64.*percents"),
        ({"speed_B": np.array([0, 1])}, "speed_B=.*got 0.*>= 1"),
        ({"speed_B": np.array([1, 2**62])}, "too far apart.*larger units"),
        ({"transfer_NB": np.ones((2, 3), np.int64)}, r"transfer_NB=.*\(2, 3\).*\(2, 2\)"),
        ({"transfer_NB": np.full((2, 2), -1)}, "transfer_NB=.*got -1"),
        ({"group_size": 3}, "group_size=.*got 3.*divisor of 2"),
        ({"group_size": 0}, "group_size=.*got 0"),
    ],
    ids=range(9),
)
def test_bad_options_are_named(fields: dict[str, object], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        Problem(cost_NP=np.ones((2, 1), np.int64), num_buckets=2, **fields)  # type: ignore[arg-type]
