"""Place the items of a step into buckets, microbatches and packs of even cost.

Every method is a function of its arguments alone: integer comparisons, ties by index of the item,
a budget of rounds and never a clock. Axes as in `problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from megadask.planner.errors import ConfigError
from megadask.planner.placing import (
    arrival,
    fill_empty,
    longest_first,
    regroup,
    spread,
    whole_packs,
)
from megadask.planner.problem import Ints, Problem, bucket_loads, check, lower_bound, sums
from megadask.planner.refine import Exchange, Room

__all__ = ["Method", "Problem", "balance", "bucket_loads", "check_options", "lower_bound"]

Method = Literal["assignment", "greedy", "none"]


def balance(problem: Problem, method: Method = "assignment", **options: Any) -> Ints:
    """Place every item into a bin.

    Parameters
    ----------
    problem
        The items and the bins.
    method
        ``"none"`` leaves items as `start_N` has them, or deals them out in turn. ``"greedy"``
        places the costliest first, each where the load is the least. ``"assignment"`` takes the
        best of these and refines it by linear assignment; its slowest bucket (several parts: their
        sum) is never slower than that of the others.
    **options
        ``rounds=`` of "assignment": how often it exchanges items, 64 unless given.

    Returns
    -------
    (N,) int64, the bin of each item. Caps and equal counts hold, and no microbatch is empty if
    there are as many items as microbatches.

    Raises
    ------
    ConfigError
        The method or an option is unknown.
    PlanError
        No placement was found. With `start_N` there always is one.
    """
    check_options(method, options)
    bin_N = _METHODS[method][0](problem, **options)
    check(problem, bin_N, f"balance({method!r})")
    return bin_N


def check_options(method: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError unless there is such a method and it knows these options."""
    if method not in _METHODS:
        raise ConfigError("balance(method=)", got=repr(method), limit=f"one of {get_args(Method)}")
    known = _METHODS[method][1]
    for name, value in options.items():
        if name not in known:
            limit = f"one of {sorted(known)}" if known else "no options"
            raise ConfigError(f"option of balance({method!r})", got=repr(name), limit=limit)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(
                f"balance({method!r}, {name}=)", got=repr(value), limit="an integer >= 0"
            )


def assignment(problem: Problem, rounds: int = 64) -> Ints:
    """Refine the best cheap placement by linear assignment: buckets first, then microbatches."""
    starts = [arrival(problem), longest_first(problem)]
    if problem.capacity is not None:
        starts.append(whole_packs(problem, starts[0]))
    bin_N = min(starts, key=lambda start_N: _slowest(problem, start_N))
    if problem.num_items:
        refine = _refine_free if problem.capacity is None else _refine_packed
        bin_N = refine(problem, bin_N, rounds)
    return _heaviest_first(problem, bin_N)


def _slowest(problem: Problem, bin_N: Ints) -> int:
    return int(bucket_loads(problem, bin_N).sum(axis=1).max(axis=0).sum())


def _slowest_microbatches(problem: Problem, bin_N: Ints) -> int:
    load_BMP = bucket_loads(problem, _heaviest_first(problem, bin_N))
    return int(load_BMP.max(axis=0).sum())


