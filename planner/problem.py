"""The balancing problem: items with costs, and the bins that they are placed into.

Axes: N items, P parts of the cost, B buckets, M microbatches of a bucket, Q packs of a microbatch,
S = M * Q packs of a bucket. Bin of an item = (bucket * M + microbatch) * Q + pack.

Loads are costs, transfers included. Times are loads times `Problem.slow_B`: integers too, so that
placements of buckets of uneven speeds compare exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import PlanError

Ints = NDArray[np.int64]
Sync = Literal["part", "step"]

_SPEED_BITS = 16  # a time is exact to one in 2**16, where the costs leave room for that
_TOTAL_BITS = 62  # of all costs, and of all times


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
    sync
        What waits for the slowest bucket. ``"part"``: every part on its own, so that the sum over
        parts of the slowest bucket counts. ``"step"``: only the step, so that the bucket whose
        parts sum to the most counts.
    speed_B
        (B,) int64 >= 1, relative speeds of the buckets, such as percents; None: all alike.
    transfer_NB
        (N, B) int64 >= 0, what item n costs more in bucket b than elsewhere, in the first part: its
        data must arrive before that begins. None: nothing.
    group_size
        Buckets of a group, such as the ranks of a node; "assignment" then evens out groups of
        neighbouring buckets first, and the buckets within each after that. None: all at once.
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
    sync: Sync = "part"
    speed_B: Ints | None = None
    transfer_NB: Ints | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        cost_NP = self.cost_NP
        if cost_NP.ndim != 2 or cost_NP.shape[1] < 1 or cost_NP.dtype != np.int64:
            raise PlanError(
                "Problem(cost_NP=)",
                got=f"{cost_NP.dtype} {cost_NP.shape}",
                limit="int64 (N, P >= 1)",
            )
        if (cost_NP < 0).any() or cost_NP.sum(dtype=np.float64) >= 2**_TOTAL_BITS:
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
        self._check_options()
        self._check_room()
        if self.start_N is not None:
            check(self, self.start_N, "Problem(start_N=)")

    def _check_options(self) -> None:
        if self.sync not in get_args(Sync):
            raise PlanError("Problem(sync=)", got=repr(self.sync), limit=f"one of {get_args(Sync)}")
        size = self.group_size
        if size is not None and (size < 1 or self.num_buckets % size):
            raise PlanError(
                "Problem(group_size=)", got=size, limit=f"a divisor of {self.num_buckets} buckets"
            )
        speed_B, transfer_NB = self.speed_B, self.transfer_NB
        if speed_B is not None:
            if speed_B.shape != (self.num_buckets,) or speed_B.dtype != np.int64:
                raise PlanError(
                    "Problem(speed_B=)",
                    got=f"{speed_B.dtype} {speed_B.shape}",
                    limit=f"int64 ({self.num_buckets},)",
                    remedy="Give speeds in whole percents.",
                )
            if speed_B.min() < 1:
                raise PlanError("Problem(speed_B=)", got=speed_B.min(), limit=">= 1")
            if self._speed_bits() < 1:
                raise PlanError(
                    "costs and speeds too far apart",
                    got=f"costs of {self._total()} and speeds {speed_B.min()} to {speed_B.max()}",
                    limit=f"costs x fastest / slowest below 2**{_TOTAL_BITS - 2}",
                    remedy="Count costs in larger units.",
                )
        if transfer_NB is not None:
            shape = (self.num_items, self.num_buckets)
            if transfer_NB.shape != shape or transfer_NB.dtype != np.int64:
                raise PlanError(
                    "Problem(transfer_NB=)",
                    got=f"{transfer_NB.dtype} {transfer_NB.shape}",
                    limit=f"int64 {shape}",
                )
            if transfer_NB.min(initial=0) < 0 or self._total() >= 2**_TOTAL_BITS:
                raise PlanError(
                    "Problem(transfer_NB=)",
                    got=transfer_NB.min(initial=0),
                    limit=f">= 0, all below 2**{_TOTAL_BITS}",
                )

    def _total(self) -> int:
        """At least the sum of the loads of any placement."""
        total = int(self.cost_NP.sum())
        if self.transfer_NB is not None:
            total += sum(self.transfer_NB.max(axis=1, initial=0).tolist())
        return total

    def _speed_bits(self) -> int:
        assert self.speed_B is not None
        ratio = int(self.speed_B.max()) // int(self.speed_B.min()) + 1
        return min(_SPEED_BITS, _TOTAL_BITS - self._total().bit_length() - ratio.bit_length())

    @property
    def slow_B(self) -> Ints | None:
        """(B,) int64, time of a unit of cost; None where all buckets are equally fast: 1."""
        if self.speed_B is None or np.ptp(self.speed_B) == 0:
            return None
        speed_B = self.speed_B // np.gcd.reduce(self.speed_B)
        fastest = int(speed_B.max()) << self._speed_bits()
        return np.array([fastest // speed for speed in speed_B.tolist()], np.int64)

    def reduced(self) -> Problem:
        """Return the problem whose parts wait for each other: one part with ``sync="step"``."""
        if self.sync == "part" or self.cost_NP.shape[1] == 1:
            return self
        return replace(self, cost_NP=self.cost_NP.sum(axis=1, keepdims=True), sync="part")

    def take(self, item_N: Ints) -> Problem:
        """Return the problem of these items, each of them once, in this order."""
        return replace(
            self,
            cost_NP=self.cost_NP[item_N],
            size_N=None if self.size_N is None else self.size_N[item_N],
            start_N=None if self.start_N is None else self.start_N[item_N],
            transfer_NB=None if self.transfer_NB is None else self.transfer_NB[item_N],
        )

    def joined(self, group_N: Ints) -> Problem:
        """Return the problem whose items are groups of these, which stay together.

        group_N: (N,) group of each item, none of them empty. Sizes and a placement are not known
        of the groups.
        """
        num_groups = int(group_N.max(initial=-1)) + 1
        transfer_NB = self.transfer_NB
        return replace(
            self,
            cost_NP=sums(self.cost_NP, group_N, num_groups),
            transfer_NB=None if transfer_NB is None else sums(transfer_NB, group_N, num_groups),
            size_N=None,
            capacity=None,
            start_N=None,
        )

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


def fits(problem: Problem, bin_N: Ints) -> bool:
    """Whether no pack exceeds its capacity or its number of items."""
    if problem.capacity is not None and problem.size_N is not None:
        used = sums(problem.size_N, bin_N, problem.num_bins)
        if used.max(initial=0) > problem.capacity:
            return False
    items = np.bincount(bin_N, minlength=problem.num_bins)
    return problem.max_items is None or bool(items.max() <= problem.max_items)


def sums(value_N: Ints, group_N: Ints, num_groups: int) -> Ints:
    """Return (num_groups, ...) the sum of the items' values (N, ...) in each group, exactly."""
    total = np.zeros((num_groups, *value_N.shape[1:]), np.int64)
    np.add.at(total, group_N, value_N)
    return total


