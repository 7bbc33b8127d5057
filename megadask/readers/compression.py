"""Decompressing a stream without losing the bytes before the place where it breaks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import zstandard

from megadask.planner.errors import ConfigError
from megadask.readers.storage import BrokenData


class Decoder(Protocol):
    """Decodes one member (gzip) or frame (Zstandard) of a stream."""

    @property
    def eof(self) -> bool:
        """Whether its end was seen."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What followed the end."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """Return what the next bytes decode to."""
        ...


def _gzip() -> Decoder:
    return zlib.decompressobj(wbits=31)


def _zstandard() -> Decoder:
    # Corpora are often written with `zstd --long=31`; the memory is used for such files only.
    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()


class _Kind(NamedTuple):
    """How one kind of compression is undone.

    padding
        What may lie between and after members.
    piece_bytes
        Bytes decoded at a time: a few can stand for very many (1 to 1,000 in gzip, 1 to 30,000 in
        Zstandard), and what a piece decodes to is held.
    """

    make: Callable[[], Decoder]
    padding: bytes
    piece_bytes: int


_GZIP = _Kind(_gzip, b"\0", 2**12)
_ZSTANDARD = _Kind(_zstandard, b"", 2**9)

#: By suffix.
_DECODERS = {".gz": _GZIP, ".tgz": _GZIP, ".zst": _ZSTANDARD, ".zstd": _ZSTANDARD}
_UNKNOWN = (".bz2", ".xz", ".lz4", ".br", ".zip", ".Z")


def is_compressed(name: str) -> bool:
    """Whether a file of this name is read through `decompress` rather than as it is."""
    return name.endswith(tuple(_DECODERS))


def check_suffix(name: str) -> None:
    """Raise ConfigError for a compression that cannot be read."""
    if name.endswith(_UNKNOWN):
        raise ConfigError(
            f"{name} has a compression that is not supported",
            limit=f"none, or one of {sorted(_DECODERS)}",
            remedy="Compress it with zstd instead.",
        )


def decompress(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Yield the decoded bytes of a file; its name says how.

    Members and frames may follow one another. Raises BrokenData, after all that can be decoded,
    where the stream is corrupt or ends too soon.
    """
    kind = next((kind for suffix, kind in _DECODERS.items() if name.endswith(suffix)), None)
    if kind is None:
        yield from chunks
        return
    decoder: Decoder | None = None
    for piece in _pieces(chunks, kind.piece_bytes):
        rest = piece
        while rest:
            if decoder is None:
                rest = rest.lstrip(kind.padding) if kind.padding else rest
                if not rest:
                    break
                decoder = kind.make()
            try:
                data = decoder.decompress(rest)
            except (zlib.error, zstandard.ZstdError) as error:
                raise BrokenData(str(error)) from error
            if data:
                yield data
            rest = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise BrokenData("the compressed stream ends too soon")


def _pieces(chunks: Iterator[bytes], piece_bytes: int) -> Iterator[bytes]:
    for chunk in chunks:
        for start in range(0, len(chunk), piece_bytes):
            yield chunk[start : start + piece_bytes]
