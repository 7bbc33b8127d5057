"""Documents poured into packs one after the other, and cut where a pack ends.

Axes: n spans as they were drawn, N pieces of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megadask.planner.batching import ENDLESS, Batching
from megadask.planner.metadata import Metadata, Ragged

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rest:
    """What of a span goes on in the next step.

    Attributes
    ----------
    row
        The span's row.
    start
        Where the rest begins, in tokens of the sample.
    """

    row: int
    start: int


class Pouring:
    """Packs that are filled one after the other; a span that reaches beyond one goes on behind it.

    A pack is closed when it is full, or when it has as many pieces as it may have.
    """

    def __init__(self, num_packs: int, batching: Batching) -> None:
        self._seq_len = batching.seq_len
        self._multiple = batching.pad_to_multiple
        self._most_pieces = batching.documents_limit
        self._num_packs = num_packs
        self._pack = self._num_pieces = self._used = 0  # pack to fill; and what is in it
        self._spans = 0
        self._pieces: list[tuple[int, int, int]] = []  # span, tokens, pack
        self.room = ENDLESS if num_packs else 0  # largest span of which some part still fits
        self.rest_tokens = 0  # of the last span, what did not fit

    def add(self, tokens: int) -> int:
        """Pour in a span, as much of it as there is room for; return the pack that it begins in."""
        first = self._pack
        while tokens and self.room:
            piece = min(tokens, self._seq_len - self._used)
            self._pieces.append((self._spans, piece, self._pack))
            tokens -= piece
            self._used += -(-piece // self._multiple) * self._multiple
            self._num_pieces += 1
            if self._used == self._seq_len or self._num_pieces == self._most_pieces:
                self._pack += 1
                self._used = self._num_pieces = 0
                self.room = ENDLESS if self._pack < self._num_packs else 0
        self._spans += 1
        self.rest_tokens = tokens
        return first

    def cut(self, table: Metadata) -> tuple[Metadata, Ints]:
        """Return (N rows) the pieces of the spans that were poured in, and (N,) the pack of each.

        table: (n rows) the spans in the order in which they were.
        """
        span_N, tokens_N, pack_N = np.array(self._pieces, np.int64).reshape(-1, 3).T
        # Within its span, a piece begins where the one before it ends.
        before_N = np.cumsum(tokens_N) - tokens_N
        start_N = table["start"][span_N] + before_N - before_N[np.searchsorted(span_N, span_N)]
        return parts(table, span_N, start_N, start_N + tokens_N), pack_N


def parts(table: Metadata, row_N: Ints, start_N: Ints, stop_N: Ints) -> Metadata:
    """Return (N rows) the parts [start, stop) of rows of a span table.

    Every target counts in the loss. Items go with the beginning of their span.
    """
    first_N = start_N == table["start"][row_N]
    columns = {name: column[row_N] for name, column in table.columns.items()}
    columns["start"], columns["stop"], columns["tokens"] = start_N, stop_N, stop_N - start_N
    columns["loss_tokens"] = np.maximum(np.minimum(stop_N, columns["length"] - 1) - start_N, 0)
    items = {}
    for name, ragged in table.ragged.items():
        count_N = np.where(first_N, np.diff(ragged.offsets)[row_N], 0)
        items[name] = Ragged.counted(ragged.take(row_N[first_N]).lengths_I, count_N)
    return Metadata(columns, items)
