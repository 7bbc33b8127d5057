"""The method "assignment": the best cheap placement, refined from the buckets down to the packs.

Which bucket an item is in decides how long a step takes; so buckets are made even first, and then
the microbatches within each. An `Exchange` holds the units (items or whole packs) of some groups
(buckets or microbatches) and swaps them by linear assignment; `swap` looks for single pairs.
Neither sees all that counts, so what comes out is taken only where it is no slower than what went
in.

Axes as in `problem`; units, groups and problems of an exchange as in `refine`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np

from megadask.planner.bound import floors
from megadask.planner.dealing import divide
from megadask.planner.differencing import karmarkar_karp
from megadask.planner.fitting import fill_empty
from megadask.planner.microbatches import common_profile, heaviest_first, slowest_microbatches
from megadask.planner.placing import arrival, longest_first, regroup, whole_packs
from megadask.planner.problem import Ints, Problem, Sync, placed_costs, slowest, sums
from megadask.planner.refine import Exchange, Room
from megadask.planner.swaps import swap

#: Microbatches that are that even are even enough: ranks meet once a step, where buckets count, or
#: at every microbatch, where what is left of this is lost among what cannot be evened out.
_MICROBATCH_EVEN_BITS = 9


def assignment(problem: Problem, rounds: int = 64) -> Ints:
    """Refine the best cheap placement: buckets first, then microbatches.

    With several parts, both ways to synchronise are tried, and the better one for `sync` is taken.
    """
    if problem.cost_NP.shape[1] == 1:
        return _refined(problem, rounds)
    ways = [_refined(replace(problem, sync=sync).reduced(), rounds) for sync in get_args(Sync)]
    return _fastest(problem, ways)


def _fastest(problem: Problem, ways: list[Ints]) -> Ints:
    """Return the placement whose slowest bucket takes the least time, the first of equals."""
    return min(ways, key=lambda way_N: slowest(problem, way_N))


def _refined(problem: Problem, rounds: int) -> Ints:
    """Refine the best cheap placement by the sum over parts of the slowest bucket."""
    first_N = arrival(problem)
    if problem.capacity is not None:
        problem = replace(problem, start_N=first_N)  # which need not be found again
    starts = [first_N, longest_first(problem), karmarkar_karp(problem)]
    if problem.capacity is not None:
        starts.append(whole_packs(problem, first_N))
    bin_N = _fastest(problem, starts)
    if problem.num_items and rounds:
        refine = _refine_free if problem.capacity is None else _refine_packed
        bin_N = refine(problem, bin_N, rounds)
    return heaviest_first(problem, bin_N)


def _refine_free(problem: Problem, start_N: Ints, rounds: int) -> Ints:
    """Refine a placement without capacity: buckets, from which microbatches and packs follow."""
    slots, bin_N = problem.packs_per_bucket, start_N
    if problem.group_size is not None:
        bin_N = _even_out_groups(problem, bin_N, rounds)
    buckets = Exchange(
        problem.cost_NP,
        bin_N // slots,
        _shape(problem),
        least=problem.least_items,
        most=problem.most_items,
        slow_F=problem.slow_B,
        transfer_UF=problem.transfer_NB,
        floor_RP=_floors(problem),
    )
    _exchange(buckets, rounds)
    bucket_N = _fastest(problem, [buckets.group_U * slots, start_N]) // slots
    cost_NP = placed_costs(problem, bucket_N)
    profile_BM = common_profile(problem, bucket_N, cost_NP.sum(axis=1))
    ways = _divided(problem, bucket_N, cost_NP, np.zeros_like(profile_BM), rounds // 2)
    if profile_BM.any():  # which is one of all parts together
        sum_N1 = cost_NP.sum(axis=1, keepdims=True)
        ways += _divided(problem, bucket_N, sum_N1, profile_BM, rounds // 2)
    return min(ways, key=lambda way_N: slowest_microbatches(problem, way_N))


def _divided(
    problem: Problem, bucket_N: Ints, cost_NP: Ints, base_BM: Ints, rounds: int
) -> list[Ints]:
    """Return (N,) bins in two ways: buckets dealt out to microbatches and packs; and refined.

    base_BM: (B, M) what microbatches weigh before, so that they come out as much lighter.
    """
    cost_N = cost_NP.sum(axis=1)
    most = problem.num_items if problem.max_items is None else problem.max_items
    most_of_microbatch = problem.num_packs * most
    dealt_N = divide(
        bucket_N, cost_N, problem.num_microbatches, most=most_of_microbatch, base_GW=base_BM
    )
    microbatches = Exchange(
        cost_NP,
        dealt_N,
        base_BM.shape,
        least=_least_of_microbatches(problem, dealt_N * problem.num_packs),
        most=most_of_microbatch,
        base_FP=base_BM.reshape(-1, 1),
        even_bits=_MICROBATCH_EVEN_BITS,
    )
    _exchange(microbatches, rounds)
    return [
        divide(micro_N, cost_N, problem.num_packs, most=most)
        for micro_N in (dealt_N, microbatches.group_U)
    ]


def _refine_packed(problem: Problem, bin_N: Ints, rounds: int) -> Ints:
    """Refine a placement into packs of limited capacity: buckets, then their microbatches.

    In both, whole packs change places first, which fit anywhere, and then their items.
    """
    bin_N = _packed_buckets(problem, bin_N, rounds)
    return _packed_microbatches(problem, bin_N, rounds // 2)


def _packed_buckets(problem: Problem, bin_N: Ints, rounds: int) -> Ints:
    """Exchange packs and items between buckets; return the best placement on the way."""
    ways = [bin_N]
    if not problem.equal_counts:
        transfer_NB = problem.transfer_NB
        packs = Exchange(
            sums(problem.cost_NP, bin_N, problem.num_bins),
            np.arange(problem.num_bins) // problem.packs_per_bucket,
            _shape(problem),
            least=problem.packs_per_bucket,
            most=problem.packs_per_bucket,
            slow_F=problem.slow_B,
            transfer_UF=None if transfer_NB is None else sums(transfer_NB, bin_N, problem.num_bins),
        )
        _exchange(packs, rounds)
        ways.append(fill_empty(problem, regroup(packs.group_U)[bin_N]))
        bin_N = _fastest(problem, ways)
    if problem.group_size is not None:
        ways.append(fill_empty(problem, _even_out_groups(problem, bin_N, rounds)))
        bin_N = ways[-1]
    items = Exchange(
        problem.cost_NP,
        bin_N // problem.packs_per_bucket,
        _shape(problem),
        least=problem.least_items,
        most=problem.most_items,
        room=_room(problem, bin_N, problem.num_buckets),
        slow_F=problem.slow_B,
        transfer_UF=problem.transfer_NB,
        floor_RP=_floors(problem),
    )
    ways.append(fill_empty(problem, _exchange(items, rounds)))
    return _fastest(problem, ways)


def _packed_microbatches(problem: Problem, bin_N: Ints, rounds: int) -> Ints:
    """Exchange packs and items between the microbatches of each bucket; return the best way."""
    cost_NP = placed_costs(problem, bin_N // problem.packs_per_bucket)
    shape, ways = (problem.num_buckets, problem.num_microbatches), [bin_N]
    if problem.num_packs > 1:
        packs = Exchange(
            sums(cost_NP, bin_N, problem.num_bins),
            np.arange(problem.num_bins) // problem.num_packs,
            shape,
            least=problem.num_packs,
            most=problem.num_packs,
            even_bits=_MICROBATCH_EVEN_BITS,
        )
        _exchange(packs, rounds)
        ways.append(fill_empty(problem, regroup(packs.group_U)[bin_N]))
        bin_N = ways[-1]
    items = Exchange(
        cost_NP,
        bin_N // problem.num_packs,
        shape,
        least=_least_of_microbatches(problem, bin_N),
        most=problem.num_items,
        room=_room(problem, bin_N, shape[0] * shape[1]),
        even_bits=_MICROBATCH_EVEN_BITS,
    )
    ways.append(fill_empty(problem, _exchange(items, rounds)))
    return min(ways, key=lambda way_N: slowest_microbatches(problem, way_N))


def _even_out_groups(problem: Problem, bin_N: Ints, rounds: int) -> Ints:
    """Return (N,) bins: items of groups of neighbouring buckets swap places."""
    assert problem.group_size is not None
    num_groups = problem.num_buckets // problem.group_size
    group_N = bin_N // (problem.num_bins // num_groups)
    slow_F = transfer_NF = None
    if problem.slow_B is not None:
        slow_FG = problem.slow_B.reshape(num_groups, -1).tolist()
        speeds = [math.fsum(1 / slow for slow in slow_G) for slow_G in slow_FG]
        slow_F = np.array([max(1, round(1 / speed)) for speed in speeds], np.int64)
    if problem.transfer_NB is not None:
        transfer_NF = problem.transfer_NB.reshape(len(bin_N), num_groups, -1).min(axis=2)
    groups = Exchange(
        problem.cost_NP,
        group_N,
        (1, num_groups),
        least=np.bincount(group_N, minlength=num_groups),
        most=problem.num_items,
        room=_room(problem, bin_N, num_groups),
        slow_F=slow_F,
        transfer_UF=transfer_NF,
    )
    swap(groups, rounds)
    assert groups.room is not None
    return groups.room.bin_U


def _exchange(groups: Exchange, rounds: int) -> Ints:
    """Refine groups in all ways; return (U,) the bin of each unit, or its group if it has none."""
    groups.run(rounds // 2)
    swap(groups, 2 * rounds)
    if groups.room is not None:
        return groups.room.bin_U
    if groups.shape[0] == 1:
        groups.repartition(rounds // 4)
        if groups.cost_UP.shape[1] > 1:  # which leaves swaps between other groups to be found
            swap(groups, 2 * rounds)
    return groups.group_U


def _shape(problem: Problem) -> tuple[int, int]:
    """Return how many groups of buckets are refined each on its own, and of how many buckets."""
    size = problem.group_size or problem.num_buckets
    return problem.num_buckets // size, size


def _floors(problem: Problem) -> Ints | None:
    return np.array([floors(problem)]) if problem.group_size is None else None


def _room(problem: Problem, bin_N: Ints, num_groups: int) -> Room:
    """Return the room in all bins, by group of bins."""
    size_N = problem.size_N
    if problem.capacity is None or size_N is None:
        size_N = np.zeros_like(bin_N)
    used = sums(size_N, bin_N, problem.num_bins)
    items = np.bincount(bin_N, minlength=problem.num_bins)
    return Room(
        size_U=size_N,
        bin_U=bin_N.copy(),
        free_FS=((problem.capacity or 0) - used).reshape(num_groups, -1),
        spots_FS=((problem.max_items or problem.num_items) - items).reshape(num_groups, -1),
    )


def _least_of_microbatches(problem: Problem, bin_N: Ints) -> Ints:
    """(B * M,) 1 where the bucket has an item for each microbatch, else 0."""
    count_B = np.bincount(bin_N // problem.packs_per_bucket, minlength=problem.num_buckets)
    return np.repeat(
        (count_B >= problem.num_microbatches).astype(np.int64), problem.num_microbatches
    )
