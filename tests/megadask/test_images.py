"""Images become rows of patches; what is none, or too much of one, is an error of its record."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import megadask as md
from megadask.fingerprints.fingerprint import fingerprint
from megadask.transforms import TransformError
from megadask.transforms.images import DecodeImage, fit

_RNG = np.random.default_rng(0)


def encode(pixels: Any, kind: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    data = io.BytesIO()
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    (image.convert(mode) if mode else image).save(data, kind, **options)
    return data.getvalue()


def noise(height: int, width: int) -> Any:
    return _RNG.integers(0, 256, (height, width, 3), np.uint8)


def unpatch(sample: Any, index: int, patch: int) -> Any:
    """Put the patches of one image together again."""
    rows, columns = sample["image_grid"][index]
    patches = sample["image"][index].reshape(rows, columns, patch, patch, 3)
    return patches.swapaxes(1, 2).reshape(rows * patch, columns * patch, 3)


class TestPatches:
    def test_whole_patches_are_the_pixels_themselves(self) -> None:
        pixels = noise(32, 48)
        sample = DecodeImage(patch=16)({"image": encode(pixels), "label": "bee"})
        assert sample["image_grid"].tolist() == [[2, 3]]
        assert [patches.shape for patches in sample["image"]] == [(6, 768)]
        np.testing.assert_array_equal(unpatch(sample, 0, 16), pixels)
        assert sample["label"] == "bee"

    def test_several_images_and_their_lengths(self) -> None:
        images = [encode(noise(8 * n, 8)) for n in (1, 3, 2)]
        sample = DecodeImage("photos", patch=8)({"photos": images})
        assert [len(patches) for patches in sample["photos"]] == [1, 3, 2]
        assert sample["photos_grid"].tolist() == [[1, 1], [3, 1], [2, 1]]

    def test_no_images(self) -> None:
        sample = DecodeImage()({"image": []})
        assert sample["image"] == []
        assert sample["image_grid"].shape == (0, 2)

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
    def test_formats(self, kind: str) -> None:
        even = np.full((64, 64, 3), (200, 100, 50), np.uint8)
        sample = DecodeImage(patch=16, max_patches=4)({"image": {"bytes": encode(even, kind)}})
        assert sample["image_grid"].tolist() == [[2, 2]]
        found = unpatch(sample, 0, 16).astype(int)
        assert abs(found - (200, 100, 50)).max() <= (0 if kind not in ("JPEG", "WEBP") else 6)

    @pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "RGBA", "LA", "F"])
    def test_modes(self, mode: str) -> None:
        grey = np.full((16, 16, 3), 255, np.uint8)
        kind = "TIFF" if mode in ("CMYK", "F") else "PNG"
        sample = DecodeImage()({"image": encode(grey, kind, mode)})
        assert (sample["image"][0] == 255).all()

    def test_sixteen_bits_a_pixel(self) -> None:
        data = io.BytesIO()
        Image.fromarray(np.full((16, 16), 200 * 256 + 7, np.uint16)).save(data, "PNG")
        assert (DecodeImage()({"image": data.getvalue()})["image"][0] == 200).all()

    def test_what_is_transparent_is_white(self) -> None:
        clear = np.zeros((16, 16, 4), np.uint8)
        assert (DecodeImage()({"image": encode(clear)})["image"][0] == 255).all()

    def test_pixels_as_they_are(self) -> None:
        pixels = noise(16, 16)
        sample = DecodeImage()({"image": pixels})
        np.testing.assert_array_equal(unpatch(sample, 0, 16), pixels)
        assert DecodeImage()({"image": pixels[:, :, 0]})["image"][0].shape == (1, 768)

    @given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 64), st.integers(1, 3000))
    def test_the_number_of_patches_is_bounded(
        self, height: int, width: int, patch: int, max_patches: int
    ) -> None:
        rows, columns = fit(height, width, patch, max_patches)
        assert rows >= 1
        assert columns >= 1
        assert rows * columns <= max_patches

    @given(st.integers(200, 5000), st.integers(200, 5000), st.integers(256, 3000))
    def test_proportions_are_kept_and_room_is_used(
        self, height: int, width: int, max_patches: int
    ) -> None:
        rows, columns = fit(height, width, 8, max_patches)
        if max(height, width) > 4 * min(height, width):
            return
        assert abs(np.log(rows / columns) - np.log(height / width)) < 0.3
        original = (height // 8) * (width // 8)
        assert rows * columns >= 0.7 * min(max_patches, original)


class TestBadImages:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"no image",
            encode(noise(64, 64))[:500],
            encode(noise(64, 64), "JPEG")[:100],
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        ],
    )
    def test_what_cannot_be_decoded(self, data: bytes) -> None:
        with pytest.raises(TransformError, match="not an image that can be decoded"):
            DecodeImage()({"image": data})

    @pytest.mark.parametrize("value", [None, "text", 3, [None], np.zeros((4, 4)), {"path": "x"}])
    def test_what_is_no_image(self, value: Any) -> None:
        with pytest.raises(TransformError, match="is not an image"):
            DecodeImage()({"image": value})

    def test_a_missing_column(self) -> None:
        with pytest.raises(TransformError, match=r"no column 'image'.*'photo'"):
            DecodeImage()({"photo": b""})

    @pytest.mark.parametrize("side", [9000, 12_000, 100_000])
    def test_an_image_bomb_is_not_decoded(self, side: int) -> None:
        """Three sizes: below Pillow's own limit, where Pillow warns, and where it raises."""
        row = zlib.compress(bytes(1000))
        chunks = [
            (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
            (b"IDAT", row),
            (b"IEND", b""),
        ]
        data = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        )
        assert len(data) < 200
        with pytest.raises(TransformError, match="more pixels than max_pixels"):
            DecodeImage()({"image": data})

    def test_the_limit_counts_pixels(self) -> None:
        data = encode(noise(10, 10))
        DecodeImage(max_pixels=100)({"image": data})
        with pytest.raises(TransformError, match="10 x 10"):
            DecodeImage(max_pixels=99)({"image": data})


class TestTransform:
    def test_it_pickles_and_is_public(self) -> None:
        made = md.transforms.DecodeImage("photo", patch=14)
        assert pickle.loads(pickle.dumps(made)) == made
        assert "photo" in fingerprint(made)
        assert fingerprint(made) != fingerprint(DecodeImage("photo"))

    @pytest.mark.parametrize("options", [{"patch": 0}, {"max_patches": True}, {"max_pixels": -1}])
    def test_bad_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(md.errors.ConfigError, match="DecodeImage"):
            DecodeImage(**options)

    def test_it_makes_the_modality_that_loaders_measure(self) -> None:
        from megadask.scheduling.sample_items import item_lengths

        sample = DecodeImage(patch=8)({"image": [encode(noise(16, 8)), encode(noise(8, 8))]})
        assert item_lengths(sample, "image") == [2, 1]
