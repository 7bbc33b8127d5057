"""Tables of plans as Arrow IPC streams, with a versioned JSON header; never a pickle.

Parts of a table that are only passed on are rows of bytes, with such a header, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import StateError
from megadask.planner.metadata import Metadata, Ragged

_ITEMS = "items:"
_PART = "part:"


def write(
    kind: str,
    version: int,
    table: Metadata,
    header: Mapping[str, Any],
    parts: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return a table, a JSON header and parts (streams of their own) as one Arrow IPC stream.

    The same arguments give the same bytes. `read` inverts it.
    """
    import pyarrow as pa

    batch = _batch(table, _metadata(kind, version, header, parts or {}))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


class Cutter:
    """Writes parts of one table, some rows each; `read_cut` reads them.

    For many small parts that are read at once and kept nowhere: what they have in common is made
    once, and integers travel in the smallest type that holds all of their column.

    Parameters
    ----------
    kind, version, table, header
        As of `write`.
    """

    def __init__(self, kind: str, version: int, table: Metadata, header: Mapping[str, Any]) -> None:
        dtype = [(name, _narrow(column).str) for name, column in table.columns.items()]
        # A row lies together: columns apart would be gathered one by one.
        self._rows = np.empty(table.num_rows, dtype)
        for name, column in table.columns.items():
            self._rows[name] = column
        self._ragged = table.ragged
        types = [column.dtype.str for column in table.columns.values()]
        about = {"kind": kind, "version": version, "dtype": dtype, "types": types}
        head = {**about, "items": list(table.ragged), "header": header}
        self._head = json.dumps(head).encode()

    def cut(self, rows: NDArray[np.int64]) -> bytes:
        """Return some rows."""
        parts = [self._head, self._rows[rows].tobytes()]
        for items in self._ragged.values():
            own = items.take(rows)
            parts += [own.offsets.tobytes(), own.lengths_I.tobytes()]
        sizes = np.array([len(parts), *map(len, parts)], np.int64)
        return b"".join([sizes.tobytes(), *parts])


def read_cut(kind: str, version: int, data: bytes) -> tuple[Metadata, dict[str, Any]]:
    """Return (table, header) of what `Cutter.cut` has made.

    Raises StateError for another kind or version.
    """
    count = int(np.frombuffer(data, np.int64, 1)[0])
    sizes = np.frombuffer(data, np.int64, count, offset=8).tolist()
    ends = np.cumsum([8 * (count + 1), *sizes]).tolist()
    head_data, row_data, *item_data = (data[begin:end] for begin, end in pairwise(ends))
    head = json.loads(head_data)
    _check(kind, version, head)
    rows = np.frombuffer(row_data, [(name, dtype) for name, dtype in head["dtype"]])
    columns = {
        name: rows[name].astype(dtype)
        for name, dtype in zip(rows.dtype.names or (), head["types"], strict=True)
    }
    arrays = [np.frombuffer(part, np.int64) for part in item_data]
    items = zip(head["items"], arrays[1::2], arrays[::2], strict=True)
    return Metadata(columns, {name: Ragged(*own) for name, *own in items}), head["header"]


def _narrow(column: NDArray[Any]) -> np.dtype[Any]:
    """Return the smallest type that holds every value of a column of integers."""
    if column.dtype.kind not in "iu" or not column.size:
        return column.dtype
    return np.result_type(*(np.min_scalar_type(int(end)) for end in (column.min(), column.max())))


def _check(kind: str, version: int, head: dict[str, Any]) -> None:
    """Take kind and version from a header. Raises StateError if they are others."""
    found = (head.pop("kind", None), head.pop("version", None))
    if found != (kind, version):
        raise StateError(
            f"this is another kind or version of {kind}",
            got=f"{found[0]} {found[1]}",
            limit=f"{kind} {version}",
            remedy="Read it with the MegaDask version that wrote it.",
        )


def _metadata(
    kind: str, version: int, header: Mapping[str, Any], parts: Mapping[str, bytes]
) -> dict[str, Any]:
    head = json.dumps({"kind": kind, "version": version, **header})
    return {"megadask": head, **{f"{_PART}{name}": data for name, data in parts.items()}}


def _batch(table: Metadata, metadata: Mapping[str, Any]) -> Any:
    """Return a table as an Arrow record batch."""
    import pyarrow as pa

    arrays: dict[str, Any] = {name: pa.array(column) for name, column in table.columns.items()}
    for name, ragged in table.ragged.items():
        arrays[f"{_ITEMS}{name}"] = pa.LargeListArray.from_arrays(
            pa.array(ragged.offsets), pa.array(ragged.lengths_I)
        )
    return pa.RecordBatch.from_pydict(arrays).replace_schema_metadata(metadata)


def read(kind: str, version: int, data: bytes) -> tuple[Metadata, dict[str, Any], dict[str, bytes]]:
    """Return (table, header, parts). Raises StateError for anything but this kind and version."""
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(data) as reader:
            batch = reader.read_all().combine_chunks()
        header = json.loads(batch.schema.metadata[b"megadask"])
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is not a {kind}", got=f"{len(data)} bytes") from error
    _check(kind, version, header)
    columns: dict[str, NDArray[Any]] = {}
    items: dict[str, Ragged] = {}
    for name in batch.column_names:
        column = batch.column(name).combine_chunks()
        if name.startswith(_ITEMS):
            lengths, offsets = (np.asarray(part) for part in (column.values, column.offsets))
            items[name.removeprefix(_ITEMS)] = Ragged(lengths, offsets)
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    parts = {
        name.decode().removeprefix(_PART): value
        for name, value in batch.schema.metadata.items()
        if name.startswith(_PART.encode())
    }
    return Metadata(columns, items), header, parts
