"""Place the items of a step into buckets, microbatches and packs of even cost.

Every method is a function of its arguments alone: integer comparisons, ties by index of the item,
a budget of rounds and never a clock. Axes as in `problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from megadask.planner.assignment import assignment
from megadask.planner.bound import imbalance, lower_bound
from megadask.planner.differencing import karmarkar_karp
from megadask.planner.errors import ConfigError
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


_METHODS: dict[str, tuple[Callable[..., Ints], frozenset[str]]] = {
    "assignment": (assignment, frozenset({"rounds"})),
    "greedy": (lambda problem: longest_first(problem.reduced()), frozenset()),
    "karmarkar_karp": (lambda problem: karmarkar_karp(problem.reduced()), frozenset()),
    "none": (lambda problem: arrival(problem.reduced()), frozenset()),
}
