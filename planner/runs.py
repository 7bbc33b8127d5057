"""Sets of integers as runs: small where the integers are mostly consecutive."""

from __future__ import annotations

import bisect


class Runs:
    """A set of integers kept as sorted, disjoint runs [start, stop)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> int:
        """Add [start, stop); return how many of it were there before."""
        if start >= stop:
            return 0
        low = bisect.bisect_left(self._stops, start)
        high = bisect.bisect_right(self._starts, stop)
        before = sum(
            max(0, min(stop, old_stop) - max(start, old_start))
            for old_start, old_stop in zip(
                self._starts[low:high], self._stops[low:high], strict=True
            )
        )
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]
        return before

    def remove(self, start: int, stop: int) -> None:
        """Take [start, stop) out."""
        low = bisect.bisect_right(self._stops, start)
        high = bisect.bisect_left(self._starts, stop)
        if start >= stop or low >= high:
            return
        first, last = self._starts[low], self._stops[high - 1]
        parts = [part for part in ((first, start), (stop, last)) if part[0] < part[1]]
        self._starts[low:high] = [begin for begin, _ in parts]
        self._stops[low:high] = [end for _, end in parts]

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any of [start, stop) is in the set."""
        at = bisect.bisect_left(self._starts, stop) - 1
        return start < stop and at >= 0 and self._stops[at] > start

    def missing_below(self, end: int) -> list[int]:
        """Return the integers in [0, end) that are not in the set."""
        gaps: list[int] = []
        at = 0
        for start, stop in zip([*self._starts, end], [*self._stops, end], strict=True):
            gaps.extend(range(at, min(start, end)))
            at = max(at, stop)
        return gaps

    def covers(self, end: int) -> bool:
        """Whether all integers in [0, end) are in the set."""
        return end <= 0 or (0 in self and end <= self._stops[0])

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __contains__(self, value: int) -> bool:
        at = bisect.bisect_right(self._starts, value) - 1
        return at >= 0 and value < self._stops[at]
