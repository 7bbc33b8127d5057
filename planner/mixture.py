"""Which source the next sample comes from: exact shares without noise.

Axes: S sources. All arithmetic is on integers, so that every platform draws alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Shares of one step sum to this.
TOTAL_SHARE = 2**32


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
        (S,) int64, units of size x TOTAL_SHARE: share so far less what was received; not modified.
    share_S
        (S,) int64 shares, zero where a source is not to be drawn (no weight, or ended).
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
    total = int(share.sum())
    if size_S is None:
        slack = total // (2 * len(active) - 2)
        due = deficit + share >= slack
        deadline = (total - slack - deficit - share) // share
    else:
        due = deficit >= 0
        deadline = (total * size_S[active] - deficit) // share
    if not due.any():  # only after a change of weights, which leaves deficits that do not add up
        due = deficit >= deficit.max()
    return int(active[due][np.argmin(deadline[due])])


def charge(
    deficit_S: NDArray[np.int64], share_S: NDArray[np.int64], source: int, size: int
) -> NDArray[np.int64]:
    """Return the deficits after ``source`` received a sample of ``size``.

    Sources without a share (no weight, or ended) are owed nothing.
    """
    deficit_S = np.where(share_S > 0, deficit_S + share_S * size, 0)
    deficit_S[source] -= int(share_S.sum()) * size
    return deficit_S
