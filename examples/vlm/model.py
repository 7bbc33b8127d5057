"""A small vision encoder in front of a small language model.

Axes: L patches of all images that this rank encodes, one image after another; N merged ones; P
numbers of a patch, E of an embedding; Q packs, T tokens of a pack; A attention heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

import megadask as md
from megadask.demo.model import DocumentTransformer, ModelConfig, loss_sum

PATCH, MERGE = 16, 2
#: Token of a place that an image takes; of the bytes and the end of a text those below.
IMAGE = 257
WIDTH, HEADS = 64, 4


class Encoder(nn.Module):
    """One layer of attention within each image; squares of patches become one embedding."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH**2, WIDTH)
        self.places = nn.Linear(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.merge = nn.Sequential(
            nn.LayerNorm(MERGE**2 * WIDTH), nn.Linear(MERGE**2 * WIDTH, hidden)
        )

    def forward(self, patches_LP: Tensor, cu_seqlens: Tensor, grid: Tensor) -> Tensor:
        """Return (N, E) embeddings of images that lie one after another.

        Parameters
        ----------
        patches_LP
            (L, P) uint8, square of patches by square, as `DecodeImage(merge=)` cuts them.
        cu_seqlens
            (images + 1,) where each image begins.
        grid
            (images, 2) its patches down and across.
        """
        places = torch.cat([_places(*size) for size in grid.tolist()])
        x_LE = self.patches(patches_LP.float() / 127.5 - 1) + self.places(places)
        qkv = self.qkv(self.norm(x_LE)).view(len(x_LE), 3, HEADS, -1).permute(1, 2, 0, 3)
        attended = [
            functional.scaled_dot_product_attention(*qkv[None, :, :, first:end].unbind(1))[0]
            for first, end in pairwise(cu_seqlens.tolist())
        ]
        x_LE = x_LE + self.out(torch.cat(attended, 1).transpose(0, 1).flatten(1))
        merged: Tensor = self.merge(x_LE.view(-1, MERGE**2 * WIDTH))
        return merged


class VisionLanguageModel(nn.Module):
    """The loss of a batch, whose images other ranks may encode.

    Parameters
    ----------
    group
        The ranks that exchange embeddings. Not the group of DistributedDataParallel, whose
        reductions run at the same time.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        super().__init__()
        config = ModelConfig(hidden=64, layers=2)
        self.encoder = Encoder(config.hidden)
        self.language = DocumentTransformer(config)
        self._group = group

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a microbatch, added up over its targets."""
        blank = torch.zeros(MERGE**2, 3 * PATCH**2, dtype=torch.uint8)
        patches, cu_seqlens = md.items_or_placeholder(batch, "image", blank)
        grid = batch.get("image_grid", torch.tensor([[MERGE, MERGE]]))
        own = self.encoder(patches, cu_seqlens, grid)
        images = md.exchange(own, batch, "image", group=self._group)
        words = self.language.embedding(batch["tokens"])
        embeddings = md.scatter_embeddings(words, images, batch["image_index"])
        logits = self.language(
            batch["tokens"], batch["position_ids"], batch["cu_seqlens_padded"], embeddings
        )
        return loss_sum(logits, batch["labels"], batch["loss_mask"])


def _places(rows: int, columns: int) -> Tensor:
    """(L, 2) where the patches of an image lie, from -1 to 1, in the order of their squares."""
    down, across = torch.meshgrid(
        torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns), indexing="ij"
    )
    places = torch.stack([down, across], -1)
    squares = places.view(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
    return squares.transpose(1, 2).reshape(-1, 2)
