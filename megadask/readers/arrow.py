"""Arrow IPC: a shard is a record batch of a file, or the whole of a stream."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from megadask.planner.errors import ConfigError
from megadask.readers.columns import ColumnReader
from megadask.readers.files import Part, check_columns, check_has_columns
from megadask.readers.ipc_footer import MAGIC, Block, blocks
from megadask.readers.paths import DataFile, Paths
from megadask.readers.records import records, telling
from megadask.readers.storage import ARROW_ERRORS, is_storage_error, open_arrow
from megadask.scheduling.reading import BadRecord, Shard, told_columns


class ArrowIpc(ColumnReader):
    """Read Arrow IPC: the file format (Feather V2), the stream format, or a mix of both.

    Memory is one record batch, as the writer cut them. Nothing is mapped into memory, since a
    mapped file that shrinks kills the process.

    Parameters
    ----------
    paths
        A path, glob, brace list or fsspec URL, or several of them.
    columns
        Columns to make records of; all of them when None. Of a file the others are not read, of a
        stream they are read and dropped.
    """

    def __init__(self, paths: Paths, columns: Sequence[str] | None = None) -> None:
        self._columns = check_columns(type(self).__name__, columns)
        super().__init__(paths, columns=self._columns)

    def _list(self, file: DataFile) -> list[Part]:
        try:
            with open_arrow(file.url) as source:
                names, batches = self._inspect(source)
        except (ValueError, pa.ArrowNotImplementedError, *ARROW_ERRORS) as error:
            if is_storage_error(error):
                raise
            raise ConfigError(
                f"{file.url} is neither an Arrow file nor a stream: {error}"
            ) from error
        check_has_columns(file.url, self._columns, names)
        self._found[file.url] = tuple(names)
        if batches is None:
            return [Part(file.url, Shard(file.name, None, file.size_bytes))]
        return [
            Part(file.url, Shard(f"{file.name}#batch{index}", *block), index)
            for index, block in enumerate(batches)
        ]

    def _inspect(self, source: pa.NativeFile) -> tuple[list[str], list[Block] | None]:
        """Return the names of the columns, and the record batches unless it is a stream."""
        is_file = source.read(len(MAGIC)) == MAGIC
        batches = blocks(source) if is_file else None
        source.seek(0)
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source) as reader:
            return reader.schema.names, batches

    def _options_for(
        self, source: pa.NativeFile, part: Part
    ) -> tuple[pa.ipc.IpcReadOptions, Sequence[str] | None]:
        """Return what leaves out the bytes of columns that are not read, and what to tell."""
        included: list[int] = []
        told = None
        if self._columns is not None:
            with (pa.ipc.open_stream if part.index < 0 else pa.ipc.open_file)(source) as reader:
                names = reader.schema.names
            told = told_columns(self._columns, names)
            included = [i for i, name in enumerate(names) if name in self._columns]
            source.seek(0)
        return pa.ipc.IpcReadOptions(included_fields=included), told

    def _read(self, part: Part, start: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        position = 0
        with open_arrow(part.url) as source:
            try:
                options, told = self._options_for(source, part)
                batches = (_stream if part.index < 0 else _file)(source, part, options)
                for batch in batches:
                    first = max(start - position, 0)
                    if self._columns is not None:
                        batch = batch.select(_present(self._columns, batch))
                    if first < batch.num_rows:
                        yield from _checked(telling(batch.slice(first), told), position + first)
                    position += batch.num_rows
            except ARROW_ERRORS as error:
                if is_storage_error(error):
                    raise
                raise part.truncated(max(position, start), error) from error


def _present(columns: Sequence[str], batch: pa.RecordBatch) -> list[str]:
    return [name for name in columns if name in batch.schema.names]


def _file(
    source: pa.NativeFile, part: Part, options: pa.ipc.IpcReadOptions
) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_file(source, options=options) as reader:
        count = reader.num_record_batches
        batch = reader.get_batch(part.index) if part.index < count else None
    rows = None if batch is None else batch.num_rows
    if rows != part.shard.rows:
        raise ConfigError(
            f"{part.shard.name} changed since it was listed",
            got=f"{rows} rows" if rows is not None else f"a file with {count} record batches",
            limit=f"{part.shard.rows} rows",
            remedy="Start again with the new files, or restore the old ones.",
        )
    yield batch


def _stream(
    source: pa.NativeFile, part: Part, options: pa.ipc.IpcReadOptions
) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_stream(source, options=options) as reader:
        yield from reader
    # A stream may lack its end marker, so one cut between batches looks complete.
    size_bytes = source.size()
    if part.shard.size_bytes is not None and size_bytes < part.shard.size_bytes:
        raise pa.ArrowInvalid(f"the file has {size_bytes} of {part.shard.size_bytes} bytes")


def _checked(batch: pa.RecordBatch, first_row: int) -> Iterator[Mapping[str, Any] | BadRecord]:
    """Yield the records of a batch that came from storage: broken offsets would crash Arrow."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        pass
    else:
        yield from records(batch, first_row)
        return
    for row in range(batch.num_rows):
        single = batch.slice(row, 1)
        try:
            single.validate(full=True)
        except pa.ArrowInvalid as error:
            yield BadRecord(f"row {first_row + row}: {error}")
        else:
            yield from records(single, first_row + row)
