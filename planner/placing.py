"""Cheap placements of items into bins: by arrival, longest first, by whole packs.

They are the methods "none" and "greedy", and where "assignment" begins. Axes as in `problem`.
"""

from __future__ import annotations

import heapq

import numpy as np

from megadask.planner.errors import PlanError
from megadask.planner.problem import Ints, Problem, bucket_loads, sums


def arrival(problem: Problem) -> Ints:
    """Place items in their order: as `start_N` has them, or dealt out to buckets in turn."""
    if problem.start_N is not None:
        return fill_empty(problem, problem.start_N)
    order = np.arange(problem.num_items)
    if problem.capacity is not None:
        # By least count, which is in turn as long as everything fits.
        bin_N = _fit(problem, order, np.ones_like(order))
        return fill_empty(problem, _first_fit(problem) if bin_N is None else bin_N)
    bins = np.arange(problem.num_bins)
    turns = bins.reshape(problem.num_buckets, -1, problem.num_packs).transpose(2, 1, 0)
    return turns.reshape(-1)[order % problem.num_bins]


def longest_first(problem: Problem) -> Ints:
    """Place the costliest items first, each into the bucket, microbatch and pack of the least load.

    Where that leaves an item without room, whole packs of the placement by arrival take the part
    of the items: they fit anywhere.
    """
    cost_N = problem.cost_NP.sum(axis=1)
    order = np.argsort(-cost_N, kind="stable")
    if problem.capacity is not None:
        fitted_N = _fit(problem, order, cost_N)
        if fitted_N is None:
            return whole_packs(problem, arrival(problem))
        return fill_empty(problem, fitted_N)
    most, extras = problem.quota
    bucket_N = np.empty_like(order)
    bucket_N[order] = _deal(
        cost_N[order].tolist(),
        problem.num_buckets,
        least=problem.least_items,
        most=most,
        extras=extras,
    )
    micro_N = spread(problem, bucket_N, problem.num_microbatches, problem.num_packs)
    return spread(problem, micro_N, problem.num_packs, 1)


def whole_packs(problem: Problem, bin_N: Ints) -> Ints:
    """Move whole packs, the costliest first, to the bucket of the least load that has a pack left.

    With equal counts, where packs of unlike numbers cannot change places, nothing moves.
    """
    if problem.equal_counts:
        return bin_N
    cost_F = sums(problem.cost_NP, bin_N, problem.num_bins).sum(axis=1)
    order = np.argsort(-cost_F, kind="stable")
    group_F = np.empty_like(order)
    group_F[order] = _deal(
        cost_F[order].tolist(), problem.num_buckets, most=problem.packs_per_bucket
    )
    return fill_empty(problem, regroup(group_F)[bin_N])


def regroup(group_F: Ints) -> Ints:
    """Return (F,) new numbers of F packs such that those of one group follow each other."""
    number_F = np.empty_like(group_F)
    number_F[np.argsort(group_F, kind="stable")] = np.arange(len(group_F))
    return number_F


def spread(problem: Problem, group_N: Ints, ways: int, packs: int) -> Ints:
    """Spread the items of every group over ``ways`` parts of it of ``packs`` packs; longest first.

    For problems without capacity. Returns (N,) the flat part: group * ways + part.
    """
    if ways == 1:
        return group_N
    most = problem.num_items if problem.max_items is None else packs * problem.max_items
    cost_N = problem.cost_NP.sum(axis=1)
    order = np.lexsort((-cost_N, group_N))
    part_N = np.empty_like(group_N)
    for some in np.split(order, np.flatnonzero(np.diff(group_N[order])) + 1):
        least = 1 if len(some) >= ways else 0
        part_N[some] = _deal(cost_N[some].tolist(), ways, least=least, most=most)
    return group_N * ways + part_N


