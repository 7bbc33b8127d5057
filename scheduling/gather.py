"""Pull the payload of one microbatch from the loaders, each asked once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.metadata import Metadata
from megadask.scheduling.assemble import Pieces
from megadask.scheduling.owners import Partners


async def gather(partners: Partners, sources: Sequence[str], table: Metadata) -> Payload:
    """Return the payload of all rows of a span table.

    Raises what the loader raised: SourceError when a sample reads differently than when planned.
    """
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    places = zip(table["source"].tolist(), table["lane"].tolist(), strict=True)
    for row, (source, lane) in enumerate(places):
        owner = await partners.owner_of(sources[source], lane)
        groups[source, owner.incarnation].append(row)
    parts = [np.array(rows, np.int64) for rows in groups.values()]
    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(
                partners.ask(
                    sources[int(table["source"][rows[0]])],
                    int(table["lane"][rows[0]]),
                    "serve",
                    wanted=table.take(rows).pack(),
                )
            )
            for rows in parts
        ]
    return Payload(table.num_rows, parts, [task.result() for task in asked])


class Payload:
    """Token slices of the rows of one span table, as the loaders sent them."""

    def __init__(
        self, num_rows: int, parts: list[NDArray[np.int64]], replies: list[dict[str, NDArray[Any]]]
    ) -> None:
        self._part_N = np.empty(num_rows, np.int64)
        self._within_N = np.empty(num_rows, np.int64)
        self._replies = replies
        for number, rows in enumerate(parts):
            self._part_N[rows] = number
            self._within_N[rows] = np.arange(len(rows))

    @property
    def num_bytes(self) -> int:
        """Bytes received."""
        return sum(array.nbytes for part in self._replies for array in part.values())

    @property
    def filled_N(self) -> NDArray[np.bool_]:
        """(N,) rows that fillers stand in for."""
        filled_N = np.zeros(len(self._part_N), bool)
        for number, part in enumerate(self._replies):
            if "filled" in part:
                rows = np.flatnonzero(self._part_N == number)
                filled_N[rows] = part["filled"][self._within_N[rows]]
        return filled_N

    def pieces(
        self,
        rows: NDArray[np.int64],
        table: Metadata,
        pack_n: NDArray[np.int64],
        offset_n: NDArray[np.int64],
    ) -> Pieces:
        """Return what some rows bring to a microbatch, in the given order."""
        tokens, masks, masked = [], [], False
        for row in rows.tolist():
            part, within = self._replies[self._part_N[row]], self._within_N[row]
            piece = slice(*part["offsets"][within : within + 2])
            tokens.append(part["tokens"][piece])
            mask = part.get("mask")
            masked = masked or mask is not None
            masks.append(np.ones(len(tokens[-1]), np.float32) if mask is None else mask[piece])
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in tokens])]).astype(np.int64)
        return Pieces(
            pack_N=pack_n,
            offset_N=offset_n,
            start_N=table["start"][rows],
            stop_N=table["stop"][rows],
            tokens=np.concatenate(tokens) if tokens else np.empty(0, np.int64),
            token_offsets=offsets,
            mask=np.concatenate(masks) if masked else None,
        )
