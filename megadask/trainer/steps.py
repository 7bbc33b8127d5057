"""One optimizer step of a loader, as an iterable of its microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megadask.scheduling.delivery import StepFacts
from megadask.trainer.presets import Batch

if TYPE_CHECKING:
    from megadask.trainer.loader import Loader


class Step:
    """One optimizer step: iterate over it for its microbatches.

    Attributes
    ----------
    index
        Number of the step.
    num_microbatches
        How many it yields; the same on every rank. Fewer where it was begun before.
    num_loss_tokens
        Targets of the whole step over all ranks: what to divide the sum of the loss by.
    imbalance
        Planned max / mean cost over the buckets.
    """

    def __init__(self, loader: Loader, facts: StepFacts, num_microbatches: int) -> None:
        self._loader = loader
        self.index = facts.index
        self.num_microbatches = num_microbatches
        self.num_loss_tokens = facts.num_loss_tokens
        self.imbalance = facts.imbalance
        self.left = num_microbatches

    def __len__(self) -> int:
        return self.num_microbatches

    def __iter__(self) -> Iterator[Batch]:
        while self.left:
            assert self._loader._link.position[0] == self.index
            batch = self._loader._next()
            assert batch is not None
            self.left -= 1
            yield batch
