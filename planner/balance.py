"""Place the items of a step into buckets, microbatches and packs of even cost.

A `Problem` says what is placed where; a method answers with the bin of each item. Cheap methods are
in `placing` and `differencing`; `assignment` refines the best of what they give. Every method is a
function of its arguments alone: integer comparisons, ties by index of the item, a budget of rounds
and never a clock. Axes as in `problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from megadask.planner.assignment import assignment
from megadask.planner.bound import imbalance, lower_bound
from megadask.planner.checks import check_integer
from megadask.planner.differencing import karmarkar_karp
from megadask.planner.errors import ConfigError
from megadask.planner.microbatches import heaviest_first
from megadask.planner.placing import arrival, longest_first
from megadask.planner.problem import Ints, Problem, Sync, bucket_loads, check, slowest

__all__ = [
    "Method",
    "Problem",
    "Sync",
    "balance",
    "bucket_loads",
    "check_options",
    "imbalance",
    "lower_bound",
    "prepare",
    "slowest",
]

Method = Literal["assignment", "greedy", "karmarkar_karp", "none"]


def balance(problem: Problem, method: Method = "assignment", **options: Any) -> Ints:
    """Place every item into a bin.

    Parameters
    ----------
    problem
        The items and the bins.
    method
        ``"none"`` leaves items as `start_N` has them, or deals them out in turn. ``"greedy"``
        places the costliest first, each where the load is the least. ``"karmarkar_karp"`` sets
        the costliest apart by differencing. ``"assignment"`` takes the best of these and refines it
        by linear assignment and swaps; by `slowest` it is never worse than any of the others.
        All but "none" sort the items first, so that the order in which they come counts only among
        items of the same cost and size. (Transfers do not count in that; and "assignment" is "none"
        where that is better.)
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
    place = _METHODS[method][0]
    bin_N = place(problem, **options) if method == "none" else _in_order(problem, method, options)
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
        check_integer(f"balance({method!r}, {name}=)", value, 0)


def prepare(method: Method) -> None:
    """Load what a method needs, for which its first problem would wait: up to half a second."""
    if method == "assignment":
        import scipy.optimize  # noqa: F401  40 MB that only processes that place are to have


def _in_order(problem: Problem, method: str, options: Mapping[str, Any]) -> Ints:
    """Place the items sorted by falling cost, part by part, then by falling size."""
    keys = [-cost_N for cost_N in problem.cost_NP.T[::-1]]
    if problem.size_N is not None:
        keys.insert(0, -problem.size_N)
    order = np.lexsort(keys)
    bin_N = np.empty_like(order)
    bin_N[order] = _METHODS[method][0](problem.take(order), **options)
    if method == "assignment":  # which saw the arrival of the sorted items only
        arrived_N = heaviest_first(problem, arrival(problem.reduced()))
        bin_N = min(bin_N, arrived_N, key=lambda way_N: slowest(problem, way_N))
    return bin_N


_METHODS: dict[str, tuple[Callable[..., Ints], frozenset[str]]] = {
    "assignment": (assignment, frozenset({"rounds"})),
    "greedy": (lambda problem: longest_first(problem.reduced()), frozenset()),
    "karmarkar_karp": (lambda problem: karmarkar_karp(problem.reduced()), frozenset()),
    "none": (lambda problem: arrival(problem.reduced()), frozenset()),
}
