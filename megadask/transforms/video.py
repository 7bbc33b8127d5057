"""Videos as patches of some of their frames, with limits on what a video may cost.

Letters: F frames, H, W their height and width in pixels; T frames that are kept; N patches of all
of them, P the numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.transforms.images import (
    DecodeImage,
    check_counts,
    check_patches,
    cut,
    fit_merged,
    need_pillow,
    open_image,
    readable,
)
from megadask.transforms.transform import InPlace, Record, Sample, TransformError, column_of

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Frames(InPlace):
    """Take frames of the videos of a column and cut each into square patches.

    All frames of a video are resized alike, as the first one is wide and high, so that they have
    at most ``max_patches`` together. The record gets

    - under ``column`` a list of (N, P) uint8 arrays, one a video: patches as `DecodeImage` makes
      them, frame after frame. It is the modality of `Source(modalities=)`.
    - under ``{column}_grid`` a (videos, 3) int32 array: frames, patches down and across.

    Other columns stay. Put it before what makes the tokens, in a `Chain`.

    Parameters
    ----------
    column
        Holds a video: a list of frames (each as `DecodeImage` takes an image), an (F, H, W, 3)
        uint8 array, or an animated GIF or WebP, as bytes or a dict that has them under ``bytes``;
        or a list of videos that are lists or arrays. Files of movies are for another library to
        decode, before.
    patch, merge
        As in `DecodeImage`.
    max_patches
        Patches of a video, at most. It must leave every frame one square of patches.
    every
        Keep each so many-th frame, the first among them.
    num_frames
        Keep so many frames at even distances, or all where there are fewer. Not with `every`.
    max_frames
        A video of more frames, those not kept among them, is an error of its record.
    max_pixels
        So is one with more pixels in all frames that have to be decoded. A file of some kilobytes
        can hold gigabytes of them.
    """

    column: str = "video"
    _: KW_ONLY
    patch: int = 16
    max_patches: int = 4096
    every: int = 1
    num_frames: int | None = None
    merge: int = 1
    max_frames: int = 4096
    max_pixels: int = 1_000_000_000

    def __post_init__(self) -> None:
        counts = ("patch", "max_patches", "every", "merge", "max_frames", "max_pixels")
        check_counts(self, counts if self.num_frames is None else (*counts, "num_frames"))
        check_patches(self.max_patches, self.merge, "Frames")
        if self.num_frames is not None and self.every != 1:
            raise ConfigError(
                "Frames(every=, num_frames=)",
                got=f"every={self.every}, num_frames={self.num_frames}",
                limit="one of them",
            )
        need_pillow("Frames")

    def __call__(self, record: Record) -> Sample:
        """Return the record with patches; raises TransformError for what is no video."""
        value = column_of(record, self.column)
        videos = value if _is_several(value) else [value]
        pairs = [self._patches(video) for video in videos]
        return {
            **record,
            self.column: [patches_NP for patches_NP, _ in pairs],
            f"{self.column}_grid": np.array([grid for _, grid in pairs], np.int32).reshape(-1, 3),
        }

    def fingerprint(self) -> str:
        """Return a text that differs where results would: Pillow's decoders are part of them."""
        from PIL import __version__

        return f"{self!r} with Pillow {__version__}"

    def _patches(self, video: Any) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
        with readable(self.column):
            if isinstance(video, bytes | Mapping):
                with open_image(video, self.column, self._most_of_a_frame) as image:
                    most = self.max_pixels // (image.width * image.height)
                    return self._cut(_animation(image, self.column, min(self.max_frames, most)))
            if not isinstance(video, list | tuple) and np.ndim(video) != 4:
                raise TransformError(
                    f"column {self.column!r} is not a video",
                    got="null" if video is None else type(video).__name__,
                    limit="a list of frames, an (F, H, W, 3) array, or an animated image",
                )
            if len(video) > self.max_frames:
                raise _too_long(self.column, len(video), self.max_frames)
            most = self.max_pixels // max(1, len(self._kept(len(video))))
            return self._cut(_Listed(video, self.column, min(most, self._most_of_a_frame)))

    @property
    def _most_of_a_frame(self) -> int:
        return min(self.max_pixels, DecodeImage.max_pixels)

    def _cut(self, frames: _Animated | _Listed) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
        kept = self._kept(len(frames))
        each = self.max_patches // len(kept)
        if each < self.merge**2:
            raise TransformError(
                f"column {self.column!r} has more frames than patches",
                got=f"{len(kept)} frames",
                limit=f"max_patches={self.max_patches}, merge={self.merge}",
                remedy="Choose Frames(num_frames=) or a larger max_patches.",
            )
        parts: list[NDArray[np.uint8]] = []
        rows = columns = 0
        for image in frames.of(kept):
            if not parts:
                rows, columns = fit_merged(image.height, image.width, self.patch, each, self.merge)
            parts.append(cut(image, rows, columns, self.patch, self.merge))
        return np.concatenate(parts), (len(kept), rows, columns)

    def _kept(self, count: int) -> list[int]:
        if not count:
            raise TransformError(f"column {self.column!r} is a video without frames")
        if self.num_frames is None:
            return list(range(0, count, self.every))
        number = min(self.num_frames, count)
        return [(2 * n + 1) * count // (2 * number) for n in range(number)]


class _Listed:
    """Frames that are images of their own."""

    def __init__(self, frames: Any, column: str, max_pixels: int) -> None:
        self._frames, self._column, self._max_pixels = frames, column, max_pixels

    def __len__(self) -> int:
        return len(self._frames)

    def of(self, kept: list[int]) -> Iterator[Image.Image]:
        """Yield the given frames."""
        for number in kept:
            with open_image(self._frames[number], self._column, self._max_pixels) as image:
                yield image


class _Animated:
    """Frames of one animated image."""

    def __init__(self, image: Image.Image, count: int) -> None:
        self._image, self._count = image, count

    def __len__(self) -> int:
        return self._count

    def of(self, kept: list[int]) -> Iterator[Image.Image]:
        """Yield the given frames, rising."""
        for number in kept:
            self._image.seek(number)
            yield self._image.copy()


def _animation(image: Image.Image, column: str, max_frames: int) -> _Animated:
    """Return the frames of an opened image, having counted no more of them than are allowed.

    Counting decodes them, as Pillow's own count does for most formats.
    """
    count = 0
    try:
        while True:
            image.seek(count)
            count += 1
            if count > max_frames:
                raise _too_long(column, count, max_frames)
    except EOFError:
        image.seek(0)
    return _Animated(image, count)


def _too_long(column: str, count: int, limit: int) -> TransformError:
    return TransformError(
        f"column {column!r} has more frames or pixels than a video may have",
        got=f"{count} frames or more",
        limit=f"{limit} frames of this size",
        remedy="Cut videos before, or raise Frames(max_frames=, max_pixels=).",
    )


def _is_several(value: Any) -> bool:
    """Whether a column holds a list of videos, not of frames."""
    return isinstance(value, list | tuple) and all(
        isinstance(one, list | tuple) or (isinstance(one, np.ndarray) and one.ndim == 4)
        for one in value
    )
