"""The moving window over the spans of one source during one draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Columns:
    """Of all spans in the order of their `Lines`, as lists: single reads of arrays are slow.

    size, tokens
        Padded tokens, and tokens.
    due
        Whether the span can be passed over no longer.
    """

    size: Sequence[int]
    tokens: Sequence[int]
    due: Sequence[bool]


class Window:
    """The next K spans of one epoch of a source that were not drawn.

    Parameters
    ----------
    columns
        What is known of the spans.
    start
        Place of the source's first span in them.
    epochs
        Epoch, place behind its last span, and whether it is complete; one after the other.
    complete_epochs
        As `Rows` has it.
    final
        Whether nothing can follow what is known.
    width
        K.
    """

    def __init__(
        self,
        columns: Columns,
        start: int,
        epochs: Sequence[tuple[int, int, bool]],
        complete_epochs: int,
        final: bool,
        width: int,
    ) -> None:
        self._columns = columns
        self._width = width
        self._final = final
        self._complete_epochs = complete_epochs
        # Places of spans that were passed over in this draw; all others from `_next` on are left.
        self._holes: list[int] = []
        self._next = self._stop = start
        self._epochs = iter(epochs)
        self._complete = True
        self.epoch = complete_epochs
        self.num_taken = 0
        self.starved = False
        self._refill()

    @property
    def num_left(self) -> int:
        """Spans of the epoch that are known and not drawn."""
        return len(self._holes) + self._stop - self._next

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return self._next == self._stop and not self._holes

    @property
    def head_tokens(self) -> int:
        """Tokens of the first span, 0 if there is none."""
        if self.is_empty:
            return 0
        return self._columns.tokens[self._holes[0] if self._holes else self._next]

    def would_starve(self) -> bool:
        """Whether there would not be enough rows to draw as much again."""
        return not self._final and self.num_left < self._width + max(1, self.num_taken)

    def draw_fitting(self, room: int) -> int:
        """Draw the first span that fits; return its place, or -1.

        There is none either where a span does not fit that can be passed over no longer.
        """
        size, due = self._columns.size, self._columns.due
        for index, place in enumerate(self._holes):
            if size[place] <= room:
                return self._draw_hole(index)
            if due[place]:
                return -1
        first = self._next
        for place in range(first, min(self._stop, first + self._width - len(self._holes))):
            if size[place] <= room:
                self._draw_fresh(place)
                return place
            if due[place]:
                return -1
        return -1

    def draw_due(self, room: int) -> int:
        """Draw the first span that can be passed over no longer, if it fits; else return -1."""
        size, due = self._columns.size, self._columns.due
        for index, place in enumerate(self._holes):
            if due[place]:
                return self._draw_hole(index) if size[place] <= room else -1
        first = self._next
        for place in range(first, min(self._stop, first + self._width - len(self._holes))):
            if due[place]:
                if size[place] > room:
                    return -1
                self._draw_fresh(place)
                return place
        return -1

    def _draw_hole(self, index: int) -> int:
        place = self._holes.pop(index)
        self.num_taken += 1
        self._refill()
        return place

    def _draw_fresh(self, place: int) -> None:
        if place > self._next:
            self._holes.extend(range(self._next, place))
        self._next = place + 1
        self.num_taken += 1
        if not self._complete or self._next == self._stop:
            self._refill()

    def _refill(self) -> None:
        """Go on to the next epoch behind the last span of this one; note where rows run out."""
        while self.is_empty:
            following = next(self._epochs, None)
            if following is None:
                self.epoch = self._complete_epochs
                self.starved = not self._final
                return
            self.epoch, self._stop, self._complete = following
        if not self._complete and self.num_left < self._width:
            self.starved = True
