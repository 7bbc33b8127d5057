"""Deferral: what costs too much for a step waits for one in which others cost as much.

A rank cannot have less to do than its costliest span. So a step over W ranks can be balanced only
if none of its spans costs more than 1/W of it; with a few long documents in a step of short ones
that fails, with all long documents of several steps in one of them it does not.

Axes: S sources, n readable spans in the order of their `Lines`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megadask.planner.batching import Batching
from megadask.planner.checks import check_integer
from megadask.planner.costs import Cost, Tokens, evaluate
from megadask.planner.lines import Bools, Ints, Lines, Readable
from megadask.planner.metadata import Metadata
from megadask.planner.sequences import padded_table


@dataclass(frozen=True, kw_only=True)
class Deferral:
    """No span costs more than 1/W of its step, unless it has waited K steps.

    Attributes
    ----------
    steps
        K, steps for which a span may wait because it costs too much.
    ways
        W, ranks (buckets) over which steps are to be balanced. A number of its own: what a step
        consists of must not depend on the topology.
    cost
        What a span costs; of several parts their sum.
    """

    steps: int
    ways: int
    cost: Cost = field(default_factory=Tokens)

    def __post_init__(self) -> None:
        for name in ("steps", "ways"):
            check_integer(f"defer({name}=)", getattr(self, name), 1)

    def costs(self, table: Metadata, batching: Batching) -> NDArray[np.int64]:
        """Return (N,) what spans cost, in the cost's unit; padded tokens count."""
        padded = padded_table(table, batching)
        return np.asarray(evaluate(self.cost, padded).sum(axis=1), np.int64)


@dataclass(frozen=True)
class Missing:
    """Where a limit cannot be judged: source to the spans that have to be known of it."""

    wanted: dict[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Forecast:
    """Foresees what a step would consist of under a limit of costs, without packing it.

    Attributes
    ----------
    readable
        The spans.
    cost_n
        (n,) what each costs, in their order.
    share_S
        (S,) shares of the sources; they sum to TOTAL_SHARE.
    by_tokens
        Whether they are shares of the tokens.
    final_S
        (S,) whether nothing follows what is known of the source.
    num_packs, batching
        Capacity of the step.
    window
        K, as in the rules of the draw.
    """

    readable: Readable
    cost_n: Ints
    share_S: Ints
    by_tokens: bool
    final_S: Bools
    num_packs: int
    batching: Batching
    window: int

    def lines(self, limit: int | None) -> Lines:
        """Return the order in which spans go where those above the limit wait."""
        if limit is None:
            return self.readable.lines()
        may_wait_n = ~self.readable.due_n & (self.share_S > 0)[self.readable.source_n]
        return self.readable.lines_without((self.cost_n > limit) & may_wait_n, self.window)

    def judged(self, lines: Lines, place_m: Ints, limit: int | None) -> tuple[Ints, Bools]:
        """Return (m,) what the spans at some places of the lines cost, and which could not wait."""
        index_m = lines.order_n[place_m]
        cost_m, due_m = self.cost_n[index_m], self.readable.due_n[index_m]
        return cost_m, due_m if limit is None else due_m | (cost_m > limit)

    def taken(self, lines: Lines) -> Bools | Missing:
        """Return (n,) in the order of the lines, which spans the step would take."""
        order_n = lines.order_n
        size_n1 = _sums(self.readable.size_n[order_n])
        tokens_n1 = _sums(self.readable.tokens_n[order_n]) if self.by_tokens else None
        first_S, stop_S = lines.first_S, lines.stop_S
        most = (
            self.num_packs * self.batching.documents_limit,
            self.num_packs * self.batching.seq_len,
        )

        def counts(progress: int) -> Ints:
            # The product stays below 2**63 for a progress of up to 2**42.
            wanted_S = ((self.share_S >> 11) * progress) >> 21
            if tokens_n1 is None:
                return wanted_S
            target_S = tokens_n1[first_S] + wanted_S
            return np.searchsorted(tokens_n1, target_S) - first_S

        def fits(progress: int) -> bool:
            end_S = np.minimum(first_S + counts(progress), stop_S)
            size = int((size_n1[end_S] - size_n1[first_S]).sum())
            return int((end_S - first_S).sum()) <= most[0] and size <= most[1]

        low, high = 0, max(most)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        count_S, known_S = counts(low), stop_S - first_S
        short = np.flatnonzero((count_S > known_S) & ~self.final_S & (self.share_S > 0))
        if len(short):
            wanted = np.minimum(count_S, 2 * known_S + 1)[short] + self.window
            return Missing(dict(zip(short.tolist(), wanted.tolist(), strict=True)))
        within_n = np.arange(len(order_n)) - first_S[self.readable.source_n]
        return np.asarray(within_n < np.minimum(count_S, known_S)[self.readable.source_n])


@dataclass(frozen=True)
class Limit:
    """Most that a span may cost in a step.

    value
        The limit, None for none.
    floor
        A limit below it would be no help: half of the spans cost more.
    """

    value: int | None
    floor: int

    def lowered(self, cost_m: Ints, excused_m: Bools, ways: int) -> Limit:
        """Return the limit to try next where a step breaks the rule, this one where it keeps it.

        A step that has to take a costly span all the same takes with it what costs as much: that
        makes it no slower.

        Parameters
        ----------
        cost_m
            (m,) what the spans of the step cost.
        excused_m
            (m,) which of them could not wait.
        ways
            W of the rule.
        """
        if self.floor < 0:
            return self
        bearable = max(int(cost_m.sum()) // ways, int(cost_m[excused_m].max(initial=0)))
        if cost_m[~excused_m].max(initial=0) <= bearable:
            return self
        return Limit(bearable, self.floor) if bearable >= self.floor else NO_LIMIT


#: For steps that no limit makes any better: what holds without deferral.
NO_LIMIT = Limit(None, -1)


def find_limit(forecast: Forecast, ways: int) -> Limit | Missing:
    """Return the highest limit under which a step is foreseen to keep the rule.

    The more a step takes, the more a span in it may cost. So the limits tried fall from the one
    that the step without any would allow to the highest that allows itself.
    """
    limit: Limit | None = None
    while True:
        value = None if limit is None else limit.value
        lines = forecast.lines(value)
        taken_n = forecast.taken(lines)
        if isinstance(taken_n, Missing):
            return taken_n
        cost_m, excused_m = forecast.judged(lines, np.flatnonzero(taken_n), value)
        if not len(cost_m):
            return NO_LIMIT
        if limit is None:
            limit = Limit(None, int(np.partition(cost_m, len(cost_m) // 2)[len(cost_m) // 2]))
        lower = limit.lowered(cost_m, excused_m, ways)
        if lower is limit or lower is NO_LIMIT:
            return lower
        limit = lower


def _sums(values: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(values)])
