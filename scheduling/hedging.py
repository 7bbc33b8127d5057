"""When a read takes so much longer than usual that a shadow is asked for the same.

Pure: `owners` measures, and asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

#: Nothing is slow that takes less.
LEAST_S = 1.0
#: So many times what nine of ten reads take is slow.
FACTOR = 5.0
#: Reads that are known before anything else is called slow than what takes very long.
FEW = 8
#: What is slow as long as few are known: files are opened, caches are cold.
FIRST_S = 10.0
#: For so long after a loader was slow its shadow is asked first.
SLOW_S = 30.0
#: So many reads are remembered.
MOST = 64


def patience_s(seconds: Collection[float]) -> float:
    """Return how long a read may take, in seconds; seconds: what the last ones took."""
    if len(seconds) < FEW:
        return max(FIRST_S, FACTOR * max(seconds, default=0.0))
    return max(LEAST_S, FACTOR * sorted(seconds)[-1 - len(seconds) // 10])


class Usual:
    """What reads of one kind take."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MOST)

    def note(self, seconds: float) -> None:
        """Take note of one that was answered, in seconds from when it was asked."""
        self._seconds.append(seconds)

    @property
    def patience_s(self) -> float:
        """How long the next one may take, in seconds."""
        return patience_s(self._seconds)
