"""How even do the balance methods make the ranks, and how long do they take?

``python benchmarks/bench_balance.py`` measures what the planner must reach, the mixes of `lengths`,
and the growth in samples; ``--rows reach`` or ``mixes`` or ``growth`` only these. Times are of the
process on one thread, medians over the seeds; they include making the problem and reading the
loads.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import lengths
import numpy as np
import reporting

from megadask.planner.balance import Problem, balance, bucket_loads, imbalance, lower_bound

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = 10
#: Methods in the order of the columns: the problem that each gets, and what it is called.
METHODS = {
    "random": "none",
    "arrival": "none",
    "greedy": "greedy",
    "KK free": "karmarkar_karp",
    "KK equal": "karmarkar_karp",
    "assignment": "assignment",
}
TIMED = ("greedy", "KK free", "KK equal", "assignment")
GROWTH = [2**k for k in range(10, 21, 2)]

Made = Callable[[np.random.Generator], Problem]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table: what is made from a generator, and what it should reach."""

    name: str
    make: Made
    reach: float | None = None  # max / mean, or over the bound of each part
    of_bound: bool = False
    within_ms: float | None = None


def plain(ranks: int, each: int, *, parts: int = 1, microbatches: int = 1, cap: int = 0) -> Made:
    """Make problems of lognormal(6.5, 1.3) lengths up to 8k; with a cap, of free counts."""

    def make(rng: np.random.Generator) -> Problem:
        n = ranks * each
        tokens_N = lengths.lognormal(rng, n, float(np.exp(6.5)), 1.3, 8192)
        columns = [lengths.transformer_cost(tokens_N)]
        if parts == 2:
            columns.append(lengths.transformer_cost(lengths.encoder_tokens(rng, n)))
        return Problem(
            cost_NP=np.column_stack(columns),
            num_buckets=ranks,
            num_microbatches=microbatches,
            size_N=tokens_N if cap else None,
            capacity=cap or None,
            equal_counts=not cap,
        )

    return make


def mixed(name: str, context: int, ranks: int, each: int) -> Made:
    """Make problems of a mix, of equal counts."""

    def make(rng: np.random.Generator) -> Problem:
        tokens_N = lengths.mix(name, rng, ranks * each, context)["tokens"]
        cost_NP = lengths.transformer_cost(tokens_N)[:, None]
        return Problem(cost_NP=cost_NP, num_buckets=ranks, equal_counts=True)

    return make


def reach_rows() -> list[Row]:
    scale = {"of_bound": True, "reach": 1.01, "within_ms": 1500.0}
    return [
        Row(name="64 x 8, equal counts", make=plain(64, 8), reach=1.001, within_ms=20),
        Row(name="288 x 16, equal counts", make=plain(288, 16), reach=1.0005, within_ms=100),
        Row(
            name="64 x 8, two parts",
            make=plain(64, 8, parts=2),
            reach=1.002,
            of_bound=True,
            within_ms=150,
        ),
        Row(
            name="288 x 16, two parts",
            make=plain(288, 16, parts=2),
            reach=1.002,
            of_bound=True,
            within_ms=150,
        ),
        Row(
            name="4,096 x 16, cap of 24,576 tokens",
            make=plain(4096, 16, cap=24576),
            **scale,
        ),
        Row(
            name="4,096 x 16 in 4 microbatches, cap of 8,192 each",
            make=plain(4096, 16, microbatches=4, cap=8192),
            **scale,
        ),
    ]


def mix_rows() -> Iterator[Row]:
    for name in lengths.MIXES:
        for context in (8192, 32768):
            for ranks in (8, 64, 288):
                for each in (4, 16):
                    yield Row(
                        name=f"{name} {context // 1024}k, {ranks} x {each}",
                        make=mixed(name, context, ranks, each),
                    )


def measure(row: Row, seeds: int = SEEDS) -> dict[str, object]:
    """Return medians and worst values over the seeds."""
    ratios: dict[str, list[float]] = {name: [] for name in METHODS}
    over: dict[str, list[float]] = {name: [] for name in METHODS}
    times_ms: dict[str, list[float]] = {name: [] for name in METHODS}
    bounds = []
    for seed in range(seeds):
        given = row.make(np.random.default_rng(seed))
        shuffled_N = np.random.default_rng(seed).permutation(given.num_items)
        parts = [replace(given, cost_NP=part_N[:, None]) for part_N in given.cost_NP.T]
        part_bounds = np.array([lower_bound(part) for part in parts])
        bounds.append(lower_bound(given))
        for name, method in METHODS.items():
            began = time.process_time()
            problem = replace(given)
            if name == "random":
                size_N = None if given.size_N is None else given.size_N[shuffled_N]
                problem = replace(given, cost_NP=given.cost_NP[shuffled_N], size_N=size_N)
            elif name == "KK free" and given.capacity is None:
                problem = replace(given, equal_counts=False)
            elif name == "KK equal":
                problem = replace(given, equal_counts=True)
            load_BP = bucket_loads(problem, bin_N := balance(problem, method)).sum(axis=1)
            times_ms[name].append((time.process_time() - began) * 1e3)
            ratios[name].append(imbalance(problem, bin_N))
            even_P = load_BP.max(axis=0) / load_BP.mean(axis=0)
            over[name].append(float((even_P / part_bounds).max()))
    return {
        "name": row.name,
        "bound": [float(np.median(bounds)), max(bounds)],
        "ratio": {name: [float(np.median(v)), max(v)] for name, v in ratios.items()},
        "over_bound": {name: [float(np.median(v)), max(v)] for name, v in over.items()},
        "ms": {name: [float(np.median(v)), max(v)] for name, v in times_ms.items()},
        "reach": row.reach,
        "of_bound": row.of_bound,
        "within_ms": row.within_ms,
    }


