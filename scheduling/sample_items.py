"""The items of a sample: images, recordings, videos; each an array of one row a patch or frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.fields import is_deliverable
from megadask.planner.sequences import SEQUENCES

Sample = Mapping[str, Any]


def items_of(sample: Sample, name: str, index: NDArray[np.int64] | None) -> dict[str, Any]:
    """Return the items of a modality, with their grid; check the index that came with them."""
    lengths = item_lengths(sample, name)
    rows = _embeddings(sample, name, lengths)
    total = sum(lengths) if rows is None else int(rows.sum())
    if index is not None and index.size and not -1 <= index.min() <= index.max() < total:
        raise ConfigError(
            f"a sample's '{name}_index'",
            got=f"{index.min()}..{index.max()}",
            limit=f"-1, or a row of its items: 0..{total - 1}",
        )
    if not lengths:
        return {}
    items = [np.array(item) for item in sample[name]]
    if any(item.dtype.kind not in "biuf" or not is_deliverable(item.dtype) for item in items):
        raise ConfigError(
            f"a sample's items {name!r}", got=[str(item.dtype) for item in items], limit="numbers"
        )
    found: dict[str, Any] = {name: items}
    if sample.get(f"{name}_grid") is not None:
        grid = np.array(sample[f"{name}_grid"])
        if grid.ndim != 2 or len(grid) != len(lengths) or grid.dtype.kind not in "iu":
            raise ConfigError(
                f"a sample's '{name}_grid'",
                got=f"{grid.dtype} of shape {grid.shape}",
                limit=f"integers of shape ({len(lengths)}, axes)",
            )
        found[f"{name}_grid"] = grid
    if rows is not None:
        found[f"{name}_rows"] = rows
    return found


def item_lengths(sample: Sample, name: str) -> list[int]:
    """Return the length of every item of a modality, or sequence, [] where a sample has none.

    The length of an item is that of its first axis: patches, frames. Raises ConfigError for
    anything but a list of arrays.
    """
    items = sample.get(name)
    if items is None:
        return []
    if name == SEQUENCES:
        return [int(length) for length in items]
    if not isinstance(items, list | tuple) or not all(np.ndim(item) for item in items):
        raise ConfigError(
            f"a sample's items {name!r}",
            got=type(items).__name__,
            limit="a list of arrays with one row a patch or frame",
        )
    return [len(item) for item in items]


def embedding_rows(sample: Sample, modality: str) -> NDArray[np.int64]:
    """(K,) embeddings that each item of a sample becomes: its own length unless it says so."""
    rows = sample.get(f"{modality}_rows")
    if rows is not None:
        return np.asarray(rows, np.int64)
    return np.array([len(item) for item in sample.get(modality, ())], np.int64)


def _embeddings(sample: Sample, name: str, lengths: list[int]) -> NDArray[np.int64] | None:
    """Return how many embeddings each item becomes, None where the sample does not say so."""
    value = sample.get(f"{name}_rows")
    if value is None:
        return None
    rows = np.asarray(value)
    good = rows.shape == (len(lengths),) and (rows.dtype.kind in "iu" or not rows.size)
    if not good or (rows < 0).any():
        raise ConfigError(
            f"a sample's '{name}_rows'",
            got=f"{rows.dtype} of shape {rows.shape}",
            limit=f"({len(lengths)},) integers >= 0, one an item",
        )
    return rows.astype(np.int64)
