"""Writes the record of a run to its journal: a delta each step, everything now and then."""

from __future__ import annotations

import json
from collections.abc import Mapping

from megadask.planner.plan import Plan
from megadask.scheduling.journal import Journal, Place
from megadask.scheduling.kept import Kept, step_delta
from megadask.scheduling.marks import Watermark
from megadask.scheduling.retention import Retention

#: So many steps are replayed at most; then everything is written again.
FULL_EVERY_STEPS = 100


class Checkpoint:
    """What a run writes. All methods block, but for `acknowledged`; none may run beside another.

    Parameters
    ----------
    journal
        Where to write.
    full_every_steps
        Deltas between full objects.
    """

    def __init__(self, journal: Journal, full_every_steps: int = FULL_EVERY_STEPS) -> None:
        self._journal = journal
        self._full_every_steps = full_every_steps
        self._retention = Retention()
        self._num_steps = 0  # since the last full object
        self._low_step = -1

    @property
    def is_full_due(self) -> bool:
        """Whether enough steps were written since everything was."""
        return self._num_steps >= self._full_every_steps

    def begin(self, kept: Kept) -> None:
        """Begin the chain of a generation."""
        place = self._journal.begin(kept.generation, kept.to_bytes())
        self._wrote_full(place, kept, begins=True)

    def full(self, kept: Kept) -> None:
        """Write everything, and remove what nobody needs any more."""
        self.acknowledged(kept.low)
        floor = self._retention.floor
        within = floor is not None and floor[0] == kept.generation
        place = self._journal.append(
            "full", kept.to_bytes(), kept=floor[1] if floor and within else 0
        )
        self._wrote_full(place, kept, begins=False)

    def step(self, before: str, plan: bytes) -> None:
        """Write a step; before: JSON of the planner state before it."""
        self._journal.append("step", step_delta(before, Plan.from_arrow(plan)))
        self._num_steps += 1

    def event(self, step: int, weights: Mapping[str, float]) -> None:
        """Write a mixture that was set."""
        self._journal.append("event", json.dumps({"step": step, "weights": weights}).encode())

    def marks(self, low: Watermark) -> None:
        """Write what all ranks have acknowledged, if that is another step than before."""
        if low[0] > self._low_step:
            self._journal.append("marks", json.dumps({"low": low}).encode())
            self._low_step = low[0]

    def acknowledged(self, low: Watermark) -> None:
        """Note what all ranks of the present generation have acknowledged."""
        self._retention.acknowledged(low)

    def _wrote_full(self, place: Place, kept: Kept, *, begins: bool) -> None:
        self._num_steps = 0
        self._low_step = kept.low[0]
        mark = kept.low if begins else (kept.step, 0)
        self._retention.wrote(place, mark, begins=begins)
        if self._retention.floor is not None:
            self._journal.prune(self._retention.floor)
