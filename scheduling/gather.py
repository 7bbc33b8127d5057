"""Pull the payload of one microbatch from the loaders, each asked once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.batching import Batching
from megadask.planner.metadata import Metadata
from megadask.planner.sequences import SEQUENCES
from megadask.scheduling.assemble import Pieces
from megadask.scheduling.extras import join_rows
from megadask.scheduling.owners import Partners
from megadask.scheduling.samples import EXTRAS
from megadask.scheduling.serving import FIELD, ROWS


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
                partners.read(
                    sources[int(table["source"][rows[0]])],
                    int(table["lane"][rows[0]]),
                    "serve",
                    wanted=table.take(rows).pack(),
                )
            )
            for rows in parts
        ]
    return Payload(table.num_rows, parts, [task.result().reply for task in asked])


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

    def field(self, row: int, name: str) -> NDArray[Any] | None:
        """Return what is aligned with the tokens of a row, and the one after; None for nothing."""
        part, within = self._replies[self._part_N[row]], self._within_N[row]
        array = part.get(f"{FIELD}{name}")
        return None if array is None else array[..., slice(*part["offsets"][within : within + 2])]

    def embedding_rows(self, rows: NDArray[np.int64], modality: str) -> NDArray[np.int64]:
        """Return (N,) embeddings that the items of some rows become, of each together."""
        counts = [
            part[key][self._within_N[row]] if (key := f"{ROWS}{modality}") in part else 0
            for row in rows.tolist()
            for part in [self._replies[self._part_N[row]]]
        ]
        return np.array(counts, np.int64)

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
        batching: Batching,
    ) -> Pieces:
        """Return what some rows bring to a microbatch, in the given order.

        A row of several sequences comes as that many, each where it lies.
        """
        found: list[_Document] = []
        for row, pack, offset in zip(
            rows.tolist(), pack_n.tolist(), offset_n.tolist(), strict=True
        ):
            start, stop = int(table["start"][row]), int(table["stop"][row])
            whole = self._document(row, pack=pack, offset=offset, start=start, stop=stop)
            found.extend(whole.sequences(self.lengths(row), batching))
        tokens = [one.part["tokens"][one.piece] for one in found]
        mask = None
        if any("mask" in one.part for one in found):
            mask = np.concatenate([one.taken("mask", (), 1, "float32") for one in found])
        fields = {
            field.name: np.concatenate(
                [one.taken(key, field.shape, field.fill, field.dtype) for one in found], axis=-1
            )
            for field in batching.fields
            if any((key := f"{FIELD}{field.name}") in one.part for one in found)
        }
        return Pieces(
            pack_N=np.array([one.pack for one in found], np.int64),
            offset_N=np.array([one.offset for one in found], np.int64),
            start_N=np.array([one.start for one in found], np.int64),
            stop_N=np.array([one.stop for one in found], np.int64),
            tokens=np.concatenate(tokens) if tokens else np.empty(0, np.int64),
            token_offsets=np.cumsum([0, *map(len, tokens)]).astype(np.int64),
            mask=mask,
            fields=fields,
        )

    def lengths(self, row: int) -> list[int]:
        """Return the real lengths of the sequences of a row, none where it is one."""
        return [int(length) for length in self._row(row, SEQUENCES)]

    def num_sequences(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many sequences each of some rows has."""
        return np.array([max(1, len(self.lengths(row))) for row in rows.tolist()], np.int64)

    def extras(self, rows: NDArray[np.int64], names: Sequence[str]) -> NDArray[np.uint8]:
        """Return the extras of some rows, in their order, as `extras.decode` reads them."""
        found = [self._row(row, EXTRAS) for row in rows.tolist()]
        offsets = np.cumsum([0, *map(len, found)]).astype(np.int64)
        return join_rows(names, np.concatenate([np.empty(0, np.uint8), *found]), offsets)

    def _row(self, row: int, name: str) -> NDArray[Any]:
        """Return what is not aligned with the tokens of one row, nothing where it is not there."""
        part, within = self._replies[self._part_N[row]], self._within_N[row]
        if name not in part:
            return np.empty(0, np.uint8)
        first, end = part[f"{name}_offsets"][within : within + 2].tolist()
        array: NDArray[Any] = part[name][first:end]
        return array

    def _document(self, row: int, **place: int) -> _Document:
        part, within = self._replies[self._part_N[row]], self._within_N[row]
        first, end = part["offsets"][within : within + 2].tolist()
        return _Document(part=part, piece=slice(first, end), **place)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Document:
    """What attends to itself alone: where it goes, and where its tokens lie in a reply."""

    part: dict[str, NDArray[Any]]
    piece: slice
    pack: int
    offset: int
    start: int
    stop: int

    def sequences(self, lengths: list[int], batching: Batching) -> Iterator[_Document]:
        """Yield the sequences of a span of so many, itself where it is one."""
        if not lengths:
            yield self
            return
        first = 0
        for length, size in zip(lengths, batching.padded(np.array(lengths)).tolist(), strict=True):
            begin = self.piece.start + first
            yield replace(
                self,
                piece=slice(begin, begin + length),
                offset=self.offset + first,
                start=0,
                stop=length,
            )
            first += size

    def taken(self, key: str, shape: tuple[int, ...], fill: int, dtype: str) -> NDArray[Any]:
        """Return what is aligned with its tokens, filled up where the reply has none."""
        if key in self.part:
            return self.part[key][..., self.piece]
        return np.full((*shape, self.piece.stop - self.piece.start), fill, dtype)
