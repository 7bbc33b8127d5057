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

    arrays: dict[str, Any] = {name: pa.array(column) for name, column in table.columns.items()}
    for name, ragged in table.ragged.items():
        arrays[f"{_ITEMS}{name}"] = pa.LargeListArray.from_arrays(
            pa.array(ragged.offsets), pa.array(ragged.lengths_I)
        )
    head = json.dumps({"kind": kind, "version": version, **header})
    metadata: dict[str, Any] = {"megadask": head}
    metadata |= {f"{_PART}{name}": data for name, data in (parts or {}).items()}
    batch = pa.RecordBatch.from_pydict(arrays).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


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
