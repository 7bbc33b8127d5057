"""Which items of a modality a rank is given with a microbatch, and whom it exchanges results with.

Axes: I items of a routing, K items that one rank encodes, X embeddings that it sends, Y that it
receives, R ranks.

Everything here is a pure function of a committed plan. Encoders are ranks of the first pipeline
stage, unless work is distributed over "pp" too. All ranks of an encoder bucket encode the same
items; each serves those backbone ranks that stand where it stands along the other axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megadask.planner.plan import Plan
from megadask.planner.routing import Routing
from megadask.planner.strategy import Selection, Strategy
from megadask.planner.topology import Axis, ClientPlaceTree

#: What the batch of a rank holds of a modality, as ``{name}{ending}``: its items, and with whom
#: they are exchanged. Where they are, each rank has its own, whatever is broadcast.
ENDINGS = ("", "_cu_seqlens", "_grid", "_rows", "_send", "_receive")


@dataclass(frozen=True, eq=False, kw_only=True)
class Duty:
    """What one rank does for one modality with one microbatch.

    Attributes
    ----------
    span_K, item_K
        (K,) int64, the items that it encodes: the row of their span in the plan, and which of the
        span's items it is.
    send_X2
        (X, 2) int64: to which rank goes the result of which of its items, 0..K-1; by ranks, and for
        each in the order that it receives them. None without an exchange.
    receive_Y3
        (Y, 3) int64: from which rank, for which microbatch, and which item of that microbatch, in
        the order of its packs; in the order they arrive. None without an exchange.
    """

    span_K: NDArray[np.int64]
    item_K: NDArray[np.int64]
    send_X2: NDArray[np.int64] | None = None
    receive_Y3: NDArray[np.int64] | None = None


def duties(
    plan: Plan,
    modality: str,
    strategy: Strategy,
    topology: ClientPlaceTree,
    microbatch: int,
    ranks: Iterable[int],
) -> dict[int, Duty]:
    """Return what each of some ranks does with a microbatch; ranks that take no part are left out.

    Without a selection every rank that is given tokens encodes what its own microbatch uses. With
    one, the encoders of a turn do: one turn a microbatch, or one a step, which comes with the first
    microbatch that is left of it.
    """
    selection = strategy.selections.get(modality)
    if selection is None:
        return _own(plan, modality, strategy, topology, microbatch, ranks)
    if selection.encode == "microbatch":
        turn = microbatch
    elif microbatch == plan.first_microbatch:
        turn = 0
    else:
        return {}
    exchange = _Exchange(plan, plan.routing[modality], turn, selection, strategy.axis, topology)
    return {rank: exchange.duty(rank) for rank in ranks if exchange.takes_part(rank)}


def item_keys(modalities: Iterable[str]) -> list[str]:
    """Return the keys that batches may have of some modalities."""
    return [f"{name}{ending}" for name in modalities for ending in (*ENDINGS, "_index")]


def exchanged_keys(keys: Iterable[str]) -> set[str]:
    """Return the keys of a batch that belong to its rank alone, since items are exchanged."""
    return _keys_beside("_send", set(keys))


def encoded_keys(keys: Iterable[str]) -> set[str]:
    """Return the keys of a batch that are about items, and not about its tokens."""
    return _keys_beside("_cu_seqlens", set(keys))


def _keys_beside(mark: str, keys: set[str]) -> set[str]:
    """Return the keys of those modalities that have a key of this ending."""
    names = [key.removesuffix(mark) for key in keys if key.endswith(mark)]
    return {f"{name}{ending}" for name in names for ending in ENDINGS} & keys


def items_used(
    plan: Plan, modality: str, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (row of its span, number within it) of every item of some rows, in their order."""
    ragged = plan.table.ragged.get(modality)
    if ragged is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    count_n = np.diff(ragged.offsets)[rows]
    span_K = np.repeat(rows, count_n)
    return span_K, np.arange(len(span_K)) - np.repeat(np.cumsum(count_n) - count_n, count_n)


def _own(
    plan: Plan,
    modality: str,
    strategy: Strategy,
    topology: ClientPlaceTree,
    microbatch: int,
    ranks: Iterable[int],
) -> dict[int, Duty]:
    found, of_bucket = {}, dict[int, Duty]()
    for rank in ranks:
        delivery = topology.delivery(rank, strategy.broadcast_axes, strategy.axis)
        if delivery == "payload" and embeds(topology, strategy.axis, rank):
            bucket = topology.bucket_of(rank, strategy.axis)
            if bucket not in of_bucket:
                span_K, item_K = items_used(plan, modality, plan.rows_of(bucket, microbatch))
                of_bucket[bucket] = Duty(span_K=span_K, item_K=item_K)
            found[rank] = of_bucket[bucket]
    return found


