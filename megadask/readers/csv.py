"""Comma-separated values: every file is a shard, every row of it a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

from megadask.planner.errors import ConfigError
from megadask.readers.columns import ColumnReader
from megadask.readers.compression import decompress
from megadask.readers.files import Part, check_columns, check_positive
from megadask.readers.lines import (
    MAX_RECORD_BYTES,
    Decode,
    LineReader,
    Raw,
    lines,
    without_mark,
)
from megadask.readers.paths import DataFile, Paths
from megadask.readers.storage import BrokenData, chunks, open_binary
from megadask.scheduling.reading import BadRecord, new_record, told_columns

FieldType = Literal["str", "int", "float", "bool"]


def _bool(text: str) -> bool:
    try:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    except KeyError:
        raise ValueError(text) from None


_CONVERT: dict[FieldType, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _bool,
}


class Csv(ColumnReader, LineReader):
    """Read CSV as RFC 4180 has it, plain or compressed (``.gz``, ``.zst``).

    Fields may be quoted, and then hold delimiters, line ends and doubled quotes. Empty lines are
    passed over.

    Parameters
    ----------
    paths
        A path, glob, brace list or fsspec URL, or several of them.
    columns
        Columns to keep; all of them when None.
    types
        Column to ``"str"`` (where it is not named), ``"int"``, ``"float"`` or ``"bool"``. An
        empty field of another type than str is None.
    names
        Names of the columns in files that do not begin with them.
    delimiter
        What parts the fields, one ASCII character.
    max_record_bytes
        A longer row is a bad record, and so is what a quote opens that is never closed.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        types: Mapping[str, FieldType] | None = None,
        names: Sequence[str] | None = None,
        delimiter: str = ",",
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        check_positive("Csv", max_record_bytes=max_record_bytes)
        if isinstance(names, str):
            raise ConfigError("Csv(names=)", got=repr(names), limit="a list of names")
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
            raise ConfigError("Csv(delimiter=)", got=repr(delimiter), limit="one ASCII character")
        self._types = dict(types or {})
        unknown = {name: kind for name, kind in self._types.items() if kind not in _CONVERT}
        if unknown:
            raise ConfigError("Csv(types=)", got=unknown, limit=f"some of {get_args(FieldType)}")
        self._columns = check_columns("Csv", columns)
        self._names = None if names is None else list(names)
        self._delimiter = delimiter.encode()
        self._max_record_bytes = max_record_bytes
        super().__init__(
            paths,
            columns=self._columns,
            types=self._types,
            names=self._names,
            delimiter=delimiter,
            max_record_bytes=max_record_bytes,
        )

    def _list(self, file: DataFile) -> list[Part]:
        parts = super()._list(file)
        with open_binary(file.url) as raw:
            plain = decompress(chunks(raw, None), file.url)
            try:
                header = self._header(self._cut(without_mark(plain)))
                self._decoder_of(header)
            except BrokenData as error:
                raise ConfigError(f"{file.url} is not a CSV file: {error}") from error
            except ConfigError as error:
                raise ConfigError(
                    f"{file.url}: {error.what}", got=error.got, limit=error.limit
                ) from error
        self._found[file.url] = tuple(header)
        return parts

    def _cut(self, plain: Iterator[bytes]) -> Iterator[Raw]:
        return _rows(lines(plain, self._max_record_bytes), self._delimiter, self._max_record_bytes)

    def _decoder(self, records: Iterator[Raw]) -> Decode:
        return self._decoder_of(self._header(records))

    def _decoder_of(self, header: list[str]) -> Decode:
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise ConfigError("two columns have one name", got=twice)
        wanted = header if self._columns is None else self._columns
        needed = [] if self._is_projected else dict.fromkeys([*wanted, *self._types])
        missing = [name for name in needed if name not in header]
        # A file without a single line has no columns, and no rows that lack them.
        if missing and header:
            raise ConfigError("it lacks columns", got=missing, limit=f"some of {header}")
        fields = [
            (name, header.index(name), self._types.get(name, "str"))
            for name in wanted
            if name in header
        ]
        told = told_columns(self._columns, header)
        return partial(_decode, self._delimiter, len(header), fields, told)

    def _header(self, records: Iterator[Raw]) -> list[str]:
        if self._names is not None:
            return self._names
        number, data = next(records, (0, b""))
        if not number:
            return []
        if data is None:
            raise ConfigError("its first line is longer than max_record_bytes")
        try:
            return [field.decode() for field in _split(data, self._delimiter)]
        except ValueError as error:
            raise ConfigError(f"its first line does not name its columns: {error}") from error


