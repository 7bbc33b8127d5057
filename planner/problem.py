"""The balancing problem: items with costs, and the bins that they are placed into.

Axes: N items, P parts of the cost, B buckets, M microbatches of a bucket, Q packs of a microbatch,
S = M * Q packs of a bucket. Bin of an item = (bucket * M + microbatch) * Q + pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import PlanError

Ints = NDArray[np.int64]
from typing import Any, Literal

Sync = Literal["part", "step"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What `balance` is to place, and where. Arrays are not modified.

    Parameters
    ----------
    cost_NP
        (N, P) int64 >= 0, quantised cost of each item by part, in canonical order of the items.
    num_buckets, num_microbatches, num_packs
        B; M of a bucket; Q of a microbatch.
    size_N
        (N,) int64 >= 0, padded tokens of each item; needed with `capacity`.
    capacity
        Most padded tokens of a pack; None is no limit.
    max_items
        Most items of a pack; None is no limit.
    start_N
        (N,) int64, a placement (bin of each item) known to fit, such as the canonical packing.
    equal_counts
        Whether the numbers of items of any two buckets may differ by at most one.
    """

    cost_NP: Ints
    num_buckets: int
    num_microbatches: int = 1
    num_packs: int = 1
    size_N: Ints | None = None
    capacity: int | None = None
    max_items: int | None = None
    start_N: Ints | None = None
    equal_counts: bool = False
    group_size: Any = None
    sync: Any = "part"
    speed_B: Any = None
    transfer_NB: Any = None

    def __post_init__(self) -> None:
        cost_NP = self.cost_NP
        if cost_NP.ndim != 2 or cost_NP.shape[1] < 1 or cost_NP.dtype != np.int64:
            raise PlanError(
                "Problem(cost_NP=)",
                got=f"{cost_NP.dtype} {cost_NP.shape}",
                limit="int64 (N, P >= 1)",
            )
        if (cost_NP < 0).any() or cost_NP.sum(dtype=np.float64) >= 2**62:
            raise PlanError("Problem(cost_NP=)", got=cost_NP.min(), limit=">= 0, all below 2**62")
        for name in ("num_buckets", "num_microbatches", "num_packs", "capacity", "max_items"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"Problem({name}=)", got=value, limit=">= 1")
        if self.capacity is not None and self.size_N is None:
            raise PlanError("Problem(capacity=)", got="no size_N", limit="both or neither")
        for name in ("size_N", "start_N"):
            column = getattr(self, name)
            if column is not None and column.shape != cost_NP.shape[:1]:
                raise PlanError(f"Problem({name}=)", got=column.shape, limit=cost_NP.shape[:1])
        self._check_room()
        if self.start_N is not None:
            check(self, self.start_N, "Problem(start_N=)")

    def _check_room(self) -> None:
        if self.max_items is not None and self.num_items > self.num_bins * self.max_items:
            raise PlanError(
                "too many items for the packs of the step",
                got=self.num_items,
                limit=f"at most {self.num_bins} packs x {self.max_items} items",
                remedy="Plan more packs, or allow more items in one.",
            )
        if self.capacity is None or self.size_N is None:
            return
        if (self.size_N > self.capacity).any():
            raise PlanError(
                f"item {int((self.size_N > self.capacity).argmax())} fits into no pack",
                got=f"{self.size_N.max()} tokens",
                limit=f"at most {self.capacity}",
                remedy="Split or truncate long documents.",
            )
        if self.size_N.sum() > self.num_bins * self.capacity:
            raise PlanError(
                "too many tokens for the packs of the step",
                got=self.size_N.sum(),
                limit=f"at most {self.num_bins} packs x {self.capacity} tokens",
                remedy="Plan more packs.",
            )

    @property
    def num_items(self) -> int:
        """N."""
        return len(self.cost_NP)

    @property
    def packs_per_bucket(self) -> int:
        """S."""
        return self.num_microbatches * self.num_packs

    @property
    def num_bins(self) -> int:
        """Packs of all buckets."""
        return self.num_buckets * self.packs_per_bucket

    @property
    def least_items(self) -> int:
        """Fewest items of a bucket: no bucket, and no microbatch, is empty if there are enough."""
        share = self.num_items // self.num_buckets
        if self.equal_counts:
            return share
        return self.num_microbatches if share >= self.num_microbatches else min(1, share)

    @property
    def quota(self) -> tuple[int, int]:
        """(most, extras): a bucket takes `most` items, and `extras` of the buckets one more."""
        if self.equal_counts:
            return divmod(self.num_items, self.num_buckets)
        return self.most_items, 0

    @property
    def most_items(self) -> int:
        """Most items of a bucket."""
        if self.equal_counts:
            return -(-self.num_items // self.num_buckets)
        if self.max_items is None:
            return self.num_items
        return self.packs_per_bucket * self.max_items


def check(problem: Problem, bin_N: Ints, what: str) -> None:
    """Raise PlanError unless the placement fits into the bins and has equal counts where asked."""
    if not len(bin_N):
        return
    if bin_N.min() < 0 or bin_N.max() >= problem.num_bins:
        raise PlanError(what, got=f"bin {bin_N.max()}", limit=f"bins 0 to {problem.num_bins - 1}")
    if problem.capacity is not None and problem.size_N is not None:
        used = sums(problem.size_N, bin_N, problem.num_bins)
        if used.max() > problem.capacity:
            raise PlanError(what, got=f"a pack of {used.max()} tokens", limit=problem.capacity)
    items = np.bincount(bin_N, minlength=problem.num_bins)
    if problem.max_items is not None and items.max() > problem.max_items:
        raise PlanError(what, got=f"a pack of {items.max()} items", limit=problem.max_items)
    counts = items.reshape(problem.num_buckets, -1).sum(axis=1)
    if problem.equal_counts and np.ptp(counts) > 1:
        raise PlanError(
            what, got=f"buckets of {counts.min()} to {counts.max()}", limit="equal counts"
        )


def sums(value_N: Ints, group_N: Ints, num_groups: int) -> Ints:
    """Return (num_groups, ...) the sum of the items' values (N, ...) in each group, exactly."""
    total = np.zeros((num_groups, *value_N.shape[1:]), np.int64)
    np.add.at(total, group_N, value_N)
    return total


def bucket_loads(problem: Problem, bin_N: Ints) -> Ints:
    """Return (B, M, P) int64 the cost of every microbatch of every bucket."""
    shape = (problem.num_buckets, problem.num_microbatches, problem.cost_NP.shape[1])
    return sums(problem.cost_NP, bin_N // problem.num_packs, shape[0] * shape[1]).reshape(shape)


def lower_bound(problem: Problem) -> float:
    """Return a ratio of the heaviest to the mean bucket that no placement can beat (worst part).

    No bucket is lighter than the largest item. With equal counts, the n heaviest items either have
    a bucket each, which their share of the lightest items completes, or two of them meet in one.
    """
    worst = 1.0
    for cost_N in problem.cost_NP.T:
        mean = cost_N.sum() / problem.num_buckets
        if not mean:
            continue
        worst = max(worst, float(cost_N.max() / mean))
        others = problem.num_items // problem.num_buckets - 1
        if not problem.equal_counts or others < 1:
            continue
        light = np.concatenate([[0], np.cumsum(np.sort(cost_N))])
        heavy = np.sort(cost_N)[::-1][: problem.num_buckets]
        n = np.arange(1, len(heavy) + 1)
        apart = (np.cumsum(heavy) + light[n * others]) / n
        together = np.where(n > 1, 2 * heavy + light[others - 1], np.inf)
        worst = max(worst, float(np.minimum(apart, together).max() / mean))
    return worst
