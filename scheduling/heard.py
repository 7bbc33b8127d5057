"""What the ranks of a constructor have acknowledged, and when the supervisor is to know of it."""

from __future__ import annotations

from collections.abc import Mapping

from megadask.scheduling.marks import Watermark


class Heard:
    """Watermarks of some ranks, and what the supervisor knows of them.

    It needs to know at once when all ranks are done with a step, for the planner may go on then;
    when a rank leaves the place where it began, for others may ask to begin there anew; or where
    somebody waits for it to know. The rest may wait, and is told together.

    Attributes
    ----------
    marks
        Rank to watermark.
    finished
        Ranks that are done with their pass.
    """

    def __init__(self) -> None:
        self.marks: dict[int, Watermark] = {}
        self.finished: set[int] = set()
        self._reported: dict[int, Watermark] = {}
        self._begun: dict[int, Watermark] = {}
        self._is_pressed = False

    def restart(self, marks: Mapping[int, Watermark]) -> None:
        """Begin anew with what the supervisor says."""
        self.marks, self._reported, self._begun = dict(marks), dict(marks), dict(marks)

    def hear(self, rank: int, mark: Watermark) -> bool:
        """Take a rank's word; return whether it is news."""
        is_news = mark > self.marks.get(rank, (-1, 0))
        if is_news:
            self.marks[rank] = mark
        return is_news

    def low(self) -> Watermark | None:
        """Return what all ranks have acknowledged but those that are done with their pass."""
        return self._low(self.marks)

    def news(self) -> dict[int, Watermark]:
        """Return what the supervisor does not know."""
        return {rank: mark for rank, mark in self.marks.items() if self._reported.get(rank) != mark}

    def press(self) -> None:
        """Note that somebody waits for the supervisor to know of all there is."""
        self._is_pressed = True

    def is_due(self) -> bool:
        """Whether the supervisor is to know at once."""
        low, told = self._low(self.marks), self._low(self._reported)
        is_over = low is not None and told is not None and low[0] > told[0]
        return self._is_pressed or is_over or any(map(self._leaves, self.marks))

    def _leaves(self, rank: int) -> bool:
        """Whether a rank has left its beginning, and the supervisor does not know."""
        begun = self._begun.get(rank)
        return self.marks[rank] != begun and self._reported.get(rank) == begun

    def report(self) -> dict[int, Watermark]:
        """Return the news, which the supervisor is told now."""
        self._is_pressed = False
        return self.news()

    def told(self, news: Mapping[int, Watermark]) -> None:
        """Note that the supervisor knows."""
        self._reported.update(news)

    def _low(self, marks: Mapping[int, Watermark]) -> Watermark | None:
        return min(
            (mark for rank, mark in marks.items() if rank not in self.finished), default=None
        )
