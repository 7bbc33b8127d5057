"""Several cursors over the microbatches of one loader, as a virtual pipeline needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megadask.scheduling.marks import Watermark
from megadask.trainer.presets import Batch

if TYPE_CHECKING:
    from megadask.trainer.loader import Loader


class Tee:
    """Several cursors over the microbatches of one loader; the slowest one acknowledges."""

    def __init__(self, loader: Loader, count: int, opened: object) -> None:
        self._loader = loader
        self._opened = opened  # what the loader knows the pass by
        self._first = 0  # number of the oldest batch that is kept
        self._kept: deque[tuple[Batch | None, Watermark, Any]] = deque()
        self._at = [0] * count
        self._point = loader._link.point

    @property
    def point(self) -> Any:
        """The point behind the slowest cursor."""
        return self._point

    def iterator(self, cursor: int) -> Iterator[Batch]:
        """Yield what one cursor sees."""
        while True:
            self._forget()
            at = self._at[cursor]
            if at == self._first + len(self._kept):
                batch = self._loader._read()
                link = self._loader._link
                if batch is None:
                    self._loader._end_pass(self._opened)
                self._kept.append((batch, link.position, link.point))
            batch, _, _ = self._kept[at - self._first]
            if batch is None:
                return
            self._at[cursor] = at + 1
            self._update_point()
            yield dict(batch)

    def _update_point(self) -> None:
        slowest = min(self._at) - self._first
        if slowest:
            self._point = self._kept[slowest - 1][2]

    def _forget(self) -> None:
        """Let go of what every cursor has passed, and acknowledge it."""
        while self._first < min(self._at):
            _, mark, _ = self._kept.popleft()
            self._first += 1
            self._loader._link.consume(mark)
