"""Passes over a pipeline that restarts: pass n of one rank meets pass n of the others.

Every rank goes through passes 0, 1, 2, ..., and each is open to all ranks at once: it begins when
the last rank is done with the one before, however far each of them came. So a rank may break off,
or pass over a pass that others read to the end, and is in step again with the next one.
"""

from __future__ import annotations

from collections.abc import Iterable


class Passes:
    """How far the ranks of one pipeline are, in passes.

    Parameters
    ----------
    num_ranks
        Ranks that meet.
    """

    def __init__(self, num_ranks: int) -> None:
        self._next = [0] * num_ranks  # the pass that each rank is in, or begins next
        self._inside: set[int] = set()  # ranks that are in it

    @property
    def current(self) -> int:
        """The pass that some rank is not done with."""
        return min(self._next)

    @property
    def finished(self) -> list[int]:
        """Ranks that are done with the current pass."""
        return [rank for rank, number in enumerate(self._next) if number > self.current]

    def next_of(self, rank: int) -> int:
        """Return the pass that a rank is in, or begins next."""
        return self._next[rank]

    def begin(self, rank: int, number: int) -> None:
        """Note that a rank reads a pass, which must be open."""
        if self._next[rank] == number == self.current:
            self._inside.add(rank)

    def end(self, rank: int, number: int) -> None:
        """Note that a rank is done with a pass; telling so again changes nothing."""
        self._next[rank] = max(self._next[rank], number + 1)
        self._inside.discard(rank)

    def left(self, rank: int) -> None:
        """Note that a rank's trainer is gone, or another one: it has broken off its pass."""
        if rank in self._inside:
            self.end(rank, self._next[rank])

    def level(self, ranks: Iterable[int]) -> None:
        """Let ranks whose trainers were all lost at once take up one pass, the latest."""
        latest = max(self._next)
        for rank in ranks:
            self._next[rank] = latest
            self._inside.discard(rank)
