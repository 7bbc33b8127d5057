"""Laws that lengths follow: their figures, their shape, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.errors import ConfigError
from megadask.planner.lengths import Distribution, ImageText, Lognormal, mix
from tests.strategies import laws


@laws
@given(st.integers(1, 5000), st.floats(0, 2), st.none() | st.integers(1, 9000), st.integers(0, 9))
def test_lognormal_lengths_are_whole_and_within_the_clip(
    median: int, sigma: float, clip: int | None, seed: int
) -> None:
    table = Lognormal(median, sigma, clip).sample(np.random.default_rng(seed), 200)
    tokens_N = table["tokens"]
    assert tokens_N.dtype == np.int64
    assert tokens_N.shape == (200,)
    assert tokens_N.min() >= 1
    assert clip is None or tokens_N.max() <= clip


def test_half_of_the_documents_exceed_the_median() -> None:
    lengths = Lognormal(600, 1.1).lengths(np.random.default_rng(0), 20_000)
    assert np.median(lengths) == pytest.approx(600, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(1.1, rel=0.05)


@laws
@given(st.none() | st.integers(1, 6000), st.integers(1, 8), st.integers(0, 9))
def test_images_are_part_of_their_document(clip: int | None, most: int, seed: int) -> None:
    law = ImageText(most_images=most, clip=clip)
    table = law.sample(np.random.default_rng(seed), 100)
    images = table.ragged["image"]
    assert len(images.offsets) == 101
    count_N = np.diff(images.offsets)
    assert count_N.max() <= most
    assert (images.sum() < table["tokens"]).all() or clip is not None
    assert (images.sum() <= table["tokens"]).all()
    assert images.lengths_I.max(initial=0) <= 4096
    if clip is None:
        assert count_N.min() >= 1
    else:
        assert table["tokens"].max() <= clip


def test_a_clip_leaves_out_the_images_behind_the_first_that_does_not_fit() -> None:
    whole = ImageText().sample(np.random.default_rng(1), 500)
    cut = ImageText(clip=900).sample(np.random.default_rng(1), 500)
    text_N = whole["tokens"] - whole.ragged["image"].sum()
    for row, text in enumerate(text_N.tolist()):
        items = whole.ragged["image"].take(np.array([row])).lengths_I
        ends = np.minimum(text, 900) + np.cumsum(items)
        kept = cut.ragged["image"].take(np.array([row])).lengths_I
        assert kept.tolist() == items[ends <= 900].tolist()
        assert cut["tokens"][row] == min(text, 900) + kept.sum()


@pytest.mark.parametrize("name", ["web", "mixed", "longctx", "vl"])
def test_mixes_stay_within_the_context(name: str) -> None:
    sources, weights = mix(name, context=4096)
    assert sources.keys() == weights.keys()
    assert sum(weights.values()) == pytest.approx(1)
    for law in sources.values():
        assert isinstance(law, Distribution)
        assert law.sample(np.random.default_rng(0), 500)["tokens"].max() <= 4096


@pytest.mark.parametrize(
    ("law", "options", "said"),
    [
        (Lognormal, {"median": 0, "sigma": 1}, "median="),
        (Lognormal, {"median": True, "sigma": 1}, "median="),
        (Lognormal, {"median": 5, "sigma": -1}, "sigma="),
        (Lognormal, {"median": 5, "sigma": float("nan")}, "sigma="),
        (Lognormal, {"median": 5, "sigma": 1, "clip": 0}, "clip="),
        (Lognormal, {"median": 5, "sigma": 1, "clip": 1.5}, "clip="),
        (ImageText, {"most_images": 0}, "most_images="),
        (ImageText, {"clip": 0}, "clip="),
        (mix, {"name": "books", "context": 4096}, r"lengths\.mix\(name\)"),
        (mix, {"name": "web", "context": 0}, "context"),
    ],
    ids=range(10),
)
def test_what_cannot_be_is_refused(
    law: Callable[..., Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        law(**options)
