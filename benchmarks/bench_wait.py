"""For what share of the time of a step do trainers wait for data?

Two trainer processes sleep for the time of a step and meet at its end. What they wait is the time
between asking for a batch and having its tensors, over a whole step, as a share of the step time.
Batches are of a size that the CPUs can make in a given part of the step: how much they can is
measured first, with steps that take no time. Beside each stand trainers whose batches lie ready in
their own memory, in the same run: what those wait, the machine makes them wait. Steps of few packs
cost more for a token, so how much the CPUs can make is measured again in steps of the size taken:
``python benchmarks/bench_wait.py``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from reporting import Report, arguments, progress, spread

if TYPE_CHECKING:
    from distributed import Client
    from flow.corpus import Web
    from throughput.ranks import Log, Slot
    from throughput.systems import Feed

KINDS = ("bytes", "bpe")
STEP_MS = (50, 250, 1000, 2000)
SEQ_LEN, MICROBATCHES = 4096, 2
#: Packs of a step, at most; and in which it is measured first how much the CPUs can make.
MOST_PACKS, LARGE_PACKS = 64, 32
WORKERS = 2
PASSES = 5
#: Steps of a pass take so long together, but are not fewer than that.
PASS_S, LEAST_STEPS = 10.0, 8
#: The first steps of each pass do not count: nothing is built ahead yet.
WARM = 5
#: Part of what the CPUs can make that trainers ask for.
SHARE = 0.5
MEGADASK, READY = "MegaDask", "ready batches"
#: Step time in ms to the percentile of waits that is looked at, and its most, in % of the step.
GOALS = {50: (50, 1.0), 250: (99, 1.0)}


@dataclass(kw_only=True)
class Cell:
    """Trainers of one step time, and what they waited.

    Attributes
    ----------
    packs
        Packs of a step.
    can
        Tokens a second that the CPUs can make in steps of so many packs.
    share
        What is asked for, of that.
    waits
        System to, for every pass, the waits of all steps and ranks, in parts of the step time.
    tokens
        Tokens that all passes of MegaDask gave.
    seconds
        Their time.
    """

    step_s: float
    packs: int
    can: float
    share: float = 0.0
    waits: dict[str, list[list[float]]] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0

    def all_waits(self, system: str) -> list[float]:
        """Return the waits of all passes."""
        return list(itertools.chain(*self.waits[system]))

    def percent(self, system: str, percentile: float) -> float:
        """Return a percentile of the waits of all passes, in % of the step time."""
        return 100 * float(np.percentile(self.all_waits(system), percentile))

    def overall(self, system: str) -> str:
        """Return the share of all waits together, of the median pass."""
        return spread([100 * statistics.fmean(one) for one in self.waits[system]], 2, "%")


def run_pass(slot: Slot, feed: Feed, step_s: float, num_steps: int) -> list[Log]:
    """Let the ranks go through so many steps."""
    from flow.corpus import RANKS
    from flow.feeds import Limited, Sleeping

    make = functools.partial(Sleeping, microbatch_s=step_s / MICROBATCHES)
    return slot.run(Limited(feed=feed, num_steps=num_steps), RANKS, make)


def run_megadask(
    slot: Slot, client: Client, web: Web, packs: int, step_s: float, num_steps: int
) -> list[Log]:
    """The same, for a service of its own."""
    from flow.corpus import RANKS
    from throughput.systems import MegaDask

    import megadask as md

    pipeline = web.pipeline(SEQ_LEN, packs, packs // (RANKS * MICROBATCHES))
    with md.serve(pipeline, client) as service:
        return run_pass(slot, MegaDask(address=service.address), step_s, num_steps)


def capacity(
    slot: Slot, client: Client, web: Web, packs: int, options: argparse.Namespace
) -> float:
    """Return how many tokens a second come where trainers take no time."""

    def one_pass() -> float:
        num_steps = max(LEAST_STEPS, options.capacity_packs // packs)
        logs = run_megadask(slot, client, web, packs, 0.0, num_steps)
        seconds = max(log.ended_s for log in logs) - max(log.began_s for log in logs)
        return sum(log.tokens for log in logs) / seconds

    return statistics.median(one_pass() for _ in range(options.passes))


def measure(
    web: Web, slot: Slot, client: Client, options: argparse.Namespace
) -> tuple[list[Cell], float]:
    """Return the cells of one kind of tokens, and what the CPUs can make, in tokens a second."""
    from flow.corpus import RANKS
    from flow.feeds import Ready

    can_of = functools.cache(lambda packs: capacity(slot, client, web, packs, options))
    can = can_of(LARGE_PACKS)
    unit = RANKS * MICROBATCHES
    cells = []
    for step_s in (ms / 1000 for ms in options.step_ms):
        units = round(options.share * can * step_s / SEQ_LEN / unit)
        packs = min(max(1, units) * unit, MOST_PACKS)
        cells.append(Cell(step_s=step_s, packs=packs, can=can_of(packs)))
    for number in range(options.passes):
        for cell in cells:
            num_steps = WARM + max(LEAST_STEPS, int(options.pass_s / cell.step_s))
            ready = Ready(num_microbatches=MICROBATCHES)
            logs = run_megadask(slot, client, web, cell.packs, cell.step_s, num_steps)
            others = run_pass(slot, ready, cell.step_s, num_steps)
            for system, some in ((MEGADASK, logs), (READY, others)):
                waits = [wait_s / cell.step_s for log in some for wait_s in log.wait_s[WARM:]]
                cell.waits.setdefault(system, []).append(waits)
            cell.tokens += sum(log.tokens for log in logs)
            cell.seconds += max(log.ended_s for log in logs) - max(log.began_s for log in logs)
            cell.share = cell.tokens / cell.seconds / cell.can
            progress(
                f"pass {number + 1}, {web.kind}, {cell.step_s * 1000:g} ms: "
                f"p99 {cell.percent(MEGADASK, 99):.2f}%, ready {cell.percent(READY, 99):.2f}%"
            )
    return cells, can


def tell(report: Report, web: Web, cells: list[Cell], can: float) -> None:
    """Print the table of one kind of tokens."""
    rows = [
        [
            f"{cell.step_s * 1000:g} ms",
            f"{cell.packs * SEQ_LEN:,}",
            f"{cell.share:.0%}",
            len(cell.all_waits(MEGADASK)),
            *(f"{cell.percent(MEGADASK, p):.2f}%" for p in (50, 99)),
            cell.overall(MEGADASK),
            *(f"{cell.percent(READY, p):.2f}%" for p in (50, 99)),
        ]
        for cell in cells
    ]
    for cell in cells:
        if (goal := GOALS.get(round(cell.step_s * 1000))) is not None:
            what = f"{web.kind}, {cell.step_s * 1000:g} ms: % of a step, p{goal[0]}"
            report.goal(what, cell.percent(MEGADASK, goal[0]), most=goal[1])
    columns = [
        "step",
        "tokens a step",
        "of what the CPUs make",
        "waits",
        "p50",
        "p99",
        "all waits",
        "ready: p50",
        "p99",
    ]
    report.table(
        f"{web}; the CPUs make {can / 1e6:.2f} million a second in steps of {LARGE_PACKS} packs",
        columns,
        rows,
    )
    report.figures[web.kind] = {"capacity": can, "cells": [vars(cell) for cell in cells]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--passes", type=int, help="of each step time; 5, or 1 with --quick")
    parser.add_argument("--pass-s", type=float, help="seconds of a pass; 10, or 1 with --quick")
    parser.add_argument("--step-ms", type=int, nargs="+", help="step times")
    parser.add_argument("--share", type=float, default=SHARE, help="of what the CPUs can make")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="both; bytes with --quick")
    options = parser.parse_args()
    quick = options.quick
    options.passes = options.passes or (1 if quick else PASSES)
    options.capacity_packs = (4 if quick else 20) * LARGE_PACKS
    options.pass_s = options.pass_s or (1.0 if quick else PASS_S)
    options.step_ms = options.step_ms or ((50, 250) if quick else STEP_MS)
    kinds: tuple[str, ...] = options.kinds or (("bytes",) if quick else KINDS)
    # Not above: the processes of Dask import this file, and have no use for torch.
    from distributed import Client
    from flow import corpus
    from throughput.ranks import Slot

    from megadask.demo.cluster import local_cluster

    report = Report("wait", "Waiting for data", options)
    with tempfile.TemporaryDirectory(prefix="bench-wait-") as name, ExitStack() as stack:
        folder = Path(name)
        tokens = 1_000_000 if quick else 16_000_000
        webs = [corpus.write(kind, folder / kind, tokens, SEQ_LEN) for kind in kinds]
        cluster = stack.enter_context(local_cluster(WORKERS, folder))
        client = stack.enter_context(Client(cluster, set_as_default=False))
        slot = stack.enter_context(Slot(corpus.RANKS))
        found = [(web, *measure(web, slot, client, options)) for web in webs]
    for line in (
        f"{corpus.RANKS} ranks, {WORKERS} Dask workers on the same machine; packs of {SEQ_LEN:,} "
        f"tokens, {MICROBATCHES} microbatches a rank and step; all tensors of docs/batches.md",
        f"{options.passes} passes of {options.pass_s:g} s, or of {LEAST_STEPS} steps if those take "
        f"longer, after {WARM} steps that do not count; percentiles are of the waits of all steps "
        "and ranks, in parts of the step time; all waits: median of the passes, least and largest",
        "a wait ends when a batch is handed over: what the threads beside a trainer take of its "
        "interpreter afterwards, to ask for the next one, is no wait",
        "of what the CPUs make: what came, of what comes where steps of as many packs take no time",
    ):
        report.note(line)
    for web, cells, can in found:
        tell(report, web, cells, can)
    report.write()


if __name__ == "__main__":
    main()
