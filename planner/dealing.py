"""Give items in turn to the lightest of several groups: a heap, or many small deals at once.

Axes as in `problem`; F groups of items, each dealt to W ways.
"""

from __future__ import annotations

import heapq

import numpy as np

from megadask.planner.problem import Ints, Problem

_FEW = 16  # groups that are dealt one after the other
_NEVER = np.iinfo(np.int64).max


def spread_out(problem: Problem, bucket_N: Ints, weight_N: Ints) -> Ints:
    """Return (N,) bins: the items of every bucket spread over its microbatches and their packs."""
    most = problem.num_items if problem.max_items is None else problem.max_items
    micro_N = divide(bucket_N, weight_N, problem.num_microbatches, most=problem.num_packs * most)
    return divide(micro_N, weight_N, problem.num_packs, most=most)


def divide(
    group_N: Ints, weight_N: Ints, ways: int, *, most: int, base_GW: Ints | None = None
) -> Ints:
    """Deal the items of every group to ``ways`` parts of it, the heaviest first.

    No part is empty if the group has enough items, and a part takes at most ``most``. ``base_GW``
    is what the parts of each group weigh before.
    Returns (N,) the flat part: group * ways + part.
    """
    if ways == 1 or not len(group_N):
        return group_N
    order = np.lexsort((-weight_N, group_N))
    starts = np.flatnonzero(np.diff(group_N[order], prepend=-1))
    counts = np.diff(np.append(starts, len(order)))
    part_N = np.empty_like(group_N)
    if len(starts) > _FEW:
        some = group_N[order[starts]]
        load_FW = np.zeros((len(some), ways), np.int64) if base_GW is None else base_GW[some]
        part_N[order] = _deal_at_once(weight_N[order], starts, counts, load_FW, most)
    else:
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            some = order[start : start + count]
            base = None if base_GW is None else base_GW[group_N[some[0]]].tolist()
            part_N[some] = deal(
                weight_N[some].tolist(), ways, least=int(count >= ways), most=most, base=base
            )
    return group_N * ways + part_N


def _deal_at_once(weight_N: Ints, starts: Ints, counts: Ints, load_FW: Ints, most: int) -> Ints:
    """Return (N,) the part of every item, as `deal` does for each group: all groups step by step.

    Items are sorted by group, groups start at ``starts`` (F,) and have ``counts`` (F,) items.
    Changes ``load_FW``.
    """
    count_FW = np.zeros_like(load_FW)
    least_F = (counts >= load_FW.shape[1]).astype(np.int64)
    lacking_F = least_F * load_FW.shape[1]
    part_N = np.empty(len(weight_N), np.int64)
    for step in range(int(counts.max())):
        some = np.flatnonzero(counts > step)
        number_SW, left_S = count_FW[some], counts[some] - step
        limit_S = np.where(left_S == lacking_F[some], 1, most)
        item_S = starts[some] + step
        free_S = weight_N[item_S] == 0
        load_SW = np.where(free_S[:, None], number_SW, load_FW[some])
        part_S = np.where(number_SW < limit_S[:, None], load_SW, _NEVER).argmin(axis=1)
        part_N[item_S] = part_S
        number_S = count_FW[some, part_S]
        lacking_F[some] -= number_S < least_F[some]
        load_FW[some, part_S] += weight_N[item_S]
        count_FW[some, part_S] += 1
    return part_N


def deal(
    weight: list[int],
    num_groups: int,
    *,
    least: int = 0,
    most: int,
    extras: int = 0,
    base: list[int] | None = None,
) -> list[int]:
    """Give each item in turn to the lightest group; items of no weight come last and even counts.

    A group gets at least ``least`` items and at most ``most``; ``extras`` groups get one more.
    ``base`` is what groups weigh before.
    """
    heap = [(load, group, 0) for group, load in enumerate(base or [0] * num_groups)]
    heapq.heapify(heap)
    groups, lacking, weighty = [], num_groups * least, True
    for left, value in zip(range(len(weight), 0, -1), weight, strict=True):
        if left == lacking:  # from here on, only groups below their least
            heap = [entry for entry in heap if entry[2] < least]
            heapq.heapify(heap)
            lacking, most, extras = -1, least, 0
        if weighty and not value:
            heap = [(count, group, count) for _, group, count in heap]
            heapq.heapify(heap)
            weighty = False
        load, group, count = heap[0]
        while count > most or (count == most and not extras):
            heapq.heappop(heap)
            load, group, count = heap[0]
        extras -= count == most
        lacking -= count < least
        groups.append(group)
        heapq.heapreplace(heap, (load + (value or 1), group, count + 1))
    return groups