def placed_costs(problem: Problem, bucket_N: Ints) -> Ints:
    """Return (N, P) int64 the cost of every item where it is, transfers included."""
    if problem.transfer_NB is None:
        return problem.cost_NP
    cost_NP = problem.cost_NP.copy()
    cost_NP[:, 0] += problem.transfer_NB[np.arange(problem.num_items), bucket_N]
    return cost_NP


def bucket_loads(problem: Problem, bin_N: Ints) -> Ints:
    """Return (B, M, P) int64 the cost of every microbatch of every bucket, transfers included."""
    cost_NP = placed_costs(problem, bin_N // problem.packs_per_bucket)
    shape = (problem.num_buckets, problem.num_microbatches, cost_NP.shape[1])
    return sums(cost_NP, bin_N // problem.num_packs, shape[0] * shape[1]).reshape(shape)


def times(problem: Problem, bin_N: Ints) -> Ints:
    """Return (B, M, P) int64 the time of every microbatch; where speeds are alike, its load."""
    load_BMP, slow_B = bucket_loads(problem, bin_N), problem.slow_B
    return load_BMP if slow_B is None else load_BMP * slow_B[:, None, None]


def slowest(problem: Problem, bin_N: Ints) -> int:
    """Return what "assignment" minimises: the time of the slowest bucket, summed as `sync` says."""
    problem = problem.reduced()
    return int(times(problem, bin_N).sum(axis=1).max(axis=0).sum())
