"""How far a constructor has come in giving out, and what of it is held back; see `resharding`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megadask.scheduling.shelf import Slot


class Reach:
    """What the ranks of one constructor were given, as far as it can know.

    Parameters
    ----------
    ranks
        The ranks that it serves.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = frozenset(ranks)
        self._asked: dict[int, Slot] = {}  # the lowest slot that a rank asked for
        self._given: dict[int, int] = {}  # the first step of which a rank was given nothing
        self._older: frozenset[str] | None = None  # tokens that an earlier life may have served
        self._held: tuple[int, int | None] | None = None  # a hold's number and first step
        self._reported = 0

    def clear(self) -> None:
        """Begin anew, in another generation."""
        self._asked.clear()
        self._given.clear()

    def hear(self, rank: int, slot: Slot) -> None:
        """Note where a rank asks: its trainer has nothing from the lowest such slot on."""
        self._asked[rank] = min(slot, self._asked.get(rank, slot))

    def gave(self, rank: int, step: int) -> None:
        """Note that a rank was given something of the steps before ``step``."""
        self._given[rank] = max(step, self._given.get(rank, step))

    def hold(self, held: Sequence[int | None] | None, tokens: Mapping[int, str]) -> None:
        """Take the supervisor's word of a hold, and of whom the ranks belong to."""
        if self._older is None:
            self._older = frozenset(tokens.values())
        self._held = None
        if held is not None:
            number, step = held
            assert number is not None
            self._held = (number, step)

    def is_held(self, slot: Slot) -> bool:
        """Whether a slot is not to be given out now."""
        return self._held is not None and (self._held[1] is None or slot[0] >= self._held[1])

    def due(self, tokens: Mapping[int, str]) -> int | None:
        """Return the number of a hold that waits for this constructor's word, None for none.

        What an earlier life of it gave out, the trainers say by what they ask for; until all have
        asked that it may have served, there is nothing to say.
        """
        if self._held is None or self._held[1] is not None or self._held[0] == self._reported:
            return None
        older = self._older or frozenset()
        silent = {rank for rank, token in tokens.items() if token in older and rank in self._ranks}
        return self._held[0] if silent <= self._asked.keys() else None

    def report(self, number: int, marks: Iterable[Slot]) -> int:
        """Return the first step of which nothing was given out; marks: what was acknowledged."""
        self._reported = number
        begun = [step + (microbatch > 0) for step, microbatch in (*self._asked.values(), *marks)]
        return max([*self._given.values(), *begun])
