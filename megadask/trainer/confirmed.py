"""What a training loop has confirmed of the batches that it was given."""

from __future__ import annotations

from collections import deque

from megadask.planner.errors import ConfigError
from megadask.scheduling.marks import Watermark
from megadask.scheduling.point import Point
from megadask.scheduling.trainer_link import TrainerLink


class Confirmed:
    """Follows a loop that is given batches before it has used those that it has.

    Frameworks ask for the next batch early, to know whether there is one. What was given out then
    says nothing about what was trained on; only `done` does.
    """

    def __init__(self, link: TrainerLink) -> None:
        self._link = link
        self.reset()

    @property
    def point(self) -> Point:
        """The point behind the last batch that was confirmed."""
        return self._point

    def reset(self) -> None:
        """Begin anew where the link stands, or is about to go."""
        self._given: deque[tuple[Watermark, Point]] = deque()
        self._point = self._link.point

    def give(self) -> None:
        """Note that the batch before the link's position is given out."""
        self._given.append((self._link.position, self._link.point))

    def explain(self, error: Exception) -> None:
        """Say with an error that some batches are not confirmed, if so it is."""
        if self._given:
            error.add_note(
                f"MegaDask: of the batches that were given out {len(self._given)} are not "
                "confirmed; connect(confirm=True) needs a loader.done() for each."
            )

    def done(self) -> None:
        """Note that the oldest batch was used."""
        if not self._given:
            raise ConfigError("loader.done()", got="no batch left", limit="one call for each batch")
        mark, self._point = self._given.popleft()
        self._link.consume(mark)