class _Exchange:
    """Who encodes what in one turn, and for whom."""

    def __init__(
        self,
        plan: Plan,
        routing: Routing,
        turn: int,
        selection: Selection,
        axis: Axis,
        topology: ClientPlaceTree,
    ) -> None:
        at_I = np.flatnonzero(routing.turn_I == turn)
        self.span_I, self.item_I = routing.span_I[at_I], routing.item_I[at_I]
        self.encoder_I, self.bucket_I = routing.encoder_I[at_I], routing.bucket_I[at_I]
        self.microbatch_I = routing.microbatch_I[at_I]
        self.place_I = self._places(plan)
        self.axis, self.encoder_axis, self.tree = axis, selection.axis, topology

    def _places(self, plan: Plan) -> NDArray[np.int64]:
        """(I,) which item of its microbatch each one is, in the order of the packs."""
        pack_I, offset_I = plan.pack_N[self.span_I], plan.offset_N[self.span_I]
        keys = (self.item_I, offset_I, pack_I, self.microbatch_I, self.bucket_I)
        order = np.lexsort(keys)
        group = np.stack([self.bucket_I, self.microbatch_I])[:, order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = (group[:, 1:] != group[:, :-1]).any(axis=0)
        within = np.arange(len(order))
        place_I = np.empty(len(order), np.int64)
        place_I[order] = within - np.maximum.accumulate(np.where(is_first, within, 0))
        return place_I

    def takes_part(self, rank: int) -> bool:
        """Whether a rank encodes, or uses what is encoded."""
        return self._encodes(rank) or embeds(self.tree, self.axis, rank)

    def duty(self, rank: int) -> Duty:
        """Return what a rank does in this turn."""
        mine = np.empty(0, np.int64)
        if self._encodes(rank):
            own = self.tree.bucket_of(rank, self.encoder_axis)
            mine = np.flatnonzero(self.encoder_I == own)
        return Duty(
            span_K=self.span_I[mine],
            item_K=self.item_I[mine],
            send_X2=self._sent(rank, mine),
            receive_Y3=self._received(rank),
        )

    def _sent(self, rank: int, mine: NDArray[np.int64]) -> NDArray[np.int64]:
        parts = [np.empty((0, 2), np.int64)]
        bucket_K = self.bucket_I[mine]
        for bucket in np.unique(bucket_K).tolist():
            used = np.flatnonzero(bucket_K == bucket)
            used = used[np.lexsort((self.place_I[mine[used]], self.microbatch_I[mine[used]]))]
            encoder = self.encoder_I[mine[used[:1]]]
            users = [
                user
                for user in self.tree.ranks_of(bucket, self.axis)
                if embeds(self.tree, self.axis, user) and self._servers(encoder, user)[0] == rank
            ]
            parts += [np.stack([np.full(len(used), user), used], axis=1) for user in users]
        sent_X2 = np.concatenate(parts)
        return sent_X2[np.argsort(sent_X2[:, 0], kind="stable")]

    def _received(self, rank: int) -> NDArray[np.int64]:
        if not embeds(self.tree, self.axis, rank):
            return np.empty((0, 3), np.int64)
        used = np.flatnonzero(self.bucket_I == self.tree.bucket_of(rank, self.axis))
        from_Y = self._servers(self.encoder_I[used], rank)
        received_Y3 = np.stack([from_Y, self.microbatch_I[used], self.place_I[used]], axis=1)
        return received_Y3[np.lexsort((received_Y3[:, 2], received_Y3[:, 1], from_Y))]

    def _encodes(self, rank: int) -> bool:
        return "pp" in self.tree.axes(self.encoder_axis) or not self.tree.coords(rank)["pp"]

    def _servers(self, encoder_Y: NDArray[np.int64], user: int) -> NDArray[np.int64]:
        """(Y,) the rank of each of some encoder buckets that serves a rank."""
        axes = self.tree.axes(self.encoder_axis)
        sizes = [getattr(self.tree, axis) for axis in axes]
        along = dict(zip(axes, np.unravel_index(encoder_Y, sizes), strict=True))
        own: Mapping[str, int] = {**self.tree.coords(user), "pp": 0}
        place = [along.get(axis, np.full(len(encoder_Y), own[axis])) for axis in self.tree.order]
        return np.ravel_multi_index(place, self.tree.shape).astype(np.int64)


def embeds(topology: ClientPlaceTree, axis: Axis, rank: int) -> bool:
    """Whether a rank turns tokens into embeddings, among which item embeddings go."""
    return "pp" in topology.axes(axis) or not topology.coords(rank)["pp"]
