"""Divide buckets into microbatches: even ones, or such that like meets like across buckets.

Where ranks wait for each other at every microbatch, the step takes the sum over microbatches of the
slowest bucket's. A document that is heavier than a microbatch should be makes its own one slow
whatever is done; the others then gain nothing from an even one, and all from filling up their
heaviest to the same height. So besides even microbatches, those of a common falling profile are
tried. Axes as in `problem`.
"""

from __future__ import annotations

import numpy as np

from megadask.planner.problem import Ints, Problem, bucket_loads, times


def slowest_microbatches(problem: Problem, bin_N: Ints) -> int:
    """Return the time of a step that waits for the slowest bucket of every part and microbatch."""
    time_BMP = times(problem, heaviest_first(problem, bin_N))
    return int(time_BMP.max(axis=0).sum())


def heaviest_first(problem: Problem, bin_N: Ints) -> Ints:
    """Renumber the microbatches of every bucket by falling load, so that like meets like."""
    load_BM = bucket_loads(problem, bin_N).sum(axis=2)
    rank_BM = (-load_BM).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    bucket_N = bin_N // problem.packs_per_bucket
    rank_N = rank_BM.reshape(-1)[bin_N // problem.num_packs]
    micro_N = bucket_N * problem.num_microbatches + rank_N
    return np.asarray(micro_N * problem.num_packs + bin_N % problem.num_packs)


def common_profile(problem: Problem, bucket_N: Ints, cost_N: Ints) -> Ints:
    """Return (B, M) what each microbatch should stay below the first one of its bucket.

    The profile is the lowest whose sum is the time of the slowest bucket and that has a microbatch
    for each of the costliest items of every bucket. Level where no item is that costly, or where
    no bucket has items to choose from.
    """
    num_buckets, num_microbatches = problem.num_buckets, problem.num_microbatches
    if np.bincount(bucket_N).max(initial=0) <= num_microbatches:
        return np.zeros((num_buckets, num_microbatches), np.int64)
    slow_B = np.ones(num_buckets, np.int64) if problem.slow_B is None else problem.slow_B
    order = np.lexsort((-cost_N, bucket_N))
    first = np.searchsorted(bucket_N[order], np.arange(num_buckets))
    number_N = np.arange(len(order)) - first[bucket_N[order]]
    top_BM = np.zeros((num_buckets, num_microbatches), np.int64)
    few = np.flatnonzero(number_N < num_microbatches)
    top_BM[bucket_N[order[few]], number_N[few]] = cost_N[order[few]]
    time_B = np.zeros(num_buckets, np.int64)
    np.add.at(time_B, bucket_N, cost_N)
    slowest = int((time_B * slow_B).max())
    # Falling, as are the costliest items of each bucket.
    height_M = (top_BM * slow_B[:, None]).max(axis=0)
    for number in range(num_microbatches):
        level = (slowest - int(height_M[:number].sum())) // (num_microbatches - number)
        if level >= height_M[number]:
            height_M[number:] = level
            break
    return np.asarray((height_M[0] - height_M) // slow_B[:, None])
