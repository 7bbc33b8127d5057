"""Parquet: every row group is a shard."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megadask.planner.errors import ConfigError
from megadask.readers.columns import ColumnReader
from megadask.readers.files import Part, check_columns, check_has_columns, check_positive
from megadask.readers.footers import shared_footer
from megadask.readers.paths import DataFile, Paths
from megadask.readers.records import records, telling
from megadask.readers.spool import OpenShards, Spooled
from megadask.readers.storage import ARROW_ERRORS, is_storage_error, open_arrow
from megadask.scheduling.reading import BadRecord, Shard, told_columns

#: A request to remote storage costs more than these bytes.
_REMOTE_BUFFER_BYTES = 2**19


class Parquet(ColumnReader):
    """Read Parquet files, a few rows at a time.

    Parameters
    ----------
    paths
        A path, glob, brace list or fsspec URL, or several of them.
    columns
        Columns to read; all of them when None. Reading few saves most of the memory.
    batch_rows
        Rows decoded at a time.
    buffer_bytes
        Read buffer of each column, at least 512 KiB for remote files: it is what one request
        fetches. Memory is this and a data page for each column, and a batch.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        batch_rows: int = 16,
        buffer_bytes: int = 64 * 1024,
    ) -> None:
        check_positive("Parquet", batch_rows=batch_rows, buffer_bytes=buffer_bytes)
        self._columns = check_columns("Parquet", columns)
        self._batch_rows = batch_rows
        self._buffer_bytes = buffer_bytes
        self._open = OpenShards()
        super().__init__(
            paths, columns=self._columns, batch_rows=batch_rows, buffer_bytes=buffer_bytes
        )

    def _list(self, file: DataFile) -> list[Part]:
        try:
            with open_arrow(file.url, in_order=False) as source, pq.ParquetFile(source) as parquet:
                metadata, names = parquet.metadata, parquet.schema_arrow.names
        except (pa.ArrowNotImplementedError, *ARROW_ERRORS) as error:
            if is_storage_error(error):
                raise
            raise ConfigError(f"{file.url} is not a Parquet file: {error}") from error
        check_has_columns(file.url, self._columns, names)
        self._found[file.url] = tuple(names)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        # The sizes of compressed columns would add up exactly, but asking a damaged footer for a
        # column ends the process (pyarrow 26).
        whole = max(sum(group.total_byte_size for group in groups), 1)
        return [
            Part(
                file.url,
                Shard(
                    f"{file.name}#rg{index}",
                    group.num_rows,
                    (file.size_bytes or whole) * group.total_byte_size // whole,
                ),
                index,
            )
            for index, group in enumerate(groups)
        ]

    def _read(self, part: Part, start: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        row = start
        failure: Exception | None = None
        # Where a batch cannot be decoded its first rows may be: they are read again one by one, so
        # that the row where the shard breaks does not depend on the batches it was read in.
        for batch_rows in (self._batch_rows, 1):
            try:
                decoded = self._batches(part, row, batch_rows)
                with Spooled(decoded, (part.shard.rows or 0) - row, self._open) as batches:
                    for batch in batches:
                        for record in records(batch, row):
                            row += 1
                            yield record
            except ARROW_ERRORS as error:
                if is_storage_error(error):
                    raise
                failure = error
            else:
                failure = None
                break
        assert part.shard.rows is not None
        if failure is not None or row < part.shard.rows:
            raise part.truncated(row, failure or f"{part.shard.rows} rows expected") from failure

    def _batches(
        self, part: Part, start: int, batch_rows: int
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the row group from row ``start`` on."""
        is_remote = "://" in part.url
        buffer_bytes = max(self._buffer_bytes, _REMOTE_BUFFER_BYTES if is_remote else 0)
        with (
            # The columns lie apart, and what is read ahead of one would be dropped for the next.
            open_arrow(part.url, in_order=False) as source,
            pq.ParquetFile(
                source,
                metadata=(footer := shared_footer(part.url, source)),  # held while this is open
                buffer_size=buffer_bytes,
                pre_buffer=False,
                page_checksum_verification=True,
            ) as parquet,
        ):
            _check_unchanged(footer, part)
            told = told_columns(self._columns, parquet.schema_arrow.names)
            position = 0
            for batch in parquet.iter_batches(
                batch_rows, [part.index], columns=self._columns, use_threads=False
            ):
                skipped = min(max(start - position, 0), batch.num_rows)
                position += batch.num_rows
                if skipped < batch.num_rows:
                    yield telling(batch.slice(skipped), told)


def _check_unchanged(metadata: pq.FileMetaData, part: Part) -> None:
    groups = metadata.num_row_groups
    rows = metadata.row_group(part.index).num_rows if part.index < groups else None
    if rows != part.shard.rows:
        raise ConfigError(
            f"{part.shard.name} changed since it was listed",
            got=f"{rows} rows" if rows is not None else f"a file with {groups} row groups",
            limit=f"{part.shard.rows} rows",
            remedy="Start again with the new files, or restore the old ones.",
        )
