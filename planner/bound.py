"""How even a placement is, and how even any placement could be.

Axes as in `problem`.
"""

from __future__ import annotations

import math

import numpy as np

from megadask.planner.problem import Ints, Problem, placed_costs, times

_ROUNDING = 2.0**-40  # what rounding may add to a bound that is computed in floats
_SPEED_ROUNDING = 2.0**-15  # what times may be off where speeds differ


def imbalance(problem: Problem, bin_N: Ints) -> float:
    """Return the time of the slowest bucket over the even time, of the worst part; 1.0 at best.

    The even time is that of a step whose whole cost is spread evenly, by speed; where all buckets
    are equally fast this is max / mean. Transfers make buckets slower, never the even time.
    """
    problem = problem.reduced()
    time_P = times(problem, bin_N).sum(axis=1).max(axis=0, initial=0)
    ratios = [time / even for time, even in zip(time_P, even_times(problem), strict=True) if even]
    return float(max(ratios, default=1.0))


def lower_bound(problem: Problem, bin_N: Ints | None = None) -> float:
    """Return an `imbalance` that no placement can beat.

    With ``bin_N``, (N,) int64, the transfers of that placement belong to the even time: a max /
    mean of loads that no placement can beat without moving less.
    """
    problem = problem.reduced()
    even_P = even_times(problem)
    if bin_N is not None and problem.transfer_NB is not None:
        cost_NP = placed_costs(problem, bin_N // problem.packs_per_bucket)
        even_P[0] = int(cost_NP[:, 0].sum()) / _speed(problem)
    ratios = [floor / even for floor, even in zip(floors(problem), even_P, strict=True) if even]
    rounding = _ROUNDING if problem.slow_B is None else _SPEED_ROUNDING
    return max(1.0, max(ratios, default=1.0) * (1 - rounding))


def even_times(problem: Problem) -> list[float]:
    """Return the time of each part when its cost is spread evenly, by speed."""
    return [total / _speed(problem) for total in problem.cost_NP.sum(axis=0).tolist()]


def floors(problem: Problem) -> list[int]:
    """Return a time of each part that its slowest bucket cannot beat, whatever the placement.

    The buckets share the costs at best evenly. None is faster than the largest item in the fastest
    bucket. With equal counts and speeds, the n heaviest items either have a bucket each, which
    their share of the lightest items completes, or two of them meet in one; and of the n B + 1
    heaviest, n + 1 meet in one (pigeonhole).
    """
    slow_B = problem.slow_B
    fastest = 1 if slow_B is None else int(slow_B.min())
    found = []
    for part, cost_N in enumerate(problem.cost_NP.T):
        if not len(cost_N):
            found.append(0)
            continue
        if part == 0 and problem.transfer_NB is not None:
            cost_N = cost_N + problem.transfer_NB.min(axis=1)
        floor = max(_shared(problem, int(cost_N.sum())), int(cost_N.max()) * fastest)
        others = problem.num_items // problem.num_buckets - 1
        if problem.equal_counts and slow_B is None and others >= 1:
            rising_N = np.sort(cost_N)
            light = np.concatenate([[0], np.cumsum(rising_N)])
            heavy = rising_N[::-1][: problem.num_buckets]
            n = np.arange(1, len(heavy) + 1)
            apart = (np.cumsum(heavy) + light[n * others]) // n
            together = 2 * heavy + light[others - 1]
            together[0] = apart[0]  # one item meets no other of its kind
            floor = max(floor, int(np.minimum(apart, together).max()))
            floor = max(floor, _met(rising_N, light, problem.num_buckets))
        found.append(floor)
    return found


def _met(rising_N: Ints, light: Ints, num_buckets: int) -> int:
    """Return the most that items which must meet weigh, with the lightest to make up the number.

    light: (N + 1,) the weights of the n lightest items.
    """
    falling = np.concatenate([[0], np.cumsum(rising_N[::-1])])
    n = np.arange(1, (len(rising_N) - 1) // num_buckets + 1)
    met = falling[n * num_buckets + 1] - falling[n * num_buckets - n]
    missing = np.maximum(len(rising_N) // num_buckets - n - 1, 0)
    return int((met + light[missing]).max(initial=0))


def _shared(problem: Problem, total: int) -> int:
    if problem.slow_B is None:
        return total // problem.num_buckets
    return int(total / _speed(problem) * (1 - _ROUNDING))


def _speed(problem: Problem) -> float:
    """Return the cost that all buckets together work off in one unit of time."""
    slow_B = problem.slow_B
    if slow_B is None:
        return float(problem.num_buckets)
    return math.fsum(1 / slow for slow in slow_B.tolist())
