"""Opening files, and telling storage that fails (try again) from data that is broken (do not)."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import fsspec.core
import pyarrow as pa

#: Bytes asked of remote storage at a time: a request there costs more than the bytes.
REMOTE_BLOCK_BYTES = 2**20

#: Bytes of a file that are held at a time when it is read from start to end.
CHUNK_BYTES = 2**14


#: What Arrow raises for broken data, and for failing storage; `is_storage_error` tells which. Not
#: among them: memory that runs out and what Arrow does not implement, which another machine or
#: version may read.
ARROW_ERRORS = (pa.ArrowInvalid, pa.ArrowKeyError, UnicodeDecodeError, OSError)


class BrokenData(Exception):
    """Internal to readers: the bytes are there, and nothing can be made of the next ones."""


def open_binary(url: str) -> BinaryIO:
    """Open a file whose failures are OSErrors with an errno, whatever the file system is."""
    if "://" not in url:
        return open(url, "rb", buffering=0)
    return cast("BinaryIO", _RemoteFile(url))


def open_arrow(url: str, *, in_order: bool = True) -> pa.NativeFile:
    """Open a file for Arrow, with the same failures; a local one is read without the GIL.

    Of a remote file that is not read in order, exactly what is asked for is fetched.
    """
    if "://" not in url:
        return pa.OSFile(url)
    return pa.PythonFile(_RemoteFile(url, "readahead" if in_order else "none"), mode="r")


def is_storage_error(error: BaseException) -> bool:
    """Whether storage failed. Arrow raises OSError for broken data too, but without an errno."""
    return isinstance(error, OSError) and error.errno is not None


def chunks(file: BinaryIO, size_bytes: int | None) -> Iterator[bytes]:
    """Yield a file piece by piece, all but the last of `CHUNK_BYTES`.

    Raises BrokenData at the end of a file that is shorter than the ``size_bytes`` it once had.
    """
    total_bytes = 0
    chunk = bytearray()
    while piece := file.read(CHUNK_BYTES - len(chunk)):
        chunk += piece  # storage may return less than asked; where pieces end must not depend on it
        if len(chunk) == CHUNK_BYTES:
            yield bytes(chunk)
            total_bytes += CHUNK_BYTES
            chunk.clear()
    if chunk:
        yield bytes(chunk)
        total_bytes += len(chunk)
    if size_bytes is not None and total_bytes < size_bytes:
        raise BrokenData(f"the file ends after {total_bytes} of {size_bytes} bytes")


_ERRNOS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}


class _RemoteFile(io.RawIOBase):
    """An fsspec file whose every failure is an OSError with an errno."""

    def __init__(self, url: str, cache_type: str = "readahead") -> None:
        try:
            filesystem, path = fsspec.core.url_to_fs(url)
            self._file: Any = filesystem.open(
                path, "rb", block_size=REMOTE_BLOCK_BYTES, cache_type=cache_type
            )
        except Exception as error:
            raise _with_errno(error) from error

    def read(self, size: int = -1, /) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as error:
            raise _with_errno(error) from error

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _with_errno(error: Exception) -> OSError:
    if isinstance(error, OSError) and error.errno is not None:
        return error
    code = next((code for kind, code in _ERRNOS.items() if isinstance(error, kind)), errno.EIO)
    # OSError makes itself the subclass that belongs to the number.
    return OSError(code, f"{type(error).__name__}: {error}")
