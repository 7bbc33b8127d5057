"""Cheap placements of items into bins: by arrival, longest first, by whole packs.

They are the methods "none" and "greedy", and where "assignment" begins. Problems are reduced (see
`Problem.reduced`). Axes as in `problem`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megadask.planner.bound import floors
from megadask.planner.dealing import deal, spread_out
from megadask.planner.fitting import fill_empty, first_fit, fit
from megadask.planner.problem import Ints, Problem, fits, sums

Floats = NDArray[np.float64]

_WINDOW = 512  # buckets that `evenly` looks at for one item
_BLOCK = 8  # it places one item for so many buckets at once


def arrival(problem: Problem) -> Ints:
    """Place items in their order: as `start_N` has them, or dealt out to buckets in turn.

    Where that exceeds a capacity, they are placed by size. Raises PlanError if no way was found.
    """
    if problem.start_N is not None:
        return fill_empty(problem, problem.start_N)
    bins = np.arange(problem.num_bins)
    turns = bins.reshape(problem.num_buckets, -1, problem.num_packs).transpose(2, 1, 0).reshape(-1)
    bin_N = turns[np.arange(problem.num_items) % problem.num_bins]
    if problem.size_N is None or fits(problem, bin_N):
        return bin_N
    bin_N = spread_out(problem, _deal_to_buckets(problem, problem.size_N), problem.size_N)
    return fill_empty(problem, bin_N if fits(problem, bin_N) else first_fit(problem))


def longest_first(problem: Problem) -> Ints:
    """Place the costliest items first, each into the bucket, microbatch and pack of the least load.

    With several parts, speeds or transfers it goes where the step stays the most even, see
    `evenly`. Where a capacity leaves an item without room, whole packs of the placement by arrival
    take the part of the items: they fit anywhere.
    """
    cost_N = problem.cost_NP.sum(axis=1)
    if problem.capacity is not None:
        fitted_N = fit(problem, np.argsort(-cost_N, kind="stable"), cost_N)
        if fitted_N is None:
            return whole_packs(problem, arrival(problem))
        return fill_empty(problem, fitted_N)
    plain = problem.cost_NP.shape[1] == 1 and problem.slow_B is None
    if plain and problem.transfer_NB is None:
        return spread_out(problem, _deal_to_buckets(problem, cost_N), cost_N)
    return spread_out(problem, evenly(problem), cost_N)


def evenly(problem: Problem) -> Ints:
    """Return (N,) the bucket of each item: longest first, where the step stays the most even.

    That is where the sum over parts of the fourth powers of the bucket's times, each over what the
    slowest bucket of any placement needs, comes out the least. Capacities are not looked at.
    """
    scale_P = np.maximum(floors(problem), 1).astype(np.float64)
    share_NP = problem.cost_NP / scale_P
    load_PB = np.zeros((len(scale_P), problem.num_buckets))
    count_B = np.zeros(problem.num_buckets, np.int64)
    (most, extras), least = problem.quota, problem.least_items
    lacking = least * problem.num_buckets
    bucket_N = np.empty(problem.num_items, np.int64)
    order = np.argsort(-share_NP.max(axis=1), kind="stable")
    number = turn = 0
    while number < len(order):
        if len(order) - number == lacking:  # from here on, only buckets below their least
            lacking, most, extras = -1, least, 0
            load_PB[:, count_B >= most] = np.inf
        # A few items at once, each into a bucket of its own.
        first, turn = turn * _WINDOW, (turn + 1) % -(-problem.num_buckets // _WINDOW)
        window_B = np.arange(problem.num_buckets)[first : first + _WINDOW]
        window_B = window_B[load_PB[0, window_B] < np.inf]
        if not len(window_B):
            continue
        at_once = 1 if problem.transfer_NB is not None else max(1, len(window_B) // _BLOCK)
        block = order[number : number + at_once]
        price_XB = _prices(problem, scale_P, share_NP[block], block, load_PB, window_B)
        for item, price_B in zip(block.tolist(), price_XB, strict=True):
            if len(order) - number == lacking:
                break
            at = int(price_B.argmin())
            bucket = int(window_B[at])
            bucket_N[item] = bucket
            load_PB[:, bucket] += share_NP[item]
            if problem.transfer_NB is not None:
                load_PB[0, bucket] += problem.transfer_NB[item, bucket] / scale_P[0]
            price_XB[:, at] = np.inf
            number += 1
            count = int(count_B[bucket])
            count_B[bucket] += 1
            lacking -= count < least
            extras -= count == most
            if count + 1 >= most + (extras > 0):
                load_PB[:, bucket] = np.inf
    return bucket_N


def _prices(
    problem: Problem,
    scale_P: Floats,
    share_XP: Floats,
    item_X: Ints,
    load_PB: Floats,
    bucket_B: Ints,
) -> Floats:
    """Return (X, B) the sum of the fourth powers of the times of each bucket with each item."""
    price_XB = np.zeros((len(item_X), len(bucket_B)))
    for part, scale in enumerate(scale_P.tolist()):
        time_XB = load_PB[part, bucket_B] + share_XP[:, part, None]
        if problem.transfer_NB is not None and part == 0:
            time_XB += problem.transfer_NB[item_X[:, None], bucket_B] / scale
        if problem.slow_B is not None:
            time_XB *= problem.slow_B[bucket_B]
        # Powers by multiplication, which every platform rounds alike.
        time_XB *= time_XB
        time_XB *= time_XB
        price_XB += time_XB
    return price_XB


def whole_packs(problem: Problem, bin_N: Ints) -> Ints:
    """Move whole packs, the costliest first, to the bucket of the least load that has a pack left.

    With equal counts, where packs of unlike numbers cannot change places, nothing moves.
    """
    if problem.equal_counts:
        return bin_N
    cost_F = sums(problem.cost_NP, bin_N, problem.num_bins).sum(axis=1)
    order = np.argsort(-cost_F, kind="stable")
    group_F = np.empty_like(order)
    group_F[order] = deal(
        cost_F[order].tolist(), problem.num_buckets, most=problem.packs_per_bucket
    )
    return fill_empty(problem, regroup(group_F)[bin_N])


def regroup(group_F: Ints) -> Ints:
    """Return (F,) new numbers of F packs such that those of one group follow each other."""
    number_F = np.empty_like(group_F)
    number_F[np.argsort(group_F, kind="stable")] = np.arange(len(group_F))
    return number_F


def _deal_to_buckets(problem: Problem, weight_N: Ints) -> Ints:
    """Return (N,) the bucket of each item, dealt out by falling weight."""
    most, extras = problem.quota
    order = np.argsort(-weight_N, kind="stable")
    bucket_N = np.empty_like(order)
    bucket_N[order] = deal(
        weight_N[order].tolist(),
        problem.num_buckets,
        least=problem.least_items,
        most=most,
        extras=extras,
    )
    return bucket_N
