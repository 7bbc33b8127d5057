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
        self._size, self._tokens, self._due = columns.size, columns.tokens, columns.due
        self._width = width
        self._final = final
        self._complete_epochs = complete_epochs
        self._epochs = iter(epochs)
        # Places of spans that were passed over in this draw; all others from `_next` on are left.
        self._holes: list[int] = []
        self._start = self._next = self._stop = start
        self._complete = True
        self._watch = start  # from this place on, rows or the epoch may run out
        self.epoch = complete_epochs
        self.starved = False
        self._refill()

    @property
    def num_taken(self) -> int:
        """Spans drawn."""
        return self._next - self._start - len(self._holes)

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
        if self._holes:
            return self._tokens[self._holes[0]]
        return self._tokens[self._next] if self._next < self._stop else 0

    def would_starve(self) -> bool:
        """Whether there would not be enough rows to draw as much again."""
        return not self._final and self.num_left < self._width + max(1, self.num_taken)

    def draw_fitting(self, room: int) -> int:
        """Draw the first span that fits; return its place, or -1.

        There is none either where a span does not fit that can be passed over no longer.
        """
        size, due, first = self._size, self._due, self._next
        if not self._holes and first < self._stop and size[first] <= room:
            self._next = first + 1
            if first + 1 >= self._watch:
                self._refill()
            return first
        for index, place in enumerate(self._holes):
            if size[place] <= room:
                return self._draw_hole(index)
            if due[place]:
                return -1
        for place in range(first, min(self._stop, first + self._width - len(self._holes))):
            if size[place] <= room:
                return self._draw_fresh(place)
            if due[place]:
                return -1
        return -1

    def draw_due(self, room: int) -> int:
        """Draw the first span that can be passed over no longer, if it fits; else return -1."""
        size, due, first = self._size, self._due, self._next
        for index, place in enumerate(self._holes):
            if due[place]:
                return self._draw_hole(index) if size[place] <= room else -1
        for place in range(first, min(self._stop, first + self._width - len(self._holes))):
            if due[place]:
                return self._draw_fresh(place) if size[place] <= room else -1
        return -1

    def _draw_hole(self, index: int) -> int:
        place = self._holes.pop(index)
        self._refill()
        return place

    def _draw_fresh(self, place: int) -> int:
        self._holes.extend(range(self._next, place))
        self._next = place + 1
        self._refill()
        return place

    def _refill(self) -> None:
        """Go on to the next epoch behind the last span of this one; note where rows run out."""
        while self.is_empty:
            following = next(self._epochs, None)
            if following is None:
                self.epoch = self._complete_epochs
                self.starved = not self._final
                return
            self.epoch, self._stop, self._complete = following
            self._watch = self._stop - (0 if self._complete else self._width - 1)
        if not self._complete and self.num_left < self._width:
            self.starved = True
