"""A model with an encoder of images, trained on one rank or on several that exchange embeddings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megadask as md


class Tiny(nn.Module):
    """Numbers for tokens, with those of images in their places; the loss of a batch."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.words = nn.Linear(1, 3).double()
        self.group = group

    def encode(self, batch: Any) -> Tensor:
        placeholder = torch.zeros(1, 2, dtype=torch.int32)
        items, _ = md.items_or_placeholder(batch, "image", placeholder)
        embeddings: Tensor = self.encoder(items.double() / 40_000)
        return embeddings

    def forward(self, batch: Any, images: Tensor | None = None) -> Tensor:
        """Return the loss, summed over targets; images: what was exchanged before."""
        if images is None:
            images = md.exchange(self.encode(batch), batch, "image", group=self.group)
        tokens = batch["tokens"]
        words = self.words(tokens[..., None].double() / 1e6)
        embeddings = md.scatter_embeddings(words, images, batch["image_index"])
        weights = batch["loss_mask"] * (tokens % 5 + 1)
        return (embeddings.tanh().sum(-1) * weights).sum()


def gradients(
    loader: md.Loader, model: Tiny, world: int = 1, *, by_step: bool = False
) -> list[Any]:
    """Return the loss and all gradients of every step, over all ranks."""
    replica = DistributedDataParallel(model) if world > 1 else model
    seen = []
    for step in loader.steps():
        model.zero_grad()
        total = torch.zeros(1, dtype=torch.float64)
        shared = None
        for batch in step:
            if not by_step:
                # A sum over ranks, where DistributedDataParallel takes the mean.
                with replica.no_sync() if world > 1 and not batch["is_last"] else _nothing():
                    loss = replica(batch)
                    (loss * world).backward()
            else:
                shared = shared or md.exchange_step(
                    model.encode(batch), batch, "image", group=model.group
                )
                loss = model(batch, shared[batch["microbatch"]])
                loss.backward()
            total += loss.detach()
        if shared is not None:
            shared.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if world > 1:
            dist.all_reduce(total)
        parts = [parameter.grad.flatten() for parameter in model.parameters()]
        seen.append([step.index, [float(total), *torch.cat(parts).tolist()]])
    return seen


def exchange_gradients(job: dict[str, Any], shared: Any) -> Any:
    """Train on every rank of a job; shared: the ranks that one of them fetches for."""
    group = dist.new_group()
    with md.connect(job["address"], job["service"], timeout=30.0, group=shared) as loader:
        by_step = job["encode"] == "step"
        return gradients(loader, Tiny(group), dist.get_world_size(), by_step=by_step)


def come_alone(job: dict[str, Any], _: Any) -> Any:
    """Rank 0 exchanges, the others do not."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    with md.connect(job["address"], job["service"], timeout=30.0) as loader:
        batch = next(iter(loader))
        if loader.rank == 0:
            Tiny(group)(batch)
    return {}


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
