"""Decoding images into rows of patches, with limits on what an image may cost.

Letters: H, W the height and width of an image in pixels; N its patches, row by row; P the numbers
of a patch.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.transforms import Record, Sample, TransformError

if TYPE_CHECKING:
    from PIL import Image

_CHANNELS = 3

#: Pillow knows others, which are rare in corpora; some of them run programs.
_FORMATS = {"AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"}


@dataclass(frozen=True)
class DecodeImage:
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
    """

    column: str = "image"
    _: KW_ONLY
    patch: int = 16
    max_patches: int = 1024
    max_pixels: int = 64_000_000

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a record that it reads; it keeps the others."""
        return (self.column,)

    @property
    def keeps_columns(self) -> bool:
        """Whether what comes after it in a chain sees the other columns, too."""
        return True

    def __post_init__(self) -> None:
        for name in ("patch", "max_patches", "max_pixels"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"DecodeImage({name}=)", got=repr(value), limit="an integer >= 1")
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "transforms.DecodeImage needs the package Pillow",
                remedy="pip install 'megadask[images]'",
            ) from error

    def __call__(self, record: Record) -> Sample:
        """Return the record with patches; raises TransformError for what is no image."""
        if self.column not in record:
            raise TransformError(
                f"the record has no column {self.column!r}",
                got=f"columns {sorted(record)}",
                limit=self.column,
            )
        value = record[self.column]
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
        from PIL import Image

        try:
            with self._open(item) as image:
                rows, columns = fit(image.height, image.width, self.patch, self.max_patches)
                size = (columns * self.patch, rows * self.patch)
                if image.format == "JPEG":
                    image.draft("RGB", size)  # decodes at 1/2, 1/4 or 1/8 where that is enough
                resized = _rgb(image).resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
        except TransformError:
            raise
        # Decoders raise all kinds of errors for broken data, SyntaxError among them.
        except Exception as error:
            raise TransformError(
                f"column {self.column!r} is not an image that can be decoded",
                got=f"{type(error).__name__}: {error}",
            ) from error
        pixels = np.asarray(resized, np.uint8)
        p = self.patch
        grid = pixels.reshape(rows, p, columns, p, _CHANNELS).swapaxes(1, 2)
        return grid.reshape(rows * columns, p * p * _CHANNELS), (rows, columns)

    def _open(self, item: Any) -> Image.Image:
        """Return an image that is not decoded yet."""
        from PIL import Image

        data = item.get("bytes") if isinstance(item, Mapping) else item
        if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim in (2, 3):
            self._check_size(data.shape[1], data.shape[0])
            return Image.fromarray(data)
        if not isinstance(data, bytes):
            raise TransformError(
                f"column {self.column!r} is not an image",
                got="null" if data is None else type(data).__name__,
                limit="bytes of an image file, or uint8 pixels",
            )
        # Pillow has a limit of its own, and warns or raises by how far it is passed.
        try:
            Image.init()
            image = Image.open(io.BytesIO(data), formats=sorted(_FORMATS & Image.OPEN.keys()))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise TransformError(
                f"column {self.column!r} has more pixels than max_pixels", got=str(error)
            ) from error
        self._check_size(*image.size)
        return image

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self.max_pixels or not width * height:
            raise TransformError(
                f"column {self.column!r} has more pixels than max_pixels"
                if width * height
                else f"column {self.column!r} is an image without pixels",
                got=f"{width} x {height}",
                limit=f"1 to {self.max_pixels}",
                remedy="An image bomb, or DecodeImage(max_pixels=) is too low.",
            )


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
