"""The columnar table of metadata that loaders report and the planner plans from.

Axes: N rows (spans), I items of one modality over all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError

#: Columns that identify a span and say where its record lies; every served row has them.
SPAN_COLUMNS: dict[str, str] = {
    "source": "int32",  # index into the pipeline's sources
    "epoch": "int64",
    "lane": "int32",
    "position": "int64",
    "shard": "int32",  # ordinal of the shard within the lane
    "row": "int64",  # row of the record within the shard
    "start": "int64",  # the span is [start, stop) of the sample, in tokens
    "stop": "int64",
    "verdict": "uint8",
    "tokens": "int64",  # stop - start
    "length": "int64",  # tokens of the sample that are planned: the stop of its last span
    "loss_tokens": "int64",  # targets of this span that count in the loss
    "bytes": "int64",  # payload of the whole sample
    "checksum": "uint32",  # CRC-32 of the whole sample's payload
}


@dataclass(frozen=True, eq=False)
class Ragged:
    """Lengths of the items of one modality, row after row.

    lengths_I: (I,) int64; offsets: (N + 1,) int64, row n has lengths_I[offsets[n]:offsets[n + 1]].
    """

    lengths_I: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Return the lengths of some rows of items."""
        counts = np.array([len(row) for row in rows], np.int64)
        return cls.counted(np.array([length for row in rows for length in row], np.int64), counts)

    @classmethod
    def counted(cls, lengths_I: NDArray[np.int64], count_N: NDArray[np.integer]) -> Ragged:
        """Return rows of so many items each, whose lengths follow one another."""
        return cls(lengths_I, np.concatenate([[0], np.cumsum(count_N)]).astype(np.int64))

    def take(self, rows: NDArray[np.integer]) -> Ragged:
        """Return the items of the given rows, in their order."""
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return Ragged(self.lengths_I[np.repeat(self.offsets[:-1][rows], counts) + within], offsets)

    def sum(self, power: int = 1) -> NDArray[np.int64]:
        """Return (N,) the sum of every row's item lengths, each raised to ``power``."""
        totals = np.concatenate([[0], np.cumsum(self.lengths_I**power)])
        return np.asarray(totals[self.offsets[1:]] - totals[self.offsets[:-1]], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Metadata(Mapping[str, NDArray[Any]]):
    """A table of N rows: named numpy columns, and ragged item lengths per modality.

    Reads like a mapping: ``table["tokens"]`` is an (N,) array. Columns are shared, never copied or
    modified. Raises ConfigError when columns differ in length.
    """

    columns: Mapping[str, NDArray[Any]]
    ragged: Mapping[str, Ragged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        lengths |= {name: len(ragged.offsets) - 1 for name, ragged in self.ragged.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError("metadata columns differ in length", got=lengths)

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are {sorted(self.columns)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        """Return the number of columns, as a mapping does; see `num_rows`."""
        return len(self.columns)

    @property
    def num_rows(self) -> int:
        """Number of rows N."""
        return next((len(column) for column in self.columns.values()), 0)

    def take(self, rows: NDArray[Any]) -> Metadata:
        """Return the given rows (integers or a mask), in their order."""
        index = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        return Metadata(
            {name: column[index] for name, column in self.columns.items()},
            {name: ragged.take(index) for name, ragged in self.ragged.items()},
        )

    def read_only(self) -> Metadata:
        """Return this table with columns that cannot be written to, for functions of users."""
        columns = {name: column.view() for name, column in self.columns.items()}
        for column in columns.values():
            column.flags.writeable = False
        return Metadata(columns, self.ragged)

    def with_columns(self, **columns: NDArray[Any]) -> Metadata:
        """Return this table with columns added or replaced."""
        return Metadata({**self.columns, **columns}, self.ragged)

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return a flat dict of arrays, which Dask sends without a copy; see `unpack`."""
        flat = dict(self.columns)
        for name, ragged in self.ragged.items():
            flat[f"items:{name}:lengths"] = ragged.lengths_I
            flat[f"items:{name}:offsets"] = ragged.offsets
        return flat

    @classmethod
    def unpack(cls, flat: Mapping[str, NDArray[Any]]) -> Metadata:
        """Invert `pack`."""
        columns = {name: column for name, column in flat.items() if not name.startswith("items:")}
        names = sorted({name.split(":")[1] for name in flat if name.startswith("items:")})
        items = {
            name: Ragged(flat[f"items:{name}:lengths"], flat[f"items:{name}:offsets"])
            for name in names
        }
        return cls(columns, items)


def concat(tables: Sequence[Metadata]) -> Metadata:
    """Put tables with the same columns and modalities below one another.

    tables: at least one; those without rows may lack columns.
    """
    tables = [table for table in tables if table.num_rows] or [tables[0]]
    if len(tables) == 1:
        return tables[0]
    first = tables[0]
    columns = {name: np.concatenate([t.columns[name] for t in tables]) for name in first.columns}
    items = {}
    for name in first.ragged:
        parts = [table.ragged[name] for table in tables]
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        lengths_I = np.concatenate([part.lengths_I for part in parts])
        items[name] = Ragged.counted(lengths_I, counts)
    return Metadata(columns, items)


def empty_spans() -> Metadata:
    """Return a span table without rows."""
    return Metadata({name: np.empty(0, dtype) for name, dtype in SPAN_COLUMNS.items()})
