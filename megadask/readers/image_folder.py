"""A folder of images in a folder for each class; some images of one class are a shard."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megadask.planner.errors import ConfigError
from megadask.readers.files import FileReader, Part, check_positive
from megadask.readers.lines import MAX_RECORD_BYTES
from megadask.readers.paths import DataFile, Paths, below
from megadask.readers.storage import open_binary
from megadask.scheduling.reading import BadRecord, Shard

#: Suffixes, in lower case, of the files that are taken for images.
SUFFIXES = (
    ".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip


@dataclass(frozen=True)
class ImagePart(Part):
    """Neighbouring images of one class.

    Attributes
    ----------
    images
        Their files, in the order of their names.
    """

    images: tuple[DataFile, ...] = ()


class ImageFolder(FileReader):
    """Read the images below a folder: ``{"image": bytes, "label": class, "path": path}``.

    The class is the name of the first folder below the root, ``path`` is relative to the root.
    Images are not decoded here; `megadask.transforms.DecodeImage` does that. Passed over are files
    of other suffixes than those of images, and hidden ones. The list of the images is held in
    memory and travels with the reader: put millions of them into tar files instead.

    Parameters
    ----------
    folder
        The root, a path or fsspec URL.
    shard_images
        Images of a shard, at most.
    max_record_bytes
        A longer file is a bad record, and is not read.
    """

    def __init__(
        self,
        folder: Paths,
        *,
        shard_images: int = 256,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        check_positive("ImageFolder", shard_images=shard_images, max_record_bytes=max_record_bytes)
        self._shard_images, self._max_record_bytes = shard_images, max_record_bytes
        super().__init__(folder, shard_images=shard_images, max_record_bytes=max_record_bytes)
        if len(self._patterns) > 1:
            raise ConfigError("ImageFolder(folder)", got=self._patterns, limit="one folder")

    def paths(self) -> Sequence[str]:
        """Return the images, as absolute paths or URLs."""
        return sorted(image.url for part in self._listing() for image in _images(part))

    def _files(self) -> list[DataFile]:
        return [DataFile(self._patterns[0], "", None)]

    def _list(self, file: DataFile) -> list[Part]:
        images = [image for image in below(file.url) if _is_image(image.name)]
        if not images:
            raise ConfigError(f"there are no images below {file.url!r}", limit=f"some {SUFFIXES}")
        stray = next((image.name for image in images if "/" not in image.name), None)
        if stray is not None:
            raise ConfigError(
                f"an image in {file.url!r} has no class",
                got=stray,
                limit="a folder for each class",
                remedy="Name the folder above, or move it into a folder.",
            )
        parts: list[Part] = []
        for label, group in groupby(images, lambda image: image.name.partition("/")[0]):
            of_class = tuple(group)
            for first in range(0, len(of_class), self._shard_images):
                chosen = of_class[first : first + self._shard_images]
                sizes = [image.size_bytes for image in chosen]
                known = [size for size in sizes if size is not None]
                name = f"{label}#{first // self._shard_images}-{_digest(chosen)}"
                total = sum(known) if len(known) == len(sizes) else None
                parts.append(ImagePart(file.url, Shard(name, len(chosen), total), -1, chosen))
        return parts

    def _read(self, part: Part, start: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        for row, image in enumerate(_images(part)[start:], start):
            with open_binary(image.url) as file:
                data = _read_up_to(file, self._max_record_bytes + 1)
            reason = None
            if len(data) > self._max_record_bytes:
                reason = "longer than max_record_bytes"
            elif not data:
                reason = "an empty file"
            elif image.size_bytes not in (None, len(data)):
                reason = f"{len(data)} bytes, it had {image.size_bytes} when it was listed"
            if reason:
                yield BadRecord(f"row {row}: {image.name}: {reason}")
            else:
                label = image.name.partition("/")[0]
                yield {"image": data, "label": label, "path": image.name}


def _is_image(name: str) -> bool:
    hidden = posixpath.basename(name).startswith(".")
    return name.lower().endswith(SUFFIXES) and not hidden


def _images(part: Part) -> tuple[DataFile, ...]:
    assert isinstance(part, ImagePart)
    return part.images


def _digest(images: Sequence[DataFile]) -> str:
    """Return a hash that differs where the names or sizes of the images do."""
    listing = repr([(image.name, image.size_bytes) for image in images])
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _read_up_to(file: Any, size_bytes: int) -> bytes:
    data = bytearray()
    while piece := file.read(min(size_bytes - len(data), 2**20)):
        data += piece
    return bytes(data)
