"""What readers of text share: lines of bounded length, and records made of lines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from megadask.readers.compression import check_suffix, decompress
from megadask.readers.files import FileReader, Part
from megadask.readers.paths import DataFile
from megadask.readers.storage import BrokenData, chunks, open_binary
from megadask.scheduling.reading import BadRecord, Shard

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

#: A longer record is a bad one: without a limit, a file of something else fills the memory.
MAX_RECORD_BYTES = 256 * 2**20

#: The number of the line that a record starts at, and its bytes: None where they are too many.
Raw = tuple[int, bytes | None]

Decode = Callable[[bytes | None, int], Mapping[str, Any] | BadRecord]


class LineReader(FileReader):
    """Base of readers of text, plain or compressed: every file is a shard.

    A subclass says how bytes are cut into records, and what a record is. Records before the first
    that is asked for are cut but not decoded.
    """

    @abstractmethod
    def _cut(self, plain: Iterator[bytes]) -> Iterator[Raw]:
        """Yield the records of a file that comes in pieces."""

    @abstractmethod
    def _decoder(self, records: Iterator[Raw]) -> Decode:
        """Return what decodes a record; may take a header off the records first."""

    def _list(self, file: DataFile) -> list[Part]:
        check_suffix(file.name)
        return [Part(file.url, Shard(file.name, None, file.size_bytes))]

    def _read(self, part: Part, start: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        row = 0
        with open_binary(part.url) as raw:
            plain = decompress(chunks(raw, part.shard.size_bytes), part.url)
            try:
                records = self._cut(without_mark(plain))
                decode = self._decoder(records)
                for number, data in records:
                    row += 1
                    if row > start:
                        yield decode(data, number)
            except BrokenData as error:
                raise part.truncated(row, str(error)) from error


def lines(plain: Iterator[bytes], max_bytes: int) -> Iterator[bytes | None]:
    """Yield the lines without their ends, None for each that is too long."""
    pending = bytearray()
    too_long = False
    for chunk in plain:
        first, *others = chunk.split(b"\n")
        if not too_long:
            pending += first
        for following in others:
            too_long = too_long or len(pending) > max_bytes
            yield None if too_long else bytes(pending)
            too_long = False
            pending = bytearray(following)
        if len(pending) > max_bytes:
            too_long = True
            pending.clear()
    if too_long or pending:
        yield None if too_long else bytes(pending)


def filled_lines(plain: Iterator[bytes], max_bytes: int) -> Iterator[Raw]:
    """Yield the lines that are not blank, with their numbers."""
    for number, line in enumerate(lines(plain, max_bytes), 1):
        if line is None or line.strip():
            yield number, line


def without_mark(plain: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same bytes, less the byte order mark that some editors put first."""
    start = b""
    for chunk in plain:
        start += chunk
        if len(start) >= len(_BYTE_ORDER_MARK):
            break
    yield start.removeprefix(_BYTE_ORDER_MARK)
    yield from plain
