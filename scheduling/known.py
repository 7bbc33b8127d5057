"""What is known of a record before its payload is read, and what follows for its spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """A record, as a column of lengths or an index tells of it.

    It stands in for the record: readers of `SourceSpec.known` yield entries.

    Attributes
    ----------
    tokens
        Length of the sample; 0 where it is dropped.
    loss_tokens
        Targets of the sample that count; None where all of them do, or `loss_runs` says.
    loss_runs
        Where the loss mask is not zero: start, stop, start, stop, ..., in tokens.
    size_bytes, checksum
        Of the payload; 0 where unknown.
    scalars, items
        Numbers by name, item lengths by modality, as far as known.
    whole
        What keeps the sample from being cut; None where it may be.
    """

    tokens: int
    loss_tokens: int | None = None
    loss_runs: NDArray[np.int64] | None = None
    size_bytes: int = 0
    checksum: int = 0
    scalars: Mapping[str, float] = field(default_factory=dict)
    items: Mapping[str, Sequence[int]] = field(default_factory=dict)
    whole: str | None = None

    def num_targets(self, start: int, stop: int, length: int) -> int:
        """Return how many inputs of [start, stop) have a target that counts; see rule 18.

        length: tokens that are planned. Of `loss_tokens` every span gets its share by length, and
        all spans of a sample together have as many.
        """
        first, last = start, min(stop, length - 1)  # of the inputs that have a target
        if self.loss_runs is not None:
            runs = np.clip(self.loss_runs - 1, first, max(first, last))
            return int((runs[1::2] - runs[::2]).sum())
        if self.loss_tokens is None or self.tokens < 2:
            return last - first
        targets = self.tokens - 1
        return self.loss_tokens * last // targets - self.loss_tokens * first // targets


def mask_runs(mask: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return where a loss mask is not zero: start, stop, start, stop, ..."""
    is_on = np.concatenate([[False], mask != 0, [False]])
    return np.flatnonzero(is_on[1:] != is_on[:-1])
