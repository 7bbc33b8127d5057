"""Items as a loader sends them: the flat arrays that Dask sends as they are.

Axes: K items, in the order asked for; L their rows one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.metadata import Metadata
from megadask.scheduling.sample_items import Sample, embedding_rows

Arrays = dict[str, NDArray[Any]]

#: The column of a table of items that says which of its sample's an item is.
NUMBER = "item"


def served_items(
    samples: Mapping[tuple[int, int, int], Sample], wanted: Metadata, modality: str
) -> Arrays:
    """Return items of samples, packed into flat arrays.

    Parameters
    ----------
    samples
        Payload by epoch, lane and position.
    wanted
        One row an item: the columns of its span, and ``item``, which of the sample's it is.

    Returns
    -------
    dict of arrays
        ``items`` (L, ...), ``lengths`` and ``rows`` (K,), and ``grid`` (K, axes) where they have
        one.
    """
    names = ("epoch", "lane", "position", NUMBER)
    columns = (wanted[name].tolist() for name in names)
    picked = [(samples[e, k, p], number) for e, k, p, number in zip(*columns, strict=True)]
    items = [sample[modality][number] for sample, number in picked]
    reply = {
        "items": below(modality, items),
        "lengths": np.array([len(item) for item in items], np.int64),
        "rows": np.array([embedding_rows(sample, modality)[number] for sample, number in picked]),
    }
    grids = [sample.get(f"{modality}_grid") for sample, _ in picked]
    given = [
        grid[number : number + 1]
        for grid, (_, number) in zip(grids, picked, strict=True)
        if grid is not None
    ]
    if given:
        if len(given) < len(picked):
            raise differ(f"{modality}_grid", "some items without a grid")
        reply["grid"] = below(f"{modality}_grid", given)
    return reply


def below(name: str, arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays below one another, of one type and width. arrays: at least one."""
    kinds = sorted({f"{array.dtype} of (..., {array.shape[1:]})" for array in arrays})
    if len(kinds) > 1:
        raise differ(name, " and ".join(kinds))
    return np.concatenate(arrays)


def differ(name: str, got: str) -> ConfigError:
    """Return the error of items that cannot lie below one another."""
    return ConfigError(
        f"items {name!r} of one pipeline differ in form",
        got=got,
        limit="one type and width",
        remedy="Use the same transform, with the same options, in all sources.",
    )
