"""What do the layouts of context parallelism cost a step, and what does spreading documents gain?

Plans steps from made-up lengths, in one process, without a cluster:
``python benchmarks/bench_context.py``. The first table gives the attention that ranks wait for over
that of an even share without tiles; the second one max / mean over the ranks, and medians of time.
"""

from __future__ import annotations

import time

import lengths
import numpy as np
import reporting

from megadask.planner import Packed
from megadask.planner.balance import Problem, balance, bucket_loads
from megadask.planner.cp import Context, Packs, attention_work, choose_layout, slowest_work
from megadask.planner.hybrid import spread
from megadask.planner.packing import Packing

CONTEXT = 32768
CP = 8
NUM_STEPS = 20
PACKS = 8
REPEATS = 5
#: "chat" or a mix of `lengths`.
MIXES = ("chat", "web", "mixed", "longctx")


def documents(mix: str, count: int, rng: np.random.Generator) -> lengths.Ints:
    """Return (count,) tokens of documents."""
    if mix == "chat":
        return lengths.lognormal(rng, count, 250, 1.0, CONTEXT)
    return lengths.mix(mix, rng, count, CONTEXT)["tokens"]


def packed(mix: str, rng: np.random.Generator) -> Packs:
    """Return documents packed by best fit in the order of arrival, up to the first without room."""
    batching = Packed(CONTEXT, PACKS, pad_to_multiple=2 * CP)
    packing, used = Packing(PACKS, batching), [0] * PACKS
    sizes, packs, offsets = [], [], []
    for size in batching.padded(documents(mix, PACKS * CONTEXT // 100, rng)).tolist():
        if size > packing.room:
            break
        pack = packing.add(size)
        sizes.append(size)
        packs.append(pack)
        offsets.append(used[pack])
        used[pack] += size
    size_N, pack_N, offset_N = (np.array(column) for column in (sizes, packs, offsets))
    return Packs(size_N=size_N, pack_N=pack_N, offset_N=offset_N, num_packs=PACKS, seq_len=CONTEXT)


def compare_layouts(mix: str, tile: int) -> tuple[float, float, float, float]:
    """Return what ranks wait for under "document", "sequence" and "auto", and how often it cuts."""
    rng = np.random.default_rng(0)
    waits, cuts = [], []
    for _ in range(NUM_STEPS):
        packs = packed(mix, rng)
        even = attention_work(packs, CP, "document").sum() / CP
        wait = {
            layout: slowest_work(attention_work(packs, CP, layout, tile), 1, PACKS) / even
            for layout in ("document", "sequence")
        }
        chosen = choose_layout(Context(layout="auto", tile=tile), packs, CP, 1, PACKS)
        waits.append((wait["document"], wait["sequence"], wait[chosen]))
        cuts.append(chosen == "document")
    return (*np.mean(waits, axis=0), float(np.mean(cuts)))


def compare_spreading(dp: int, microbatches: int) -> tuple[float, ...]:
    """Return max / mean of whole documents and of spread ones, microbatch by microbatch, and ms."""
    seen = []
    for seed in range(REPEATS):
        tokens_N = documents("mixed", 16 * dp * CP, np.random.default_rng(seed))
        cost_N = lengths.transformer_cost(tokens_N)
        mean = cost_N.sum() / (dp * CP)
        problem = Problem(
            cost_NP=cost_N[:, None], num_buckets=dp * CP, num_microbatches=microbatches
        )
        load_BM = bucket_loads(problem, balance(problem))[:, :, 0]
        began = time.process_time()
        hybrid = spread(cost_N, tokens_N, dp=dp, cp=CP, microbatches=microbatches)
        took_ms = (time.process_time() - began) * 1e3
        whole, whole_micro = load_BM.sum(axis=1).max(), load_BM.max(axis=0).sum()
        loads = (whole, whole_micro, hybrid.slowest, hybrid.slowest_microbatches)
        shared = (hybrid.cp_degree > 1).mean()
        seen.append((*(load / mean for load in loads), shared, took_ms))
    return tuple(np.median(seen, axis=0))


def main() -> None:
    options = reporting.arguments(__doc__).parse_args()
    report = reporting.Report("context", "Context parallelism", options)
    report.note(f"packs of {CONTEXT:,} tokens at cp={CP}; padding to {2 * CP} tokens included")
    report.note("times are medians of the CPU of one process")
    rows = []
    for mix in MIXES:
        for tile in (64, 128):
            *waits, cuts = compare_layouts(mix, tile)
            rows.append((mix, tile, *(f"{wait:.3f}" for wait in waits), f"{cuts:.0%}"))
    report.table(
        "Attention that ranks wait for, over an even share without tiles",
        ["lengths", "tile", "document", "sequence", "auto", "cut by document"],
        rows,
    )
    rows = []
    for dp in (8,) if options.quick else (8, 36, 512):
        for microbatches in (1, 4):
            *loads, shared, ms = compare_spreading(dp, microbatches)
            shown = (f"{load:.{4 if at > 1 else 3}f}" for at, load in enumerate(loads))
            rows.append((dp * CP, microbatches, *shown, f"{shared:.2%}", f"{ms:.0f} ms"))
    report.table(
        f"Max / mean of mixed lengths up to {CONTEXT:,}, 16 documents a rank",
        [
            *("ranks", "microbatches", "whole, a step", "whole, a microbatch"),
            *("spread, a step", "spread, a microbatch", "shared documents", "time"),
        ],
        rows,
    )
    report.write()


if __name__ == "__main__":
    main()
