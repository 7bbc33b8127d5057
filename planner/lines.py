"""What every source has to give: the readable spans of all sources, and in which order they go.

Axes: S sources, N rows of the joint table, n readable ones among them, g their (source, epoch)
groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megadask.planner.batching import Batching
from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata, concat
from megadask.planner.state import PlannerState, SourceState

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Rows:
    """What is known of a source from its state on.

    table
        Spans in canonical order, those outstanding first; verdicts of all kinds.
    complete_epochs
        Every record of the epochs below this one is in the table or lies before it.
    """

    table: Metadata
    complete_epochs: int


@dataclass(frozen=True, eq=False)
class Known:
    """All that is known of all sources, one below the other.

    states
        Of the sources.
    table
        (N rows) the sources' tables in order of the sources.
    first_S1
        (S + 1,) where the rows of each source begin, and where the last ones end.
    complete_S
        (S,) `Rows.complete_epochs`.
    active_S
        (S,) whether the source has a weight. Of one without, only what is outstanding is known.
    """

    states: Sequence[SourceState]
    table: Metadata
    first_S1: Ints
    complete_S: Ints
    active_S: Bools

    @classmethod
    def of(cls, state: PlannerState, rows: Mapping[str, Rows], share_S: Ints) -> Known:
        """Put together what is known of the sources with a share, and what others owe."""
        states = list(state.sources.values())
        active_S = share_S > 0
        parts = [
            rows[name] if active else Rows(own.outstanding, own.cursor[0])
            for (name, own), active in zip(state.sources.items(), active_S.tolist(), strict=True)
        ]
        counts = [part.table.num_rows for part in parts]
        return cls(
            states=states,
            table=concat([part.table for part in parts]),
            first_S1=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            complete_S=np.array([part.complete_epochs for part in parts], np.int64),
            active_S=active_S,
        )

    @cached_property
    def source_N(self) -> Ints:
        """(N,) source of each row, as an index into the states."""
        return np.repeat(np.arange(len(self.states)), np.diff(self.first_S1))

    @cached_property
    def outstanding_N(self) -> Bools:
        """(N,) whether a row was passed over before."""
        count_S = np.array([own.outstanding.num_rows for own in self.states], np.int64)
        within_N = np.arange(self.table.num_rows) - self.first_S1[self.source_N]
        return within_N < count_S[self.source_N]

    @cached_property
    def ok_N(self) -> Bools:
        """(N,) whether a row is readable."""
        return np.asarray(self.table["verdict"] == Verdict.OK)

    def readable(self, batching: Batching, due_N: Bools) -> Readable:
        """Return the readable spans, of which those in ``due_N`` (N,) can wait no longer."""
        row_n = np.flatnonzero(self.ok_N)
        source_n, epoch_n = self.source_N[row_n], self.table["epoch"][row_n]
        tokens_n = self.table["tokens"][row_n]
        starts = np.ones(len(row_n), bool)
        starts[1:] = (np.diff(source_n) != 0) | (np.diff(epoch_n) != 0)
        group_n = np.cumsum(starts) - 1
        complete_n = (epoch_n < self.complete_S[source_n]) | ~self.active_S[source_n]
        return Readable(
            row_n=row_n,
            source_n=source_n,
            group_n=group_n,
            size_n=batching.padded(tokens_n),
            tokens_n=tokens_n,
            due_n=due_N[row_n],
            fresh_n=~self.outstanding_N[row_n],
            first_S1=np.searchsorted(source_n, np.arange(len(self.states) + 1)),
            epoch_g=epoch_n[starts],
            complete_g=complete_n[starts],
        )


@dataclass(frozen=True, eq=False)
class Readable:
    """The readable spans of all sources in canonical order, source after source.

    row_n
        (n,) row in `Known.table`.
    source_n, group_n
        (n,) source; and number of the (source, epoch).
    size_n, tokens_n
        (n,) padded tokens, and tokens.
    due_n, fresh_n
        (n,) whether the span can wait no longer; whether it was never passed over.
    first_S1
        (S + 1,) where the spans of each source begin.
    epoch_g, complete_g
        (g,) epoch of each group, and whether all of its spans are here.
    """

    row_n: Ints
    source_n: Ints
    group_n: Ints
    size_n: Ints
    tokens_n: Ints
    due_n: Bools
    fresh_n: Bools
    first_S1: Ints
    epoch_g: Ints
    complete_g: Bools

    def lines(self) -> Lines:
        """Return the order in which spans go where none is held back: the canonical one."""
        return self._lines(np.arange(len(self.row_n)), np.zeros(len(self.row_n), bool))

    def lines_without(self, costly_n: Bools, window: int) -> Lines:
        """Return the order in which spans go where the costly ones wait.

        They go behind the others of their epoch. In one step a source lets at most ``window`` more
        spans wait than it gives; so what has to be known of it stays bounded.
        """
        # Of each source, how many more it has let wait than given, up to each span.
        score_n = np.cumsum(np.where(costly_n, self.fresh_n.astype(np.int64), -1))
        before_S = np.concatenate([[0], score_n])[self.first_S1[:-1]]
        lead_n = score_n - before_S[self.source_n]
        # A running maximum that starts anew with every source.
        floor_n = self.source_n * (2 * len(lead_n) + 2)
        highest_n = np.maximum.accumulate(lead_n + floor_n) - floor_n
        previous_n = np.where(
            np.diff(self.source_n, prepend=-1) != 0, 0, np.concatenate([[0], highest_n[:-1]])
        )
        too_many_n = (lead_n > window) & (lead_n > previous_n)
        waits_n = costly_n & ~(self.fresh_n & too_many_n)
        return self._lines(np.argsort(2 * self.group_n + waits_n, kind="stable"), waits_n)

    def _lines(self, order_n: Ints, waits_n: Bools) -> Lines:
        num_groups = len(self.epoch_g)
        stop_g = np.searchsorted(self.group_n, np.arange(num_groups), side="right")
        waiting_g = np.bincount(self.group_n, waits_n, minlength=num_groups).astype(np.int64)
        return Lines(
            readable=self,
            order_n=order_n,
            waits_n=waits_n[order_n],
            # While more of an epoch may come, what waits does not go.
            stop_g=stop_g - np.where(self.complete_g, 0, waiting_g),
            first_group_S1=np.searchsorted(
                self.source_n[stop_g - 1], np.arange(len(self.first_S1))
            ),
        )


@dataclass(frozen=True, eq=False)
class Lines:
    """The order in which every source gives its spans.

    readable
        The spans.
    order_n
        (n,) index into them, source after source, epoch after epoch.
    waits_n
        (n,) in that order, whether the span is held back.
    stop_g
        (g,) where, in that order, the spans of each group end that may go now.
    first_group_S1
        (S + 1,) where the groups of each source begin.
    """

    readable: Readable
    order_n: Ints
    waits_n: Bools
    stop_g: Ints
    first_group_S1: Ints

    @cached_property
    def first_S(self) -> Ints:
        """(S,) where the spans of each source begin."""
        return self.readable.first_S1[:-1]

    @cached_property
    def stop_S(self) -> Ints:
        """(S,) where the spans of each source end that may go now."""
        has_S = np.diff(self.first_group_S1) > 0
        last_S = np.maximum(self.first_group_S1[1:] - 1, 0)
        return np.where(has_S, self.stop_g[last_S] if len(self.stop_g) else 0, self.first_S)

    def epochs_of(self, source: int) -> list[tuple[int, int, bool]]:
        """Return (epoch, stop, whether it is complete) of the groups of a source."""
        own = slice(*self.first_group_S1[source : source + 2])
        columns = (self.readable.epoch_g[own], self.stop_g[own], self.readable.complete_g[own])
        return list(zip(*(column.tolist() for column in columns), strict=True))
