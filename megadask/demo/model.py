"""A small causal transformer over packed documents, whose compute is quadratic per document.

Axes: Q packs, T tokens of a pack, S = Q x T, V vocabulary, E hidden, A heads, H = E / A.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from megadask.planner.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the demo's model.

    Parameters
    ----------
    vocabulary
        Number of token ids: 256 bytes and one to end a text, rounded up to a multiple of 8.
    hidden
        Width of the residual stream; the feed-forward layer has 4 times as many.
    layers
        Number of layers.
    heads
        Attention heads of a layer.
    """

    vocabulary: int = 264
    hidden: int = 64
    layers: int = 2
    heads: int = 4

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                "ModelConfig(hidden=)",
                got=self.hidden,
                limit=f"a multiple of 2 x {self.heads} heads",
            )


class DocumentTransformer(nn.Module):
    """Decoder-only transformer with rotary positions; documents of a pack do not see each other.

    Parameters
    ----------
    config
        Its sizes.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for weight in (self.embedding.weight, self.head.weight):  # the first loss is log(V)
            nn.init.normal_(weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        cu_seqlens_padded: Tensor,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Return (Q, T, V) logits of the next token.

        Parameters
        ----------
        tokens, position_ids
            (Q, T) int64.
        cu_seqlens_padded
            (Q, D + 1) integers, where documents start in their pack, the last value repeated.
            Pads may count as tokens of their document, since they follow all of its real ones.
        embeddings
            (Q, T, E) in the place of those of the tokens.
        """
        num_packs, seq_len = tokens.shape
        lengths, is_tail = _segments(cu_seqlens_padded, seq_len)
        half = self.config.hidden // self.config.heads // 2
        x_QTE = self.embedding(tokens) if embeddings is None else embeddings
        x_SE = x_QTE.reshape(num_packs * seq_len, -1)
        rates = 10_000.0 ** (-torch.arange(half, dtype=x_SE.dtype, device=x_SE.device) / half)
        angles = position_ids.reshape(-1, 1) * rates
        rotation = (angles.cos(), angles.sin())
        for layer in self.layers:
            x_SE = layer(x_SE, rotation, lengths, is_tail)
        logits: Tensor = self.head(self.norm(x_SE))
        return logits.view(num_packs, seq_len, -1)


class _Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(config.hidden),
            nn.Linear(config.hidden, 4 * config.hidden),
            nn.GELU(),
            nn.Linear(4 * config.hidden, config.hidden),
        )

    def forward(
        self,
        x_SE: Tensor,
        rotation: tuple[Tensor, Tensor],
        lengths: list[int],
        is_tail: list[bool],
    ) -> Tensor:
        """Return (S, E), given the segments that the S tokens consist of."""
        qkv = self.qkv(self.attention_norm(x_SE)).view(len(x_SE), 3, self.heads, -1)
        q_ASH, k_ASH, v_ASH = qkv.permute(1, 2, 0, 3)
        q_ASH, k_ASH = _rotate(q_ASH, *rotation), _rotate(k_ASH, *rotation)
        # One call a document: the time it takes is then quadratic in the document, not in the pack.
        # A tail attends to itself alone, which also keeps all parameters in the graph of a
        # microbatch without documents; DistributedDataParallel would wait for their gradients.
        attended = [
            v
            if tail
            else functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True
            ).squeeze(0)
            for q, k, v, tail in zip(
                torch.split(q_ASH, lengths, 1),
                torch.split(k_ASH, lengths, 1),
                torch.split(v_ASH, lengths, 1),
                is_tail,
                strict=True,
            )
        ]
        x_SE = x_SE + self.out(torch.cat(attended, 1).transpose(0, 1).reshape(x_SE.shape))
        fed: Tensor = x_SE + self.feed_forward(x_SE)
        return fed


def loss_sum(logits: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the cross entropy added up over all targets, each times its weight; 0 without any.

    Parameters
    ----------
    logits
        (Q, T, V).
    labels
        (Q, T) int64; any token id where the weight is 0.
    loss_mask
        (Q, T) weights.
    """
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * loss_mask.flatten()).sum()


def _segments(cu_seqlens_padded: Tensor, seq_len: int) -> tuple[list[int], list[bool]]:
    """Return lengths of the documents and tails that make up the packs, and which are tails."""
    lengths, is_tail = [], []
    for bounds in cu_seqlens_padded.tolist():
        documents = [stop - start for start, stop in pairwise(bounds)]
        documents = [length for length in documents if length]
        lengths += [*documents, seq_len - bounds[-1]]
        is_tail += [False] * len(documents) + [True]
    return lengths, is_tail


def _rotate(x_ASH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head's pairs of channels by the angle of its token's position."""
    first, second = x_ASH.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
