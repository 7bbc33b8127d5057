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


def is_slow_pace(pace_s: float, paces_s: Collection[float]) -> bool:
    """Whether records took far longer than they do; in seconds each, and what they took before.

    Nobody knows before there were some.
    """
    return bool(paces_s) and pace_s > FACTOR * sorted(paces_s)[-1 - len(paces_s) // 10]


class Usual:
    """What reads of one kind take."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=MOST)
        self._paces_s: deque[float] = deque(maxlen=MOST)  # by record

    def note(self, seconds: float, num_records: int = 0, *, is_short: bool = False) -> bool:
        """Take note of one that was answered, in seconds from when it was asked.

        A loader answers with what it has when its time is over: so one that is slow, not stuck,
        never makes anybody impatient. It shows by its pace.

        Parameters
        ----------
        num_records
            That were read; 0 where nobody says.
        is_short
            Whether these are fewer than were asked for, as time was over.

        Returns
        -------
        bool
            Whether it was short because its records took far longer than they do.
        """
        pace_s = seconds / max(1, num_records)
        is_slow = is_short and is_slow_pace(pace_s, self._paces_s)
        if num_records:
            self._paces_s.append(pace_s)
        if not is_short:
            self._seconds.append(seconds)
        return is_slow

    @property
    def patience_s(self) -> float:
        """How long the next one may take, in seconds."""
        return patience_s(self._seconds)
