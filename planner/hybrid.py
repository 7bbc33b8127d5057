"""Spread long documents over neighbouring context-parallel ranks, and leave short ones whole.

What hybrid context parallelism in Megatron-Core runs: every document has a degree d, a power of two
that divides cp, and belongs to an aligned group of d ranks of one replica, which share its tokens
and its cost evenly (zigzag). Such groups lie within each other or apart, never across.

The ranks of a group run a document together, in one microbatch, the widest documents first. All
ranks follow one order, so they cannot wait for each other in a circle: of the documents not yet
done, the first in the order finds its ranks ready. And as groups nest, the ranks of a group have
run the same wider documents before, so that within a microbatch nobody waits at all.

Axes: N spans, R ranks (replica * cp + rank along cp), M microbatches, D degrees, G aligned groups
of one degree, X shares (one rank's part of a span).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from megadask.planner.balance import Problem, balance
from megadask.planner.errors import PlanError
from megadask.planner.problem import Ints, sums

_TRIES = 4  # limits of a share: that of an even step, and halves of it
_EVEN_BITS = 6  # even enough: the slowest rank is within 2**-6 of the bound


@dataclass(frozen=True, kw_only=True, eq=False)
class Hybrid:
    """Where the spans of a step go when some are spread over several ranks.

    Attributes
    ----------
    cp_degree
        (N,) int64, ranks that share each span.
    group
        (N,) int64, first of these ranks; the others follow it.
    microbatch
        (N,) int64, the microbatch in which all of them run it.
    loads
        (R, M) int64 cost of every microbatch of every rank.
    bound
        Lowest max / mean over the ranks that any placement could reach.
    """

    cp_degree: Ints
    group: Ints
    microbatch: Ints
    loads: Ints
    bound: float

    @property
    def slowest(self) -> int:
        """Cost of the heaviest rank."""
        return int(self.loads.sum(axis=1).max())

    @property
    def slowest_microbatches(self) -> int:
        """Cost of the step where all ranks meet after every microbatch."""
        return int(self.loads.max(axis=0).sum())

    def order_of(self, rank: int, microbatch: int) -> Ints:
        """Return the spans of one microbatch of a rank in the order in which it runs them."""
        mine_N = (self.group <= rank) & (rank < self.group + self.cp_degree)
        rows = np.flatnonzero(mine_N & (self.microbatch == microbatch))
        return rows[np.argsort(-self.cp_degree[rows], kind="stable")]


def spread(
    cost_N: Ints,
    tokens_N: Ints,
    *,
    dp: int,
    cp: int,
    microbatches: int = 1,
    max_tokens: int | None = None,
) -> Hybrid:
    """Place spans on the ranks of ``dp`` replicas of ``cp`` ranks each, so that all take as long.

    A span is spread over the fewest ranks that bring its share of the cost under an even share of
    the step, and its tokens under the cap; where that leaves ranks uneven, over more. The slowest
    rank is never slower than with whole spans only, balanced by `balance`.

    Parameters
    ----------
    cost_N
        (N,) int64 >= 0, cost of each span; not modified.
    tokens_N
        (N,) int64 >= 0, padded tokens of each span; not modified.
    microbatches
        M. None of a rank is empty if there are enough whole spans.
    max_tokens
        Most tokens of one microbatch of one rank. Without it microbatches are as uneven as the
        longest spans make them: those are together in the first.

    Raises
    ------
    PlanError
        An argument is out of range, a span has too many tokens for cp ranks, or no placement was
        found.
    """
    if cost_N.shape != tokens_N.shape or cost_N.min(initial=0) < 0:
        got = f"{cost_N.shape} and {tokens_N.shape}, from {cost_N.min(initial=0)}"
        raise PlanError("spread(cost_N, tokens_N)", got=got, limit="both (N,), costs >= 0")
    ranks = _Ranks(dp, cp, microbatches, max_tokens)
    total, heaviest = int(cost_N.sum()), int(cost_N.max(initial=0))
    share = -(-total // ranks.count)
    floor = max(share, -(-heaviest // int(ranks.degrees_D[-1])))
    found: list[Hybrid] = []
    for halvings in range(_TRIES):
        degree_N = _degrees(cost_N, tokens_N, ranks, max(1, share >> halvings))
        placed = _place(cost_N, tokens_N, degree_N, ranks)
        if placed is None:  # by tokens more spans fit
            placed = _place(tokens_N, tokens_N, degree_N, ranks)
        if placed is not None:
            found.append(_hybrid(cost_N, degree_N, *placed, ranks))
            if found[-1].slowest - floor <= floor >> _EVEN_BITS:
                break
    # Whole spans cannot do better than this: no need to place them where that is reached.
    if not found or min(hybrid.slowest for hybrid in found) > max(share, heaviest):
        found += _whole(cost_N, tokens_N, ranks)
    if not found:
        raise PlanError(
            "no placement of the spans on the ranks was found",
            got=f"{tokens_N.sum()} tokens",
            limit=f"{ranks.count} ranks x {microbatches} microbatches of {max_tokens} tokens",
            remedy="Plan more microbatches.",
        )
    return min(found, key=lambda hybrid: (hybrid.slowest, hybrid.slowest_microbatches))


class _Ranks:
    """The ranks that spans are placed on, and how widely a span may be spread over them."""

    def __init__(self, dp: int, cp: int, microbatches: int, max_tokens: int | None) -> None:
        sizes = {"dp": dp, "cp": cp, "microbatches": microbatches, "max_tokens": max_tokens}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise PlanError(f"spread({name}=)", got=value, limit=">= 1")
        self.count, self.microbatches, self.max_tokens = dp * cp, microbatches, max_tokens
        powers = (1 << bit for bit in range(cp.bit_length()))
        self.degrees_D = np.array(list(takewhile(lambda degree: cp % degree == 0, powers)))


def _degrees(cost_N: Ints, tokens_N: Ints, ranks: _Ranks, limit: int) -> Ints:
    """(N,) the fewest ranks that bring a span's share under the limit and the cap, else the most.

    Raises PlanError for a span that does not fit on the most ranks.
    """
    fits_ND = cost_N[:, None] <= limit * ranks.degrees_D
    fits_ND[:, -1] = True
    if ranks.max_tokens is not None:
        under_ND = tokens_N[:, None] <= ranks.max_tokens * ranks.degrees_D
        if not under_ND[:, -1].all():
            span = int(under_ND[:, -1].argmin())
            raise PlanError(
                f"span {span} is too long for a context-parallel group",
                got=f"{tokens_N[span]} tokens",
                limit=f"at most {ranks.degrees_D[-1]} ranks x {ranks.max_tokens} tokens",
                remedy="Split or truncate long documents, or allow more tokens.",
            )
        fits_ND &= under_ND
    return np.asarray(ranks.degrees_D[fits_ND.argmax(axis=1)], np.int64)


def _place(
    weight_N: Ints, tokens_N: Ints, degree_N: Ints, ranks: _Ranks
) -> tuple[Ints, Ints] | None:
    """Place spans of given degrees: the widest first, then by falling weight.

    Wide spans go to the lightest group, and as early as the cap allows: then the ranks that run one
    in a microbatch all do. Returns the groups and the microbatches, None if a span fits nowhere.
    """
    num_micros = ranks.microbatches
    capped = ranks.max_tokens is not None
    load_RM = np.zeros((ranks.count, num_micros), np.int64)
    free_RM = np.full_like(load_RM, ranks.max_tokens or 0)
    size_N = -(-tokens_N // degree_N) if capped else np.zeros_like(tokens_N)
    group_N, micro_N = np.empty_like(degree_N), np.empty_like(degree_N)
    order = np.lexsort((-weight_N, -degree_N))
    num_wide = int((degree_N > 1).sum())
    for span in order[:num_wide].tolist():
        degree, size = int(degree_N[span]), int(size_N[span])
        fits_GM = free_RM.reshape(-1, degree, num_micros).min(axis=1) >= size
        load_G = load_RM.sum(axis=1).reshape(-1, degree).max(axis=1)
        open_G = fits_GM.any(axis=1)
        if not open_G.any():
            return None
        group = int(np.where(open_G, load_G, np.iinfo(np.int64).max).argmin())
        micro = int(fits_GM[group].argmax())
        mine = slice(group * degree, (group + 1) * degree)
        load_RM[mine, micro] += -(-weight_N[span] // degree)
        free_RM[mine, micro] -= size
        group_N[span], micro_N[span] = group * degree, micro
    whole = order[num_wide:]
    placed = _place_whole(weight_N[whole].tolist(), size_N[whole].tolist(), load_RM, free_RM)
    if placed is None:
        return None
    group_N[whole], micro_N[whole] = placed
    return group_N, micro_N


def _place_whole(
    cost: list[int], size: list[int], load_RM: Ints, free_RM: Ints
) -> tuple[list[int], list[int]] | None:
    """Give each span, by falling cost, to the lightest rank with room.

    cost, size: of each span; load_RM, free_RM: (R, M) what wide spans cost and leave of the cap.
    Returns the ranks and the microbatches, None if a span fits nowhere.
    """
    bins = _Bins(load_RM, free_RM, _levels(load_RM, cost))
    heap = [(load, rank) for rank, load in enumerate(load_RM.sum(axis=1).tolist())]
    heapq.heapify(heap)
    ranks, micros = [], []
    for left, value, tokens in zip(range(len(cost), 0, -1), cost, size, strict=True):
        scarce, passed = left <= bins.num_empty, []  # from then on, only into empty microbatches
        while heap:
            load, rank = heap[0]
            micro = bins.lowest(rank, tokens, only_empty=scarce)
            if micro is not None:
                break
            passed.append(heapq.heappop(heap))
        else:
            return None
        heapq.heapreplace(heap, (load + value, rank))
        bins.add(rank, micro, value, tokens)
        if not scarce:  # else a rank without empty microbatches has no more to get
            for entry in passed:
                heapq.heappush(heap, entry)
        ranks.append(rank)
        micros.append(micro)
    return ranks, micros


class _Bins:
    """Microbatches of all ranks as they fill up.

    load_RM, free_RM: (R, M) cost in them, and tokens that they still take; not modified.
    level: M loads that all ranks are to have in each microbatch, so that like meets like.
    """

    def __init__(self, load_RM: Ints, free_RM: Ints, level: list[int]) -> None:
        self._lack = (np.array(level) - load_RM).tolist()
        self._free = free_RM.tolist()
        self._empty = (load_RM == 0).tolist()
        self.num_empty = int((load_RM == 0).sum())

    def lowest(self, rank: int, tokens: int, *, only_empty: bool) -> int | None:
        """Return the microbatch with room that lacks most of its level, None if there is none."""
        found, most = None, 0
        for micro, (lack, free, empty) in enumerate(
            zip(self._lack[rank], self._free[rank], self._empty[rank], strict=True)
        ):
            if free >= tokens and (empty or not only_empty) and (found is None or lack > most):
                found, most = micro, lack
        return found

    def add(self, rank: int, micro: int, cost: int, tokens: int) -> None:
        """Put a span into a microbatch."""
        self._lack[rank][micro] -= cost
        self._free[rank][micro] -= tokens
        self.num_empty -= self._empty[rank][micro]
        self._empty[rank][micro] = False


def _levels(load_RM: Ints, cost: list[int]) -> list[int]:
    """Return (M,) the load of every microbatch of an even step.

    As even as what is placed, and the heaviest of the rest in the first, allow; and in sum what an
    average rank has to do.
    """
    placed_M = load_RM.max(axis=0)
    placed_M[0] = max(placed_M[0], max(cost, default=0))
    share = (int(load_RM.sum()) + sum(cost)) // len(load_RM)
    order = np.sort(placed_M)
    # The lowest level that, with those microbatches that are above it, makes up the share.
    for count in range(len(order), 0, -1):
        level = (share - int(order[count:].sum())) // count
        if level >= order[count - 1]:
            return [max(placed, level) for placed in placed_M.tolist()]
    return list(placed_M.tolist())


def _whole(cost_N: Ints, tokens_N: Ints, ranks: _Ranks) -> list[Hybrid]:
    """Return the balance of whole spans, if they fit."""
    if ranks.max_tokens is not None and (tokens_N > ranks.max_tokens).any():
        return []
    try:
        problem = Problem(
            cost_NP=cost_N[:, None],
            num_buckets=ranks.count,
            num_microbatches=ranks.microbatches,
            size_N=tokens_N,
            capacity=ranks.max_tokens,
        )
        bin_N = balance(problem)
    except PlanError:
        return []
    rank_N, micro_N = np.divmod(bin_N, ranks.microbatches)
    return [_hybrid(cost_N, np.ones_like(cost_N), rank_N, micro_N, ranks)]


def _hybrid(cost_N: Ints, degree_N: Ints, group_N: Ints, micro_N: Ints, ranks: _Ranks) -> Hybrid:
    within_X = np.arange(degree_N.sum()) - np.repeat(np.cumsum(degree_N) - degree_N, degree_N)
    share_X = np.repeat(cost_N // degree_N, degree_N)
    share_X += within_X < np.repeat(cost_N % degree_N, degree_N)
    flat_X = (np.repeat(group_N, degree_N) + within_X) * ranks.microbatches
    flat_X += np.repeat(micro_N, degree_N)
    loads = sums(share_X, flat_X, ranks.count * ranks.microbatches)
    heaviest, mean = cost_N.max(initial=0) / ranks.degrees_D[-1], cost_N.sum() / ranks.count
    return Hybrid(
        cp_degree=degree_N,
        group=group_N,
        microbatch=micro_N,
        loads=loads.reshape(ranks.count, ranks.microbatches),
        bound=max(1.0, float(heaviest / mean)) if mean else 1.0,
    )
