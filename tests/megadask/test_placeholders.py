"""Markers of a text become runs of placeholders that point at item embeddings."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megadask as md
from megadask.fingerprints.fingerprint import fingerprint
from megadask.transforms import Bytes, TransformError
from megadask.transforms.placeholders import Placeholders

AUDIO = Placeholders("audio", 301, marker="<sound>", every=2)
BOTH = Placeholders("image", 300, Bytes(), also=(AUDIO,))


def items(*lengths: int) -> list[Any]:
    return [np.zeros((length, 2), np.uint8) for length in lengths]


def test_a_marker_becomes_the_length_of_its_item() -> None:
    sample = Placeholders("image", 300)({"text": "a<image>b<image>", "image": items(2, 3)})
    assert sample is not None
    assert sample["tokens"].tolist() == [97, 300, 300, 98, 300, 300, 300, 256]
    assert sample["image_index"].tolist() == [-1, 0, 1, -1, 2, 3, 4, -1]
    assert sample["loss_mask"].tolist() == [1, 0, 0, 1, 0, 0, 0, 1]
    assert sample["image_rows"].tolist() == [2, 3]


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    parts = draw(st.lists(st.sampled_from(["<image>", "<sound>"]) | st.text("ab<>é", max_size=3)))
    text = "".join(parts)
    length = st.integers(0, 5)
    images, sounds = text.count("<image>"), text.count("<sound>")
    return (
        text,
        draw(st.lists(length, min_size=images, max_size=images)),
        draw(st.lists(length, min_size=sounds, max_size=sounds)),
    )


@given(interleaved())
def test_every_embedding_has_its_token_in_order(case: tuple[str, list[int], list[int]]) -> None:
    text, images, sounds = case
    sample = BOTH({"text": text, "image": items(*images), "audio": items(*sounds)})
    assert sample is not None
    tokens = sample["tokens"]
    for name, token, rows in (
        ("image", 300, sum(images)),
        ("audio", 301, sum(-(-n // 2) for n in sounds)),
    ):
        index = sample[f"{name}_index"]
        assert index[index >= 0].tolist() == list(range(rows))
        np.testing.assert_array_equal(index >= 0, tokens == token)
        assert sample[f"{name}_rows"].sum() == rows
    np.testing.assert_array_equal(sample["loss_mask"] == 0, tokens >= 300)
    left = bytes(tokens[tokens < 256].astype(np.uint8)).decode()
    assert left == text.replace("<image>", "").replace("<sound>", "")


def test_merged_squares_are_one_token_each() -> None:
    decode = md.transforms.DecodeImage(patch=8, merge=2)
    chain = md.transforms.Chain(decode, Placeholders("image", 300, merge=2))
    sample = chain({"text": "<image>", "image": [np.zeros((32, 50, 3), np.uint8)]})
    assert sample is not None
    assert sample["image_grid"].tolist() == [[4, 6]]
    assert len(sample["image"][0]) == 24
    assert sample["image_rows"].tolist() == [6]
    with pytest.raises(TransformError, match="cannot be merged"):
        Placeholders("image", 300, merge=2)({"text": "<image>", "image": items(6)})


def test_patches_of_a_square_follow_one_another() -> None:
    pixels = np.arange(4)[:, None].repeat(4, 1) * 10 + np.arange(4)
    image = np.repeat(pixels[..., None], 3, -1).astype(np.uint8)
    decode = md.transforms.DecodeImage(patch=1, merge=2)
    (patches,) = decode({"image": image})["image"]
    assert patches[:8, 0].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "<image>", "image": []}, "differ in number.*1 markers"),
        ({"text": "", "image": items(1)}, "differ in number"),
        ({"text": "<image><sound>", "image": items(1)}, "'<sound>' and items of 'audio'"),
        ({"text": None}, "not text.*null"),
        ({"image": items(1)}, "not text"),
        ({"text": "<image>", "image": b"png"}, "holds no items"),
    ],
)
def test_records_that_do_not_fit(record: dict[str, Any], words: str) -> None:
    with pytest.raises(TransformError, match=words):
        BOTH(record)


def test_plain_text_has_an_index_of_nothing() -> None:
    sample = BOTH({"text": "ab"})
    assert sample is not None
    assert sample["image_index"].tolist() == [-1, -1, -1]
    assert Placeholders("image", 300, Bytes(eos=False))({"text": ""}) is None


def test_a_tokenizer_encodes_what_is_between() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "see": 1, "and": 2, "[END]": 3}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = Placeholders("image", 9, md.transforms.Tokenizer(built, eos="[END]"))
    sample = made({"text": "see <image> and <image>", "image": items(2, 1)})
    assert sample is not None
    assert sample["tokens"].tolist() == [1, 9, 9, 2, 9, 3]


def test_it_pickles_and_is_public() -> None:
    made = md.transforms.Placeholders("image", 300, also=(AUDIO,))
    assert pickle.loads(pickle.dumps(made)) == made
    prints = {fingerprint(one) for one in (made, BOTH, AUDIO, Placeholders("image", 7))}
    assert len(prints) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"token": -1},
        {"merge": 0},
        {"every": 0},
        {"encoder": len},
        {"modality": ""},
        {"also": (Placeholders("image", 1, marker="x"),)},
        {"also": (Placeholders("audio", 1, marker="<image>"),)},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(md.errors.ConfigError, match="Placeholders"):
        Placeholders(**{"modality": "image", "token": 1, **options})
