"""Which source the next sample comes from: exact shares without noise.

Axes: S sources. All arithmetic is on integers, so that every platform draws alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from megadask.planner.weights import quantise

#: Shares of the sources that can be drawn from sum to this.
TOTAL_SHARE = 2**32


def settle(
    deficit_S: NDArray[np.int64], share_S: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return deficits and shares over the sources that take part from now on.

    To be called whenever the sources that can be drawn from change. Shares sum to TOTAL_SHARE
    again, so that a deficit keeps its unit; deficits sum to 0: the others share, by weight, what a
    source that drops out was owed or had too much.

    Parameters
    ----------
    deficit_S
        (S,) int64, units of size x TOTAL_SHARE; not modified.
    share_S
        (S,) int64 >= 0, zero where a source takes no part; not modified.
    """
    if not share_S.any():
        return np.zeros_like(deficit_S), share_S
    share_S = quantise(share_S.tolist())
    deficit_S = np.where(share_S > 0, deficit_S, 0)
    excess = int(deficit_S.sum())
    if excess:
        deficit_S -= [share * excess // TOTAL_SHARE for share in share_S.tolist()]
        deficit_S[share_S.argmax()] -= deficit_S.sum()  # what rounding left
    return deficit_S, share_S


class Turns:
    """Sources take turns by the earliest deadline among those that are due.

    A source is due when it has received no more than its share so far; its deadline is the moment
    at which its next sample, taken any later, would leave it a whole sample behind. This keeps
    every source within one sample of its share at any time: by samples it is the rule of Tijdeman
    ("The chairman assignment problem", 1980), by size the one of Bennett and Zhang ("WF2Q:
    worst-case fair weighted fair queueing", 1996), which stays within the largest sample.

    Time is what all sources have received together. The moments at which a source becomes due and
    overdue change only when it receives something: so two heaps give each turn in O(log S).

    Parameters
    ----------
    deficit_S
        (S,) int64, units of size x TOTAL_SHARE: share so far less what was received; sums to 0.
    share_S
        (S,) int64 shares as `settle` returns them, zero where a source is not to be drawn.
    size_S
        (S,) size of each source's next sample, or None to count samples.
    """

    def __init__(
        self,
        deficit_S: NDArray[np.int64],
        share_S: NDArray[np.int64],
        size_S: Sequence[int] | None = None,
    ) -> None:
        self._deficit_S: list[int] = deficit_S.tolist()
        self._share_S: list[int] = share_S.tolist()
        self._received_S = [0] * len(share_S)
        self._now = 0
        live = np.flatnonzero(share_S > 0).tolist()
        # By samples, time is looked at one ahead, and less half a sample shared by the others.
        self._ahead = 1 if size_S is None else 0
        self._slack = TOTAL_SHARE // max(1, 2 * len(live) - 2) if size_S is None else 0
        self._due: list[tuple[int, int]] = []  # (deadline, source)
        self._later: list[tuple[int, int, int]] = []  # (time from which it is due, ...)
        for source in live:
            self._later.append(self._entry(source, 1 if size_S is None else size_S[source]))
        self._later.sort()

    def first(self) -> int:
        """Return the source whose turn it is, or -1 when no source has a share."""
        later, due = self._later, self._due
        while later and later[0][0] <= self._now:
            heappush(due, heappop(later)[1:])
        return due[0][1] if due else -1

    def give(self, size: int, next_size: int) -> int:
        """Enter that the source whose turn it is received ``size``, and what its next one is.

        Returns the source whose turn it is then.
        """
        source = heappop(self._due)[1]
        self._received_S[source] += size
        self._now += size
        heappush(self._later, self._entry(source, next_size))
        return self.first()

    def deficits(self) -> NDArray[np.int64]:
        """Return (S,) the deficits now."""
        columns = zip(self._deficit_S, self._share_S, self._received_S, strict=True)
        now = self._now
        return np.array([d + now * s - got * TOTAL_SHARE for d, s, got in columns], np.int64)

    def _entry(self, source: int, size: int) -> tuple[int, int, int]:
        """Return from when on a source is due for its next sample, the deadline, and the source."""
        share = self._share_S[source]
        owed = self._deficit_S[source] - self._received_S[source] * TOTAL_SHARE - self._slack
        deadline = (TOTAL_SHARE * size - owed - 2 * self._slack) // share
        return -(owed // share) - self._ahead, deadline, source
