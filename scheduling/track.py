"""Where a rank stands: the microbatch that it reads next, and what it knows of that step."""

from __future__ import annotations

from collections.abc import Iterator

from megadask.scheduling.delivery import StepFacts
from megadask.scheduling.marks import Watermark
from megadask.scheduling.point import Point
from megadask.scheduling.portions import microbatches_of


class Track:
    """The way of one rank through the steps.

    Parameters
    ----------
    start
        Where it begins.

    Attributes
    ----------
    start
        As given.
    position
        The next microbatch to read: (step, microbatch).
    facts
        Of the step at the position, once they are known.
    """

    def __init__(self, start: Point) -> None:
        self.start = start
        self.position: Watermark = (start.step, start.microbatch)
        self.facts: StepFacts | None = None
        self._before: StepFacts | None = None  # the step that was read last
        self._num_microbatches = 1  # of the last step that is known

    @property
    def is_at_start(self) -> bool:
        """Whether nothing was read yet."""
        return self.position == (self.start.step, self.start.microbatch)

    @property
    def point(self) -> Point:
        """The point behind everything read."""
        step, microbatch = self.position
        if self.is_at_start:
            return self.start
        state = self.start.state if self._before is None else self._before.header["state_after"]
        if microbatch == 0:
            return Point(step=step, state=state)
        assert self.facts is not None
        header = self.facts.header
        return Point.of(
            step=step,
            state=state,
            microbatch=microbatch,
            microbatch_N=microbatches_of(header),
            draw_digest=header["draw_digest"],
            assignment_digest=header["assignment_digest"],
            verdicts=header["verdicts"],
            events=header["events"],
        )

    def learn(self, facts: StepFacts) -> None:
        """Take up what is said of the step at the position."""
        self.facts = facts
        self._num_microbatches = facts.num_microbatches

    def advance(self) -> bool:
        """Go on behind the microbatch at the position; returns whether its step is over."""
        assert self.facts is not None
        step, microbatch = self.position
        if microbatch < self.facts.num_microbatches - 1:
            self.position = (step, microbatch + 1)
            return False
        self.position = (step + 1, 0)
        self._before, self.facts = self.facts, None
        return True

    def ahead(self) -> Iterator[Watermark]:
        """Yield the microbatches from the position on.

        How many a later step has is a guess; a wrong one costs an empty answer.
        """
        step, microbatch = self.position
        count = self._num_microbatches if self.facts is None else self.facts.num_microbatches
        while True:
            yield step, microbatch
            microbatch += 1
            if microbatch >= count:
                step, microbatch, count = step + 1, 0, self._num_microbatches
