"""Runs the cells of bench_throughput.py, and says what came out."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from distributed import Client
from reporting import Report, progress, spread
from throughput import engines, steptimes
from throughput.cells import (
    KIND,
    LIMITS,
    MEGADASK,
    PACKS_PER_RANK,
    PLAIN,
    READY,
    SINGLE,
    SLOW,
    WINDOW,
    Cell,
    Pass,
    Prepared,
    Variation,
    run_megadask,
    run_pass,
)
from throughput.ranks import PROCESSES, Slot
from throughput.systems import Feed, Replayed

from megadask.demo.cluster import local_cluster

PASSES = 5
#: Passes of slow baselines that run at the same time, and ranks in them, at most: they keep no core
#: busy.
SLOTS, MOST_RANKS = 10, 320
#: Ranks are processes of their own, up to so many: where several share one, each waits until the
#: others' threads let go of its interpreter.
MOST_PROCESSES = 16
#: Dask workers for the loaders, the planner and the constructors.
WORKERS = 2

COLUMNS = (
    "",
    "seconds",
    "MegaDask is faster",
    "of its bound",
    "waits for data",
    "imbalance",
    "first batch",
)

VARIATIONS = (Variation(attention=1.1), Variation(attention=0.9), Variation(defer=True))
#: Two cores need half of a step, or more, to make what it consists of: where that is dear, steps
#: are longer.
CELLS = [
    Cell(data="bytes", context=32768, ranks=16, step_s=0.7, variations=VARIATIONS),
    Cell(data="bytes", context=8192, ranks=16, step_s=0.5, engines=True),
    Cell(data="bpe", context=32768, ranks=16, step_s=2.0, steps=8),
    Cell(data="bpe", context=8192, ranks=16, step_s=1.0, steps=8),
    Cell(data="jpeg", context=32768, ranks=16, step_s=3.0, steps=8),
    Cell(data="jpeg", context=8192, ranks=16, step_s=0.8),
    Cell(data="bytes", context=8192, ranks=2, step_s=0.4),
    Cell(data="bytes", context=32768, ranks=2, step_s=0.4),
    Cell(data="bytes", context=8192, ranks=64, step_s=2.0),
    Cell(data="equal", context=8192, ranks=16, step_s=0.5),
    Cell(data="bytes", context=32768, ranks=16, step_s=0.7, floor_tokens=1024),
]
QUICK = [Cell(data="bytes", context=4096, ranks=4, steps=6, step_s=0.25)]


class Bench:
    """Runs cells with processes that stay, while entered."""

    def __init__(self, folder: Path, slots: int, passes: int, *, alone: bool) -> None:
        self._folder, self._passes, self._alone = folder, passes, alone
        self._stack = ExitStack()
        self._num_slots = slots

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            cluster = stack.enter_context(local_cluster(WORKERS, self._folder))
            self._client = stack.enter_context(Client(cluster, set_as_default=False))
            self._slots = [stack.enter_context(Slot()) for _ in range(self._num_slots)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, cell: Cell) -> tuple[dict[str, list[Pass]], Prepared]:
        """Return the passes of every system."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder, ExitStack() as stack:
            prepared = Prepared(cell, Path(folder), steptimes.load()[0])
            feeds = {} if self._alone else dict(prepared.baselines())
            # MegaDask's ranks leave threads behind, which no other system should fork.
            mine, other = (
                stack.enter_context(Slot(min(cell.ranks, MOST_PROCESSES))) for _ in range(2)
            )
            in_turn = {name: (feed, other) for name, feed in feeds.items() if name not in SLOW}
            others: dict[str, tuple[Feed, Slot | None]] = {}
            if cell.engines and not self._alone:
                make = engines.opened(prepared.fixed(), prepared.folder, cell.ranks)
                others = stack.enter_context(make)
            in_turn |= {name: (feed, slot or other) for name, (feed, slot) in others.items()}
            own = {str(one): one for one in (PLAIN, *cell.variations)}
            names = (*own, READY, *feeds, *others)
            found: dict[str, list[Pass]] = {name: [] for name in names}
            for _ in range(self._passes):
                for name, variation in own.items():
                    found[name].append(run_megadask(mine, self._client, prepared, variation))
                replayed = Replayed(lengths=found[MEGADASK][-1].lengths)
                found[READY].append(run_pass(mine, replayed, prepared))
                for name, (feed, slot) in in_turn.items():
                    found[name].append(run_pass(slot, feed, prepared))
            slow = [name for name in SLOW if name in feeds for _ in range(self._passes)]
            passes = self._at_once([feeds[name] for name in slow], prepared)
            for name, one in zip(slow, passes, strict=True):
                found[name].append(one)
        return found, prepared

    def _at_once(self, feeds: Sequence[Feed], prepared: Prepared) -> list[Pass]:
        free: SimpleQueue[Slot] = SimpleQueue()
        for slot in self._slots:
            free.put(slot)

        def one(feed: Feed) -> Pass:
            slot = free.get()
            try:
                return run_pass(slot, feed, prepared)
            finally:
                free.put(slot)

        most = max(1, min(len(self._slots), MOST_RANKS // prepared.cell.ranks))
        with ThreadPoolExecutor(most) as pool:
            return list(pool.map(one, feeds))


def tell(report: Report, cell: Cell, found: dict[str, list[Pass]], prepared: Prepared) -> None:
    """Print the table of a cell, and keep its figures."""
    own = found[MEGADASK]
    rows = [[name, *_cells(passes, own)] for name, passes in found.items()]
    has_engines = cell.engines and SINGLE in found
    absent = [name for name in engines.MODULES if has_engines and name not in found]
    missing = [[name, "not installed"] for name in absent]
    rows += [[*row, *[""] * (len(COLUMNS) - len(row))] for row in missing]
    corpus = prepared.corpus
    report.table(str(cell), COLUMNS, rows)
    seconds = statistics.median(one.seconds for one in own)
    report.say(
        f"{corpus.documents:,} documents, {corpus.tokens:,} tokens, in {own[0].num_steps} steps of "
        f"{cell.global_batch} packs; {corpus.tokens / seconds:,.0f} tokens/s."
    )
    report.figures[str(cell)] = {
        "cell": asdict(cell),
        "scale": prepared.times.scale,
        "documents": corpus.documents,
        "tokens": corpus.tokens,
        "passes": {name: [_kept(one) for one in passes] for name, passes in found.items()},
    }


def _cells(passes: list[Pass], own: list[Pass]) -> list[str]:
    faster = "1" if passes is own else f"{spread(ratios(passes, own))} x"
    return [
        spread([one.seconds for one in passes]),
        faster,
        f"{statistics.median(one.of_bound for one in passes):.1%}",
        f"{statistics.median(one.wait_share for one in passes):.1%}",
        f"{statistics.median(one.imbalance for one in passes):.3f}",
        f"{statistics.median(one.first_s for one in passes):.2f} s",
    ]


def _kept(one: Pass) -> dict[str, object]:
    """Return a pass without the lengths, which are many."""
    return {name: value for name, value in vars(one).items() if name != "lengths"}


def ratios(passes: list[Pass], own: list[Pass]) -> list[float]:
    """Return how much longer each pass took than MegaDask's of the same number."""
    return [one.seconds / mine.seconds for one, mine in zip(passes, own, strict=True)]


def summarise(report: Report, cells: dict[Cell, dict[str, list[Pass]]]) -> None:
    """Print the table of all cells, and the least of its figures."""
    names = list(dict.fromkeys(name for found in cells.values() for name in found))
    others = [name for name in names if not name.startswith(MEGADASK) and name != READY]
    rows, shares, least = [], [], []
    for cell, found in cells.items():
        for own in (name for name in found if name.startswith(MEGADASK)):
            what = f"{cell}{own.removeprefix(MEGADASK)}"
            share = statistics.median(one.of_bound for one in found[own])
            faster = {
                name: statistics.median(ratios(found[name], found[own]))
                for name in others
                if name in found
            }
            shares.append((share, what))
            report.goal(f"{what}: share of its bound", share, least=0.97)
            if own == MEGADASK:
                lying = statistics.median(ratios(found[READY], found[own]))
                told = f"{what}: time of the same batches lying ready / MegaDask"
                report.goal(told, lying, least=0.97)
            if own == MEGADASK and (other := _beaten(cell)) in faster:
                report.goal(f"{what}: time of {other} / MegaDask", faster[other], least=4.5)
            least += [(ratio, f"{what}: {name}") for name, ratio in faster.items()]
            cells_of_row = (f"{faster[name]:.2f} x" if name in faster else "" for name in others)
            rows.append([what, f"{share:.1%}", *cells_of_row])
    report.table(
        "How many times as long as MegaDask the others take", ("", "of its bound", *others), rows
    )
    share, where = min(shares)
    report.say(f"The least share of the bound is {share:.1%} ({where}).")
    if least:
        ratio, which = min(least)
        report.say(f"The others take {ratio:.3f} times as long at least ({which}).")
        report.goal(f"least time of another / MegaDask ({which})", ratio, least=1.0)


def _beaten(cell: Cell) -> str | None:
    """Return the baseline that is to be beaten by far in a cell, if any."""
    if cell.ranks == 64:
        return KIND
    return SINGLE if cell.context == 32768 and cell.ranks == 16 else None


def heads(report: Report) -> None:
    """Say what was done, and what it leaves out."""
    times, known = steptimes.load()
    report.note(
        f"step times: {known['model']}; {known['date']}, {known['hardware']['processor']}, "
        f"load average {known['load_after']:.0f}; "
        f"attention outweighs the rest above {times.crossover_tokens:,.0f} tokens. The planner has "
        f"the law that `costs.Measured` fits to them, {times.fitted!r}"
    )
    report.note(
        f"ranks are processes, 64 of them threads of {MOST_PROCESSES}, those of the two slow "
        f"baselines, which keep no core busy, threads of {PROCESSES}; "
        f"{PACKS_PER_RANK} packs a rank and step, "
        'one a microbatch. Lengths of documents are those of `megadask.lengths`, mix "mixed": 30% '
        "chat, 40% web, 10% long, 20% code (in place of image-text where there are no images)"
    )
    report.note(
        "DataLoader, fixed length: concatenated and cut to the context, without boundaries of "
        "documents; a sample each: shuffled, one document a microbatch, in which all ranks meet; "
        "a kind a rank: as many documents a rank and step as MegaDask has on average, ranks meet "
        "once a step. num_workers=1 a rank, files mapped into memory. Other engines get packs of "
        "fixed length that were tokenised and cut before"
    )
    report.note(
        "of its bound: the time that the same microbatches take ranks that wait for each other "
        "alone (`megadask.planner.simulation`), over the time taken. imbalance: that time over an "
        "even spread of the same work. Time begins when all ranks have their first batch"
    )
    report.note(
        f"{READY}: MegaDask's batches of each pass, by their lengths alone, in the ranks' own "
        "memory: what these miss of their bound the emulation takes, which meets and wakes all "
        "ranks on these cores. A loader can do no better"
    )
    report.note(
        "attention x 1.1: the planner takes attention for 1.1 times as costly as it is. "
        "A floor per launch: a microbatch takes at least as long as a document of 1,024 tokens, "
        "and the planner does not know"
    )
    report.note(
        f"MegaDask in all cells: {WORKERS} Dask workers, window and patience {WINDOW}, "
        f"{LIMITS.loader_bytes / 2**20:.0f} MiB of samples a loader, otherwise defaults"
    )
    report.note(
        "left out: copies to a device, a second host; and waiting ranks leave their CPU to the "
        "loaders. Passes of the two slow baselines run several at a time; how near they come to "
        "their own bound says whether that harmed them"
    )


def run(report: Report, folder: Path, options: argparse.Namespace) -> None:
    """Run the cells that the options of bench_throughput ask for, and write the report."""
    heads(report)
    quick, alone = options.quick, options.alone
    cells = QUICK if quick else CELLS
    named = [cell for text in options.only for cell in cells if text in str(cell)]
    cells = list(dict.fromkeys(named))
    done: dict[Cell, dict[str, list[Pass]]] = {}
    number = options.passes or (1 if quick else PASSES)
    slots = 0 if alone else 1 if quick else min(SLOTS, len(SLOW) * number)
    try:
        with Bench(folder, slots, number, alone=alone) as bench:
            for cell in cells:
                progress(str(cell))
                done[cell], prepared = bench.run(cell)
                tell(report, cell, done[cell], prepared)
                report.say(f"Times of the model are multiplied by {prepared.times.scale:.4g}.")
    finally:  # an hour of cells is not lost to one that fails, or to Ctrl-C
        if missing := [str(cell) for cell in cells if cell not in done]:
            report.note(f"ended early, without: {'; '.join(missing)}")
        if done:
            summarise(report, done)
            report.write()
