"""Transforms and collates of payload of all kinds; workers import them, and no torch with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.megadask.helpers.data import unfold


def text(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**unfold(record), "url": f"text/{record['id']}"}


def pair(record: Mapping[str, Any]) -> dict[str, Any]:
    """Two sequences: the record's tokens, and their second half again; prompts of one token."""
    tokens = unfold(record)["tokens"]
    halves = [tokens, tokens[len(tokens) // 2 :]]
    sequences = [
        {"tokens": half, "loss_mask": np.arange(len(half)) > 1, "advantages": half * 0.5}
        for half in halves
    ]
    scores = np.array([record["id"], len(tokens)], np.float32)
    return {"sequences": sequences, "url": f"pairs/{record['id']}", "scores": scores}


def count_vowels(batch: dict[str, Any]) -> dict[str, Any]:
    """Add a key, change one, drop one, and use all that there is to know."""
    made = {key: value for key, value in batch.items() if key != "position_ids"}
    made["advantages"] = batch["advantages"] + 1
    made["starts"] = batch["spans"][:, 0] + batch["step"] * 1000 + batch["microbatch"]
    made["lanes"] = np.array([ident.lane for ident in batch["sample_ids"]], np.int64)
    made["share"] = np.array(0.25)
    made["extras"] = {"path": [url.upper() for url in batch["extras"]["url"]]}
    return made


def without_bounds(batch: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": batch["tokens"]}


def fails(batch: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("no such column")


def stops(batch: dict[str, Any]) -> dict[str, Any]:
    raise StopIteration


def returns(value: Any, batch: dict[str, Any]) -> Any:
    return value


def picture(record: Mapping[str, Any]) -> dict[str, Any]:
    pixels = np.full((int(record["length"]), 4), record["id"], np.uint8)
    return {"pixels": pixels, "label": int(record["id"]) % 3}


def stack(batch: dict[str, Any]) -> dict[str, Any]:
    pixels = [np.empty((0, 4), np.uint8), *batch["extras"]["pixels"]]
    labels = np.array(batch["extras"]["label"], np.int64)
    return {"pixels": np.concatenate(pixels), "labels": labels, "cu_seqlens": batch["cu_seqlens"]}