def _decode(
    delimiter: bytes,
    num_fields: int,
    wanted: Sequence[tuple[str, int, FieldType]],
    told: Sequence[str] | None,
    data: bytes | None,
    number: int,
) -> Mapping[str, Any] | BadRecord:
    if data is None:
        return BadRecord(f"line {number}: longer than max_record_bytes")
    try:
        fields = _split(data, delimiter)
    except ValueError as error:
        return BadRecord(f"line {number}: {error}")
    if len(fields) != num_fields:
        return BadRecord(f"line {number}: {len(fields)} fields, expected {num_fields}")
    record = new_record(told)
    for name, index, kind in wanted:
        field = fields[index]
        try:
            record[name] = None if kind != "str" and not field else _CONVERT[kind](field.decode())
        except UnicodeDecodeError as error:
            return BadRecord(
                f"line {number}: column {name!r}: invalid UTF-8 at byte {error.start} of the field"
            )
        except ValueError:
            return BadRecord(f"line {number}: column {name!r}: {field[:50]!r} is not {kind}")
    return record


def _rows(found: Iterator[bytes | None], delimiter: bytes, max_record_bytes: int) -> Iterator[Raw]:
    """Put the lines of each row together: a quoted field may hold line ends."""
    row: list[bytes] = []
    first, size_bytes, is_open = 0, 0, False
    for number, line in enumerate(found, 1):
        if line is not None and not is_open and not line.strip(b"\r"):
            continue
        first = first or number
        # What follows a line that is too long is taken for a new row: its quotes were not seen.
        is_open = line is not None and _is_open(line, delimiter, is_open)
        size_bytes += max_record_bytes + 1 if line is None else len(line) + bool(row)
        if size_bytes > max_record_bytes:
            row.clear()
        else:
            assert line is not None
            row.append(line)
        if not is_open:
            yield first, None if size_bytes > max_record_bytes else _joined(row)
            row, first, size_bytes = [], 0, 0
    if first:
        yield first, None if size_bytes > max_record_bytes else _joined(row)


def _joined(row: Sequence[bytes]) -> bytes:
    return b"\n".join(row).removesuffix(b"\r")


def _is_open(line: bytes, delimiter: bytes, is_open: bool) -> bool:
    """Whether a quoted field goes on behind the line; ``is_open``: whether it began before it."""
    if b'"' not in line:
        return is_open
    position = 0
    while True:
        if not is_open and line.startswith(b'"', position):
            is_open, position = True, position + 1
        if is_open:
            position = _closing(line, position) + 1
            if not position:
                return True
            is_open = False
        position = line.find(delimiter, position) + 1
        if not position:
            return False


def _closing(data: bytes, position: int) -> int:
    """Return where the quote stands that closes a field, -1 where there is none."""
    while (quote := data.find(b'"', position)) >= 0:
        if not data.startswith(b'"', quote + 1):
            return quote
        position = quote + 2
    return -1


def _split(data: bytes, delimiter: bytes) -> list[bytes]:
    """Return the fields of a row; raises ValueError where its quotes do not fit."""
    if b'"' not in data:
        return data.split(delimiter)
    fields = []
    position = 0
    while True:
        if data.startswith(b'"', position):
            stop = _closing(data, position + 1)
            if stop < 0:
                raise ValueError("a quoted field is not closed")
            fields.append(data[position + 1 : stop].replace(b'""', b'"'))
            stop += 1
            if stop < len(data) and not data.startswith(delimiter, stop):
                raise ValueError(f"field {len(fields)} goes on behind its closing quote")
        else:
            stop = data.find(delimiter, position)
            stop = len(data) if stop < 0 else stop
            fields.append(data[position:stop])
        if stop == len(data):
            return fields
        position = stop + 1
