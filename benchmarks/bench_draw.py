"""How full are the packs of a step, how even its ranks, and how long does planning it take?

Draws and places steps from made-up lengths, in one process, without a cluster:
``python benchmarks/bench_draw.py``. Prints medians over the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megadask.planner import ClientPlaceTree, DGraph, Packed, costs
from megadask.planner.draw import Draw, DrawRules, draw, rows_after
from megadask.planner.metadata import SPAN_COLUMNS, Metadata
from megadask.planner.mixture import TOTAL_SHARE
from megadask.planner.place import place
from megadask.planner.state import PlannerState

NUM_STEPS = 9
RANKS = 8
SHARES = np.array([TOTAL_SHARE // 2, TOTAL_SHARE // 4, TOTAL_SHARE // 4])
NAMES = ("a", "b", "c")

#: Name to sequence length, mean tokens of a document, and lengths of n documents.
CORPORA: dict[str, tuple[int, int, Callable[[np.random.Generator, int], NDArray[np.int64]]]] = {
    "lognormal(6.5, 1.3) <= 8k": (
        8192,
        1300,
        lambda rng, n: np.minimum(rng.lognormal(6.5, 1.3, n), 8192).astype(np.int64) + 1,
    ),
    "code in bytes, 6.7k median": (
        4096,
        16_000,
        lambda rng, n: rng.lognormal(np.log(6700), 1.38, n).astype(np.int64) + 1,
    ),
}


def spans(lengths: NDArray[np.int64], batching: Packed, source: int) -> Metadata:
    """Return the metadata of documents in one lane."""
    rows = [
        (source, 0, 0, n, 0, n, a, b, 0, b - a, length, b - a - (b == length), 2 * length, 0)
        for n, length in enumerate(lengths.tolist())
        for a, b in batching.cut(length)
    ]
    columns = zip(*rows, strict=True)
    names = zip(SPAN_COLUMNS.items(), columns, strict=True)
    return Metadata({name: np.array(column, dtype) for (name, dtype), column in names})


def measure(corpus: str, global_batch: int) -> tuple[float, float, float, float, int]:
    """Return the medians of pack fill, imbalance, draw and place milliseconds, and spans."""
    seq_len, mean, lengths = CORPORA[corpus]
    batching = Packed(seq_len, global_batch)
    rng = np.random.default_rng(0)
    count = NUM_STEPS * global_batch * seq_len // mean + 500
    fetched = {n: spans(lengths(rng, count), batching, i) for i, n in enumerate(NAMES)}
    graph = DGraph(NAMES, ClientPlaceTree(dp=RANKS)).cost(costs.Transformer(1024))
    strategy, rules = graph.freeze(), DrawRules(batching=batching)
    state = PlannerState.initial(dict.fromkeys(NAMES, 1))
    seen = []
    for _ in range(NUM_STEPS):
        rows = {n: rows_after(state.sources[n], fetched[n], 0) for n in NAMES}
        began = time.perf_counter()
        drawn = draw(state, rows, SHARES, rules)
        assert isinstance(drawn, Draw)
        placed = time.perf_counter()
        plan = place(drawn, strategy, batching, ClientPlaceTree(dp=RANKS), {})
        ended = time.perf_counter()
        fill = drawn.table["tokens"].sum() / (global_batch * seq_len)
        times_ms = ((placed - began) * 1e3, (ended - placed) * 1e3)
        seen.append((fill, plan.imbalance, *times_ms, drawn.table.num_rows))
        state = drawn.state
    fill, imbalance, draw_ms, place_ms, num_spans = np.median(seen, axis=0)
    return fill, imbalance, draw_ms, place_ms, int(num_spans)


def main() -> None:
    """Print the table."""
    print(
        f"{'lengths':28}{'packs':>6}{'spans':>7}{'fill':>7}{'max/mean':>10}{'draw':>9}{'place':>9}"
    )
    for corpus in CORPORA:
        for global_batch in (16, 64, 512):
            fill, imbalance, draw_ms, place_ms, num_spans = measure(corpus, global_batch)
            print(
                f"{corpus:28}{global_batch:6}{num_spans:7}{fill:7.3f}{imbalance:10.4f}"
                f"{draw_ms:6.1f} ms{place_ms:6.1f} ms"
            )


if __name__ == "__main__":
    main()
