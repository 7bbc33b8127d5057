"""How samples become batches: what the draw, the placement and the constructors share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.fields import Field, aligned_fields, position_field
from megadask.planner.schedule import StepSchedule

#: Most packs of a step.
MOST_PACKS = 2**22

Overflow = Literal["split", "truncate", "drop", "error"]


@dataclass(frozen=True)
class Packed:
    """Pack documents into sequences of a fixed length.

    Parameters
    ----------
    seq_len
        T, tokens of one pack, padding included.
    global_batch
        Packs of one step over all ranks: a number, or a schedule of it (ramp-up).
    micro_batch
        Packs of one microbatch of one rank.
    overflow
        What becomes of a document longer than `seq_len`: ``"split"`` into spans that tile it,
        ``"truncate"``, ``"drop"`` (counted as filtered) or ``"error"``.
    pad_to_multiple
        Every document is padded to a multiple of this many tokens. Part of the draw, so it must not
        depend on the topology; context parallelism needs a multiple of 2 x cp, fp8 one of 16.
    max_documents
        Most documents of one pack, which fixes the length of ``cu_seqlens``; ``seq_len // 32``
        (at least 16) when None.
    sequences
        Most sequences of one sample; those of a sample stay together, as one document.
    aligned
        Fields of the samples that are delivered beside their tokens: a name to the type of a
        token's value, ``"float32"``, or ``"(8,)float16"`` for an array a token.
    position_axes
        Axes of the positions that samples bring: ``position_ids`` of a batch are (3, Q, T) for 3.
    """

    seq_len: int
    global_batch: int | StepSchedule
    micro_batch: int = 1
    overflow: Overflow = "split"
    pad_to_multiple: int = 1
    max_documents: int | None = None
    sequences: int = 1
    aligned: Mapping[str, str] = field(default_factory=dict, hash=False)
    position_axes: int = 1

    def __post_init__(self) -> None:
        for name in ("seq_len", "micro_batch", "pad_to_multiple", "sequences", "position_axes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"Packed({name}=)", got=repr(value), limit="an integer >= 1")
        is_count = isinstance(self.global_batch, int) and not isinstance(self.global_batch, bool)
        is_batch = is_count and 1 <= self.global_batch <= MOST_PACKS  # type: ignore[operator]
        if not is_batch and not isinstance(self.global_batch, StepSchedule):
            raise ConfigError(
                "Packed(global_batch=)",
                got=repr(self.global_batch),
                limit=f"an integer, 1 to {MOST_PACKS}, or a schedule of it",
            )
        if self.overflow not in get_args(Overflow):
            raise ConfigError(
                "Packed(overflow=)", got=repr(self.overflow), limit=f"one of {get_args(Overflow)}"
            )
        if self.seq_len % self.pad_to_multiple:
            raise ConfigError(
                "Packed(pad_to_multiple=)",
                got=self.pad_to_multiple,
                limit=f"a divisor of seq_len={self.seq_len}",
                remedy="Choose seq_len as a multiple of it.",
            )
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError("Packed(max_documents=)", got=self.max_documents, limit=">= 1")
        if self.max_documents is None:
            object.__setattr__(self, "max_documents", max(16, self.seq_len // 32))
        _ = self.fields

    @property
    def documents_limit(self) -> int:
        """Most documents of one pack."""
        assert self.max_documents is not None
        return self.max_documents

    @property
    def sequences_limit(self) -> int:
        """Most sequences of one pack: what fixes the length of ``cu_seqlens``."""
        return self.documents_limit * self.sequences

    @property
    def fields(self) -> tuple[Field, ...]:
        """What samples may bring for every token, besides tokens and mask."""
        declared = aligned_fields(type(self).__name__, self.aligned)
        return (*declared, position_field(self.position_axes))

    def global_batch_at(self, step: int) -> int:
        """Return the number of packs of ``step``."""
        if isinstance(self.global_batch, int):
            return self.global_batch
        return self.global_batch.integer(step)

    def padded(self, tokens_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (N,) tokens that documents of these lengths take up in a pack."""
        multiple = self.pad_to_multiple
        return -(-tokens_N // multiple) * multiple

    def cut(self, tokens: int) -> list[tuple[int, int]]:
        """Return the spans [start, stop) that a document of this many tokens is planned as.

        The spans tile the document, or its first ``seq_len`` tokens under ``"truncate"``; none
        under ``"drop"``. Raises ConfigError under ``"error"``.
        """
        if tokens <= self.seq_len or self.overflow == "truncate":
            return [(0, min(tokens, self.seq_len))]
        if self.overflow == "drop":
            return []
        if self.overflow == "error":
            raise ConfigError(
                "a document is longer than the sequence",
                got=f"{tokens} tokens",
                limit=f"at most seq_len={self.seq_len}",
                remedy='Choose Packed(overflow="split", "truncate" or "drop").',
            )
        return [
            (start, min(start + self.seq_len, tokens)) for start in range(0, tokens, self.seq_len)
        ]
