"""From Arrow to records: dicts of Python objects, with numeric lists as numpy arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from megadask.scheduling.reading import BadRecord, new_record

#: Marks the schema of batches whose file lacks columns that were asked for: those that it has.
_TOLD = b"megadask.file_columns"


def telling(batch: pa.RecordBatch, file_columns: Sequence[str] | None) -> pa.RecordBatch:
    """Return a batch whose records know what their file has; None where they lack nothing."""
    if file_columns is None:
        return batch
    return batch.replace_schema_metadata({_TOLD: json.dumps(list(file_columns))})


def records(batch: pa.RecordBatch, first_row: int) -> Iterator[Mapping[str, Any] | BadRecord]:
    """Yield the records of a batch one at a time, owning their memory.

    A list of numbers without nulls becomes a numpy array, anything else what ``as_py`` makes of it.
    ``first_row`` is the row of the shard that the batch starts at, for the reasons of bad records.
    """
    columns = [
        (field.name, column, _is_numeric_list(field.type))
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    told = (batch.schema.metadata or {}).get(_TOLD)
    file_columns = None if told is None else json.loads(told)
    for row in range(batch.num_rows):
        record = new_record(file_columns)
        try:
            for name, column, numeric in columns:
                record[name] = _array(column[row]) if numeric else column[row].as_py()
        except (ValueError, OverflowError, IndexError) as error:
            # Not UTF-8, no such date, or an index that its dictionary lacks.
            yield BadRecord(f"row {first_row + row}: column {name!r}: {error}")
        else:
            yield record


def _is_numeric_list(kind: pa.DataType) -> bool:
    is_list = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    return bool(is_list) and bool(
        pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)
    )


def _array(scalar: Any) -> Any:
    if not scalar.is_valid or scalar.values.null_count:
        return scalar.as_py()
    # A copy: a view would keep the whole batch alive for as long as the record.
    return scalar.values.to_numpy(zero_copy_only=False).copy()
