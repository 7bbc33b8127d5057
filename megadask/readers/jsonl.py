"""JSON lines: every file is a shard, every line that is not blank a record."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from megadask.readers.files import Part, check_positive
from megadask.readers.lines import MAX_RECORD_BYTES, Decode, LineReader, Raw, filled_lines
from megadask.readers.paths import Paths
from megadask.scheduling.reading import BadRecord

#: What is said where already the first record of a file cannot be decoded.
_NO_JSON_LINES = (
    "its first record cannot be decoded, so the file does not look like JSON lines: one object a "
    "line. For other files take another of md.readers"
)


class Jsonl(LineReader):
    """Read files of one JSON object a line, plain or compressed (``.gz``, ``.zst``).

    Parameters
    ----------
    paths
        A path, glob, brace list or fsspec URL, or several of them.
    max_line_bytes
        A longer line is a bad record: without a limit, a file of something else fills the memory.
    """

    def __init__(self, paths: Paths, *, max_line_bytes: int = MAX_RECORD_BYTES) -> None:
        check_positive("Jsonl", max_line_bytes=max_line_bytes)
        self._max_line_bytes = max_line_bytes
        super().__init__(paths, max_line_bytes=max_line_bytes)

    def _read(self, part: Part, start: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        with closing(super()._read(part, start)) as records:
            for row, record in enumerate(records, start):
                if row == 0 and isinstance(record, BadRecord):
                    record = BadRecord(f"{record.reason}; {_NO_JSON_LINES}")
                yield record

    def _cut(self, plain: Iterator[bytes]) -> Iterator[Raw]:
        return filled_lines(plain, self._max_line_bytes)

    def _decoder(self, records: Iterator[Raw]) -> Decode:
        return _record


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