def _refine_free(problem: Problem, bin_N: Ints, rounds: int) -> Ints:
    """Refine a placement without capacity, where microbatches and packs follow from the buckets."""
    buckets = Exchange(
        problem.cost_NP,
        bin_N // problem.packs_per_bucket,
        (1, problem.num_buckets),
        least=problem.least_items,
        most=problem.most_items,
    )
    buckets.run(rounds)
    buckets.repartition(rounds // 8)
    micro_N = spread(problem, buckets.group_U, problem.num_microbatches, problem.num_packs)
    most = problem.num_items if problem.max_items is None else problem.num_packs * problem.max_items
    micros = Exchange(
        problem.cost_NP,
        micro_N,
        (problem.num_buckets, problem.num_microbatches),
        least=_least_of_microbatches(problem, micro_N * problem.num_packs),
        most=most,
    )
    micros.run(rounds // 2)
    ways = [spread(problem, some_N, problem.num_packs, 1) for some_N in (micro_N, micros.group_U)]
    return min(ways, key=lambda way_N: _slowest_microbatches(problem, way_N))


def _refine_packed(problem: Problem, bin_N: Ints, rounds: int) -> Ints:
    """Refine a placement into packs of limited capacity: first whole packs, then their items."""
    bins = np.arange(problem.num_bins)
    if not problem.equal_counts:
        packs = Exchange(
            sums(problem.cost_NP, bin_N, problem.num_bins),
            bins // problem.packs_per_bucket,
            (1, problem.num_buckets),
            least=problem.packs_per_bucket,
            most=problem.packs_per_bucket,
        )
        packs.run(rounds)
        packs.repartition(rounds // 8)
        moved_N = fill_empty(problem, regroup(packs.group_U)[bin_N])
        bin_N = min(bin_N, moved_N, key=lambda start_N: _slowest(problem, start_N))
    bin_N = _exchange_items(problem, bin_N, (1, problem.num_buckets), rounds // 2)
    shape = (problem.num_buckets, problem.num_microbatches)
    ways = [bin_N]
    if problem.num_packs > 1:
        micros = Exchange(
            sums(problem.cost_NP, bin_N, problem.num_bins),
            bins // problem.num_packs,
            shape,
            least=problem.num_packs,
            most=problem.num_packs,
        )
        micros.run(rounds // 2)
        ways.append(fill_empty(problem, regroup(micros.group_U)[bin_N]))
    ways.append(_exchange_items(problem, ways[-1], shape, rounds // 4))
    return min(ways, key=lambda way_N: _slowest_microbatches(problem, way_N))


def _exchange_items(problem: Problem, bin_N: Ints, shape: tuple[int, int], rounds: int) -> Ints:
    """Refine buckets, or microbatches within buckets, by items that fit into each other's packs."""
    assert problem.size_N is not None
    assert problem.capacity is not None
    groups, by_bucket = shape[0] * shape[1], shape[0] == 1
    used = sums(problem.size_N, bin_N, problem.num_bins)
    items = np.bincount(bin_N, minlength=problem.num_bins)
    room = Room(
        size_U=problem.size_N,
        bin_U=bin_N.copy(),
        free_FS=(problem.capacity - used).reshape(groups, -1),
        spots_FS=((problem.max_items or problem.num_items) - items).reshape(groups, -1),
    )
    exchange = Exchange(
        problem.cost_NP,
        bin_N // (problem.num_bins // groups),
        shape,
        least=problem.least_items if by_bucket else _least_of_microbatches(problem, bin_N),
        most=problem.most_items if by_bucket else problem.num_items,
        room=room,
    )
    exchange.run(rounds)
    return fill_empty(problem, room.bin_U)


def _least_of_microbatches(problem: Problem, bin_N: Ints) -> Ints:
    """(B * M,) 1 where the bucket has an item for each microbatch, else 0."""
    count_B = np.bincount(bin_N // problem.packs_per_bucket, minlength=problem.num_buckets)
    return np.repeat(
        (count_B >= problem.num_microbatches).astype(np.int64), problem.num_microbatches
    )


def _heaviest_first(problem: Problem, bin_N: Ints) -> Ints:
    """Renumber the microbatches of every bucket by falling load, so that like meets like."""
    load_BM = bucket_loads(problem, bin_N).sum(axis=2)
    rank_BM = (-load_BM).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    bucket_N = bin_N // problem.packs_per_bucket
    rank_N = rank_BM.reshape(-1)[bin_N // problem.num_packs]
    micro_N = bucket_N * problem.num_microbatches + rank_N
    return np.asarray(micro_N * problem.num_packs + bin_N % problem.num_packs)


_METHODS: dict[str, tuple[Callable[..., Ints], frozenset[str]]] = {
    "assignment": (assignment, frozenset({"rounds"})),
    "greedy": (longest_first, frozenset()),
    "none": (arrival, frozenset()),
}
