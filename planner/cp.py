"""Context parallelism within a bucket: how its packs are cut for the ranks that share it.

Every rank of a group takes as many tokens of a pack, but not as much attention: a query at position
p of its document looks at p + 1 keys. Two layouts, both with 2 x cp chunks of which rank r takes
chunks r and 2 x cp - 1 - r: "document" cuts every document so, which gives all ranks the same work
but short fragments; "sequence" cuts the pack as a whole, which leaves documents longer and ranks
uneven. Neither moves more data than the other, as every rank passes on the keys of T / cp tokens,
so that the work of the slowest rank decides. WLB-LLM (Wang et al., OSDI 2025) chooses likewise.

Axes: N spans, F packs, R context-parallel ranks, X fragments (what a chunk holds of a span).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError, PlanError
from megadask.planner.problem import Ints, sums

Layout = Literal["document", "sequence"]
LayoutChoice = Literal["auto", "document", "sequence"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """How packs are to be cut for context parallelism.

    Attributes
    ----------
    layout
        The layout of all steps, or ``"auto"``: per step the one whose slowest rank has less to do.
    tile
        Query tokens that an attention kernel computes together; a fragment is charged whole tiles.
    """

    layout: LayoutChoice = "document"
    tile: int = 128

    def __post_init__(self) -> None:
        if self.layout not in get_args(LayoutChoice):
            raise ConfigError(
                "context(layout=)", got=repr(self.layout), limit=f"one of {get_args(LayoutChoice)}"
            )
        check_integer("context(tile=)", self.tile, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """Where the spans of a step lie in its packs. Arrays are not modified.

    Attributes
    ----------
    size_N
        (N,) int64 >= 0, padded tokens of each span.
    pack_N
        (N,) int64, flat pack of each span: (bucket * microbatches + microbatch) * packs + pack.
    offset_N
        (N,) int64, first token of each span within its pack.
    num_packs
        F.
    seq_len
        T, tokens of a pack. What follows the last span of a pack belongs to no document.
    """

    size_N: Ints
    pack_N: Ints
    offset_N: Ints
    num_packs: int
    seq_len: int


def attention_work(packs: Packs, cp: int, layout: Layout, tile: int = 1) -> Ints:
    """Return (F, R) int64 the attention of each rank of a group of ``cp`` in each pack.

    Counted in pairs of a query and a key. A kernel computes ``tile`` queries of a fragment at a
    time, each against the keys up to the last one of them, so that fragments are rounded up to
    whole tiles; with ``tile=1`` the count is exact.

    Raises
    ------
    PlanError
        A span (layout "document") or the pack ("sequence") cannot be cut in 2 x cp equal chunks.
    """
    chunks = 2 * cp
    if cp == 1:  # nothing is cut
        whole_N = _fragment_work(np.zeros_like(packs.size_N), packs.size_N, tile)
        return sums(whole_N, packs.pack_N, packs.num_packs)[:, None]
    if layout == "document":
        if (packs.size_N % chunks).any():
            bad = packs.size_N[packs.size_N % chunks > 0][0]
            raise _uncut("a span", int(bad), chunks)
        length_N = packs.size_N // chunks
        # Chunk r starts as much earlier as its partner starts later: rank 0 stands for all.
        work_N = _fragment_work(np.zeros_like(length_N), length_N, tile)
        work_N += _fragment_work(packs.size_N - length_N, packs.size_N, tile)
        work_F = sums(work_N, packs.pack_N, packs.num_packs)
        return np.repeat(work_F[:, None], cp, axis=1)
    if packs.seq_len % chunks:
        raise _uncut("the pack", packs.seq_len, chunks)
    length = packs.seq_len // chunks
    end_N = packs.offset_N + packs.size_N
    first_N = packs.offset_N // length
    count_N = np.where(packs.size_N > 0, (end_N - 1) // length - first_N + 1, 0)
    span_X = np.repeat(np.arange(len(count_N)), count_N)
    chunk_X = np.arange(len(span_X)) - np.repeat(np.cumsum(count_N) - count_N - first_N, count_N)
    offset_X = packs.offset_N[span_X]
    start_X = np.maximum(chunk_X * length, offset_X) - offset_X
    stop_X = np.minimum((chunk_X + 1) * length, end_N[span_X]) - offset_X
    rank_X = np.minimum(chunk_X, chunks - 1 - chunk_X)
    work_FR = sums(
        _fragment_work(start_X, stop_X, tile),
        packs.pack_N[span_X] * cp + rank_X,
        packs.num_packs * cp,
    )
    return work_FR.reshape(packs.num_packs, cp)


def slowest_work(work_FR: Ints, num_buckets: int, num_microbatches: int) -> int:
    """Return the attention that a step waits for.

    The ranks of a group wait for each other in every microbatch, as they exchange keys in every
    layer; the buckets do at the end of the step.

    work_FR: (F, R), see `attention_work`, F = buckets x microbatches x packs of one.
    """
    work_BMR = work_FR.reshape(num_buckets, num_microbatches, -1, work_FR.shape[1]).sum(axis=2)
    return int(work_BMR.max(axis=2).sum(axis=1).max())


def choose_layout(
    context: Context, packs: Packs, cp: int, num_buckets: int, num_microbatches: int
) -> Layout:
    """Return the layout of a step, the same for all of its ranks.

    Under ``"auto"`` the one that makes the step wait less, see `slowest_work`; ties, and a group of
    one rank, go to "document".
    """
    if cp == 1:
        return "document"
    if context.layout != "auto":
        return context.layout
    document, sequence = (
        slowest_work(attention_work(packs, cp, layout, context.tile), num_buckets, num_microbatches)
        for layout in get_args(Layout)
    )
    return "sequence" if sequence < document else "document"


def _fragment_work(start_X: Ints, stop_X: Ints, tile: int) -> Ints:
    """Return (X,) the work of queries start..stop-1 of their documents, in tiles from the start."""
    full_X, rest_X = np.divmod(stop_X - start_X, tile)
    keys_X: NDArray[np.int64] = full_X * start_X + tile * (full_X * (full_X + 1) // 2)
    return tile * (keys_X + np.where(rest_X > 0, stop_X, 0))


def _uncut(what: str, tokens: int, chunks: int) -> PlanError:
    return PlanError(
        f"{what} cannot be cut for context parallelism",
        got=f"{tokens} tokens",
        limit=f"a multiple of 2 x cp = {chunks}",
        remedy=f"Choose seq_len= and pad_to_multiple= of the batching as multiples of {chunks}.",
    )
