"""JSON lines: every file is a shard, every line that is not blank a record."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from megadask.readers.compression import check_suffix, decompress
from megadask.readers.files import FileReader, Part, check_positive
from megadask.readers.paths import DataFile, Paths
from megadask.readers.storage import BrokenData, chunks, open_binary
from megadask.scheduling.reading import BadRecord, Shard

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Jsonl(FileReader):
    """Read files of one JSON object a line, plain or compressed (``.gz``, ``.zst``).

    Parameters
    ----------
    paths
        A path, glob, brace list or fsspec URL, or several of them.
    max_line_bytes
        A longer line is a bad record: without a limit, a file of something else fills the memory.
    """

    def __init__(self, paths: Paths, *, max_line_bytes: int = 256 * 2**20) -> None:
        check_positive("Jsonl", max_line_bytes=max_line_bytes)
        self._max_line_bytes = max_line_bytes
        super().__init__(paths, max_line_bytes=max_line_bytes)

    def _list(self, file: DataFile) -> list[Part]:
        check_suffix(file.name)
        return [Part(file.url, Shard(file.name, None, file.size_bytes))]

    def _read(self, part: Part, start: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        row = 0
        with open_binary(part.url) as raw:
            plain = decompress(chunks(raw, part.shard.size_bytes), part.url)
            try:
                for number, line in enumerate(_lines(plain, self._max_line_bytes), 1):
                    if line is not None and not line.strip():
                        continue
                    row += 1
                    if row > start:
                        yield _record(line, number)
            except BrokenData as error:
                raise part.truncated(row, str(error)) from error


def _lines(plain: Iterator[bytes], max_line_bytes: int) -> Iterator[bytes | None]:
    """Yield the lines, None for each that is too long."""
    pending = bytearray()
    too_long = False
    for chunk in _without_mark(plain):
        first, *others = chunk.split(b"\n")
        if not too_long:
            pending += first
        for following in others:
            too_long = too_long or len(pending) > max_line_bytes
            yield None if too_long else bytes(pending)
            too_long = False
            pending = bytearray(following)
        if len(pending) > max_line_bytes:
            too_long = True
            pending.clear()
    if too_long or pending:
        yield None if too_long else bytes(pending)


def _without_mark(plain: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same bytes, less the byte order mark that some editors put first."""
    for chunk in plain:
        yield chunk.removeprefix(_BYTE_ORDER_MARK)
        break
    yield from plain


def _record(line: bytes | None, number: int) -> Mapping[str, Any] | BadRecord:
    if line is None:
        return BadRecord(f"line {number}: longer than max_line_bytes")
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRecord(f"line {number}: invalid UTF-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return BadRecord(f"line {number}: invalid JSON: {error}")
    if not isinstance(value, dict):
        return BadRecord(f"line {number}: a JSON {type(value).__name__}, expected an object")
    return value
