"""Samples of several sequences that stay together: preference pairs, groups of responses.

Such a sample is one span. Its sequences lie one after the other, all but the last padded like
documents of their own, so that sizes, offsets and capacities are those of any other span. The real
lengths are ragged metadata under the name `SEQUENCES`; rows without items are one sequence.

Axes: N spans, D sequences of all spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megadask.planner.metadata import Metadata, Ragged

if TYPE_CHECKING:
    from megadask.planner.batching import Batching

#: Name of the ragged column with the lengths of the sequences of a span.
SEQUENCES = "sequences"

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """What attends to itself alone, over the rows of a table: (D,) arrays.

    Attributes
    ----------
    row_D
        The span that it belongs to.
    size_D
        Its padded tokens.
    first_D
        Where it begins in its span.
    """

    row_D: Ints
    size_D: Ints
    first_D: Ints


def padded_table(table: Metadata, batching: Batching) -> Metadata:
    """Return a table whose lengths count what they take up in a pack."""
    padded = table.with_columns(tokens=batching.padded(table["tokens"]))
    items = table.ragged.get(SEQUENCES)
    if items is None:
        return padded
    real = Ragged(batching.padded(items.lengths_I), items.offsets)
    return Metadata(padded.columns, {**table.ragged, SEQUENCES: real})


def sequences_of(table: Metadata, batching: Batching) -> Sequences:
    """Return the sequences of all spans, span after span."""
    size_N = batching.padded(table["tokens"])
    items = table.ragged.get(SEQUENCES)
    row_D = np.arange(len(size_N))
    if items is None or not items.lengths_I.size:
        return Sequences(row_D=row_D, size_D=size_N, first_D=np.zeros_like(size_N))
    count_N = np.diff(items.offsets)
    row_D = np.repeat(row_D, np.maximum(count_N, 1))
    size_D = size_N[row_D]
    size_D[count_N[row_D] > 0] = batching.padded(items.lengths_I)
    before_D = np.cumsum(size_D) - size_D
    first_N = np.searchsorted(row_D, np.arange(len(size_N)))
    return Sequences(row_D=row_D, size_D=size_D, first_D=before_D - before_D[first_N[row_D]])


def num_sequences(table: Metadata) -> Ints:
    """Return (N,) how many sequences every span has."""
    items = table.ragged.get(SEQUENCES)
    if items is None:
        return np.ones(table.num_rows, np.int64)
    return np.maximum(np.diff(items.offsets), 1)


def square_sums(table: Metadata) -> NDArray[np.float64]:
    """Return (N,) the squared lengths of every span's sequences, added up: what attention costs."""
    square_N = table["tokens"].astype(np.float64) ** 2
    items = table.ragged.get(SEQUENCES)
    if items is None:
        return square_N
    return np.where(np.diff(items.offsets) > 0, items.sum(power=2).astype(np.float64), square_N)
