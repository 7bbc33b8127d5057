"""Ranks that go back to a saved point do so together: who asked, for what, and who may go on."""

from __future__ import annotations

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
        self._waiting: set[int] = set()  # those that can do nothing before they are answered
        self._granted: set[int] = set()
        self.num_refusals = 0
        self._refusal = ""

    def ask(self, rank: int, point: Point, stands: Stands, *, waits: bool) -> bool:
        """Note that a rank wants to go to a point; True when a new generation is to begin there.

        That is when all ranks have asked for the same point and some do not stand there. Raises
        StateError naming the ranks when some wait for unlike points. What a rank asks for without
        waiting for it may be the first of several loads, and contradicts nobody.
        """
        self._asked[rank] = point
        if waits:
            self._waiting.add(rank)
        places: dict[str, list[int]] = {}
        for other in sorted(self._waiting):
            places.setdefault(self._asked[other].digest, []).append(other)
        if len(places) > 1:
            asked_at = [(ranks, self._asked[ranks[0]]) for ranks in places.values()]
            self._refusal = "; ".join(
                f"ranks {ranks}: step {at.step}, microbatch {at.microbatch}"
                for ranks, at in asked_at
            )
            self.num_refusals += 1
            self._asked.clear()
            self._waiting.clear()
            self.refuse()
        agreed = sum(asked == point for asked in self._asked.values())
        stand = all(stands(other, asked) for other, asked in self._asked.items())
        return not stand and agreed == self._num_ranks

    def rest(self, rank: int) -> None:
        """Note that a rank no longer waits; what it asked for still counts for others."""
        self._waiting.discard(rank)

    def grant(self, rank: int, point: Point, stands: Stands) -> bool:
        """Whether a rank that asked may go on: it and all others stand there, or did once.

        A rank that was let go on counts as long as its trainer lives: the others may come later.
        """
        others = (other for other in range(self._num_ranks) if other != rank)
        granted = stands(rank, point) and all(
            stands(other, point) or other in self._granted for other in others
        )
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
        self._asked.pop(rank, None)
        self._waiting.discard(rank)

    def left(self, rank: int) -> None:
        """Note that the trainer of a rank is another one, or none."""
        self.moved(rank)
        self._granted.discard(rank)

    def reset(self) -> None:
        """Begin anew, with a new generation."""
        self._asked.clear()
        self._waiting.clear()
        self._granted.clear()