HEADER = [
    "work",
    "bound",
    *(f"{name}, max/mean" for name in METHODS),
    "assignment / bound",
    *(f"{name}, ms" for name in TIMED),
    "asked",
]


def cells(found: dict) -> list[str]:
    """Return a line of the table: median (worst)."""

    def both(values: list[float], digits: int) -> str:
        return f"{values[0]:.{digits}f} ({values[1]:.{digits}f})"

    asked = ""
    if found["reach"] is not None:
        asked = f"<= {found['reach']}{' x bound' if found['of_bound'] else ''}, "
        asked += f"{found['within_ms']:.0f} ms"
    return [
        found["name"],
        both(found["bound"], 3),
        *(both(found["ratio"][name], 5 if name == "assignment" else 3) for name in METHODS),
        both(found["over_bound"]["assignment"], 5),
        *(f"{found['ms'][name][0]:.1f}" for name in TIMED[:-1]),
        both(found["ms"]["assignment"], 1),
        asked,
    ]


def growth(sizes: list[int]) -> dict[str, list[list[float]]]:
    """Return lines of (samples, ms, max / mean over bound), by how the ranks grow."""
    lines: dict[str, list[list[float]]] = {}
    for label, ranks_of in (("64 ranks", lambda n: 64), ("n / 16 ranks", lambda n: n // 16)):
        lines[label] = []
        for n in sizes:
            ranks = ranks_of(n)
            row = Row(name=label, make=plain(ranks, n // ranks))
            seen = []
            for seed in range(3):
                problem = row.make(np.random.default_rng(seed))
                began = time.process_time()
                bin_N = balance(replace(problem))
                load_BP = bucket_loads(problem, bin_N).sum(axis=1)
                spent = (time.process_time() - began) * 1e3
                even = float(load_BP.max() / load_BP.mean())
                seen.append((spent, even / lower_bound(problem)))
            spent, even = np.median(seen, axis=0)
            lines[label].append([n, spent, even])
            reporting.progress(f"{label}, {n:,} samples")
    return lines


def plot(lines: dict[str, list[list[float]]]) -> Figure:
    """Return time over samples, with n log n through the first point of each line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, points in lines.items():
        n, ms, _ = np.array(points).T
        axes.loglog(n, ms, "o-", label=f"assignment, {label}")
    reference = ms[0] * n * np.log(n) / (n[0] * np.log(n[0]))
    axes.loglog(n, reference, "k:", label="n log n from there on")
    axes.set(
        xlabel="samples of a step",
        ylabel="time on one core (ms)",
        title="Balance: growth in samples",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def main() -> None:
    parser = reporting.arguments(__doc__)
    parser.add_argument("--rows", choices=["all", "reach", "mixes", "growth"], default="all")
    options = parser.parse_args()
    report = reporting.Report("balance", "Balance", options)
    seeds = 2 if options.quick else SEEDS
    for line in (
        f"{seeds} seeds: median (worst); times of the process on one thread",
        "cost l + l^2 / (6 x 5120); lengths lognormal(6.5, 1.3) up to 8k, or the mixes of "
        "`benchmarks/lengths.py`; ranks x samples a rank",
        "max/mean of the worst part; KK is Karmarkar-Karp by the sum of parts",
        "where the bound is above 1, the largest documents cost more than a rank should: "
        "docs/deferral.md and docs/context_parallel.md have what helps then",
    ):
        report.note(line)
    chosen: list[Row] = []
    if options.rows in ("all", "reach"):
        chosen += reach_rows()
    if options.rows in ("all", "mixes"):
        chosen += mix_rows()
    if options.quick:
        chosen = [row for row in chosen if not row.name.startswith("4,096")][::6]
    balance(plain(64, 8, parts=2)(np.random.default_rng(0)))  # imports and first calls
    rows = []
    for row in chosen:
        reporting.progress(row.name)
        rows.append(measure(row, seeds))
    if rows:
        report.table("Methods", HEADER, [cells(row) for row in rows])
        report.figures["rows"] = rows
    if options.rows in ("all", "growth"):
        lines = growth(GROWTH[:3] if options.quick else GROWTH)
        report.table(
            "Growth in samples",
            ["ranks", "samples", "ms", "max/mean over bound"],
            [
                (label, f"{n:,}", f"{ms:.1f}", f"{even:.5f}")
                for label, points in lines.items()
                for n, ms, even in points
            ],
        )
        report.figures["growth"] = lines
        report.plot(plot(lines), "time over samples, with n log n for comparison")
    report.write()


if __name__ == "__main__":
    main()
