"""Encoding items away from where they are used: what a training loop needs for it. Needs torch.

Axes: K items that this rank encodes, L their embeddings one after another, N embeddings that this
rank uses, E numbers of an embedding; X items sent, Y received, Z ranks of the group.

Everything is differentiable: gradients of embeddings go back to the rank that encoded their item,
by the same exchange in reverse. So all ranks of the group meet twice, once forward and once
backward, also those that have nothing to encode; a rank that does not come ends the wait of the
others by the timeout of the process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from megadask.planner.errors import ConfigError
from megadask.scheduling.errors import DeadlineError

Batch = Mapping[str, Any]
Group = distributed.ProcessGroup


def items_or_placeholder(batch: Batch, modality: str, placeholder: Tensor) -> tuple[Tensor, Tensor]:
    """Return the items to encode and where each begins; a placeholder where there are none.

    An encoder that is trained on several ranks has to run on all of them in every turn. What comes
    of the placeholder goes nowhere, and its gradient is 0: `exchange` drops it.

    Parameters
    ----------
    batch
        A batch, of any turn.
    modality
        Name of the items.
    placeholder
        (l, P) one item of the shape that the encoder takes.

    Returns
    -------
    items, cu_seqlens
        (L, P), and (K + 1,) int32.
    """
    items, cu_seqlens = batch[modality], batch[f"{modality}_cu_seqlens"]
    if len(items):
        return items, cu_seqlens
    return placeholder, cu_seqlens.new_tensor([0, len(placeholder)])


def exchange(
    embeddings: Tensor,
    batch: Batch,
    modality: str,
    *,
    rows_per_item: Tensor | None = None,
    group: Group | None = None,
) -> Tensor:
    """Return the embeddings of the items of this rank's own microbatch, in order.

    Where items were not selected (`DGraph.select`), every rank encodes its own and this returns
    them. Else all ranks of the group call it in every turn.

    Parameters
    ----------
    embeddings
        (L, E), those of the items that this rank encoded, one item after the other. Without items,
        those of a placeholder. Of one type and width on all ranks.
    batch
        The batch that brought the items.
    modality
        Name of the items.
    rows_per_item
        (K,) how many embeddings each item has; by default ``batch["{modality}_rows"]``, what the
        transform said: as many as the item has patches or frames, unless they are merged.
    group
        The ranks that exchange; all by default. In it are all ranks that encode or use items.

    Returns
    -------
    Tensor
        (N, E): ``batch["{modality}_index"]`` counts its rows.

    Raises
    ------
    ConfigError
        What is given does not fit the batch.
    """
    parts = _exchanged(embeddings, batch, modality, rows_per_item, group)
    if len(parts) > 1:
        raise ConfigError(
            f"exchange of {modality!r} that are encoded for a whole step",
            got=f"items of microbatches {sorted(parts)}",
            limit="one microbatch",
            remedy='Use md.exchange_step, or select(encode="microbatch").',
        )
    return next(iter(parts.values()))


def exchange_step(
    embeddings: Tensor,
    batch: Batch,
    modality: str,
    *,
    rows_per_item: Tensor | None = None,
    group: Group | None = None,
) -> StepEmbeddings:
    """Exchange the embeddings of a whole step, whose items came with its first microbatch.

    Takes what `exchange` takes, and returns the embeddings by microbatch.
    """
    return StepEmbeddings(_exchanged(embeddings, batch, modality, rows_per_item, group))


class StepEmbeddings:
    """Embeddings of the items of all microbatches of a step, made by `exchange_step`.

    ``embeddings[batch["microbatch"]]`` is what a microbatch uses. Its backward pass ends there;
    when all microbatches of the step had theirs, `backward` takes the gradients on to the encoders.
    """

    def __init__(self, parts: Mapping[int, Tensor]) -> None:
        self._parts = dict(parts)
        self._like = next(iter(parts.values()))
        self._leaves = {
            microbatch: part.detach().requires_grad_(part.requires_grad)
            for microbatch, part in parts.items()
        }

    def __getitem__(self, microbatch: int) -> Tensor:
        """Return (N, E), without rows where the microbatch has no items."""
        leaf = self._leaves.get(microbatch)
        return self._like.new_zeros((0, *self._like.shape[1:])) if leaf is None else leaf

    def backward(self) -> None:
        """Take the gradients of all microbatches back to the encoders; all ranks of a group must.

        Call it once a step, in the place of the last backward pass of its encoder.
        """
        parts = [part for part in self._parts.values() if part.requires_grad]
        leaves = [leaf for leaf in self._leaves.values() if leaf.requires_grad]
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        if parts:
            torch.autograd.backward(parts, gradients)


def scatter_embeddings(token_embeddings: Tensor, item_embeddings: Tensor, index: Tensor) -> Tensor:
    """Return token embeddings with those of items in the place of their placeholders.

    Parameters
    ----------
    token_embeddings
        (Q, T, E), not modified.
    item_embeddings
        (N, E) of `exchange`. Without rows they stay in the graph all the same, so that this rank
        takes part in the backward pass of the exchange.
    index
        (Q, T) integers, ``batch["{modality}_index"]``: a row of them, -1 where a token stays.
    """
    if item_embeddings.shape[1:] != token_embeddings.shape[index.ndim :]:
        raise ConfigError(
            "scatter_embeddings: item embeddings",
            got=f"shape {tuple(item_embeddings.shape)}",
            limit=f"rows of shape {tuple(token_embeddings.shape[index.ndim :])}",
        )
    items = item_embeddings.to(token_embeddings.dtype)
    # A row of zeros before all others stands for -1, and a row that is too high is an error.
    rows = torch.cat([items.new_zeros((1, *items.shape[1:])), items])
    is_item = (index >= 0).reshape(*index.shape, *(1 for _ in items.shape[1:]))
    return torch.where(is_item, rows[index + 1], token_embeddings)


def _exchanged(
    embeddings: Tensor,
    batch: Batch,
    modality: str,
    rows_per_item: Tensor | None,
    group: Group | None,
) -> dict[int, Tensor]:
    """Return microbatch to (N, E); at least one, also where this rank uses nothing."""
    microbatch = int(batch["microbatch"])
    rows_K = _rows(embeddings, batch, modality, rows_per_item)
    total = int(rows_K.sum())
    if f"{modality}_send" not in batch:
        return {microbatch: embeddings[:total]}
    send_X2, receive_Y3 = batch[f"{modality}_send"], batch[f"{modality}_receive"]
    send_Z, receive_Z = _per_rank(send_X2, group), _per_rank(receive_Y3, group)
    rows_X = rows_K[send_X2[:, 1]]
    first_K = rows_K.cumsum(0) - rows_K
    sent = embeddings[_ranges(first_K[send_X2[:, 1]], rows_X).to(embeddings.device)]
    # Only who encoded an item knows how many embeddings it has become.
    rows_Y = _all_to_all(rows_X.to(embeddings.device), send_Z, receive_Z, group).cpu()
    came = _AllToAll.apply(  # type: ignore[no-untyped-call]
        sent, _added(rows_X, send_Z), _added(rows_Y, receive_Z), group
    )
    found: dict[int, Tensor] = {}
    first_Y = rows_Y.cumsum(0) - rows_Y
    for number in receive_Y3[:, 1].unique().tolist() or [microbatch]:
        some = (receive_Y3[:, 1] == number).nonzero().squeeze(1)
        some = some[receive_Y3[some, 2].argsort()]
        index = _ranges(first_Y[some], rows_Y[some]).to(came.device)
        found[number] = came[index]
    return found


def _rows(embeddings: Tensor, batch: Batch, modality: str, rows_per_item: Tensor | None) -> Tensor:
    """(K,) embeddings of each item, checked against those there are."""
    if f"{modality}_cu_seqlens" not in batch:
        raise ConfigError(
            f"exchange of {modality!r}",
            got=f"a batch without items: microbatch {batch['microbatch']}",
            limit=f"one with {modality!r}",
            remedy="Items that are encoded by steps come with the first microbatch of each.",
        )
    num_items = len(batch[f"{modality}_cu_seqlens"]) - 1
    rows_K = batch[f"{modality}_rows"] if rows_per_item is None else rows_per_item.cpu().long()
    if len(rows_K) != num_items:
        raise ConfigError("exchange(rows_per_item=)", got=len(rows_K), limit=f"{num_items} items")
    total: int = int(rows_K.sum())
    if len(embeddings) != total and num_items:
        raise ConfigError(
            f"exchange: embeddings of {num_items} items {modality!r}",
            got=f"{len(embeddings)} rows",
            limit=f"{total}",
            remedy="Give rows_per_item where they differ from what the transform said.",
        )
    return rows_K


def _per_rank(facts: Tensor, group: Group | None) -> list[int]:
    """Return how many rows of a table each rank of the group has; its first column is the rank."""
    ranks, counts = torch.unique_consecutive(facts[:, 0], return_counts=True)
    by_rank = dict(zip(ranks.tolist(), counts.tolist(), strict=True))
    members = [0] if not _is_distributed() else distributed.get_process_group_ranks(group)
    strangers = sorted(set(by_rank) - set(members))
    if strangers:
        raise ConfigError(
            "exchange with ranks that are not in the process group",
            got=strangers,
            limit=members if len(members) < 9 else f"{len(members)} ranks",
            remedy="Start torch.distributed, and give exchange a group of all ranks of the mesh "
            "that encode or use items.",
        )
    return [by_rank.get(rank, 0) for rank in members]


def _added(rows_X: Tensor, count_Z: list[int]) -> list[int]:
    """(Z,) rows of the items of each rank, added up."""
    return [int(part.sum()) for part in torch.split(rows_X, count_Z)]


def _ranges(first_X: Tensor, rows_X: Tensor) -> Tensor:
    """Return first, first + 1, ... of so many rows, one range after the other."""
    end_X = rows_X.cumsum(0)
    return torch.arange(int(rows_X.sum())) + (first_X - end_X + rows_X).repeat_interleave(rows_X)


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _all_to_all(
    sent: Tensor, send_Z: list[int], receive_Z: list[int], group: Group | None
) -> Tensor:
    if not _is_distributed():
        return sent.clone()
    received = sent.new_empty((sum(receive_Z), *sent.shape[1:]))
    try:
        distributed.all_to_all_single(received, sent.contiguous(), receive_Z, send_Z, group)
    except RuntimeError as error:
        raise DeadlineError(
            "the exchange of embeddings did not come about",
            got=str(error).splitlines()[0],
            limit="the timeout of the process group",
            remedy="All ranks of the group exchange in every turn, forward and backward; see what "
            "the others do.",
        ) from error
    return received


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; their gradients back from them."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, send_Z: list[int], receive_Z: list[int], group: Group | None
    ) -> Tensor:
        ctx.way = send_Z, receive_Z, group
        return _all_to_all(sent, send_Z, receive_Z, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        send_Z, receive_Z, group = ctx.way
        return _all_to_all(gradients[0], receive_Z, send_Z, group), None, None, None
