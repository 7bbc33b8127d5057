"""How full are the packs of a step, how long does drawing take, and what does deferral change?

Draws and places steps from made-up lengths, in one process, without a cluster:
``python benchmarks/bench_draw.py [packing] [sources] [deferral]``, by default all three tables.
Times are medians over the steps, of this process alone (CPU).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import reporting
from numpy.typing import NDArray

from megadask.planner import ClientPlaceTree, DGraph, Packed, costs
from megadask.planner import lengths as laws
from megadask.planner.ahead import rows_after
from megadask.planner.deferral import Deferral
from megadask.planner.draw import Draw, DrawRules, draw
from megadask.planner.drift import drift
from megadask.planner.lines import Rows
from megadask.planner.metadata import SPAN_COLUMNS, Metadata
from megadask.planner.place import place
from megadask.planner.state import PlannerState
from megadask.planner.weights import TOTAL_SHARE, MixBy, quantise

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


def one_lane(lengths: NDArray[np.int64], source: int) -> Metadata:
    """Return the metadata of whole documents in one lane."""
    at, same = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
    columns = dict.fromkeys(SPAN_COLUMNS, same)
    columns |= {"source": same + source, "position": at, "row": at}
    columns |= dict.fromkeys(("stop", "tokens", "length"), lengths)
    columns |= {"loss_tokens": lengths - 1, "bytes": 2 * lengths}
    return Metadata({name: columns[name].astype(dtype) for name, dtype in SPAN_COLUMNS.items()})


def steps(
    fetched: Mapping[str, Metadata],
    share_S: NDArray[np.int64],
    rules: DrawRules,
    num_steps: int,
    ahead_S: NDArray[np.int64],
) -> Iterator[tuple[Draw, float]]:
    """Yield steps and the milliseconds that drawing took; so many spans are known ahead of each."""
    state = PlannerState.initial(dict.fromkeys(fetched, 1))
    for _ in range(num_steps):
        rows = {}
        for (name, table), ahead in zip(fetched.items(), ahead_S.tolist(), strict=True):
            known = rows_after(state.sources[name], table, 0).table
            rows[name] = Rows(known.take(np.arange(min(ahead, known.num_rows))), 0)
        began = time.process_time()
        drawn = draw(state, rows, share_S, rules)
        took_ms = (time.process_time() - began) * 1e3
        assert isinstance(drawn, Draw), drawn
        yield drawn, took_ms
        state = drawn.state


def measure(corpus: str, global_batch: int) -> tuple[float, float, float, float, int]:
    """Return the medians of pack fill, imbalance, draw and place milliseconds, and spans."""
    seq_len, mean, lengths = CORPORA[corpus]
    batching = Packed(seq_len, global_batch)
    rng = np.random.default_rng(0)
    per_step = global_batch * seq_len // mean + 500
    fetched = {
        n: spans(lengths(rng, NUM_STEPS * per_step), batching, i) for i, n in enumerate(NAMES)
    }
    graph = DGraph(NAMES, ClientPlaceTree(dp=RANKS)).cost(costs.Transformer(1024))
    strategy, rules = graph.freeze(), DrawRules(batching=batching)
    seen = []
    ahead_S = np.full(len(NAMES), 5 * per_step)
    for drawn, draw_ms in steps(fetched, SHARES, rules, NUM_STEPS, ahead_S):
        began = time.process_time()
        plan = place(drawn, strategy, batching, ClientPlaceTree(dp=RANKS), {})
        place_ms = (time.process_time() - began) * 1e3
        fill = drawn.table["tokens"].sum() / (global_batch * seq_len)
        seen.append((fill, plan.imbalance, draw_ms, place_ms, drawn.table.num_rows))
    fill, imbalance, draw_ms, place_ms, num_spans = np.median(seen, axis=0)
    return fill, imbalance, draw_ms, place_ms, int(num_spans)


def many_sources(num_sources: int, num_spans: int, by: MixBy, ways: int | None) -> float:
    """Return the median milliseconds of a draw of so many documents, one to a pack."""
    rng = np.random.default_rng(0)
    share_S = quantise(rng.dirichlet(np.ones(num_sources)).tolist())
    batching = Packed(8192, num_spans, max_documents=1)
    per_step_S = (num_spans * (share_S / TOTAL_SHARE)).astype(np.int64)
    fetched = {
        f"s{i}": one_lane(np.clip(rng.lognormal(6.5, 1.3, n), 1, 8192).astype(np.int64), i)
        for i, n in enumerate((8 * per_step_S + 1000).tolist())
    }
    deferral = None
    if ways is not None:
        deferral = Deferral(steps=4, ways=ways, cost=costs.Transformer(5120, 40))
    rules = DrawRules(batching=batching, mix_by=by, deferral=deferral)
    drawn = steps(fetched, share_S, rules, 5, 3 * per_step_S + 300)
    return float(np.median([took_ms for _, took_ms in drawn]))


def mixed(rng: np.random.Generator, count: int) -> dict[str, NDArray[np.int64]]:
    """Return lengths of count documents of each source of the mix, up to 32k tokens."""
    sources, _ = laws.mix("mixed", 32_768)
    return {name: law.sample(rng, count)["tokens"] for name, law in sources.items()}


def long_tail(ranks: int, samples: int, num_steps: int, steps_ways: tuple[int, int] | None) -> Tail:
    """Draw and place a stream of mixed documents, one to a pack."""
    graph = DGraph(topology=ClientPlaceTree(dp=ranks)).cost(costs.Transformer(5120, 40))
    if steps_ways is not None:
        graph.defer(*steps_ways)
    strategy = graph.freeze()
    batching = Packed(32_768, ranks * samples, max_documents=1)
    rules = DrawRules(batching=batching, deferral=strategy.deferral)
    share_S = quantise([0.3, 0.4, 0.1, 0.2])
    per_step_S = (ranks * samples * (share_S / TOTAL_SHARE)).astype(np.int64)
    lengths = mixed(np.random.default_rng(0), int(per_step_S.max()) * num_steps * 2 + 2000)
    fetched = {name: one_lane(length, i) for i, (name, length) in enumerate(lengths.items())}
    tables, loads, waiting, state_bytes = [], [], 0, 0
    for drawn, _ in steps(fetched, share_S, rules, num_steps, 5 * per_step_S + 1000):
        plan = place(drawn, strategy, batching, ClientPlaceTree(dp=ranks), {})
        load_B = plan.loads_BMP.sum(axis=(1, 2))
        meeting = plan.loads_BMP.sum(axis=2).max(axis=0).sum()
        loads.append((load_B.max(), load_B.mean(), meeting))
        tables.append(drawn.table)
        held = [own.outstanding.num_rows for own in drawn.state.sources.values()]
        waiting = max(waiting, sum(held))
        state_bytes = max(state_bytes, len(drawn.state.to_json()))
    return Tail(tables, np.array(loads), waiting, state_bytes)


@dataclass(frozen=True)
class Tail:
    """A stream that was placed.

    tables: the steps. loads: (T, 3) slowest rank, mean rank, and the sum of the slowest of each
    microbatch. waiting: most spans that waited. state_bytes: the largest state.
    """

    tables: list[Metadata]
    loads: NDArray[np.float64]
    waiting: int
    state_bytes: int


def report_packing(report: reporting.Report, quick: bool) -> None:
    """Report how full packs and how even ranks are."""
    rows = []
    for corpus in CORPORA:
        for global_batch in (16, 64) if quick else (16, 64, 512):
            fill, imbalance, draw_ms, place_ms, num_spans = measure(corpus, global_batch)
            times = (f"{draw_ms:.1f} ms", f"{place_ms:.1f} ms")
            rows.append(
                (corpus, global_batch, num_spans, f"{fill:.3f}", f"{imbalance:.4f}", *times)
            )
    report.table(
        "Packing",
        ["lengths", "packs", "spans", "fill", "max/mean", "draw", "place"],
        rows,
    )


def report_sources(report: reporting.Report, quick: bool) -> None:
    """Report how long a draw takes with many sources."""
    rows = []
    sizes = ((8, 1024), (8, 65_536), (1000, 4096), (1000, 65_536))
    for num_sources, num_spans in sizes[:1] if quick else sizes:
        for by, ways in (("samples", None), ("tokens", None), ("samples", num_spans // 16)):
            took_ms = many_sources(num_sources, num_spans, by, ways)
            times = (f"{took_ms:.1f} ms", f"{took_ms * 1e3 / num_spans:.1f} us")
            rows.append((num_sources, num_spans, by, "off" if ways is None else "on", *times))
    report.table(
        "Many sources",
        ["sources", "spans", "weights by", "deferral", "draw", "a span"],
        rows,
    )


def report_deferral(report: reporting.Report, quick: bool) -> None:
    """Report what deferral does to steps of mixed lengths."""
    rows = []
    sizes = ((64, 16, 40), (288, 16, 20), (8, 16, 60), (64, 4, 60))
    for ranks, samples, num_steps in ((8, 16, 20),) if quick else sizes:
        reporting.progress(f"{num_steps} steps of {ranks} x {samples}, with and without deferral")
        plain = long_tail(ranks, samples, num_steps, None)
        for deferred_steps in (0, 2, 4, 16):
            tail = plain
            if deferred_steps:
                tail = long_tail(ranks, samples, num_steps, (deferred_steps, ranks))
            top_T, mean_T, meeting_T = tail.loads.T
            found = drift(tail.tables, plain.tables)
            rows.append(
                (
                    *(ranks, samples, num_steps, deferred_steps or "off"),
                    f"{top_T.sum() / mean_T.sum():.4f}",
                    f"{(top_T / mean_T).max():.3f}",
                    f"{meeting_T.sum() / mean_T.sum():.3f}",
                    tail.waiting,
                    f"{tail.state_bytes / 1e3:.0f} kB",
                    f"{found.delayed:.3f}",
                    f"{found.mean_delay:.2f}",
                    found.max_delay,
                    f"{found.sample_mixture_T.max():.4f}",
                    f"{np.median(found.length_T):.4f}",
                    f"{found.length:.4f}",
                )
            )
    report.table(
        "Deferral",
        [
            *("ranks", "M", "steps", "K", "max/mean", "worst", "meeting", "waiting", "state"),
            *("late", "delay", "most", "mixture", "KS step", "KS all"),
        ],
        rows,
    )


TABLES = {"packing": report_packing, "sources": report_sources, "deferral": report_deferral}


def main() -> None:
    parser = reporting.arguments(__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="packing, sources, deferral")
    options = parser.parse_args()
    if strangers := set(options.tables) - set(TABLES):
        parser.error(f"no such table: {', '.join(sorted(strangers))}")
    report = reporting.Report("draw", "Drawing a step", options)
    report.note("times are medians over the steps, of the CPU of one process")
    for name in options.tables or TABLES:
        TABLES[name](report, options.quick)
    report.write()


if __name__ == "__main__":
    main()
