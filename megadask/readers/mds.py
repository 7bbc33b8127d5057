"""Mosaic Data Shards (MDS), read-only: every shard of an ``index.json`` is a shard."""

from __future__ import annotations

import posixpath
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.readers.columns import ColumnReader
from megadask.readers.compression import is_compressed
from megadask.readers.files import Part, check_columns, check_has_columns, check_positive
from megadask.readers.forward import Forward, open_forward
from megadask.readers.index_file import field, read_index
from megadask.readers.lines import MAX_RECORD_BYTES
from megadask.readers.mds_columns import decoder
from megadask.readers.paths import DataFile, Paths, below, expand
from megadask.readers.storage import BrokenData
from megadask.scheduling.reading import BadRecord, Shard, new_record, told_columns

_INDEX = "index.json"
_SIZE = np.dtype("<u4")


@dataclass(frozen=True)
class MdsPart(Part):
    """An MDS shard.

    Attributes
    ----------
    columns
        Name, encoding and fixed size in bytes (or None) of each column, in the order of storage.
    file_bytes
        Size of its file.
    """

    columns: tuple[tuple[str, str, int | None], ...] = ()
    file_bytes: int | None = None


class Mds(ColumnReader):
    """Read folders that Streaming's ``MDSWriter`` wrote, plain or compressed (gz, zstd).

    ``jpeg`` and ``png`` columns stay bytes, for `megadask.transforms.DecodeImage`. Hashes are not
    checked.

    Parameters
    ----------
    paths
        A folder with an ``index.json``, or several, as paths, globs, brace lists or fsspec URLs.
    columns
        Columns to decode; all of them when None.
    max_record_bytes
        A longer record is a bad one, and is not read.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        check_positive("Mds", max_record_bytes=max_record_bytes)
        self._columns = check_columns("Mds", columns)
        self._max_record_bytes = max_record_bytes
        super().__init__(paths, columns=self._columns, max_record_bytes=max_record_bytes)

    def _files(self) -> list[DataFile]:
        return expand(posixpath.join(pattern, _INDEX) for pattern in self._patterns)

    def _list(self, file: DataFile) -> list[Part]:
        index = read_index(file.url)
        if index.get("version") != 2:
            raise ConfigError(f"{file.url}: version", got=repr(index.get("version")), limit="2")
        files = {found.name: found for found in below(posixpath.dirname(file.url))}
        return [self._part(shard, file, files) for shard in field(index, "shards", list, file.url)]

    def _part(self, shard: Any, index: DataFile, files: Mapping[str, DataFile]) -> MdsPart:
        shard = shard if isinstance(shard, dict) else {}
        if shard.get("format") != "mds" or shard.get("version") != 2:
            raise ConfigError(
                f"{index.url}: a shard of another kind",
                got=f"format {shard.get('format')!r}, version {shard.get('version')!r}",
                limit="format 'mds', version 2",
            )
        names = field(shard, "column_names", list, index.url)
        encodings = field(shard, "column_encodings", list, index.url)
        sizes = field(shard, "column_sizes", list, index.url)
        if not len(names) == len(encodings) == len(sizes):
            raise ConfigError(f"{index.url}: columns do not fit", got=[names, encodings, sizes])
        check_has_columns(index.url, self._columns, names)
        for name, encoding in zip(names, encodings, strict=True):
            if self._columns is None or name in self._columns:
                decoder(encoding)
        raw = field(shard, "raw_data", dict, index.url)
        stored = _stored(raw, shard.get("zip_data"), index, files)
        name = posixpath.join(posixpath.dirname(index.name), field(raw, "basename", str, index.url))
        rows, size_bytes = (
            field(shard, "samples", int, index.url),
            field(raw, "bytes", int, index.url),
        )
        self._found.setdefault(stored.url, tuple(names))
        return MdsPart(
            stored.url,
            Shard(name, rows, size_bytes),
            columns=tuple(zip(names, encodings, sizes, strict=True)),
            file_bytes=stored.size_bytes,
        )

    def _read(self, part: Part, start: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        assert isinstance(part, MdsPart)
        told = told_columns(self._columns, [name for name, *_ in part.columns])
        columns = [
            (name, decoder(encoding) if self._columns is None or name in self._columns else None)
            for name, encoding, _ in part.columns
        ]
        sizes = [size for _, _, size in part.columns]
        row = start
        with open_forward(part.url, part.file_bytes) as source:
            try:
                bounds = _bounds(source, part, start)
                for i in range(len(bounds) - 1):
                    data = self._data(source, int(bounds[i]), int(bounds[i + 1]))
                    yield (
                        BadRecord(f"row {row}: {data}")
                        if isinstance(data, str)
                        else _record(data, columns, sizes, row, told)
                    )
                    row += 1
            except BrokenData as error:
                raise part.truncated(row, str(error)) from error

    def _data(self, source: Forward, first: int, stop: int) -> bytes | str:
        """Return the bytes of a record, or why there are none."""
        if not source.position <= first <= stop:
            return f"it lies from byte {first} to {stop}"
        if stop - first > self._max_record_bytes:
            return "longer than max_record_bytes"
        source.skip_to(first)
        return source.read(stop - first)


def _stored(
    raw: Mapping[str, Any], packed: Any, index: DataFile, files: Mapping[str, DataFile]
) -> DataFile:
    """Return the file of a shard: as it is if it is there, else compressed."""
    names = [field(data, "basename", str, index.url) for data in (raw, packed) if data]
    found = next((files[name] for name in names if name in files), None)
    if found is None:
        raise ConfigError(f"there is no file {names[-1]!r}, which {index.url} names")
    if found.name != names[0] and not is_compressed(found.name):
        raise ConfigError(
            f"{found.url} has a compression that is not supported",
            limit="gz or zstd",
            remedy="Decompress the shards, or write them with compression='zstd'.",
        )
    return found


def _bounds(source: Forward, part: MdsPart, start: int) -> NDArray[np.uint32]:
    """Return where the records from ``start`` on begin, and where the last one ends, in bytes."""
    (rows,) = np.frombuffer(source.read(_SIZE.itemsize), _SIZE).tolist()
    if rows != part.shard.rows:
        raise ConfigError(
            f"{part.shard.name} changed since it was listed",
            got=f"{rows} rows",
            limit=f"{part.shard.rows} rows",
            remedy="Start again with the new files, or restore the old ones.",
        )
    start = min(start, rows)
    source.skip_to((1 + start) * _SIZE.itemsize)
    table = source.read((rows + 1 - start) * _SIZE.itemsize)
    return np.frombuffer(table, _SIZE)


def _record(
    data: bytes,
    columns: Sequence[tuple[str, Any]],
    fixed: Sequence[int | None],
    row: int,
    told: Sequence[str] | None,
) -> Mapping[str, Any] | BadRecord:
    position = 0
    sizes = []
    for size in fixed:
        if not size:
            head = data[position : position + _SIZE.itemsize]
            size = int.from_bytes(head, "little")
            position += _SIZE.itemsize
        sizes.append(size)
    if position + sum(sizes) != len(data):
        return BadRecord(f"row {row}: {len(data)} bytes, its columns take {position + sum(sizes)}")
    record = new_record(told)
    for (name, decode), size in zip(columns, sizes, strict=True):
        if decode is not None:
            try:
                record[name] = decode(data[position : position + size])
            except (ValueError, RecursionError) as error:
                return BadRecord(f"row {row}: column {name!r}: {error}")
        position += size
    return record
