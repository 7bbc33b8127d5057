"""Decoding images into rows of patches, with limits on what an image may cost.

Letters: H, W the height and width of an image in pixels; N its patches, row by row; P the numbers
of a patch.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.transforms.transform import InPlace, Record, Sample, TransformError, column_of

if TYPE_CHECKING:
    from PIL import Image

_CHANNELS = 3

#: Pillow knows others, which are rare in corpora; some of them run programs.
_FORMATS = {"AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"}


@dataclass(frozen=True)
class DecodeImage(InPlace):
    """Decode the images of a column and cut each into square patches, as vision encoders take them.

    An image is resized, keeping its proportions as far as whole patches allow, so that it has at
    most ``max_patches`` of them; smaller ones are only rounded to whole patches. Its record gets

    - under ``column`` a list of (N, P) uint8 arrays, one an image, P = 3 x patch x patch: the rows
      of the patch, their pixels, red green blue. It is the modality of `Source(modalities=)`.
    - under ``{column}_grid`` an (images, 2) int32 array: patches down and across, N is their
      product.

    Other columns stay. Put it before what makes the tokens, in a `Chain`.

    Parameters
    ----------
    column
        Holds the bytes of an image file, a dict that has them under ``bytes`` (as in Hugging Face
        data sets), an (H, W) or (H, W, 3) uint8 array, or a list of these.
    patch
        Height and width of a patch, in pixels.
    max_patches
        Patches of an image, at most.
    max_pixels
        An image that claims to have more is an error of its record and is not decoded: a file of
        some kilobytes can hold an image of gigabytes.
    merge
        For encoders that merge squares of ``merge x merge`` patches into one embedding: patches
        down and across are multiples of it, and the patches of a square follow one another.
    """

    column: str = "image"
    _: KW_ONLY
    patch: int = 16
    max_patches: int = 1024
    max_pixels: int = 64_000_000
    merge: int = 1

    def __post_init__(self) -> None:
        check_counts(self, ("patch", "max_patches", "max_pixels", "merge"))
        check_patches(self.max_patches, self.merge, "DecodeImage")
        need_pillow("DecodeImage")

    def __call__(self, record: Record) -> Sample:
        """Return the record with patches; raises TransformError for what is no image."""
        value = column_of(record, self.column)
        items = value if isinstance(value, list | tuple) else [value]
        pairs = [self._patches(item) for item in items]
        return {
            **record,
            self.column: [patches_NP for patches_NP, _ in pairs],
            f"{self.column}_grid": np.array([grid for _, grid in pairs], np.int32).reshape(-1, 2),
        }

    def fingerprint(self) -> str:
        """Return a text that differs where results would: Pillow's decoders are part of them."""
        from PIL import __version__

        return f"{self!r} with Pillow {__version__}"

    def _patches(self, item: Any) -> tuple[NDArray[np.uint8], tuple[int, int]]:
        with readable(self.column), open_image(item, self.column, self.max_pixels) as image:
            grid = fit_merged(image.height, image.width, self.patch, self.max_patches, self.merge)
            return cut(image, *grid, self.patch, self.merge), grid


@contextmanager
def readable(column: str) -> Iterator[None]:
    """Turn what decoders raise into an error of the record."""
    try:
        yield
    except TransformError:
        raise
    # Decoders raise all kinds of errors for broken data, SyntaxError among them.
    except Exception as error:
        raise TransformError(
            f"column {column!r} is not an image that can be decoded",
            got=f"{type(error).__name__}: {error}",
        ) from error


def open_image(item: Any, column: str, max_pixels: int) -> Image.Image:
    """Return an image that is not decoded yet, of at most so many pixels.

    item: bytes of a file, a dict that has them under ``bytes``, or uint8 pixels.
    """
    from PIL import Image

    data = item.get("bytes") if isinstance(item, Mapping) else item
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim in (2, 3):
        _check_size(data.shape[1], data.shape[0], column, max_pixels)
        return Image.fromarray(data)
    if not isinstance(data, bytes):
        raise TransformError(
            f"column {column!r} is not an image",
            got="null" if data is None else type(data).__name__,
            limit="bytes of an image file, or uint8 pixels",
        )
    # Pillow has a limit of its own, and warns or raises by how far it is passed.
    try:
        Image.init()
        image = Image.open(io.BytesIO(data), formats=sorted(_FORMATS & Image.OPEN.keys()))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TransformError(
            f"column {column!r} has more pixels than max_pixels", got=str(error)
        ) from error
    _check_size(*image.size, column, max_pixels)
    return image


def _check_size(width: int, height: int, column: str, max_pixels: int) -> None:
    if width * height > max_pixels or not width * height:
        raise TransformError(
            f"column {column!r} has more pixels than max_pixels"
            if width * height
            else f"column {column!r} is an image without pixels",
            got=f"{width} x {height}",
            limit=f"1 to {max_pixels}",
            remedy="An image bomb, or max_pixels= is too low.",
        )


def cut(
    image: Image.Image, rows: int, columns: int, patch: int, merge: int = 1
) -> NDArray[np.uint8]:
    """Return (N, P) patches of an image that is resized to so many down and across.

    Row by row; or square by square of ``merge x merge`` patches, within each row by row.
    """
    from PIL import Image

    size = (columns * patch, rows * patch)
    if image.format == "JPEG":
        image.draft("RGB", size)  # decodes at 1/2, 1/4 or 1/8 where that is enough
    resized = _rgb(image).resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    pixels = np.asarray(resized, np.uint8)
    across = (rows // merge, merge, patch, columns // merge, merge, patch, _CHANNELS)
    grid = pixels.reshape(across).transpose(0, 3, 1, 4, 2, 5, 6)
    return grid.reshape(rows * columns, patch * patch * _CHANNELS)


def fit_merged(
    height: int, width: int, patch: int, max_patches: int, merge: int
) -> tuple[int, int]:
    """Return patches down and across as `fit` does, both multiples of ``merge``."""
    rows, columns = fit(height, width, patch * merge, max_patches // merge**2)
    return rows * merge, columns * merge


def fit(height: int, width: int, patch: int, max_patches: int) -> tuple[int, int]:
    """Return how many patches down and across an image gets, at most ``max_patches`` in all.

    Whole numbers decide, so that it is the same on every machine.
    """
    rows, columns = (max(1, (size + patch // 2) // patch) for size in (height, width))
    if rows * columns <= max_patches:
        return rows, columns
    # The largest number of rows that keeps the proportions and leaves room for its columns.
    rows = max(1, min(math.isqrt(max_patches * height // width), max_patches))
    columns = max(1, min(rows * width // height, max_patches // rows))
    return rows, columns


def _rgb(image: Image.Image) -> Image.Image:
    """Return the image in red, green and blue, what is transparent laid on white."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would cut off at 255
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)).convert(
            "RGB"
        )
    if image.mode == "P" or "A" in image.mode or "transparency" in image.info:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, "white")
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")


def check_counts(options: Any, names: Sequence[str]) -> None:
    """Raise ConfigError for options of a transform that are no whole numbers above 0."""
    for name in names:
        check_integer(f"{type(options).__name__}({name}=)", getattr(options, name), 1)


def check_patches(max_patches: int, merge: int, name: str) -> None:
    """Raise ConfigError where not even one square of patches may be kept."""
    if max_patches < merge**2:
        raise ConfigError(
            f"{name}(max_patches=)", got=max_patches, limit=f">= merge x merge = {merge**2}"
        )


def need_pillow(name: str) -> None:
    """Raise ConfigError where Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"transforms.{name} needs the package Pillow",
            remedy="pip install 'megadask[images]'",
        ) from error
