"""From the token slices of one microbatch to the arrays that a trainer reads.

Axes: N spans, Q packs of the microbatch, T tokens of a pack, D most documents of a pack,
S most sequences of a pack (D, or that many times the sequences of a sample), C = T / cp tokens of
one context-parallel slice.

Everything here is a pure function of its arguments; a Data Constructor calls them with what it
pulled from the loaders. In this module "document" is what a sequence of attention is: a span, or
one of the sequences of a span that has several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.batching import Batching, Padded
from megadask.planner.cp import Layout
from megadask.planner.errors import ConfigError, PlanError

#: What a trainer reads token by token; all are (Q, T).
TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
#: Where documents begin and end: all that attention in the middle of a pipeline needs of a batch.
SHAPE_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
#: What batches of `Padded` have besides; where the real tokens are.
PADDED_KEYS = ("attention_mask", "lengths")
#: All arrays of a batch.
ARRAY_KEYS = (*TOKEN_KEYS, *SHAPE_KEYS, *PADDED_KEYS)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pieces:
    """What the N spans of one microbatch bring: where they go, and their tokens.

    Spans may come in any order; one of several sequences comes as that many. Arrays are shared,
    never modified.

    Parameters
    ----------
    pack_N
        (N,) int64, pack of the microbatch, 0..Q-1.
    offset_N
        (N,) int64, first token of the span within its pack. The spans of a pack follow each other
        from 0 without gaps, each taking its padded length.
    start_N, stop_N
        (N,) int64, the span is [start, stop) of its sample, in tokens.
    tokens
        Flat integers, the slices of all spans. The slice of a span has its stop - start tokens
        and, where its sample goes on after the span, the next one: the target of the last input.
    token_offsets
        (N + 1,) int64, span n owns ``tokens[token_offsets[n]:token_offsets[n + 1]]``.
    mask
        Flat, as `tokens`: the loss weight of predicting that token; None stands for all ones.
    fields
        Name to what is aligned with `tokens`, (..., flat); fields that no span has may lack.
    """

    pack_N: NDArray[np.int64]
    offset_N: NDArray[np.int64]
    start_N: NDArray[np.int64]
    stop_N: NDArray[np.int64]
    tokens: NDArray[np.integer[Any]]
    token_offsets: NDArray[np.int64]
    mask: NDArray[Any] | None = None
    fields: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def assemble(spec: Batching, pieces: Pieces) -> dict[str, NDArray[Any]]:
    """Lay out the spans of one microbatch as packs.

    All shapes depend on ``spec`` alone, but for T of ``Padded(pad_to="longest")``: there it is the
    padded length of the longest span. No spans at all is a valid microbatch without loss.

    Returns
    -------
    dict
        ``tokens``, ``labels``, ``position_ids``
            (Q, T) int64. The label of an input is the next token of its document, also where the
            mask is 0; positions count from 0 in every document, where its sample brings none. All
            three are 0 on pads, and the label of a document's last token is 0: only ``loss_mask``
            says what counts. Positions of several axes, ``spec.position_axes``, are (axes, Q, T).
        ``loss_mask``
            (Q, T) float32, weight of every label.
        ``cu_seqlens``
            (Q, S + 1) int32, documents' real tokens added up from 0; the last value repeated.
        ``cu_seqlens_padded``
            (Q, S + 1) int32, where documents start in the pack, then where the last one ends,
            pads included; the last value repeated. A document of 7 tokens padded to 8 has
            ``cu_seqlens`` [0, 7] and ``cu_seqlens_padded`` [0, 8] (Transformer Engine's way).
        ``max_seqlen``
            int64 without axes: T, a constant.
        the fields of ``spec.fields``
            (..., Q, T), as their samples have them, not shifted; their fill elsewhere.
        ``attention_mask``, ``lengths``
            Of `Padded` only: (Q, T) bool, True on real tokens; (Q,) int32, how many they are.

    Raises
    ------
    PlanError
        The spans do not fit their packs, or a slice is not as long as its span says.

    Notes
    -----
    The tail of a pack, after its last document, belongs to no sequence: padded starts end at the
    last document, so attention spends nothing on it. Kernels that take both arrays (Transformer
    Engine) leave it at zero. Kernels that know one array get ``cu_seqlens_padded``, as pads follow
    the tokens of their document and causal attention never looks at them; if such a kernel leaves
    rows outside of all sequences unwritten (flash-attn) or wants the last value to be T, append a
    column of T (to ``cu_seqlens``: its last column again), which makes the tail one more sequence
    and keeps the shape static. It is not part of the batch since it would be paid for by all: a
    sequence of pads costs the square of its length.
    """
    num_packs = spec.micro_batch
    length_N = pieces.stop_N - pieces.start_N
    slice_N = np.diff(pieces.token_offsets)
    _check_slices(pieces, length_N, slice_N)
    sequences = _sequences(spec, pieces, length_N)
    one_N = np.zeros(len(length_N), np.int64)
    seq_len = int(spec.widths(spec.padded(length_N), one_N, 1)[0])
    batch: dict[str, NDArray[Any]] = {
        "tokens": np.zeros((num_packs, seq_len), np.int64),
        "labels": np.zeros((num_packs, seq_len), np.int64),
        "loss_mask": np.zeros((num_packs, seq_len), np.float32),
        **sequences,
        "max_seqlen": np.array(seq_len, np.int64),
    }
    for one in spec.fields:
        batch[one.name] = np.full((*one.shape, num_packs, seq_len), one.fill, one.dtype)
    counted_QT = np.zeros((num_packs, seq_len), np.int64)
    _copy_spans(pieces, pieces.pack_N * seq_len + pieces.offset_N, length_N, batch, counted_QT)
    positions = batch["position_ids"]
    np.copyto(positions, counted_QT, where=positions < 0)
    if isinstance(spec, Padded):
        batch["lengths"] = sequences["cu_seqlens"][:, -1].copy()
        batch["attention_mask"] = np.arange(seq_len) < batch["lengths"][:, None]
    return batch


def _copy_spans(
    pieces: Pieces,
    first_N: NDArray[np.int64],
    length_N: NDArray[np.int64],
    batch: Mapping[str, NDArray[Any]],
    counted_QT: NDArray[np.int64],
) -> None:
    """Copy every span to where it goes, and count its tokens.

    first_N, length_N: where a span begins in the packs, laid end to end, and how long it is. Span
    by span: stretches of memory are copied many times faster than as many indices are looked up.
    """
    tokens, labels, loss_mask = (batch[key].reshape(-1) for key in TOKEN_KEYS[:3])
    counted = counted_QT.reshape(-1)
    counts = np.arange(length_N.max(initial=0))
    fields = [
        (batch[name].reshape(*batch[name].shape[:-2], -1), array)
        for name, array in pieces.fields.items()
    ]
    bounds = pieces.token_offsets.tolist()
    places = zip(first_N.tolist(), length_N.tolist(), bounds[:-1], bounds[1:], strict=True)
    for at, length, begin, end in places:
        inputs, given = slice(at, at + length), slice(begin, begin + length)
        tokens[inputs] = pieces.tokens[given]
        counted[inputs] = counts[:length]
        for array, values in fields:
            array[..., inputs] = values[..., given]
        # Token i of a slice is the target of input i - 1: a slice of n tokens has n - 1 targets.
        outputs, targets = slice(at, at + max(end - begin - 1, 0)), slice(begin + 1, end)
        labels[outputs] = pieces.tokens[targets]
        loss_mask[outputs] = 1 if pieces.mask is None else pieces.mask[targets]


def most_bytes(spec: Batching) -> int | None:
    """Return the bytes of the largest microbatch where sizes differ; None where all are alike."""
    if not isinstance(spec, Padded) or spec.pad_to == "seq_len":
        return None
    none = np.empty(0, np.int64)
    pieces = Pieces(
        pack_N=none,
        offset_N=none,
        start_N=none,
        stop_N=none,
        tokens=none,
        token_offsets=np.zeros(1, np.int64),
    )
    batch = assemble(replace(spec, pad_to="seq_len"), pieces)
    return sum(array.nbytes for array in batch.values())


def slice_cp(
    batch: Mapping[str, NDArray[Any]],
    cp_rank: int,
    cp_size: int,
    layout: Layout = "document",
    fields: Collection[str] = (),
) -> dict[str, NDArray[Any]]:
    """Return what one context-parallel rank gets of a batch of `assemble`.

    The keys of `TOKEN_KEYS`, ``attention_mask`` and ``fields`` become (..., Q, C), see
    `cp_positions`; all others stay those of the whole batch, ``cu_seqlens`` too, as
    context-parallel attention expects. With ``cp_size=1`` the arrays are those of ``batch``, not
    copies.

    Raises
    ------
    ConfigError
        What the layout cuts, a document or the pack, is no multiple of 2 x cp.
    """
    positions_QC = cp_positions(
        batch["cu_seqlens_padded"], int(batch["max_seqlen"]), cp_rank, cp_size, layout
    )
    if cp_size == 1:
        return dict(batch)
    return cut_tokens(batch, positions_QC, (*TOKEN_KEYS, "attention_mask", *fields))


def cut_tokens(
    batch: Mapping[str, NDArray[Any]], positions_QC: NDArray[np.int64], keys: Collection[str]
) -> dict[str, NDArray[Any]]:
    """Return a batch in which the given keys, (..., Q, T), are (..., Q, C): these tokens."""
    return {
        key: _taken(array, positions_QC) if key in keys else array for key, array in batch.items()
    }


def _taken(array: NDArray[Any], positions_QC: NDArray[np.int64]) -> NDArray[Any]:
    """Return (..., Q, C) the given tokens of each pack of a (..., Q, T) array."""
    leading = (1,) * (array.ndim - 2)
    return np.take_along_axis(array, positions_QC.reshape(*leading, *positions_QC.shape), axis=-1)


def cp_positions(
    cu_seqlens_padded: NDArray[np.integer[Any]],
    seq_len: int,
    cp_rank: int,
    cp_size: int,
    layout: Layout = "document",
) -> NDArray[np.int64]:
    """Return (Q, C) int64, which tokens of their pack a context-parallel rank gets, in its order.

    In layout "document" every padded document is cut in 2 x cp chunks; rank r gets chunks r and
    2 x cp - 1 - r, so all ranks do the same causal attention. Documents stay in order; the tail of
    the pack is shared out as one more document. In layout "sequence" the whole pack is cut so,
    whatever documents it holds. The slices of all ranks are a partition of the pack.

    Parameters
    ----------
    cu_seqlens_padded
        (Q, S + 1) of `assemble`, not modified.
    seq_len
        T.
    cp_rank, cp_size
        The rank along the context-parallel axis, from 0, and the length of that axis.
    layout
        That of the step's plan.
    """
    if not 0 <= cp_rank < cp_size:
        raise ConfigError("context-parallel rank", got=cp_rank, limit=f"0..{cp_size - 1}")
    num_packs, chunks = len(cu_seqlens_padded), 2 * cp_size
    if cp_size == 1:
        return np.broadcast_to(np.arange(seq_len), (num_packs, seq_len))
    if seq_len % chunks:
        raise ConfigError(
            "seq_len under context parallelism",
            got=seq_len,
            limit=f"a multiple of 2 x cp = {chunks}",
        )
    tail_Q1 = np.full((num_packs, 1), seq_len)
    whole = cu_seqlens_padded if layout == "document" else np.zeros_like(tail_Q1)
    bounds = np.concatenate([whole, tail_Q1], axis=1).astype(np.int64)
    starts, lengths = bounds[:, :-1].ravel(), np.diff(bounds, axis=1).ravel()
    if (lengths % chunks).any():
        raise ConfigError(
            "a padded document cannot be cut for context parallelism",
            got=f"{lengths[lengths % chunks > 0][0]} tokens",
            limit=f"a multiple of 2 x cp = {chunks}",
            remedy=f"Choose pad_to_multiple= of the batching as a multiple of {chunks}.",
        )
    chunk = lengths // chunks
    own = 2 * chunk
    within = _within(own)
    # The second chunk follows the first in the slice; in the pack the other ranks' lie between.
    skipped = np.where(within < np.repeat(chunk, own), cp_rank, chunks - 2 - cp_rank)
    skipped *= np.repeat(chunk, own)
    positions = np.repeat(starts, own) + within + skipped
    return positions.reshape(num_packs, seq_len // cp_size)


def num_loss_tokens(batch: Mapping[str, NDArray[Any]]) -> int:
    """Return how many targets of a batch, or of a slice of one, have a weight other than 0."""
    return int(np.count_nonzero(batch.get("loss_mask", 0)))


def _sequences(
    spec: Batching, pieces: Pieces, length_N: NDArray[np.int64]
) -> dict[str, NDArray[np.int32]]:
    """Return ``cu_seqlens`` and ``cu_seqlens_padded``, having checked that the spans fit."""
    num_packs, limit = spec.micro_batch, spec.sequences_limit
    if pieces.pack_N.size and not 0 <= pieces.pack_N.min() <= pieces.pack_N.max() < num_packs:
        raise PlanError("a span lies in no pack", got=pieces.pack_N, limit=f"0..{num_packs - 1}")
    count_Q = np.bincount(pieces.pack_N, minlength=num_packs)
    if (count_Q > limit).any():
        raise PlanError("a pack has too many documents", got=count_Q.max(), limit=f"<= {limit}")
    order_N = np.lexsort((pieces.offset_N, pieces.pack_N))
    row_N, column_N = pieces.pack_N[order_N], _within(count_Q)

    def added_up(tokens_N: NDArray[np.int64]) -> NDArray[np.int64]:
        bounds = np.zeros((num_packs, limit + 1), np.int64)
        bounds[row_N, column_N + 1] = tokens_N[order_N]
        return bounds.cumsum(axis=1)

    padded = added_up(spec.padded(length_N))
    if (padded[:, -1] > spec.seq_len).any():
        raise PlanError(
            "documents do not fit their pack",
            got=f"{padded[:, -1].max()} padded tokens",
            limit=f"at most seq_len={spec.seq_len}",
        )
    if (pieces.offset_N[order_N] != padded[row_N, column_N]).any():
        raise PlanError(
            "spans of a pack overlap or leave gaps",
            got=f"offsets {pieces.offset_N[order_N]}",
            limit=f"{padded[row_N, column_N]}",
        )
    return {
        "cu_seqlens": added_up(length_N).astype(np.int32),
        "cu_seqlens_padded": padded.astype(np.int32),
    }


def _check_slices(pieces: Pieces, length_N: NDArray[np.int64], slice_N: NDArray[np.int64]) -> None:
    """Raise PlanError unless every slice has its span's tokens and at most the next one."""
    next_N = slice_N - length_N
    bad = np.flatnonzero((next_N < 0) | (next_N > 1) | (length_N < 0))
    if bad.size:
        n = bad[0]
        raise PlanError(
            f"the slice of span {n} is not as long as its span",
            got=f"{slice_N[n]} tokens",
            limit=f"{length_N[n]}, or one more where the sample goes on",
        )
    total = pieces.token_offsets[-1]
    fields = pieces.fields.values()
    is_aligned = all(array.shape[-1] == total for array in (pieces.tokens, *fields))
    if not is_aligned or (pieces.mask is not None and len(pieces.mask) != total):
        raise PlanError("slices do not add up to the tokens", got=len(pieces.tokens), limit=total)


def _within(count_N: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return 0..count-1 for each of N counts, one after the other."""
    first_N: NDArray[np.int64] = np.cumsum(count_N, dtype=np.int64) - count_N
    return np.arange(int(count_N.sum()), dtype=np.int64) - np.repeat(first_N, count_N)