def fill_empty(problem: Problem, bin_N: Ints) -> Ints:
    """Give every bucket its least number of items, and every microbatch one if there are enough.

    Items move to empty packs only, so that they fit. Returns a new placement.
    """
    shape = (problem.num_buckets, problem.num_microbatches)
    cost_N = problem.cost_NP.sum(axis=1)
    micro_N = bin_N // problem.num_packs
    count_BM = np.bincount(micro_N, minlength=shape[0] * shape[1]).reshape(shape)
    load_BM = bucket_loads(problem, bin_N).sum(axis=2)
    filled_N = bin_N.copy()

    def move(item: np.int64, bucket: np.int64) -> None:
        source = divmod(micro_N[item], shape[1])
        target = (bucket, count_BM[bucket].argmin())
        for place, sign in ((source, -1), (target, 1)):
            count_BM[place] += sign
            load_BM[place] += sign * cost_N[item]
        micro_N[item] = bucket * shape[1] + target[1]
        filled_N[item] = micro_N[item] * problem.num_packs

    # From the heaviest bucket, which has items to spare, the cheapest item.
    poor = np.flatnonzero(count_BM.sum(axis=1) < problem.least_items)
    for bucket in poor:
        while count_BM[bucket].sum() < problem.least_items:
            spare_B = count_BM.sum(axis=1) > problem.least_items
            donor = np.where(spare_B, load_BM.sum(axis=1), -1).argmax()
            items = np.flatnonzero(micro_N // shape[1] == donor)
            move(items[cost_N[items].argmin()], bucket)
    # Within a bucket, from the heaviest microbatch, the item that halves it best.
    for bucket in np.flatnonzero((count_BM == 0).any(axis=1)):
        while (count_BM[bucket] == 0).any() and (count_BM[bucket] > 1).any():
            load_M = np.where(count_BM[bucket] > 1, load_BM[bucket], -1)
            items = np.flatnonzero(micro_N == bucket * shape[1] + load_M.argmax())
            halves = np.maximum(cost_N[items], load_M.max() - cost_N[items])
            move(items[halves.argmin()], bucket)
    return filled_N


def _deal(
    cost: list[int], num_groups: int, *, least: int = 0, most: int, extras: int = 0
) -> list[int]:
    """Give each item in turn to the lightest group.

    A group gets at least ``least`` items and at most ``most``; ``extras`` groups get one more.
    """
    heap = [(0, group, 0) for group in range(num_groups)]
    groups, lacking = [], num_groups * least
    for left, value in zip(range(len(cost), 0, -1), cost, strict=True):
        if left == lacking:  # from here on, only groups below their least
            heap = [entry for entry in heap if entry[2] < least]
            heapq.heapify(heap)
            lacking, most, extras = -1, least, 0
        load, group, count = heap[0]
        while count > most or (count == most and not extras):
            heapq.heappop(heap)
            load, group, count = heap[0]
        extras -= count == most
        lacking -= count < least
        groups.append(group)
        heapq.heapreplace(heap, (load + value, group, count + 1))
    return groups


def _fit(problem: Problem, order: Ints, weight_N: Ints) -> Ints | None:
    """Give each item in turn to the bucket of the least weight that has room for it.

    Within the bucket it goes to the microbatch of the least weight, and there to the fullest pack.
    Returns (N,) the bin of each item, None when one fits nowhere.
    """
    assert problem.size_N is not None
    num_packs, packs_per_bucket = problem.num_packs, problem.packs_per_bucket
    size, weight, least = problem.size_N.tolist(), weight_N.tolist(), problem.least_items
    (most, extras), lacking = problem.quota, least * problem.num_buckets
    free = [problem.capacity or 0] * problem.num_bins
    spots = [problem.max_items or problem.num_items] * problem.num_bins
    room = free[: problem.num_buckets]  # of the roomiest pack of each bucket
    count = [0] * problem.num_buckets
    micro_weight = [0] * (problem.num_buckets * problem.num_microbatches)
    heap = [(0, bucket) for bucket in range(problem.num_buckets)]
    bin_N = np.empty(problem.num_items, np.int64)
    for left, item in zip(range(len(order), 0, -1), order.tolist(), strict=True):
        if left == lacking:  # from here on, only buckets below their least
            most, extras = least, 0
        passed = []
        while heap:
            bucket = heap[0][1]
            if room[bucket] >= size[item] and count[bucket] < most + (extras > 0):
                break
            passed.append(heapq.heappop(heap))
        else:
            return None
        first = bucket * packs_per_bucket
        packs = range(first, first + packs_per_bucket)
        _, _, pack = min(
            (micro_weight[pack // num_packs], free[pack], pack)
            for pack in packs
            if free[pack] >= size[item] and spots[pack]
        )
        bin_N[item] = pack
        free[pack] -= size[item]
        spots[pack] -= 1
        room[bucket] = max((free[pack] for pack in packs if spots[pack]), default=-1)
        micro_weight[pack // num_packs] += weight[item]
        lacking -= count[bucket] < least
        extras -= count[bucket] == most
        count[bucket] += 1
        heapq.heapreplace(heap, (heap[0][0] + weight[item], bucket))
        for entry in passed:
            heapq.heappush(heap, entry)
    return bin_N


def _first_fit(problem: Problem) -> Ints:
    """Place the largest first into the first bucket with room: fits where hardly anything does."""
    assert problem.size_N is not None
    order = np.argsort(-problem.size_N, kind="stable")
    bin_N = _fit(problem, order, np.zeros_like(order))
    if bin_N is None:
        raise PlanError(
            "no placement of the items into the packs was found",
            got=f"{problem.num_items} items of {problem.size_N.sum()} tokens",
            limit=f"{problem.num_bins} packs of {problem.capacity} tokens",
            remedy="Plan more microbatches, or give a start_N that fits.",
        )
    return bin_N
