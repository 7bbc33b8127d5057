"""From payload to what the ranks of a bucket get of a microbatch. Blocks; runs in a thread.

What a bucket gets is first made whole, by `assemble` or the user's ``collate``, then cut for its
ranks. Names that begin with a dot are not delivered under them: they are what only cutting and
counting needs, what belongs to one rank alone, and the ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.metadata import Metadata
from megadask.planner.plan import Plan
from megadask.scheduling.assemble import (
    TOKEN_KEYS,
    assemble,
    cp_positions,
    cut_tokens,
    num_loss_tokens,
)
from megadask.scheduling.collate import Collator
from megadask.scheduling.delivery import span_ids
from megadask.scheduling.gather import Payload
from megadask.scheduling.item_delivery import index_key, item_index, own_arrays
from megadask.scheduling.items import embeds
from megadask.scheduling.samples import EXTRAS
from megadask.scheduling.share import IDS, Arrays, Share
from megadask.scheduling.spec import RunSpec
from megadask.scheduling.stages import keys_sent

#: Arrays of `assemble` by which a share is cut and counted, whatever ``collate`` made of them.
_BASE = ("loss_mask", "cu_seqlens_padded", "max_seqlen")


class Builder:
    """Builds the shares of buckets and cuts them for their ranks.

    Parameters
    ----------
    spec
        Of the pipeline.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._collator = Collator(spec.collate, spec.extras) if spec.collate else None
        own = TOKEN_KEYS if spec.has_tokens else ()
        fields = [one.name for one in spec.batching.fields if one.name not in TOKEN_KEYS]
        fields += map(index_key, spec.modalities)
        self._aligned = frozenset((*own, *fields, "attention_mask"))
        # Microbatches are alike, and what a rank is sent of one is asked for with every fetch.
        self._keys: dict[tuple[Any, ...], tuple[str, ...]] = {}

    def shares(
        self,
        plan: Plan,
        microbatch: int,
        rows: Mapping[int, NDArray[np.int64]],
        payload: Payload,
        own: Mapping[int, Arrays],
    ) -> dict[int, Share]:
        """Return the share of every bucket.

        rows: the rows of each bucket in the plan; payload: that of all of them, in this order.
        own: what single ranks of each bucket get, under `own_key`.
        """
        table = plan.table.take(np.concatenate(list(rows.values())))
        built, first = {}, 0
        for bucket, mine in rows.items():
            within = np.arange(first, first + len(mine))
            first += len(mine)
            whole = self._whole(plan, mine, within, table, payload)
            if self._collator is not None or not self._spec.has_tokens:
                base = {f".{name}": whole[name] for name in _BASE}
                base[".num_samples"] = np.array(len(mine))
                whole = {**self._delivered(plan, microbatch, mine, whole), **base}
            whole[IDS] = span_ids(plan, mine)
            built[bucket] = self._cut(bucket, whole, own[bucket], plan)
        return built

    def keys(self, share: Share, rank: int, asked: Collection[str] | None) -> tuple[str, ...]:
        """Return the names of the arrays of a share that one rank is sent.

        asked: names that its trainer gave; None where it gave none.
        """
        arrays, mine = share.arrays_of[rank], share.own_of.get(rank, ())
        like = (rank, None if asked is None else tuple(asked), tuple(arrays), mine)
        keys = self._keys.get(like)
        if keys is None:
            keys = self._keys[like] = self._keys_of(rank, asked, arrays, mine)
        return keys

    def _keys_of(
        self, rank: int, asked: Collection[str] | None, arrays: Arrays, mine: Collection[str]
    ) -> tuple[str, ...]:
        tree, strategy = self._spec.topology, self._spec.strategy
        unread = {IDS}
        if not embeds(tree, strategy.axis, rank):
            unread.update(map(index_key, self._spec.modalities))
        own = [key for key in mine if asked is None or key in asked]
        have = [key for key in arrays if key not in unread and key not in mine]
        keys = keys_sent(tree, rank, strategy.broadcast_axes, strategy.axis, have, asked)
        return (*keys, *own, IDS)

    def _cut(self, bucket: int, whole: Arrays, own: Arrays, plan: Plan) -> Share:
        """Return what the ranks of a bucket get; ranks of one slice get the same arrays."""
        slices: dict[tuple[int, int], tuple[Arrays, int]] = {}
        arrays_of: dict[int, Arrays] = {}
        targets_of: dict[int, int] = {}
        own_of: dict[int, tuple[str, ...]] = {}
        for rank in self._spec.topology.ranks_of(bucket, self._spec.strategy.axis):
            place = self._spec.topology.cp_slice(rank) if self._spec.num_slices > 1 else (0, 1)
            if place not in slices:
                slices[place] = self._slice(whole, place, plan)
            arrays, targets_of[rank] = slices[place]
            mine = own_arrays(own, rank)
            arrays_of[rank] = arrays | mine if mine else arrays
            own_of[rank] = tuple(mine)
        return Share(arrays_of, targets_of, own_of)

    def _slice(self, whole: Arrays, place: tuple[int, int], plan: Plan) -> tuple[Arrays, int]:
        """Return the arrays of one slice of the packs, and the targets that count in it."""
        hidden = [name for name in whole if name.startswith(".") and name != IDS]
        arrays = {name: array for name, array in whole.items() if name not in hidden}
        base = {name: whole[f".{name}" if f".{name}" in whole else name] for name in _BASE}
        mask = {"loss_mask": base["loss_mask"]}
        if self._spec.num_slices > 1:
            positions_QC = cp_positions(
                base["cu_seqlens_padded"], int(base["max_seqlen"]), *place, plan.cp_layout
            )
            arrays = cut_tokens(arrays, positions_QC, self._aligned)
            mask = cut_tokens(mask, positions_QC, mask)
        if not self._spec.has_tokens:  # samples count instead, once over the slices
            return arrays, int(whole[".num_samples"]) if place[0] == 0 else 0
        return arrays, num_loss_tokens(mask)

    def _whole(
        self,
        plan: Plan,
        mine: NDArray[np.int64],
        within: NDArray[np.int64],
        table: Metadata,
        payload: Payload,
    ) -> Arrays:
        spec = self._spec
        pieces = payload.pieces(
            within, table, plan.pack_N[mine], plan.offset_N[mine], spec.batching
        )
        share = assemble(spec.batching, pieces)
        if spec.batching.sequences > 1:
            share["num_sequences"] = payload.num_sequences(within)
        for name in spec.modalities if spec.has_tokens else ():
            share[index_key(name)] = item_index(share, payload, within, plan, mine, name)
        if spec.extras:
            share[EXTRAS] = payload.extras(within, spec.extras)
        return share

    def _delivered(
        self, plan: Plan, microbatch: int, mine: NDArray[np.int64], share: Arrays
    ) -> Arrays:
        """Return what is delivered of a share: no tokens where no source has any, collated."""
        arrays = share
        if not self._spec.has_tokens:
            arrays = {name: array for name, array in share.items() if name not in TOKEN_KEYS}
        if self._collator is None:
            return arrays
        collated = self._collator(
            {name: array.copy() for name, array in arrays.items()},
            plan.sample_ids(mine),
            np.stack([plan.table[name][mine] for name in ("start", "stop")], axis=1),
            plan.step,
            microbatch,
        )
        self._check_aligned(collated, share["loss_mask"].shape, plan.step, microbatch)
        return collated

    def _check_aligned(
        self, collated: Arrays, shape: tuple[int, ...], step: int, microbatch: int
    ) -> None:
        """Raise ConfigError if what has to be cut for ranks no longer can be."""
        if self._spec.num_slices == 1:
            return
        for name in self._aligned & set(collated):
            if collated[name].shape[-2:] != shape:
                error = ConfigError(
                    f"Pipeline(collate=): {name!r}, which is cut for context parallelism",
                    got=f"shape {collated[name].shape}",
                    limit=f"(..., {shape[0]}, {shape[1]}), as it was",
                    remedy="Give another shape another name.",
                )
                error.add_note(
                    f"MegaDask: Pipeline(collate=), step {step}, microbatch {microbatch}"
                )
                raise error
