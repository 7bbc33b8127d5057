"""Passes over a pipeline that restarts: pass n of one rank meets pass n of the others.

Every rank goes through passes 0, 1, 2, ..., and each is open to all ranks at once: it begins when
the last rank is done with the one before, however far each of them came. So a rank may break off,
or pass over a pass that others read to the end, and is in step again with the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet


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
        self._counts = Counter({0: num_ranks})  # ranks by pass; asked for more often than it moves
        self._finished: set[int] = set()
        self.current = 0  #: The pass that some rank is not done with.

    @property
    def finished(self) -> AbstractSet[int]:
        """Ranks that are done with the current pass; changes with it."""
        return self._finished

    def next_of(self, rank: int) -> int:
        """Return the pass that a rank is in, or begins next."""
        return self._next[rank]

    def begin(self, rank: int, number: int) -> None:
        """Note that a rank reads a pass, which must be open."""
        if self._next[rank] == number == self.current:
            self._inside.add(rank)

    def end(self, rank: int, number: int) -> None:
        """Note that a rank is done with a pass; telling so again changes nothing."""
        self._inside.discard(rank)
        if number >= self._next[rank]:
            self._move(rank, number + 1)

    def left(self, rank: int) -> None:
        """Note that a rank's trainer is gone, or another one: it has broken off its pass."""
        if rank in self._inside:
            self.end(rank, self._next[rank])

    def level(self, ranks: Iterable[int]) -> None:
        """Let ranks whose trainers were all lost at once take up one pass, the latest."""
        latest = max(self._counts)
        for rank in ranks:
            self._inside.discard(rank)
            self._move(rank, latest)

    def _move(self, rank: int, number: int) -> None:
        """Let a rank be in a pass, or begin it next."""
        self._counts[self._next[rank]] -= 1
        self._counts[number] += 1
        self._next[rank] = number
        self._counts += Counter()  # drops passes that no rank is in
        if number > self.current:
            self._finished.add(rank)
        if self.current not in self._counts:
            self.current = min(self._counts)
            self._finished = {one for one, its in enumerate(self._next) if its > self.current}
