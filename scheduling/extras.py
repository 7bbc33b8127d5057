"""Columns that ride along with samples: from values to Arrow bytes and back. Never a pickle.

A sample's extras are one Arrow stream of one row, made where it is read, so that what comes out
does not depend on its neighbours. A microbatch carries those of its spans in one array of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError, StateError

Bytes = NDArray[np.uint8]

#: Marks the column of an array: a struct of its type, shape and numbers.
_ARRAY = {b"megadask": b"ndarray"}
_NAMES = b"megadask.extras"
#: Kinds of arrays that Arrow bytes hold: bool, integers, floats, complex, fixed texts and bytes.
_KINDS = "biufcUS"


def encode_row(values: Mapping[str, Any]) -> Bytes:
    """Return the extras of one sample as bytes; names whose value is None are left out.

    Takes texts, bytes, numbers, bools, lists and dicts of these, and arrays. Raises ConfigError
    naming the first that Arrow does not hold as it is.
    """
    import pyarrow as pa

    columns, fields = [], []
    for name, value in values.items():
        if value is None:
            continue
        column, metadata = _encoded(name, value)
        columns.append(column)
        fields.append(pa.field(name, column.type, metadata=metadata))
    if not columns:
        return np.empty(0, np.uint8)
    return _stream(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)))


def join_rows(names: Sequence[str], data: Bytes, offsets: NDArray[np.int64]) -> Bytes:
    """Return the extras of N spans as one array of bytes, for `decode`.

    data: the rows of `encode_row`, one after the other; offsets: (N + 1,), row n is
    ``data[offsets[n]:offsets[n + 1]]``, empty where its sample has none. names: all there may be.
    """
    import pyarrow as pa

    column = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    schema = pa.schema([pa.field("rows", pa.large_binary())], {_NAMES: json.dumps(list(names))})
    return _stream(pa.RecordBatch.from_arrays([column], schema=schema))


def decode(data: Bytes) -> dict[str, list[Any]]:
    """Invert `join_rows`: name to one value a span, None where its sample has none.

    Arrays own their memory. Raises StateError for other bytes.
    """
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            batch = reader.read_next_batch()
        names = json.loads(batch.schema.metadata[_NAMES])
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise StateError("these are no extras", got=f"{len(data)} bytes") from error
    extras: dict[str, list[Any]] = {name: [None] * batch.num_rows for name in names}
    for number, row in enumerate(batch.column(0)):
        for name, value in _decoded(row.as_buffer()):
            extras[name][number] = value
    return extras


def _stream(batch: Any) -> Bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return np.frombuffer(sink.getvalue(), np.uint8)


def _encoded(name: str, value: Any) -> tuple[Any, dict[bytes, bytes] | None]:
    """Return a column of one value, and what marks it."""
    import pyarrow as pa

    if isinstance(value, np.ndarray) and value.ndim:
        if value.dtype.kind not in _KINDS:
            raise _not_held(name, f"an array of {value.dtype}")
        parts = {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "data": np.ascontiguousarray(value).tobytes(),
        }
        kind = pa.struct(
            {"dtype": pa.string(), "shape": pa.list_(pa.int64()), "data": pa.large_binary()}
        )
        return pa.array([parts], kind), _ARRAY
    plain = _plain(value)
    try:
        column = pa.array([plain])
    except (pa.ArrowException, OverflowError) as error:
        raise _not_held(name, f"{type(value).__name__}: {error}") from error
    if not _same(column[0].as_py(), plain):
        raise _not_held(name, f"a {type(value).__name__} that comes back as another")
    return column, None


def _decoded(data: Any) -> list[tuple[str, Any]]:
    import pyarrow as pa

    if not data.size:
        return []
    with pa.ipc.open_stream(data) as reader:
        batch = reader.read_next_batch()
    values = []
    for number, field in enumerate(batch.schema):
        value = batch.column(number)[0].as_py()
        if field.metadata == _ARRAY:
            flat = np.frombuffer(value["data"], np.dtype(value["dtype"]))
            value = flat.reshape(value["shape"]).copy()
        values.append((field.name, value))
    return values


def _plain(value: Any) -> Any:
    """Return a value without numpy's own types, arrays within lists as lists."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether a value came back as it was; 1 and 1.0 are the same, a lost or added key is not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (one != one and other != other)


def _not_held(name: str, got: str) -> ConfigError:
    return ConfigError(
        f"a sample's extra {name!r}",
        got=got,
        limit="texts, bytes, numbers, bools, lists and dicts of one kind each, or arrays of them",
        remedy="Let the transform make it plain, for instance by json.dumps.",
    )
