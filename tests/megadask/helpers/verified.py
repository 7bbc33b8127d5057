"""Pipelines for `megadask verify-resume`: one that resumes, and one that cannot."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import megadask as md
from tests.megadask.helpers.data import corpus, pipeline, source, unfold

DATA = corpus({"a": 60, "b": 45}, longest=150)


def good() -> md.Pipeline:
    return pipeline(DATA, epochs=None, topology=md.ClientPlaceTree(dp=2))


def short() -> md.Pipeline:
    """Ends after a few steps."""
    return pipeline(DATA, batching=md.Fixed(seq_len=64, global_batch=8, micro_batch=1))


def augmented(record: Mapping[str, Any], rng: Any) -> dict[str, Any]:
    """Random as it should be."""
    tokens = unfold(record)["tokens"]
    return {"tokens": tokens + rng.integers(0, 7, len(tokens))}


def shuffled(record: Mapping[str, Any]) -> dict[str, Any]:
    """Random from a generator that nobody can restore."""
    tokens = unfold(record)["tokens"]
    return {"tokens": tokens + random.randrange(10**6)}


def cropped(record: Mapping[str, Any]) -> dict[str, Any]:
    """Random, and of random length."""
    tokens = unfold(record)["tokens"]
    return {"tokens": tokens[: random.randint(1, len(tokens))]}


def _with(transform: Any) -> md.Pipeline:
    sources = [source("a", DATA["a"]), source("odd", DATA["b"], transform=transform)]
    return md.Pipeline(
        sources=sources,
        topology=md.ClientPlaceTree(dp=2),
        batching=md.Packed(seq_len=128, global_batch=8),
        epochs=None,
    )


def random_with_rng() -> md.Pipeline:
    return _with(augmented)


def random_contents() -> md.Pipeline:
    return _with(shuffled)


def random_lengths() -> md.Pipeline:
    return _with(cropped)
