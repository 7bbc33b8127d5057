"""From the columns that people have (lists, arrays, data frames) to a table of metadata.

Axes: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.metadata import Metadata, Ragged

#: No document is longer; sums over tables stay within int64.
MOST_TOKENS = 2**40


def table_of(columns: Any) -> Metadata:
    """Return a table with an int64 column ``tokens``.

    Parameters
    ----------
    columns
        A mapping of names to columns (lists, numpy, pandas, polars or Arrow ones), a data frame or
        Arrow table, or a `Metadata`. A column of sequences becomes a modality, the lengths of its
        items.

    Raises
    ------
    ConfigError
        Naming the column that is missing or of the wrong kind.
    """
    table = columns if isinstance(columns, Metadata) else _table(columns)
    tokens_N = table.columns.get("tokens")
    what = 'from_metadata: column "tokens"'
    if tokens_N is None:
        raise ConfigError(what, got=f"columns {sorted(table.columns)}", limit="integers, (N,)")
    if tokens_N.ndim != 1 or tokens_N.dtype.kind not in "iu":
        got = f"{tokens_N.dtype} of shape {tokens_N.shape}"
        raise ConfigError(what, got=got, limit="integers of shape (N,)")
    _check_range(what, tokens_N)
    return table.with_columns(tokens=tokens_N.astype(np.int64))


def _table(columns: Any) -> Metadata:
    if not isinstance(columns, Mapping):
        names = getattr(columns, "column_names", getattr(columns, "columns", None))
        if names is None:
            raise ConfigError(
                "from_metadata(columns)",
                got=type(columns).__name__,
                limit="a mapping of columns, a data frame or a table",
            )
        columns = {name: columns[name] for name in names}
    arrays: dict[str, NDArray[Any]] = {}
    items: dict[str, Ragged] = {}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            items[name] = column
            continue
        values = _values(name, column)
        if values.ndim == 1 and len(values) and isinstance(values[0], list | tuple | np.ndarray):
            items[name] = _ragged(name, values)
        else:
            arrays[name] = values.astype(np.int64) if not values.size else values
    return Metadata(arrays, items)


def _values(name: str, column: Any) -> NDArray[Any]:
    """Return a column as an array; of objects where its entries are sequences."""
    if not isinstance(column, np.ndarray) and hasattr(column, "to_numpy"):
        try:
            column = column.to_numpy(zero_copy_only=False)  # Arrow
        except TypeError:
            column = column.to_numpy()
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, str) or not hasattr(column, "__len__"):
        raise ConfigError(
            f"from_metadata: column {name!r}", got=repr(column), limit="a sequence, one entry a row"
        )
    if any(isinstance(row, list | tuple | np.ndarray) for row in column):
        values = np.empty(len(column), object)
        values[:] = [[] if row is None else row for row in column]
        return values
    return np.asarray(column)


def _ragged(name: str, rows: NDArray[Any]) -> Ragged:
    """Return the lengths of the items of every row."""
    counts = np.array([len(row) for row in rows], np.int64)
    filled = [np.asarray(row) for row, count in zip(rows, counts, strict=True) if count]
    lengths = np.concatenate(filled) if filled else np.empty(0, np.int64)
    what = f"from_metadata: item lengths of {name!r}"
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        got = f"{lengths.dtype} of {lengths.ndim} dimensions"
        raise ConfigError(what, got=got, limit="a sequence of integers for every row")
    _check_range(what, lengths)
    return Ragged.counted(lengths.astype(np.int64), counts)


def _check_range(what: str, values: NDArray[Any]) -> None:
    if values.size and (values.min() < 0 or values.max() > MOST_TOKENS):
        bad = values.min() if values.min() < 0 else values.max()
        raise ConfigError(what, got=bad, limit=f"0 to {MOST_TOKENS}")
