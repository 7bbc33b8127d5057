"""Placements into packs of limited capacity, and the items that empty microbatches get.

Axes as in `problem`.
"""

from __future__ import annotations

import heapq

import numpy as np

from megadask.planner.errors import PlanError
from megadask.planner.problem import Ints, Problem, bucket_loads


def first_fit(problem: Problem) -> Ints:
    """Place the largest first into the first bucket with room: fits where hardly anything does.

    Raises PlanError where even that leaves an item without room.
    """
    assert problem.size_N is not None
    order = np.argsort(-problem.size_N, kind="stable")
    bin_N = fit(problem, order, np.zeros_like(order))
    if bin_N is None:
        raise PlanError(
            "no placement of the items into the packs was found",
            got=f"{problem.num_items} items of {problem.size_N.sum()} tokens",
            limit=f"{problem.num_bins} packs of {problem.capacity} tokens",
            remedy="Plan more microbatches, or allow unequal counts.",
        )
    return bin_N


def fit(problem: Problem, order: Ints, weight_N: Ints) -> Ints | None:
    """Give each item in turn to the bucket of the least weight, by speed, that has room for it.

    Within the bucket it goes to the microbatch of the least weight, and there to the fullest pack.
    Returns (N,) the bin of each item, None when one fits nowhere.
    """
    assert problem.size_N is not None
    num_packs, packs_per_bucket = problem.num_packs, problem.packs_per_bucket
    size, weight, least = problem.size_N.tolist(), weight_N.tolist(), problem.least_items
    (most, extras), lacking = problem.quota, least * problem.num_buckets
    slow_B = problem.slow_B
    slow = [1] * problem.num_buckets if slow_B is None else slow_B.tolist()
    free = [problem.capacity or 0] * problem.num_bins  # -1 where there is no spot
    spots = [problem.max_items or problem.num_items] * problem.num_bins
    room = free[: problem.num_buckets]  # of the roomiest pack of each bucket
    count = [0] * problem.num_buckets
    micro_weight = [0] * (problem.num_buckets * problem.num_microbatches)
    heap = [(0, bucket) for bucket in range(problem.num_buckets)]
    waiting: list[tuple[int, int, int]] = []  # (-room, weight, bucket): too full for larger items
    bin_N = np.empty(problem.num_items, np.int64)
    for left, item in zip(range(len(order), 0, -1), order.tolist(), strict=True):
        if left == lacking:  # from here on, only buckets below their least
            lacking, most, extras = -1, least, 0
        while waiting and -waiting[0][0] >= size[item]:
            heapq.heappush(heap, heapq.heappop(waiting)[1:])
        while heap:
            bucket = heap[0][1]
            if count[bucket] >= most + (extras > 0):
                heapq.heappop(heap)  # for good: the most never grows
            elif room[bucket] < size[item]:
                heapq.heappush(waiting, (-room[bucket], *heapq.heappop(heap)))
            else:
                break
        else:
            return None
        first = bucket * packs_per_bucket
        pack, lightest = -1, 0
        for other in range(first, first + packs_per_bucket):
            if free[other] >= size[item]:
                load = micro_weight[other // num_packs]
                if pack < 0 or (load, free[other]) < (lightest, free[pack]):
                    pack, lightest = other, load
        bin_N[item] = pack
        before = free[pack]
        spots[pack] -= 1
        free[pack] = before - size[item] if spots[pack] else -1
        if before == room[bucket]:
            room[bucket] = max(free[first : first + packs_per_bucket])
        micro_weight[pack // num_packs] += weight[item]
        lacking -= count[bucket] < least
        extras -= count[bucket] == most
        count[bucket] += 1
        heapq.heapreplace(heap, (heap[0][0] + weight[item] * slow[bucket], bucket))
    return bin_N


def fill_empty(problem: Problem, bin_N: Ints) -> Ints:
    """Give every bucket its least number of items, and every microbatch one if there are enough.

    Items move to empty packs only, so that they fit. Returns a new placement.
    """
    shape = (problem.num_buckets, problem.num_microbatches)
    micro_N = bin_N // problem.num_packs
    count_BM = np.bincount(micro_N, minlength=shape[0] * shape[1]).reshape(shape)
    poor = np.flatnonzero(count_BM.sum(axis=1) < problem.least_items)
    gaps = np.flatnonzero((count_BM == 0).any(axis=1) & (count_BM > 1).any(axis=1))
    filled_N = bin_N.copy()
    if not len(poor) and not len(gaps):
        return filled_N
    cost_N = problem.cost_NP.sum(axis=1)
    load_BM = bucket_loads(problem, bin_N).sum(axis=2)

    def move(item: np.int64, bucket: np.int64) -> None:
        source = divmod(micro_N[item], shape[1])
        target = (bucket, count_BM[bucket].argmin())
        for place, sign in ((source, -1), (target, 1)):
            count_BM[place] += sign
            load_BM[place] += sign * cost_N[item]
        micro_N[item] = bucket * shape[1] + target[1]
        filled_N[item] = micro_N[item] * problem.num_packs

    # From the heaviest bucket, which has items to spare, the cheapest item.
    for bucket in poor:
        while count_BM[bucket].sum() < problem.least_items:
            spare_B = count_BM.sum(axis=1) > problem.least_items
            donor = np.where(spare_B, load_BM.sum(axis=1), -1).argmax()
            items = np.flatnonzero(micro_N // shape[1] == donor)
            move(items[cost_N[items].argmin()], bucket)
    # Within a bucket, from the heaviest microbatch, the item that halves it best.
    order = np.argsort(micro_N // shape[1], kind="stable")
    ends = np.cumsum(count_BM.sum(axis=1))
    for bucket in np.flatnonzero((count_BM == 0).any(axis=1)):
        mine = order[ends[bucket] - count_BM[bucket].sum() : ends[bucket]]
        while (count_BM[bucket] == 0).any() and (count_BM[bucket] > 1).any():
            load_M = np.where(count_BM[bucket] > 1, load_BM[bucket], -1)
            items = mine[micro_N[mine] == bucket * shape[1] + load_M.argmax()]
            halves = np.maximum(cost_N[items], load_M.max() - cost_N[items])
            move(items[halves.argmin()], bucket)
    return filled_N
