"""Ranks that go back to a saved point do so together: who asked, for what, and who may go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from megadask.planner.errors import StateError
from megadask.scheduling.point import Point

#: Whether a rank stands at a point, so that it could go on from there as it is.
Stands = Callable[[int, Point], bool]


class Agreement:
    """What the ranks of one generation ask for.

    Parameters
    ----------
    name
        Of the pipeline, for errors.
    num_ranks
        Ranks that have to agree.
    """

    def __init__(self, name: str, num_ranks: int) -> None:
        self._name = name
        self._num_ranks = num_ranks
        self._asked: dict[int, Point] = {}
        self._num_asked: Counter[str] = Counter()  # by digest of the point
        self._waiting: dict[int, str] = {}  # those that can do nothing before they are answered
        self._num_waiting: Counter[str] = Counter()
        self._granted: set[int] = set()
        self._moved: set[int] = set()  # that stand at the beginning no more
        self._astray: set[int] = set()  # of those, that were not let go on
        self.num_refusals = 0
        self._refusal = ""

    def ask(self, rank: int, point: Point, stands: Stands, *, waits: bool) -> bool:
        """Note that a rank wants to go to a point; True when a new generation is to begin there.

        That is when all ranks have asked for the same point and some do not stand there. Raises
        StateError naming the ranks when some wait for unlike points. What a rank asks for without
        waiting for it may be the first of several loads, and contradicts nobody.
        """
        waits = waits or rank in self._waiting
        self._forget(rank)
        self._asked[rank] = point
        self._num_asked[point.digest] += 1
        if waits:
            self._waiting[rank] = point.digest
            self._num_waiting[point.digest] += 1
        if len(self._num_waiting) > 1:
            places: dict[str, list[int]] = {}
            for other, digest in sorted(self._waiting.items()):
                places.setdefault(digest, []).append(other)
            asked_at = [(ranks, self._asked[ranks[0]]) for ranks in places.values()]
            self._refusal = "; ".join(
                f"ranks {ranks}: step {at.step}, microbatch {at.microbatch}"
                for ranks, at in asked_at
            )
            self.num_refusals += 1
            for other in list(self._asked):
                self._forget(other)
            self.refuse()
        if self._num_asked[point.digest] < self._num_ranks:
            return False
        return not all(stands(other, point) for other in self._asked)

    def rest(self, rank: int) -> None:
        """Note that a rank no longer waits; what it asked for still counts for others."""
        digest = self._waiting.pop(rank, None)
        if digest is not None:
            self._num_waiting[digest] -= 1
            self._num_waiting += Counter()  # drops points that nobody waits for

    def grant(self, rank: int, point: Point, stands: Stands) -> bool:
        """Whether a rank that asked may go on: it and all others stand there, or did once.

        A rank that was let go on counts as long as its trainer lives: the others may come later.
        """
        granted = stands(rank, point) and not self._astray
        if granted:
            self._granted.add(rank)
        return granted

    def refuse(self) -> None:
        """Raise the error of the last refusal."""
        raise StateError(
            f"the ranks of {self._name} load states of different points",
            got=self._refusal,
            limit="the same step and microbatch on every rank",
            remedy="Load the state that all ranks saved at the same point of the loop.",
        )

    def moved(self, rank: int) -> None:
        """Note that a rank went on; what it asked for is done with."""
        self._forget(rank)
        self._moved.add(rank)
        if rank not in self._granted:
            self._astray.add(rank)

    def left(self, rank: int) -> None:
        """Note that the trainer of a rank is another one, or none."""
        self._forget(rank)
        self._granted.discard(rank)
        if rank in self._moved:
            self._astray.add(rank)

    def reset(self) -> None:
        """Begin anew, with a new generation."""
        for known in (self._asked, self._num_asked, self._waiting, self._num_waiting):
            known.clear()
        for ranks in (self._granted, self._moved, self._astray):
            ranks.clear()

    def _forget(self, rank: int) -> None:
        """Forget what a rank asked for."""
        self.rest(rank)
        point = self._asked.pop(rank, None)
        if point is not None:
            self._num_asked[point.digest] -= 1
