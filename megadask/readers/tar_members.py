"""The members of a tar file, read front to back.

`tarfile` takes a header that it cannot read for the end of the archive, which would pass for a
short shard. The layout is that of https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html
with the long names of GNU tar.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from megadask.readers.forward import Forward
from megadask.readers.storage import BrokenData

BLOCK_BYTES = 512

#: Longer headers (names, pax records) are those of no archive that somebody means.
_MAX_HEADER_BYTES = 2**20


class Member(NamedTuple):
    """A regular file of an archive."""

    name: str
    size_bytes: int


def members(source: Forward) -> Iterator[Member]:
    """Yield the regular files; when one is yielded, the source stands at its first byte.

    The caller reads of it as much as it wants. Raises BrokenData where the archive is broken or
    ends within a member; an archive without an end marker is taken as it is.
    """
    shared: dict[str, str] = {}
    own: dict[str, str] = {}
    while header := source.read_up_to(BLOCK_BYTES):
        if not header.strip(b"\0") and len(header) == BLOCK_BYTES:
            return
        info = parse_header(header, source.position - len(header))
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            name = _extended(source, info).partition(b"\0")[0]
            if info.type == tarfile.GNUTYPE_LONGNAME:
                own["path"] = name.decode("utf-8", "surrogateescape")
        elif info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            own |= _pax(_extended(source, info))
        elif info.type == tarfile.XGLTYPE:
            shared |= _pax(_extended(source, info))
        else:
            known = shared | own
            own = {}
            if info.type == tarfile.GNUTYPE_SPARSE or any(
                k.startswith("GNU.sparse") for k in known
            ):
                raise BrokenData("sparse members are not supported")
            stored = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
            size_bytes = _size(known.get("size"), info.size) if stored else 0
            stop = source.position + _padded(size_bytes)
            if info.isreg():
                yield Member(known.get("path", info.name), size_bytes)
            source.skip_to(stop)


def parse_header(header: bytes, position: int = 0) -> tarfile.TarInfo:
    """Return what a block says; raises BrokenData where it is no header."""
    try:
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise BrokenData(f"byte {position}: no tar header: {error}") from error


def _extended(source: Forward, info: tarfile.TarInfo) -> bytes:
    """Return the data of a header that describes the next member."""
    if not 0 <= info.size <= _MAX_HEADER_BYTES:
        raise BrokenData(f"byte {source.position}: an extended header of {info.size} bytes")
    return source.read(_padded(info.size))[: info.size]


def _pax(data: bytes) -> dict[str, str]:
    """Return the records of a pax header: length, key and value each."""
    found = {}
    while data:
        digits, space, _ = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not space or not equals or not 0 < length <= len(data):
            raise BrokenData("a pax header that is none")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    return found


def _size(text: str | None, stated: int) -> int:
    if text is not None and not text.isdecimal():
        raise BrokenData(f"a member of {text!r} bytes")
    size_bytes = stated if text is None else int(text)
    if size_bytes < 0:
        raise BrokenData(f"a member of {size_bytes} bytes")
    return size_bytes


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
