"""Where the record batches of an Arrow file lie and how long they are, without loading them.

pyarrow tells neither without reading the data, and both stand in the file's flatbuffers, whose
layout is fixed by https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import pyarrow as pa

MAGIC = b"ARROW1"

_FOOTER_RECORD_BATCHES = 3  # field numbers of the tables Footer, Message and RecordBatch
_MESSAGE_HEADER = 2
_RECORD_BATCH_LENGTH = 0
_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of metadata, bytes of body
_CONTINUATION = b"\xff\xff\xff\xff"


class Block(NamedTuple):
    """One record batch of an Arrow file."""

    rows: int
    size_bytes: int


def blocks(source: pa.NativeFile) -> list[Block]:
    """Return the record batches of an open Arrow file, in order.

    Raises ValueError for a file that does not end like an Arrow file.
    """
    try:
        return _blocks(source)
    except struct.error as error:
        raise ValueError(f"its footer is not that of an Arrow file: {error}") from error


def _blocks(source: pa.NativeFile) -> list[Block]:
    size = source.size()
    tail = _read_at(source, size - 10, 10)
    if not tail.endswith(MAGIC):
        raise ValueError("it does not end as an Arrow file does")
    (footer_bytes,) = struct.unpack_from("<i", tail)
    footer = _read_at(source, size - 10 - footer_bytes, footer_bytes)
    vector = _field(footer, _follow(footer, 0), _FOOTER_RECORD_BATCHES)
    if vector is None:
        return []
    start = _follow(footer, vector)
    (count,) = struct.unpack_from("<I", footer, start)
    found = []
    for index in range(count):
        place = _BLOCK.unpack_from(footer, start + 4 + index * _BLOCK.size)
        offset, metadata_bytes, body_bytes = place
        rows = _rows(_read_at(source, offset, metadata_bytes))
        found.append(Block(rows, metadata_bytes + body_bytes))
    return found


def _rows(message: bytes) -> int:
    """Return the length of the record batch that a message announces."""
    # Its size comes first, after a marker in files written since Arrow 0.15.
    table = message[8:] if message.startswith(_CONTINUATION) else message[4:]
    header = _field(table, _follow(table, 0), _MESSAGE_HEADER)
    if header is None:
        raise ValueError("a block of its footer is not a message")
    length = _field(table, _follow(table, header), _RECORD_BATCH_LENGTH)
    # Flatbuffers leave out fields that have their default, here 0.
    return 0 if length is None else int(struct.unpack_from("<q", table, length)[0])


def _read_at(source: pa.NativeFile, offset: int, size: int) -> bytes:
    if not 0 <= offset <= offset + size <= source.size():
        raise ValueError(f"its footer names bytes {offset} to {offset + size}, which it lacks")
    source.seek(offset)
    return bytes(source.read(size))


def _follow(buffer: bytes, position: int) -> int:
    """Return where the offset that stands at ``position`` leads."""
    return position + int(struct.unpack_from("<I", buffer, position)[0])


def _field(buffer: bytes, table: int, number: int) -> int | None:
    """Return where a field of a table stands, None where it is left out."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", buffer, vtable)[0]:
        return None
    (offset,) = struct.unpack_from("<H", buffer, vtable + slot)
    return table + offset if offset else None
