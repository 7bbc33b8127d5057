"""Payload on its way from a loader to a constructor: the flat arrays that Dask sends as they are.

Axes: N spans, in the order asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.metadata import Metadata
from megadask.planner.sequences import SEQUENCES
from megadask.scheduling.sample_items import embedding_rows
from megadask.scheduling.samples import EXTRAS, Form, Sample

#: What the keys of fields that are aligned with the tokens begin with.
FIELD = "field:"
#: And those of the numbers of embeddings.
ROWS = "rows:"

Arrays = dict[str, NDArray[Any]]


def served(samples: Mapping[tuple[int, int, int], Sample], wanted: Metadata, form: Form) -> Arrays:
    """Return the payload of spans, all but their items, packed into flat arrays.

    samples: payload by epoch, lane and position. wanted: the spans, whose samples are all there.

    Returns
    -------
    dict of arrays
        ``tokens`` flat, and ``offsets`` (N + 1,): the tokens of span n, and one more, the target of
        its last token, where the document goes on. What any sample has besides:

        ``mask``
            Flat float32, aligned with ``tokens``.
        ``field:NAME``
            (..., flat), aligned with ``tokens``, filled up where a sample has none.
        ``sequences``, ``sequences_offsets``
            Real lengths of the sequences of each span, none where it is one; (N + 1,).
        ``extras``, ``extras_offsets``
            Bytes of the extras of each span's sample; (N + 1,).
        ``rows:MODALITY``
            (N,) int64, embeddings that the items of each span's sample become together.
    """
    names = ("epoch", "lane", "position", "start", "stop", "length")
    columns = (wanted[name].tolist() for name in names)
    parts: list[Sample] = []
    pieces: list[slice] = []
    for epoch, lane, position, start, stop, length in zip(*columns, strict=True):
        parts.append(samples[epoch, lane, position])
        pieces.append(slice(start, min(stop + 1, length)))
    tokens, offsets = joined(
        [part["tokens"][piece] for part, piece in zip(parts, pieces, strict=True)]
    )
    payload: Arrays = {"tokens": tokens, "offsets": offsets}

    def aligned(name: str, shape: tuple[int, ...], fill: int, dtype: str) -> None:
        if not any(name in part for part in parts):
            return
        values = [
            part[name][..., piece]
            if name in part
            else np.full((*shape, len(part["tokens"][piece])), fill, dtype)
            for part, piece in zip(parts, pieces, strict=True)
        ]
        key = "mask" if name == "loss_mask" else f"{FIELD}{name}"
        payload[key] = np.concatenate(values, axis=-1).astype(dtype, copy=False)

    aligned("loss_mask", (), 1, "float32")
    for field in form.aligned:
        aligned(field.name, field.shape, field.fill, field.dtype)
    for name, dtype in ((SEQUENCES, np.int64), (EXTRAS, np.uint8)):
        if any(name in part for part in parts):
            nothing = np.empty(0, dtype)
            payload[name], payload[f"{name}_offsets"] = joined(
                [part.get(name, nothing) for part in parts]
            )
    for name in form.modalities:
        if any(name in part for part in parts):
            totals = [int(embedding_rows(part, name).sum()) for part in parts]
            payload[f"{ROWS}{name}"] = np.array(totals, np.int64)
    return payload


def joined(parts: list[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return arrays one after the other along their last axis, and where each begins and ends.

    parts: at least one.
    """
    counts = [part.shape[-1] for part in parts]
    return np.concatenate(parts, axis=-1), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
