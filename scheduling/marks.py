"""What every rank has acknowledged, and the lowest of it without a look at all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

#: The next microbatch that a rank has not acknowledged: (step, microbatch).
Watermark = tuple[int, int]


class Marks(Mapping[int, Watermark]):
    """Rank to watermark; they only rise.

    Parameters
    ----------
    world_size
        Number of ranks.
    begin
        Where all of them stand at first.
    """

    def __init__(self, world_size: int, begin: Watermark) -> None:
        self._marks = dict.fromkeys(range(world_size), begin)
        self._counts = Counter({begin: world_size})  # few: ranks are not far apart
        self._slowest: int | None = None  # as long as it is known

    def __getitem__(self, rank: int) -> Watermark:
        return self._marks[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._marks)

    def __len__(self) -> int:
        return len(self._marks)

    def raise_to(self, rank: int, mark: Watermark) -> None:
        """Note that a rank has come to ``mark``, which lies beyond where it was."""
        before = self._marks[rank]
        assert before < mark
        self._marks[rank] = mark
        if rank == self._slowest:
            self._slowest = None
        self._counts[mark] += 1
        self._counts[before] -= 1
        if not self._counts[before]:
            del self._counts[before]

    @property
    def slowest(self) -> int:
        """A rank that no other one is behind, the same one until it moves."""
        if self._slowest is None:
            low = min(self._counts)
            self._slowest = next(rank for rank, mark in self._marks.items() if mark == low)
        return self._slowest

    def low(self, without: Collection[int]) -> Watermark | None:
        """Return the lowest mark of all ranks but some; None where there are no others."""
        if not without:
            return min(self._counts)
        return min((m for rank, m in self._marks.items() if rank not in without), default=None)

    @property
    def steps(self) -> set[int]:
        """The steps that ranks stand in."""
        return {step for step, _ in self._counts}
