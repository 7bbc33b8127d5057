"""How MDS shards store the values of their columns.

The layout is that of Streaming's MDS format, version 2:
https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html.
Numbers are little-endian.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError

Decode = Callable[[bytes], Any]

_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip

#: Channels of the image modes that are 8-bit numbers; others are rare, and raw as Pillow has them.
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3}


def decoder(encoding: str) -> Decode:
    """Return what decodes the values of a column; it raises ValueError for what it cannot decode.

    Raises ConfigError for an encoding that is unknown, or that runs code when it is read.
    """
    name, _, options = encoding.partition(":")
    if name == "pkl":
        raise ConfigError(
            "MDS columns of pickles are not read",
            got=repr(encoding),
            remedy="Reading a pickle runs code that it holds. Write the column as json or bytes.",
        )
    if name == "ndarray":
        return _ndarray_decoder(encoding, options)
    if name in _DTYPES.values():
        return partial(_scalar, np.dtype(name).newbyteorder("<"))
    if name not in _DECODERS:
        raise ConfigError(
            "MDS columns of an unknown encoding", got=repr(encoding), limit=f"some {_known()}"
        )
    return _DECODERS[name]


def _known() -> list[str]:
    return sorted([*_DECODERS, *_DTYPES.values(), "ndarray"])


def _ndarray_decoder(encoding: str, options: str) -> Decode:
    dtype, _, dimensions = options.partition(":")
    try:
        shape = tuple(int(size) for size in dimensions.split(",")) if dimensions else None
    except ValueError:
        shape = (0,)
    if (dtype and dtype not in _DTYPES.values()) or (shape and min(shape) < 1):
        raise ConfigError(
            "MDS columns of an unknown encoding",
            got=repr(encoding),
            limit="ndarray, ndarray:DTYPE or ndarray:DTYPE:SIZE,SIZE,...",
        )
    return partial(_ndarray, dtype or None, shape)


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for one {dtype.name}")
    return np.frombuffer(data, dtype)[0].item()


def _ndarray(dtype: str | None, shape: tuple[int, ...] | None, data: bytes) -> NDArray[Any]:
    """Return an array that owns its memory; what the encoding leaves open stands before it."""
    offset = 0
    if dtype is None:
        dtype = _DTYPES.get(data[0] if data else -1)
        if dtype is None:
            raise ValueError("an array of an unknown type")
        offset = 1
    if shape is None:
        if len(data) <= offset:
            raise ValueError("an array without a shape")
        num_axes, width = data[offset] >> 2, 2 ** (data[offset] & 3)
        start, offset = offset + 1, offset + 1 + num_axes * width
        if len(data) < offset:
            raise ValueError("an array without a shape")
        shape = tuple(np.frombuffer(data[start:offset], f"<u{width}").tolist())
    values = np.frombuffer(data[offset:], np.dtype(dtype).newbyteorder("<"))
    return values.reshape(shape).astype(dtype)


def _image(data: bytes) -> NDArray[np.uint8]:
    """Return the pixels of a raw Pillow image, (height, width) or (height, width, channels)."""
    if len(data) < 12:
        raise ValueError("an image without a size")
    width, height, mode_bytes = np.frombuffer(data[:12], "<u4").tolist()
    mode = data[12 : 12 + mode_bytes].decode()
    if mode not in _CHANNELS:
        raise ValueError(f"an image of mode {mode!r}, not one of {sorted(_CHANNELS)}")
    pixels = np.frombuffer(data[12 + mode_bytes :], np.uint8)
    channels = _CHANNELS[mode]
    return pixels.reshape((height, width) if channels == 1 else (height, width, channels)).copy()


def _decimal(data: bytes) -> Decimal:
    try:
        return Decimal(data.decode())
    except ArithmeticError as error:
        raise ValueError(f"{data[:50]!r} is not a decimal number") from error


_DECODERS: dict[str, Decode] = {
    "bytes": bytes,
    "int": partial(_scalar, np.dtype("<i8")),
    "jpeg": bytes,
    "json": json.loads,
    "pil": _image,
    "png": bytes,
    "str": bytes.decode,
    "str_decimal": _decimal,
    "str_float": lambda data: float(data.decode()),
    "str_int": lambda data: int(data.decode()),
}
