"""Samples with images of very unlike sizes, whose numbers say which image and row they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.megadask.helpers.data import corpus, unfold


def photos(record: Mapping[str, Any]) -> dict[str, Any]:
    """Images of very unlike sizes, all in source "a"; their pixels say which they are."""
    number = int(record["id"])
    tokens = np.array(unfold(record)["tokens"])
    if number >= 40:  # source "b" is text
        return {"tokens": tokens}
    lengths = [1 + number % 5, 30 * (number % 7 == 0) + 1][: 1 + number % 2]
    images, index = [], np.full(len(tokens), -1)
    for which, length in enumerate(lengths):
        first = number * 1000 + which * 100
        images.append(np.arange(first, first + length)[:, None] * np.array([1, 10], np.int32))
    shown = min(len(tokens), sum(lengths))
    index[:shown] = np.arange(shown)
    grid = np.array([[length, 1] for length in lengths], np.int32)
    return {"tokens": tokens, "image": images, "image_index": index, "image_grid": grid}


PHOTOS = corpus({"a": 40, "b": 20}, longest=100)
