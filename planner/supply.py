"""Rows of a source that lies in memory or follows a law, as the draw asks for them.

The source has one lane. What a law gives depends on the seed, the name of the source and the
position alone, so that it does not matter how many rows are asked for at a time.
Axes: N records, then spans.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megadask.planner.ahead import Ahead
from megadask.planner.batching import Batching
from megadask.planner.errors import ConfigError
from megadask.planner.ids import Verdict
from megadask.planner.lengths import Distribution
from megadask.planner.lines import Rows
from megadask.planner.metadata import SPAN_COLUMNS, Metadata, Ragged
from megadask.planner.state import WAITS, SourceState

#: Records that are made at a time.
BLOCK = 256
#: So many records in a row without anything to plan are taken for a source that has nothing.
_PATIENCE = 64 * BLOCK

#: Lengths (N,), a table with a column ``tokens``, or a law.
SourceLike = Distribution | Metadata | ArrayLike


class Supply:
    """The records of one source.

    Parameters
    ----------
    name
        Of the source.
    source
        A table or lengths are read once an epoch, in their order; a law never ends.
    seed
        Of what a law gives.
    """

    def __init__(self, name: str, source: SourceLike, seed: int) -> None:
        self.name = name
        self._key = (seed, zlib.crc32(name.encode()))
        self.num_records: int | None = None
        # Arrays first: those of pandas can be sampled, too.
        if isinstance(source, Distribution) and not hasattr(source, "__array__"):
            self._law = source
            shape = source.sample(np.random.default_rng(0), 1)
        else:
            shape = source if isinstance(source, Metadata) else _table(name, source)
            self._table = shape
            self.num_records = shape.num_rows
        self._check(shape)
        #: Names of the scalars, and of the modalities, that records have.
        self.scalars = sorted(set(shape.columns) - {*SPAN_COLUMNS, *WAITS})
        self.modalities = sorted(shape.ragged)

    def records(self, start: int) -> Metadata:
        """Return up to `BLOCK` records of an epoch from a multiple of it on."""
        if self.num_records is not None:
            return self._table.take(np.arange(start, min(start + BLOCK, self.num_records)))
        made = self._law.sample(np.random.default_rng((*self._key, start // BLOCK)), BLOCK)
        self._check(made)
        return made

    def _check(self, table: Metadata) -> None:
        tokens_N = table.columns.get("tokens")
        if tokens_N is None or tokens_N.ndim != 1 or tokens_N.dtype.kind not in "iu":
            raise ConfigError(
                f"source {self.name!r}: lengths",
                got=f"columns {sorted(table.columns)}"
                if tokens_N is None
                else f"{tokens_N.dtype} of shape {tokens_N.shape}",
                limit='integers of shape (N,), as an array or as column "tokens"',
            )
        if not len(tokens_N) or tokens_N.min() < 1:
            raise ConfigError(
                f"source {self.name!r}: lengths",
                got="none" if not len(tokens_N) else tokens_N.min(),
                limit="at least one, all >= 1",
            )


class Feed:
    """Makes the spans of one source ahead of the draw, and forgets those that were drawn.

    Parameters
    ----------
    supply
        The records.
    index
        Place of the source in the pipeline.
    batching
        How long documents are cut.
    epochs
        Epochs to read, None for ever.
    state
        Where to begin.
    modalities
        Those of all sources: spans of other sources have no items.
    """

    def __init__(
        self,
        supply: Supply,
        index: int,
        batching: Batching,
        epochs: int | None,
        state: SourceState,
        modalities: list[str],
    ) -> None:
        self._supply = supply
        self._index = index
        self._batching = batching
        self._epochs = epochs
        self._modalities = modalities
        self._epoch, self._position = 0, 0
        self._ahead = Ahead(state)
        self._in_vain = 0

    @property
    def rows(self) -> Rows:
        """What is known of the source, from its state on."""
        return self._ahead.rows(self._epoch)

    @property
    def complete(self) -> bool:
        """Whether there is nothing more to make."""
        return self._epochs is not None and self._epoch >= self._epochs

    def fill(self, num_spans: int) -> None:
        """Make records until so many spans are known, or the source has ended."""
        while self._ahead.num_spans < num_spans and not self.complete:
            records = self._supply.records(self._position)
            self._add(self._spans(records))
            self._position += records.num_rows
            if self._position == self._supply.num_records:
                self._epoch, self._position = self._epoch + 1, 0

    def fetch(self, num_spans: int) -> None:
        """Make about so many more spans."""
        self.fill(self._ahead.num_spans + num_spans)

    def trim(self, state: SourceState) -> None:
        """Go on behind a draw."""
        self._ahead.trim(state)

    def _add(self, spans: Metadata) -> None:
        readable = bool((spans["verdict"] == Verdict.OK).any())
        self._in_vain = 0 if readable else self._in_vain + spans.num_rows
        if self._in_vain > max(_PATIENCE, self._supply.num_records or 0):
            raise ConfigError(
                f"source {self._supply.name!r} has nothing to plan",
                got=f"{self._in_vain} documents in a row above {self._batching.seq_len} tokens",
                remedy='Choose a longer seq_len, or overflow="split" or "truncate" of '
                f"{type(self._batching).__name__}.",
            )
        self._ahead.add(spans)

    def _spans(self, records: Metadata) -> Metadata:
        """Return what the records are planned as; items of a split document go with its start."""
        tokens_R = records["tokens"].astype(np.int64)
        longest, overflow = self._batching.longest_span, self._batching.overflow
        if overflow == "error":
            self._batching.cut(int(tokens_R.max()))
        count_R = -(-tokens_R // longest) if overflow == "split" else np.ones_like(tokens_R)
        record_N = np.repeat(np.arange(len(tokens_R)), count_R)
        tokens_N = tokens_R[record_N]
        start_N = (np.arange(len(record_N)) - (np.cumsum(count_R) - count_R)[record_N]) * longest
        stop_N = np.minimum(start_N + longest, tokens_N)
        dropped_N = (tokens_N > longest) & (overflow == "drop")
        stop_N[dropped_N] = 0
        length_N = np.where(dropped_N, 0, tokens_N if overflow == "split" else stop_N)
        position_N = self._position + record_N
        known = {
            "source": np.full(len(record_N), self._index),
            "epoch": np.full(len(record_N), self._epoch),
            "position": position_N,
            "row": position_N,
            "start": start_N,
            "stop": stop_N,
            "verdict": np.where(dropped_N, Verdict.FILTERED, Verdict.OK),
            "tokens": stop_N - start_N,
            "length": length_N,
            # Every token but the last of a document has a target.
            "loss_tokens": np.maximum(np.minimum(stop_N, length_N - 1) - start_N, 0),
        }
        columns: dict[str, NDArray[Any]] = {
            name: np.asarray(known.get(name, np.zeros(len(record_N))), dtype)
            for name, dtype in SPAN_COLUMNS.items()
        }
        for name in self._supply.scalars:
            columns[name] = records[name][record_N]
        items = {
            name: _items(records.ragged.get(name), record_N, start_N == 0)
            for name in self._modalities
        }
        return Metadata(columns, items)


def _items(ragged: Ragged | None, record_N: NDArray[Any], first_N: NDArray[np.bool_]) -> Ragged:
    """Return the items of every span: those of its record if it is the first one, else none."""
    if ragged is None:
        return Ragged(np.empty(0, np.int64), np.zeros(len(record_N) + 1, np.int64))
    count_N = np.where(first_N, np.diff(ragged.offsets)[record_N], 0)
    return Ragged.counted(ragged.take(record_N[first_N]).lengths_I, count_N)


def _table(name: str, source: Any) -> Metadata:
    lengths = np.asarray(source)
    if lengths.ndim != 1:
        raise ConfigError(
            f"source {name!r}",
            got=f"{type(source).__name__} of shape {lengths.shape}",
            limit="lengths of shape (N,), a Metadata table, or a law such as lengths.Lognormal",
        )
    return Metadata({"tokens": lengths})
