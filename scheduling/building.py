"""From payload to what the ranks of a bucket get of a microbatch. Blocks; runs in a thread.

A share is what the ranks of one bucket share of one microbatch: whole, as `assemble` or the user's
``collate`` made it. What only cutting and counting needs of it lies in arrays whose names begin
with a dot; they are not delivered.
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
from megadask.scheduling.gather import Payload
from megadask.scheduling.item_delivery import index_key, item_index, own_arrays
from megadask.scheduling.items import embeds
from megadask.scheduling.samples import EXTRAS
from megadask.scheduling.spec import RunSpec
from megadask.scheduling.stages import keys_sent

Arrays = dict[str, NDArray[Any]]

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

    def shares(
        self, plan: Plan, microbatch: int, rows: Mapping[int, NDArray[np.int64]], payload: Payload
    ) -> dict[int, Arrays]:
        """Return the share of every bucket.

        rows: the rows of each bucket in the plan; payload: that of all of them, in this order.
        """
        table = plan.table.take(np.concatenate(list(rows.values())))
        built, first = {}, 0
        for bucket, mine in rows.items():
            within = np.arange(first, first + len(mine))
            first += len(mine)
            share = self._share(plan, mine, within, table, payload)
            if self._collator is not None or not self._spec.has_tokens:
                base = {f".{name}": share[name] for name in _BASE}
                base[".num_samples"] = np.array(len(mine))
                share = {**self._delivered(plan, microbatch, mine, share), **base}
            built[bucket] = share
        return built

    def for_rank(self, share: Arrays, rank: int, plan: Plan) -> tuple[Arrays, int]:
        """Return what one rank gets of the share of its bucket, and the targets that count in it.

        Shares are not modified.
        """
        spec = self._spec
        arrays = {name: array for name, array in share.items() if not name.startswith(".")}
        base = {name: share[f".{name}" if f".{name}" in share else name] for name in _BASE}
        mask = {"loss_mask": base["loss_mask"]}
        if spec.num_slices > 1:
            positions_QC = cp_positions(
                base["cu_seqlens_padded"],
                int(base["max_seqlen"]),
                *spec.topology.cp_slice(rank),
                plan.cp_layout,
            )
            arrays = cut_tokens(arrays, positions_QC, self._aligned)
            mask = cut_tokens(mask, positions_QC, mask)
        if not spec.has_tokens:  # samples count instead, once over the slices
            is_first = spec.num_slices == 1 or spec.topology.cp_slice(rank)[0] == 0
            return arrays, int(share[".num_samples"]) if is_first else 0
        return arrays, num_loss_tokens(mask)

    def sent(self, share: Arrays, mine: Arrays, rank: int, asked: Collection[str] | None) -> Arrays:
        """Return what one rank is sent: of its arrays (`for_rank`), and of its own items.

        asked: names that its trainer gave; None where it gave none.
        """
        tree, strategy = self._spec.topology, self._spec.strategy
        unread: set[str] = set()
        if not embeds(tree, strategy.axis, rank):
            unread.update(map(index_key, self._spec.modalities))
        have = [key for key in mine if key not in unread]
        keys = keys_sent(tree, rank, strategy.broadcast_axes, strategy.axis, have, asked)
        own = own_arrays(share, rank)
        sent = {key: mine[key] for key in keys}
        return sent | {key: own[key] for key in own if asked is None or key in asked}

    def _share(
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
