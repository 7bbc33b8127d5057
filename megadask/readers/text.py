"""Plain text: a record is a line, a block of lines, or a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

from megadask.planner.errors import ConfigError
from megadask.readers.files import Part, check_positive
from megadask.readers.lines import (
    MAX_RECORD_BYTES,
    Decode,
    LineReader,
    Raw,
    filled_lines,
    lines,
)
from megadask.readers.paths import DataFile, Paths
from megadask.scheduling.reading import BadRecord

RecordKind = Literal["line", "block", "file"]


class Text(LineReader):
    """Read UTF-8 text, plain or compressed (``.gz``, ``.zst``); a record is ``{column: text}``.

    Parameters
    ----------
    paths
        A path, glob, brace list or fsspec URL, or several of them. Every file is a shard.
    record
        ``"line"``: every line that is not blank, without its end. ``"block"``: lines up to the
        next blank one. ``"file"``: the whole file, also an empty one.
    column
        Name of the text in its record.
    max_record_bytes
        A longer record is a bad one: without a limit, a file of something else fills the memory.
    """

    def __init__(
        self,
        paths: Paths,
        record: RecordKind = "line",
        *,
        column: str = "text",
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        check_positive("Text", max_record_bytes=max_record_bytes)
        if record not in get_args(RecordKind):
            raise ConfigError(
                "Text(record=)", got=repr(record), limit=f"one of {get_args(RecordKind)}"
            )
        if not isinstance(column, str) or not column:
            raise ConfigError("Text(column=)", got=repr(column), limit="a name")
        self._record, self._column, self._max_record_bytes = record, column, max_record_bytes
        super().__init__(paths, record=record, column=column, max_record_bytes=max_record_bytes)

    def _list(self, file: DataFile) -> list[Part]:
        (part,) = super()._list(file)
        rows = 1 if self._record == "file" else None
        return [replace(part, shard=replace(part.shard, rows=rows))]

    def _cut(self, plain: Iterator[bytes]) -> Iterator[Raw]:
        cut = {"line": filled_lines, "block": _blocks, "file": _whole}[self._record]
        return cut(plain, self._max_record_bytes)

    def _decoder(self, records: Iterator[Raw]) -> Decode:
        return partial(_decode, self._column)


def _decode(column: str, data: bytes | None, number: int) -> Mapping[str, Any] | BadRecord:
    if data is None:
        return BadRecord(f"line {number}: longer than max_record_bytes")
    try:
        return {column: data.removesuffix(b"\r").decode()}
    except UnicodeDecodeError as error:
        return BadRecord(
            f"line {number + data.count(10, 0, error.start)}: invalid UTF-8 at byte {error.start} "
            "of the record"
        )


def _blocks(plain: Iterator[bytes], max_bytes: int) -> Iterator[Raw]:
    block: list[bytes] = []
    first, size_bytes = 0, 0
    for number, line in enumerate(lines(plain, max_bytes), 1):
        if line is not None and not line.strip():
            if first:
                yield first, None if size_bytes > max_bytes else b"\n".join(block)
            block, first, size_bytes = [], 0, 0
            continue
        first = first or number
        size_bytes += max_bytes + 1 if line is None else len(line) + bool(block)
        if size_bytes > max_bytes:
            block.clear()
        else:
            assert line is not None
            block.append(line)
    if first:
        yield first, None if size_bytes > max_bytes else b"\n".join(block)


def _whole(plain: Iterator[bytes], max_bytes: int) -> Iterator[Raw]:
    data = bytearray()
    too_long = False
    for chunk in plain:
        too_long = too_long or len(data) + len(chunk) > max_bytes
        if too_long:
            data.clear()
        else:
            data += chunk
    yield 1, None if too_long else bytes(data)
