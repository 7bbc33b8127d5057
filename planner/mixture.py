"""Which source the next sample comes from: exact shares without noise.

Axes: S sources. All arithmetic is on integers, so that every platform draws alike.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from megadask.planner.weights import TOTAL_SHARE, quantise


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
        self._size_S = size_S

    def run(self) -> Generator[int, tuple[int, int], None]:
        """Yield the source whose turn it is; nothing where no source has a share.

        Wants to be sent what the source received: (size, size of its next sample). A turn that is
        not answered so does not count.
        """
        deficit_S, share_S, received_S = self._deficit_S, self._share_S, self._received_S
        live = [source for source, share in enumerate(share_S) if share]
        if not live:
            return
        sizes = self._size_S
        # By samples, time is looked at one ahead, and less half a sample shared by the others.
        ahead = 1 if sizes is None else 0
        slack = TOTAL_SHARE // max(1, 2 * len(live) - 2) if sizes is None else 0
        now = 0
        due: list[tuple[int, int]] = []  # (deadline, source)
        later: list[tuple[int, int, int]] = []  # (time from which it is due, deadline, source)
        for source in live:
            share, owed = share_S[source], deficit_S[source] - slack
            next_size = 1 if sizes is None else sizes[source]
            deadline = (TOTAL_SHARE * next_size - owed - 2 * slack) // share
            later.append((-(owed // share) - ahead, deadline, source))
        later.sort()
        while True:
            while later and later[0][0] <= now:
                _, deadline, source = heappop(later)
                heappush(due, (deadline, source))
            source = due[0][1]
            size, next_size = yield source
            heappop(due)
            received_S[source] += size
            now += size
            share, owed = (
                share_S[source],
                deficit_S[source] - received_S[source] * TOTAL_SHARE - slack,
            )
            deadline = (TOTAL_SHARE * next_size - owed - 2 * slack) // share
            heappush(later, (-(owed // share) - ahead, deadline, source))

    def deficits(self) -> NDArray[np.int64]:
        """Return (S,) the deficits now."""
        columns = zip(self._deficit_S, self._share_S, self._received_S, strict=True)
        now = sum(self._received_S)
        return np.array([d + now * s - got * TOTAL_SHARE for d, s, got in columns], np.int64)
