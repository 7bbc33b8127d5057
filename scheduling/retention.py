"""Which objects of the journal may go: what lies before the last two that are full and passed."""

from __future__ import annotations

from megadask.scheduling.journal import Place
from megadask.scheduling.marks import Watermark

#: So many full objects that every rank has passed are kept, and everything behind them.
NUM_KEPT = 2


class Retention:
    """Follows the full objects of a run, over its generations."""

    def __init__(self) -> None:
        self._open: list[tuple[Place, Watermark, bool]] = []
        self._passed: list[Place] = []

    def wrote(self, place: Place, mark: Watermark, *, begins: bool) -> None:
        """Note a full object that stands before ``mark``; begins: whether it opens a generation.

        What an earlier generation had that was not passed is void.
        """
        if begins:
            self._open.clear()
        self._open.append((place, mark, begins))

    def acknowledged(self, low: Watermark) -> None:
        """Note what every rank of the generation has acknowledged.

        The beginning of a generation is passed once something behind it was: everybody stands there
        at first, also those who soon go back further.
        """
        still = []
        for place, mark, begins in self._open:
            if low > mark or (low == mark and not begins):
                self._passed.append(place)
            else:
                still.append((place, mark, begins))
        self._open = still
        del self._passed[:-NUM_KEPT]

    @property
    def floor(self) -> Place | None:
        """The place before which nothing is needed any more; None when all is."""
        return self._passed[0] if len(self._passed) == NUM_KEPT else None
