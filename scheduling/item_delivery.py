"""Items in batches: pulled from the loaders once each, and laid out for the ranks that get them.

Axes: K items of one rank, L their rows one after another, N spans of one microbatch, Q its packs,
T tokens of a pack.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.metadata import Metadata
from megadask.planner.plan import Plan
from megadask.scheduling.gather import Payload
from megadask.scheduling.item_payload import NUMBER, Arrays, below, differ
from megadask.scheduling.items import Duty, duties
from megadask.scheduling.owners import Partners
from megadask.scheduling.spec import RunSpec

#: What the keys of a share begin with that belong to one rank alone; its number follows.
OWN = ".@"


@dataclass(frozen=True, eq=False)
class Item:
    """One item as a loader sent it."""

    data: NDArray[Any]
    rows: int
    grid: NDArray[Any] | None


class Pool:
    """Items of one modality, by the row of their span in the plan and their number in it."""

    def __init__(self, modality: str, items: Mapping[tuple[int, int], Item]) -> None:
        self._modality = modality
        self._items = items
        self._laid_out: dict[bytes, Arrays] = {}

    def arrays(self, duty: Duty) -> Arrays:
        """Return what a rank gets of a modality, by the name of its key; peers share arrays."""
        key = np.stack([duty.span_K, duty.item_K]).tobytes()
        if key not in self._laid_out:
            self._laid_out[key] = self._lay_out(duty)
        found = dict(self._laid_out[key])
        if duty.send_X2 is not None and duty.receive_Y3 is not None:
            found[f"{self._modality}_send"] = duty.send_X2
            found[f"{self._modality}_receive"] = duty.receive_Y3
        return found

    def _lay_out(self, duty: Duty) -> Arrays:
        name = self._modality
        items = [self._items[key] for key in _keys(duty)]
        lengths = np.array([len(item.data) for item in items], np.int64)
        found = {
            # Nobody knows how wide items are where there are none.
            name: below(name, [item.data for item in items])
            if items
            else np.empty((0, 0), np.uint8),
            f"{name}_cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            f"{name}_rows": np.array([item.rows for item in items], np.int64),
        }
        grids = [item.grid for item in items if item.grid is not None]
        if grids:
            if len(grids) < len(items):
                raise differ(f"{name}_grid", "some items without a grid")
            found[f"{name}_grid"] = below(f"{name}_grid", [grid[None] for grid in grids])
        return found


async def gather_items(
    partners: Partners, plan: Plan, modality: str, all_duties: Iterable[Duty]
) -> Pool:
    """Pull the items of some duties from the loaders, each once.

    Raises what a loader raised: SourceError when a sample reads differently than when planned.
    """
    wanted = sorted({key for duty in all_duties for key in _keys(duty)})
    groups: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for span, number in wanted:
        source, lane = int(plan.table["source"][span]), int(plan.table["lane"][span])
        owner = await partners.owner_of(plan.sources[source], lane)
        groups[source, owner.incarnation].append((span, number))

    async def pull(keys: list[tuple[int, int]]) -> list[Item]:
        spans = np.array([span for span, _ in keys], np.int64)
        numbers = np.array([number for _, number in keys], np.int64)
        rows = plan.table.take(spans)
        answer = await partners.read(
            plan.sources[int(rows["source"][0])],
            int(rows["lane"][0]),
            "serve_items",
            wanted=Metadata({**rows.columns, NUMBER: numbers}).pack(),
            modality=modality,
        )
        reply = answer.reply
        ends = np.cumsum(reply["lengths"]).tolist()
        starts = [0, *ends[:-1]]
        grids = reply.get("grid", [None] * len(keys))
        return [
            Item(reply["items"][start:end], int(count), grid)
            for start, end, count, grid in zip(starts, ends, reply["rows"], grids, strict=True)
        ]

    async with asyncio.TaskGroup() as group:
        asked = [(keys, group.create_task(pull(keys))) for keys in groups.values()]
    found: dict[tuple[int, int], Item] = {}
    for keys, task in asked:
        found.update(zip(keys, task.result(), strict=True))
    return Pool(modality, found)


def own_key(rank: int, name: str) -> str:
    """Return under which key a share holds what one rank alone gets."""
    return f"{OWN}{rank}:{name}"


def own_arrays(share: Mapping[str, NDArray[Any]], rank: int) -> Arrays:
    """Return what one rank alone gets of a share."""
    prefix = own_key(rank, "")
    mine = (name for name in share if name.startswith(prefix))
    return {name.removeprefix(prefix): share[name] for name in mine}


def item_index(
    batch: Mapping[str, NDArray[Any]],
    payload: Payload,
    within: NDArray[np.int64],
    plan: Plan,
    rows: NDArray[np.int64],
    modality: str,
) -> NDArray[np.int64]:
    """Return (Q, T) int64: by which row of the microbatch's embeddings each token is replaced.

    Parameters
    ----------
    batch
        The rest of the batch.
    payload, within
        What the loaders sent, and which of its rows are the microbatch's.
    plan, rows
        (N,) the same rows in the plan, in the order of the packs: that of the embeddings.
    modality
        Name of the items.
    """
    num_packs, seq_len = batch["tokens"].shape
    index_QT = np.full((num_packs, seq_len), -1, np.int64)
    flat = index_QT.reshape(-1)
    count_N = payload.embedding_rows(within, modality)
    base_N = np.cumsum(count_N) - count_N
    first_N = plan.pack_N[rows] * seq_len + plan.offset_N[rows]
    length_N = plan.table["stop"][rows] - plan.table["start"][rows]
    places = (within.tolist(), base_N.tolist(), first_N.tolist(), length_N.tolist())
    for row, base, first, length in zip(*places, strict=True):
        own = payload.field(row, index_key(modality))
        if own is not None:
            flat[first : first + length] = np.where(own < 0, -1, own + base)[:length]
    return index_QT


def index_key(modality: str) -> str:
    """Return the key of a batch that says which embedding a token is replaced by."""
    return f"{modality}_index"


async def gather_own(
    partners: Partners, spec: RunSpec, plan: Plan, microbatch: int, buckets: Sequence[int]
) -> dict[int, Arrays]:
    """Return what the ranks of each bucket get of their own, under `own_key`."""
    if not spec.modalities:
        return {bucket: {} for bucket in buckets}
    ranks_of = {b: spec.topology.ranks_of(b, spec.strategy.axis) for b in buckets}
    ranks = [rank for ranks in ranks_of.values() for rank in ranks]

    def decide() -> dict[str, dict[int, Duty]]:
        return {
            name: duties(plan, name, spec.strategy, spec.topology, microbatch, ranks)
            for name in spec.modalities
        }

    by_modality = await asyncio.to_thread(decide)
    async with asyncio.TaskGroup() as group:
        pools = {
            name: group.create_task(gather_items(partners, plan, name, found.values()))
            for name, found in by_modality.items()
        }

    def lay_out() -> dict[int, Arrays]:
        return {
            bucket: {
                own_key(rank, key): array
                for name, found in by_modality.items()
                for rank in ranks
                if rank in found
                for key, array in pools[name].result().arrays(found[rank]).items()
            }
            for bucket, ranks in ranks_of.items()
        }

    return await asyncio.to_thread(lay_out)


def _keys(duty: Duty) -> list[tuple[int, int]]:
    return list(zip(duty.span_K.tolist(), duty.item_K.tolist(), strict=True))
