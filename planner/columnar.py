"""Tables of plans as Arrow IPC streams, with a versioned JSON header; never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import StateError
from megadask.planner.metadata import Metadata, Ragged

_ITEMS = "items:"
_PART = "part:"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow IPC stream


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
    """Writes parts of one table, some rows each; `read` reads them.

    For many small parts: what all of them have in common is made once.

    Parameters
    ----------
    kind, version, table, header
        As of `write`.
    """

    def __init__(self, kind: str, version: int, table: Metadata, header: Mapping[str, Any]) -> None:
        names_of: dict[Any, list[str]] = {}
        for name, column in table.columns.items():
            names_of.setdefault(column.dtype, []).append(name)
        # A row of a block lies together: columns apart would be gathered one by one.
        self._blocks = [
            (names, np.stack([table[name] for name in names], axis=1))
            for names in names_of.values()
        ]
        self._empty = table.take(np.empty(0, np.int64))
        self._ragged = table.ragged
        self._metadata = _metadata(kind, version, header, {})
        self._schema: bytes = _batch(self._empty, self._metadata).schema.serialize().to_pybytes()

    def cut(self, rows: NDArray[np.int64]) -> bytes:
        """Return some rows as `write` would."""
        columns = dict(self._empty.columns)  # in their order
        for names, block in self._blocks:
            columns.update(zip(names, np.ascontiguousarray(block[rows].T), strict=True))
        ragged = {name: items.take(rows) for name, items in self._ragged.items()}
        batch = _batch(Metadata(columns, ragged), self._metadata)
        return self._schema + bytes(batch.serialize()) + _END


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
    if (header.pop("kind", None), header.pop("version", None)) != (kind, version):
        found = json.loads(batch.schema.metadata[b"megadask"])
        raise StateError(
            f"this is another kind or version of {kind}",
            got=f"{found.get('kind')} {found.get('version')}",
            limit=f"{kind} {version}",
            remedy="Read it with the MegaDask version that wrote it.",
        )
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
