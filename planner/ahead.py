"""The spans of one source that were fetched ahead of the draw, in canonical order."""

from __future__ import annotations

import numpy as np

from megadask.planner.behind import is_before
from megadask.planner.lines import Rows
from megadask.planner.metadata import Metadata, concat
from megadask.planner.state import NEVER, SourceState, with_waits


class Ahead:
    """A buffer that fetching fills and draws empty.

    Parameters
    ----------
    state
        Where the source stands.
    """

    def __init__(self, state: SourceState) -> None:
        self._state = state
        self._fetched: list[Metadata] = []

    @property
    def num_spans(self) -> int:
        """Spans that were fetched and lie behind the state's cursor, of all verdicts."""
        return sum(part.num_rows for part in self._fetched)

    def add(self, spans: Metadata) -> None:
        """Put what was fetched behind the rest."""
        self._fetched.append(spans)

    def rows(self, complete_epochs: int) -> Rows:
        """Return what is known of the source, from its state on, for the draw."""
        if len(self._fetched) > 1:
            self._fetched = [concat(self._fetched)]
        fetched = self._fetched[0] if self._fetched else self._state.outstanding.take(np.zeros(0))
        return rows_after(self._state, fetched, complete_epochs)

    def trim(self, state: SourceState) -> None:
        """Forget what a draw took or passed over, which left the source in this state."""
        self._state = state
        self._fetched = [part.take(~is_before(part, state.cursor)) for part in self._fetched]
        self._fetched = [part for part in self._fetched if part.num_rows]


def rows_after(state: SourceState, fetched: Metadata, complete_epochs: int) -> Rows:
    """Return what a draw from ``state`` looks at, from spans fetched in canonical order."""
    before_N = is_before(fetched, state.cursor)
    fresh = with_waits(fetched.take(~before_N) if before_N.any() else fetched, NEVER)
    if not state.outstanding.num_rows:
        return Rows(fresh, complete_epochs)
    return Rows(concat([state.outstanding, fresh]), complete_epochs)
