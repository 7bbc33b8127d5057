"""How samples become batches: what the draw, the placement and the constructors share.

Axes: N spans, G microbatches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megadask.planner.checks import check_integer, is_integer
from megadask.planner.errors import ConfigError
from megadask.planner.fields import Field, aligned_fields, position_field
from megadask.planner.schedule import StepSchedule

#: Most packs of a step.
MOST_PACKS = 2**22
#: Tokens of a span where there is no limit to them.
ENDLESS = 2**62

Overflow = Literal["split", "truncate", "drop", "error"]
PadTo = Literal["seq_len", "longest"]


@dataclass(frozen=True)
class Batching(ABC):
    """What all ways to make batches have: `Packed`, `Padded` and `Fixed`.

    A step has a number of packs (sequences, rows) of up to T tokens; a microbatch has Q of them.

    Parameters
    ----------
    seq_len
        T, tokens of one pack, padding included.
    global_batch
        Packs of one step over all ranks: a number, or a schedule of it (ramp-up).
    micro_batch
        Q, packs of one microbatch of one rank.
    aligned
        Fields of the samples that are delivered beside their tokens: a name to the type of a
        token's value, ``"float32"``, or ``"(8,)float16"`` for an array a token.
    position_axes
        Axes of the positions that samples bring: ``position_ids`` of a batch are (3, Q, T) for 3.
    """

    seq_len: int
    global_batch: int | StepSchedule
    micro_batch: int = 1
    aligned: Mapping[str, str] = field(default_factory=dict, hash=False, kw_only=True)
    position_axes: int = field(default=1, kw_only=True)

    #: Whether documents fill packs one after the other and are cut where a pack ends.
    pours: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("seq_len", "micro_batch", "pad_to_multiple", "sequences", "position_axes"):
            check_integer(self.says(name), getattr(self, name), 1)
        number = self.global_batch
        is_batch = is_integer(number, 1) and number <= MOST_PACKS
        if not is_batch and not isinstance(number, StepSchedule):
            raise ConfigError(
                self.says("global_batch"),
                got=repr(number),
                limit=f"an integer, 1 to {MOST_PACKS}, or a schedule of it",
            )
        self._check_word("overflow", Overflow)
        if self.seq_len % self.pad_to_multiple:
            raise ConfigError(
                self.says("pad_to_multiple"),
                got=self.pad_to_multiple,
                limit=f"a divisor of seq_len={self.seq_len}",
                remedy="Choose seq_len as a multiple of it.",
            )
        _ = self.fields

    @property
    @abstractmethod
    def overflow(self) -> Overflow:
        """What becomes of a document longer than `longest_span`."""

    @property
    @abstractmethod
    def pad_to_multiple(self) -> int:
        """Documents are padded to a multiple of so many tokens."""

    @property
    @abstractmethod
    def documents_limit(self) -> int:
        """D, most documents of one pack."""

    @property
    def sequences(self) -> int:
        """Most sequences of one sample, which stay together."""
        return 1

    @property
    def sequences_limit(self) -> int:
        """Most sequences of one pack: what fixes the length of ``cu_seqlens``."""
        return self.documents_limit * self.sequences

    @property
    def fields(self) -> tuple[Field, ...]:
        """What samples may bring for every token, besides tokens and mask."""
        declared = aligned_fields(type(self).__name__, self.aligned)
        return (*declared, position_field(self.position_axes))

    @property
    def longest_span(self) -> int:
        """Most tokens of one span before the draw."""
        return self.seq_len

    def says(self, field: str) -> str:
        """Return how errors name a parameter, such as ``"Packed(seq_len=)"``."""
        return f"{type(self).__name__}({field}=)"

    def global_batch_at(self, step: int) -> int:
        """Return the number of packs of ``step``."""
        if isinstance(self.global_batch, int):
            return self.global_batch
        return self.global_batch.integer(step)

    def padded(self, tokens_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (N,) tokens that documents of these lengths take up in a pack."""
        multiple = self.pad_to_multiple
        return -(-tokens_N // multiple) * multiple

    def widths(
        self, size_N: NDArray[np.int64], group_N: NDArray[np.int64], num_groups: int
    ) -> NDArray[np.int64]:
        """Return (G,) tokens of the packs of each microbatch, pads included.

        Parameters
        ----------
        size_N, group_N
            (N,) padded tokens of each span; and its microbatch, 0..G-1.
        num_groups
            G.
        """
        return np.full(num_groups, self.seq_len, np.int64)

    def cut(self, tokens: int) -> list[tuple[int, int]]:
        """Return the spans [start, stop) that a document of this many tokens is planned as.

        The spans tile the document, or its beginning under ``"truncate"``; none under ``"drop"``.
        Raises ConfigError under ``"error"``.
        """
        longest = self.longest_span
        if tokens <= longest or self.overflow == "truncate":
            return [(0, min(tokens, longest))]
        if self.overflow == "drop":
            return []
        if self.overflow == "error":
            raise ConfigError(
                "a document is longer than the sequence",
                got=f"{tokens} tokens",
                limit=f"at most seq_len={self.seq_len}",
                remedy=f'Choose {type(self).__name__}(overflow="split", "truncate" or "drop").',
            )
        return [(start, min(start + longest, tokens)) for start in range(0, tokens, longest)]

    def _check_word(self, name: str, words: Any) -> None:
        value = getattr(self, name)
        if value not in get_args(words):
            raise ConfigError(self.says(name), got=repr(value), limit=f"one of {get_args(words)}")

    def _fill_max_documents(self, most: int | None) -> None:
        """Check ``max_documents``, and put its default where it is None."""
        if most is None:
            object.__setattr__(self, "max_documents", max(16, self.seq_len // 32))
        elif not is_integer(most, 1):
            raise ConfigError(
                self.says("max_documents"), got=repr(most), limit="an integer >= 1, or None"
            )


@dataclass(frozen=True)
class Packed(Batching):
    """Pack whole documents into sequences of a fixed length, as many as fit.

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
        Most sequences of one sample (a preference pair, a group), which stay together as one
        document; the sequences of a pack are up to ``max_documents * sequences``.
    aligned, position_axes
        See `Batching`.
    """

    overflow: Overflow = "split"
    pad_to_multiple: int = 1
    max_documents: int | None = None
    sequences: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fill_max_documents(self.max_documents)

    @property
    def documents_limit(self) -> int:
        """D, most documents of one pack."""
        assert self.max_documents is not None
        return self.max_documents


@dataclass(frozen=True)
class Padded(Batching):
    """Give every document a row of its own, filled up with pads.

    Batches have ``attention_mask`` and ``lengths`` besides the keys of packs.

    Parameters
    ----------
    seq_len
        T, most tokens of a row.
    global_batch
        Rows of one step over all ranks: a number, or a schedule of it (ramp-up). As many samples,
        but for those that are split.
    micro_batch
        Rows of one microbatch of one rank.
    overflow
        What becomes of a document longer than `seq_len`: ``"truncate"``, ``"drop"`` (counted as
        filtered), ``"error"``, or ``"split"`` into spans that tile it, one a row.
    pad_to_multiple
        Documents count, and with ``pad_to="longest"`` rows are as long as, a multiple of this many
        tokens. Context parallelism needs a multiple of 2 x cp, fp8 one of 16.
    pad_to
        How long rows are: ``"seq_len"`` always, so that shapes are static; or ``"longest"``, as the
        longest document of their microbatch.
    aligned, position_axes
        See `Batching`.
    """

    overflow: Overflow = "truncate"
    pad_to_multiple: int = 1
    pad_to: PadTo = "seq_len"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_word("pad_to", PadTo)

    @property
    def documents_limit(self) -> int:
        """D: one document a row."""
        return 1

    def widths(
        self, size_N: NDArray[np.int64], group_N: NDArray[np.int64], num_groups: int
    ) -> NDArray[np.int64]:
        """Return (G,) tokens of the rows of each microbatch, pads included; see `Batching`."""
        if self.pad_to == "seq_len":
            return super().widths(size_N, group_N, num_groups)
        width_G = np.full(num_groups, self.pad_to_multiple, np.int64)
        np.maximum.at(width_G, group_N, size_N)
        return width_G


@dataclass(frozen=True)
class Fixed(Batching):
    """Put documents one after the other, in the order drawn, and cut every `seq_len` tokens.

    Every pack is full but the last one of the data. The cut falls anywhere; a document goes on in
    the next pack, also in that of the next step. Attention and positions start anew there.

    Parameters
    ----------
    seq_len
        T, tokens of one pack.
    global_batch
        Packs of one step over all ranks: a number, or a schedule of it (ramp-up).
    micro_batch
        Packs of one microbatch of one rank.
    pad_to_multiple
        Every piece is padded to a multiple of this many tokens: only those at which a document ends
        need it. Context parallelism by documents needs a multiple of 2 x cp.
    max_documents
        Most pieces of one pack, which fixes the length of ``cu_seqlens``; ``seq_len // 32`` (at
        least 16) when None. A pack that has so many is closed before it is full.
    aligned, position_axes
        See `Batching`.
    """

    pad_to_multiple: int = 1
    max_documents: int | None = None

    pours: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fill_max_documents(self.max_documents)

    @property
    def overflow(self) -> Overflow:
        """Everything is cut."""
        return "split"

    @property
    def documents_limit(self) -> int:
        """D, most pieces of one pack."""
        assert self.max_documents is not None
        return self.max_documents

    @property
    def longest_span(self) -> int:
        """The draw takes documents whole, and cuts them after that."""
        return ENDLESS
