"""Karmarkar and Karp's differencing: decide which items part ways, and where they go later.

A partial placement gives loads to all buckets. The two of the largest spread are merged, the
heaviest load of one with the lightest of the other, until one is left. After N. Karmarkar and
R. M. Karp, "The differencing method of set partitioning" (UCB/CSD 82/113, 1982); with equal counts
as W. Michiels, J. Korst, E. Aarts and J. van Leeuwen, "Performance ratios for the differencing
method applied to the balanced number partitioning problem" (STACS 2003): the first placements hold
one item a bucket.

Axes as in `problem`. A slot is one of the B loads of a partial placement. Its items are a tree:
``parent[item]``, and the slot knows the root, -1 when it has no item.
"""

from __future__ import annotations

import heapq

import numpy as np

from megadask.planner.dealing import spread_out
from megadask.planner.fitting import fill_empty
from megadask.planner.placing import arrival, regroup
from megadask.planner.problem import Ints, Problem, fits, sums

_Slots = list[tuple[int, int]]  # a heap of loads and roots, without the slots that are empty


def karmarkar_karp(problem: Problem) -> Ints:
    """Place items by differencing of their costs, summed over parts.

    Counts are equal where the problem asks for it, or where free ones would leave a bucket with too
    few or too many items. The heaviest bucket becomes the fastest one; transfers are not looked at.
    With a capacity, whole packs of the placement by arrival take the part of items; with equal
    counts too, items do, and where they do not fit, the placement is that by arrival.
    """
    cost_N = problem.cost_NP.sum(axis=1)
    num_buckets = problem.num_buckets
    if problem.capacity is not None and not problem.equal_counts:
        bin_N = arrival(problem)
        cost_F = sums(cost_N, bin_N, problem.num_bins)
        pack_F = regroup(_numbered(problem, cost_F, _equal_counts(cost_F, num_buckets)))
        return fill_empty(problem, pack_F[bin_N])
    if not problem.num_items:
        return np.empty(0, np.int64)
    bucket_N = None
    if not problem.equal_counts:
        bucket_N = _free_counts(cost_N, num_buckets)
        count_B = np.bincount(bucket_N, minlength=num_buckets)
        if count_B.min() < problem.least_items or count_B.max() > problem.most_items:
            bucket_N = None
    if bucket_N is None:
        bucket_N = _equal_counts(cost_N, num_buckets)
    bucket_N = _numbered(problem, cost_N, bucket_N)
    if problem.size_N is None or problem.capacity is None:
        return spread_out(problem, bucket_N, cost_N)
    bin_N = spread_out(problem, bucket_N, problem.size_N)
    return fill_empty(problem, bin_N) if fits(problem, bin_N) else arrival(problem)


def _numbered(problem: Problem, cost_N: Ints, group_N: Ints) -> Ints:
    """Return (N,) the bucket of each item: the heaviest group becomes the fastest bucket."""
    heavy_B = np.argsort(-sums(cost_N, group_N, problem.num_buckets), kind="stable")
    slow_B = problem.slow_B
    fast_B = np.argsort(np.zeros_like(heavy_B) if slow_B is None else slow_B, kind="stable")
    bucket_B = np.empty_like(heavy_B)
    bucket_B[heavy_B] = fast_B
    return bucket_B[group_N]


def _free_counts(cost_N: Ints, num_groups: int) -> Ints:
    """Return (N,) the group of each item; groups may have any number of them."""
    order = np.argsort(-cost_N, kind="stable")
    cost, items = cost_N[order].tolist(), order.tolist()
    parent = list(range(len(cost)))
    heap: list[tuple[int, int, int, _Slots]] = []  # (-spread, items merged before, peak, slots)
    mine: _Slots = []
    at = peak = 0
    while at < len(cost) or heap:
        spread = peak - (mine[0][0] if len(mine) == num_groups else 0)
        if heap and -heap[0][0] > spread:  # mine is the one of the largest spread
            _, _, peak, mine = heapq.heapreplace(heap, (-spread, at, peak, mine))
            spread = peak - (mine[0][0] if len(mine) == num_groups else 0)
        rival = -heap[0][0] if heap else -1
        # Items that were not merged yet count as partial placements whose spread is their cost.
        item, following = (*cost[at : at + 2], -1, -1)[:2]
        if following > spread:
            heapq.heappush(heap, (-spread, at, peak, mine))
            mine, peak = [], 0
        if item >= rival:
            height, root = item, items[at]
            if len(mine) < num_groups:
                heapq.heappush(mine, (item, root))
            else:
                height, parent[root] = mine[0][0] + item, mine[0][1]
                heapq.heapreplace(mine, (height, mine[0][1]))
            peak = max(peak, height)
            at += 1
        else:
            _, _, height, other = heapq.heappop(heap)
            mine, highest = _merged(mine, other, num_groups, parent)
            peak = max(peak, height, highest)
    return _groups([root for _, root in sorted(mine)], parent)


def _equal_counts(cost_N: Ints, num_groups: int) -> Ints:
    """Return (N,) the group of each item; numbers of items of groups differ by at most one."""
    order = np.argsort(-cost_N, kind="stable")
    missing = -len(order) % num_groups
    item_KB = np.append(order, np.full(missing, -1)).reshape(-1, num_groups)[:, ::-1]
    load_KB = np.append(cost_N[order], np.zeros(missing, np.int64)).reshape(-1, num_groups)[:, ::-1]
    parent = np.arange(len(order))
    heap = [(int(load_B[0] - load_B[-1]), row) for row, load_B in enumerate(load_KB)]
    loads, roots = list(load_KB), list(item_KB)
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first = heapq.heappop(heap)
        _, second = heap[0]
        load_B = loads[first] + loads[second][::-1]
        root_B, joined_B = roots[first], roots[second][::-1]
        both = np.flatnonzero((root_B >= 0) & (joined_B >= 0))
        parent[joined_B[both]] = root_B[both]
        root_B = np.where(root_B < 0, joined_B, root_B)
        rising_B = np.argsort(load_B, kind="stable")
        loads.append(load_B[rising_B])
        roots.append(root_B[rising_B])
        spread = int(load_B[rising_B[-1]] - load_B[rising_B[0]])
        heapq.heapreplace(heap, (-spread, len(loads) - 1))
    return _groups(roots[heap[0][1]], parent)


def _merged(
    slots: _Slots, others: _Slots, num_groups: int, parent: list[int]
) -> tuple[_Slots, int]:
    """Return both together, the heaviest slots with the lightest of the others; and a new peak."""
    if len(slots) < len(others):
        slots, others = others, slots
    falling, empty = sorted(others, reverse=True), num_groups - len(slots)
    joined = falling[:empty]
    lightest = [heapq.heappop(slots) for _ in falling[empty:]]
    for (load, root), (more, other) in zip(lightest, falling[empty:], strict=True):
        parent[other] = root
        joined.append((load + more, root))
    for slot in joined:
        heapq.heappush(slots, slot)
    return slots, max((load for load, _ in joined), default=0)


def _groups(roots: list[int] | Ints, parent: list[int] | Ints) -> Ints:
    """Return (N,) the slot whose root each item hangs from."""
    parent_N = np.array(parent, np.int64)
    while True:
        above_N = parent_N[parent_N]
        if (above_N == parent_N).all():
            break
        parent_N = above_N
    slot_N = np.empty_like(parent_N)
    root_B = np.array(roots)
    used = np.flatnonzero(root_B >= 0)
    slot_N[root_B[used]] = used
    return slot_N[parent_N]
