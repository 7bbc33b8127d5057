"""Which source the next sample comes from: exact shares without noise.

Axes: S sources. All arithmetic is on integers, so that every platform draws alike.
"""

from __future__ import annotations

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


def pick(
    deficit_S: NDArray[np.int64],
    share_S: NDArray[np.int64],
    size_S: NDArray[np.int64] | None,
) -> int:
    """Return the source to draw from next, by the earliest deadline among those that are due.

    A source is due when it has received no more than its share so far; its deadline is the moment
    at which its next sample, taken any later, would leave it a whole sample behind. This keeps
    every source within one sample of its share at any time: by samples it is the rule of Tijdeman
    ("The chairman assignment problem", 1980), by size the one of Bennett and Zhang ("WF2Q:
    worst-case fair weighted fair queueing", 1996), which stays within the largest sample.

    Parameters
    ----------
    deficit_S
        (S,) int64, units of size x TOTAL_SHARE: share so far less what was received; sums to 0.
    share_S
        (S,) int64 shares as `settle` returns them, zero where a source is not to be drawn.
    size_S
        (S,) int64 size of each source's next sample, or None to count samples.

    Returns
    -------
    int
        Index of the source, or -1 when no source has a share.
    """
    active = np.flatnonzero(share_S > 0)
    if len(active) < 2:
        return int(active[0]) if len(active) else -1
    share, deficit = share_S[active], deficit_S[active]
    if size_S is None:
        slack = TOTAL_SHARE // (2 * len(active) - 2)
        due = deficit + share >= slack
        deadline = (TOTAL_SHARE - slack - deficit - share) // share
    else:
        due = deficit >= 0
        deadline = (TOTAL_SHARE * size_S[active] - deficit) // share
    return int(active[due][np.argmin(deadline[due])])


def charge(
    deficit_S: NDArray[np.int64], share_S: NDArray[np.int64], source: int, size: int
) -> NDArray[np.int64]:
    """Return the deficits after ``source`` received a sample of ``size``."""
    deficit_S = deficit_S + share_S * size
    deficit_S[source] -= TOTAL_SHARE * size
    return deficit_S
