"""Reading a file front to back by exact counts of bytes, plain or compressed."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from megadask.readers.compression import decompress, is_compressed
from megadask.readers.storage import BrokenData, chunks, open_binary


class Forward(ABC):
    """The bytes of a file, decompressed, in their order.

    Attributes
    ----------
    position
        Offset of the next byte.
    """

    def __init__(self) -> None:
        self.position = 0

    def read(self, size: int) -> bytes:
        """Return exactly ``size`` bytes; raises BrokenData where the file ends before."""
        data = self.read_up_to(size)
        if len(data) < size:
            raise BrokenData(f"the data ends at byte {self.position}")
        return data

    @abstractmethod
    def read_up_to(self, size: int) -> bytes:
        """Return ``size`` bytes, fewer only at the end."""

    @abstractmethod
    def skip_to(self, offset: int) -> None:
        """Go on at an offset not before `position`; raises BrokenData where the file ends first."""


@contextmanager
def open_forward(url: str, size_bytes: int | None = None) -> Iterator[Forward]:
    """Open a file by what the suffix of its name says.

    ``size_bytes`` is the size that it once had: at the end of a shorter file, reads raise
    BrokenData.
    """
    with open_binary(url) as file:
        if is_compressed(url):
            yield _Decompressed(decompress(chunks(file, size_bytes), url))
        else:
            yield _Plain(file, size_bytes)


class _Plain(Forward):
    """A file that is not compressed: skipping reads nothing."""

    def __init__(self, file: BinaryIO, size_bytes: int | None) -> None:
        super().__init__()
        self._file = file
        self._size_bytes = file.seek(0, io.SEEK_END)
        self._expected_bytes = size_bytes or 0
        file.seek(0)

    def read_up_to(self, size: int) -> bytes:
        size = min(size, self._size_bytes - self.position)
        pieces: list[bytes] = []
        wanted = size
        while wanted and (piece := self._file.read(wanted)):
            pieces.append(piece)
            wanted -= len(piece)
        self.position += size - wanted
        if not size and self._size_bytes < self._expected_bytes:
            self._raise_end()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip_to(self, offset: int) -> None:
        if offset > self._size_bytes:
            self._raise_end()
        self._file.seek(offset)
        self.position = offset

    def _raise_end(self) -> None:
        raise BrokenData(
            f"the file ends after {self._size_bytes} bytes"
            + (f" of {self._expected_bytes}" if self._expected_bytes else "")
        )


class _Decompressed(Forward):
    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces = pieces
        self._rest = memoryview(b"")

    def read_up_to(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size and self._fill():
            taken = self._rest[: size - len(data)]
            self._rest = self._rest[len(taken) :]
            data += taken
            self.position += len(taken)
        return bytes(data)

    def skip_to(self, offset: int) -> None:
        while self.position < offset:
            if not self._fill():
                raise BrokenData(f"the data ends at byte {self.position}")
            skipped = min(len(self._rest), offset - self.position)
            self._rest = self._rest[skipped:]
            self.position += skipped

    def _fill(self) -> bool:
        """Have bytes at hand; False at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        return bool(self._rest)
