"""Decompressing a stream without losing the bytes before the place where it breaks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

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


#: Suffix to a maker of decoders, and the padding that may lie between and after members.
_DECODERS: dict[str, tuple[Callable[[], Decoder], bytes]] = {
    ".gz": (_gzip, b"\0"),
    ".tgz": (_gzip, b"\0"),
    ".zst": (_zstandard, b""),
    ".zstd": (_zstandard, b""),
}
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
    make, padding = kind
    decoder: Decoder | None = None
    for chunk in chunks:
        rest = chunk
        while rest:
            if decoder is None:
                rest = rest.lstrip(padding) if padding else rest
                if not rest:
                    break
                decoder = make()
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
