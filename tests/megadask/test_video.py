"""Videos become patches of their frames; what is none, or too much of one, is an error."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import megadask as md
from megadask.fingerprints.fingerprint import fingerprint
from megadask.transforms import TransformError
from megadask.transforms.images import DecodeImage
from megadask.transforms.video import Frames

_RNG = np.random.default_rng(0)


def frames(count: int, height: int = 16, width: int = 24) -> Any:
    """Frames of even grey, each of another."""
    grey = np.arange(count, dtype=np.uint8)[:, None, None, None] * 20
    return np.broadcast_to(grey, (count, height, width, 3)).copy()


def animated(video: Any, kind: str = "GIF", **options: Any) -> bytes:
    data = io.BytesIO()
    first, *others = [Image.fromarray(frame) for frame in video]
    first.save(data, kind, save_all=True, append_images=others, duration=40, **options)
    return data.getvalue()


def png(frame: Any) -> bytes:
    data = io.BytesIO()
    Image.fromarray(frame).save(data, "PNG")
    return data.getvalue()


class TestPatches:
    @pytest.mark.parametrize("form", ["array", "list", "png", "dicts", "GIF", "WEBP"])
    def test_every_form_gives_the_same(self, form: str) -> None:
        video = frames(4)
        value = {
            "array": video,
            "list": list(video),
            "png": [png(frame) for frame in video],
            "dicts": [{"bytes": png(frame)} for frame in video],
            "GIF": animated(video),
            "WEBP": {"bytes": animated(video, "WEBP", lossless=True)},
        }[form]
        sample = Frames(patch=8)({"video": value, "text": "hm"})
        assert sample["video_grid"].tolist() == [[4, 2, 3]]
        assert sample["text"] == "hm"
        (patches,) = sample["video"]
        assert patches.shape == (24, 192)
        shown = patches.reshape(4, -1).astype(int)
        assert abs(shown - np.arange(4)[:, None] * 20).max() <= (8 if form == "GIF" else 0)

    def test_a_frame_is_cut_as_an_image_is(self) -> None:
        video = _RNG.integers(0, 256, (2, 32, 48, 3), np.uint8)
        (patches,) = Frames(patch=8, max_patches=48, merge=2)({"video": video})["video"]
        decode = DecodeImage(patch=8, max_patches=24, merge=2)
        images = decode({"image": list(video)})["image"]
        np.testing.assert_array_equal(patches, np.concatenate(images))

    def test_several_videos(self) -> None:
        value = [frames(2), list(frames(3)), [png(frames(1)[0])]]
        sample = Frames(patch=8)({"video": value})
        assert sample["video_grid"].tolist() == [[2, 2, 3], [3, 2, 3], [1, 2, 3]]
        assert [len(patches) for patches in sample["video"]] == [12, 18, 6]
        assert Frames()({"video": []})["video_grid"].shape == (0, 3)

    @given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12))
    def test_which_frames_are_kept(self, count: int, every: int, number: int) -> None:
        options: dict[str, Any] = {"num_frames": number} if number else {"every": every}
        kept = Frames(**options)._kept(count)
        assert kept == sorted(set(kept))
        assert set(kept) <= set(range(count))
        expected = min(number, count) if number else -(-count // every)
        assert len(kept) == expected
        if number:  # at even distances: every gap is as long as another, give or take one
            gaps = np.diff(kept)
            assert not len(gaps) or gaps.max() - gaps.min() <= 1

    @pytest.mark.parametrize(("merge", "limit"), [(1, 100), (2, 100), (2, 64)])
    def test_all_frames_share_the_limit(self, merge: int, limit: int) -> None:
        made = Frames(patch=4, max_patches=limit, merge=merge, num_frames=5)
        (grid,) = made({"video": frames(9, 100, 60)})["video_grid"].tolist()
        assert grid[0] == 5
        assert np.prod(grid) <= limit
        assert grid[1] % merge == grid[2] % merge == 0


class TestLimits:
    def test_frames_are_counted_before_they_are_cut(self) -> None:
        with pytest.raises(TransformError, match="more frames or pixels"):
            Frames(max_frames=5)({"video": animated(frames(6))})
        with pytest.raises(TransformError, match="more frames or pixels"):
            Frames(max_frames=5)({"video": frames(6)})

    def test_pixels_of_all_frames_count(self) -> None:
        video = animated(frames(4, 10, 10))
        Frames(max_pixels=400)({"video": video})
        with pytest.raises(TransformError, match="more frames or pixels"):
            Frames(max_pixels=399)({"video": video})
        with pytest.raises(TransformError, match="more pixels than max_pixels"):
            Frames(max_pixels=399)({"video": frames(4, 10, 10)})

    def test_more_frames_than_patches(self) -> None:
        with pytest.raises(TransformError, match="more frames than patches"):
            Frames(max_patches=3)({"video": frames(4)})

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (None, "null"),
            (b"GIF89a", "decoded"),
            ([None], "null"),
            (np.zeros((0, 8, 8, 3), np.uint8), "without frames"),
            (np.zeros((8, 8, 3), np.uint8), "not a video"),
            (np.zeros((2, 8, 8, 3)), "not an image"),
            ("film.mp4", "not a video"),
        ],
    )
    def test_broken_videos(self, value: Any, words: str) -> None:
        with pytest.raises(TransformError, match=words):
            Frames()({"video": value})

    def test_no_column(self) -> None:
        with pytest.raises(TransformError, match="no column 'video'"):
            Frames()({})


class TestTransform:
    def test_it_says_which_column_it_reads(self) -> None:
        text = md.transforms.Bytes("title")
        made = md.transforms.Chain(Frames("clip"), text)
        assert made.columns == {"clip", "title"}

    def test_it_pickles_and_is_public(self) -> None:
        made = md.transforms.Frames("clip", num_frames=4)
        assert pickle.loads(pickle.dumps(made)) == made
        assert fingerprint(made) != fingerprint(Frames("clip"))

    @pytest.mark.parametrize(
        "options",
        [
            {"every": 0},
            {"num_frames": 0},
            {"every": 2, "num_frames": 3},
            {"merge": 9, "max_patches": 80},
        ],
    )
    def test_bad_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(md.errors.ConfigError, match="Frames"):
            Frames(**options)
