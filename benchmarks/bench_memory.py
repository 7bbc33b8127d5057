"""How much memory do all processes that load take, for S sources, R ranks and W workers?

Real processes, side by side in one run: torch DataLoaders each of whose workers opens every source,
with default readers and with lean ones, and a MegaDask service with ranks that read from it:
``python benchmarks/bench_memory.py``. Every source is a link to one Parquet file of 38 columns (see
`parquet_files`), of which all variants make packs of the bytes of one text column. A cell is the
proportional set size (Pss of smaps_rollup) of the processes, after enough steps that every source
was read by whoever has it open; bare ranks of the same number are subtracted. Files are read, not
mapped, so that the page cache is not in it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import reporting
from parquet_files import LAYOUTS, NUM_ROW_GROUPS, write

WORKERS = 2
SOURCES, RANKS = (8, 64, 306), (2, 4, 8)
#: All cells have the first; how much more the default of `megadask.Source` takes is shown apart.
LANES = (1, 16)
#: How pyarrow writes files when it is told nothing, and what that makes of `parquet_files`.
LAYOUT = "as pyarrow writes by default"
PACKS_A_STEP = 16
#: Longest wait for a process to begin or to make its steps.
WAIT_S = 900.0
#: A cell is weighed so often, after one more step each time.
TIMES = 5
#: The allocator of Arrow that MegaDask's workers take; for the same readers elsewhere, too.
SYSTEM = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
#: Cells of which more is expected are not begun, and what leaves less to others is broken off.
SPARED_MB = 3000.0
MB = 1e6


class TooLargeError(RuntimeError):
    """A cell does not fit into the memory that is free."""


class Process:
    """One process of `memory_processes`, talked to by lines."""

    def __init__(self, role: str, job: dict[str, Any], environ: dict[str, str]) -> None:
        script = Path(__file__).with_name("memory_processes.py")
        self.popen = subprocess.Popen(
            [sys.executable, str(script), role, json.dumps(job)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def say(self, line: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def hear(self) -> str:
        """Return its next line; raise if it ends, is silent, or memory runs out meanwhile."""
        deadline = time.monotonic() + WAIT_S
        while True:
            if free_mb() < SPARED_MB / 2:
                raise TooLargeError
            try:
                line = self._lines.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                raise
            break
        if not line:
            raise RuntimeError(f"{self.popen.args} ended with {self.popen.wait()}")
        return line

    def close(self) -> None:
        """End it and what it started."""
        assert self.popen.stdin is not None
        started = []
        if self.popen.poll() is None:
            started = psutil.Process(self.popen.pid).children(recursive=True)
        self.popen.stdin.close()
        try:
            self.popen.wait(60)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(10)
        for child in started:
            if child.is_running():
                child.kill()


def free_mb() -> float:
    """Return the memory that may be taken without swapping."""
    return psutil.virtual_memory().available / MB


@contextmanager
def processes(
    role: str, jobs: Sequence[dict[str, Any]], environ: dict[str, str] | None = None
) -> Iterator[list[Process]]:
    """Start processes that end with the block."""
    with ExitStack() as stack:
        started = []
        for job in jobs:
            started.append(Process(role, job, environ or {}))
            stack.callback(started[-1].close)
        yield started


def pss_bytes(process: Process) -> int:
    """Return what a process and all that it started take."""
    root = psutil.Process(process.popen.pid)
    total = 0
    for one in [root, *root.children(recursive=True)]:
        text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
        total += next(int(x.split()[1]) for x in text.splitlines() if x.startswith("Pss:")) * 1024
    return total


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one variant takes, in MB at each time that it was weighed.

    ranks_mb: ranks with what they started; server_mb: the cluster of a MegaDask service.
    """

    ranks_mb: list[float]
    server_mb: list[float]

    @property
    def total_mb(self) -> list[float]:
        return [sum(both) for both in zip(self.ranks_mb, self.server_mb, strict=True)]


def weigh(ranks: list[Process], server: Process | None, first_steps: int) -> Cell:
    """Make steps on all ranks, and weigh everything after each from the first few on."""
    seen: list[tuple[float, float]] = []
    for steps in [first_steps] + [1] * (TIMES - 1):
        for rank in ranks:
            rank.say(steps)
        for rank in ranks:
            assert rank.hear() == "done"
        served = 0 if server is None else pss_bytes(server)
        seen.append((sum(map(pss_bytes, ranks)) / MB, served / MB))
    ranks_mb, server_mb = zip(*seen, strict=True)
    return Cell(ranks_mb=list(ranks_mb), server_mb=list(server_mb))


class Bench:
    """Measures cells over links to one file."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder = folder
        self._file = file

    def job(self, sources: int, ranks: int, **more: Any) -> dict[str, Any]:
        paths = []
        for number in range(sources):
            path = self._folder / f"source{number}.parquet"
            if not path.exists():
                path.hardlink_to(self._file)
            paths.append(str(path))
        packs = {"packs_a_rank": max(1, PACKS_A_STEP // ranks)}
        return {"paths": paths, "ranks": ranks, "workers": WORKERS, **packs, **more}

    def ranks(self, role: str, sources: int, ranks: int, **more: Any) -> Cell:
        """Weigh ranks alone: bare ones or such with DataLoaders."""
        job = self.job(sources, ranks, **more)
        environ = SYSTEM if job.get("way") == "lean" else {}
        with processes(role, [{**job, "rank": rank} for rank in range(ranks)], environ) as started:
            for process in started:
                assert process.hear() == "ready"
            # Sources take turns: a worker has read all of them after so many of its packs, as
            # documents of 800 bytes on average are.
            packs_a_worker = 2 + sources * 800 / 4096
            steps = -(-packs_a_worker * WORKERS // job["packs_a_rank"])
            return weigh(started, None, int(steps))

    def reader(self, sources: int) -> list[float]:
        """Weigh a process that has opened each source once, less one that has opened none."""
        found = []
        for count in (0, sources):
            with processes("reader", [self.job(count, 8)], SYSTEM) as started:
                assert started[0].hear() == "ready"
                found.append(weigh(started, None, 2 + sources // PACKS_A_STEP).ranks_mb)
        return [with_them - np.median(found[0]) for with_them in found[1]]

    def megadask(self, sources: int, ranks: int, lanes: int = 1) -> Cell:
        """Weigh a service and its ranks. Its loaders read a window of every source at once."""
        job = self.job(sources, ranks, lanes=lanes)
        with processes("serve", [job]) as (server,):
            address = json.loads(server.hear())["address"]
            jobs = [{**job, "paths": [], "rank": n, "address": address} for n in range(ranks)]
            with processes("megadask", jobs) as started:
                for process in started:
                    assert process.hear() == "ready"
                return weigh(started, server, 12)


def fitted(cells: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """Return MB a worker and MB a source and worker, as (sources, ranks) to MB say."""
    rows = [(ranks * WORKERS, ranks * WORKERS * sources) for sources, ranks in cells]
    found, *_ = np.linalg.lstsq(np.array(rows, float), np.array(list(cells.values())), rcond=None)
    return float(found[0]), float(found[1])


class Grid:
    """All cells of a run, and what they say."""

    def __init__(self, bench: Bench, sources: Sequence[int], ranks: Sequence[int]) -> None:
        self._bench, self._sources, self._ranks = bench, sources, ranks
        #: Variant to (sources, ranks) to MB of each time, bare ranks included.
        self.loading: dict[str, dict[tuple[int, int], list[float]]] = {}
        self.bare: dict[int, float] = {}
        self.server: dict[tuple[int, int], list[float]] = {}
        self.engine: list[float] = []
        self.floor: dict[int, list[float]] = {}
        #: Lanes to MB of the cluster, with the fewest sources and ranks.
        self.by_lanes: dict[int, list[float]] = {}

    def measure(self) -> None:
        """Measure everything that fits, small cells first."""
        for ranks in self._ranks:
            self.bare[ranks] = float(np.median(self._bench.ranks("bare", 0, ranks).total_mb))
        self.engine = self._bench.megadask(0, min(self._ranks)).server_mb
        reporting.progress(f"bare ranks {self.bare}, engine {np.median(self.engine):.0f} MB")
        for lanes in LANES:
            few = (min(self._sources), min(self._ranks))
            self.by_lanes[lanes] = self._bench.megadask(*few, lanes=lanes).server_mb
        for sources in self._sources:
            self.floor[sources] = self._bench.reader(sources)
            for ranks in self._ranks:
                at = (sources, ranks)
                cell = self._bench.megadask(sources, ranks)
                self.server[at] = cell.server_mb
                self._keep("MegaDask", at, cell)
                for way in ("lean", "default"):
                    if self._expected_mb(way, at) > free_mb() - SPARED_MB:
                        reporting.progress(f"{at}: {way} does not fit")
                        continue
                    try:
                        self._keep(way, at, self._bench.ranks("torch", *at, way=way))
                    except TooLargeError:
                        reporting.progress(f"{at}: {way} did not fit")

    def _keep(self, variant: str, at: tuple[int, int], cell: Cell) -> None:
        self.loading.setdefault(variant, {})[at] = cell.total_mb
        reporting.progress(f"{at}: {variant} {np.median(cell.total_mb):,.0f} MB with ranks")

    def net(self, variant: str) -> dict[tuple[int, int], float]:
        """Return (sources, ranks) to MB, bare ranks subtracted."""
        cells = self.loading.get(variant, {})
        return {at: float(np.median(mb)) - self.bare[at[1]] for at, mb in cells.items()}

    def _expected_mb(self, way: str, at: tuple[int, int]) -> float:
        """Return what a cell will take, going by those measured; before those, by none."""
        known = self.net(way)
        if len({sources for sources, _ in known}) < 2:
            per_source = max((mb / (s * r * WORKERS) for (s, r), mb in known.items()), default=0.0)
            return self.bare[at[1]] + per_source * at[0] * at[1] * WORKERS
        worker, source = fitted(known)
        return self.bare[at[1]] + (worker + source * at[0]) * at[1] * WORKERS

    def report(self, report: reporting.Report) -> None:
        """Report what was measured, and apart from it what follows for cells that do not fit."""
        nets = {variant: self.net(variant) for variant in ("default", "lean", "MegaDask")}
        rows, with_ranks = [], []
        for at in nets["MegaDask"]:
            sources, ranks = at
            ours = nets["MegaDask"][at]
            loaders = float(np.median(self.server[at]))
            floor, engine = np.median(self.floor[sources]), np.median(self.engine)
            shown = [_cell(nets[way].get(at), ours) for way in ("default", "lean")]
            rows.append(
                (
                    *(sources, ranks, *shown, f"{ours:,.0f}", f"{loaders:,.0f}"),
                    *(f"{floor:,.0f}", f"{(loaders - engine) / floor:.2f}"),
                )
            )
            all_of = {way: nets[way][at] + self.bare[ranks] for way in nets if at in nets[way]}
            shown = [_cell(all_of.get(way), all_of["MegaDask"]) for way in ("default", "lean")]
            with_ranks.append((sources, ranks, *shown, f"{all_of['MegaDask']:,.0f}"))
        report.table(
            "MB of all that loads, bare ranks subtracted; in brackets over MegaDask",
            [
                *("sources", "ranks", "DataLoader, default readers", "DataLoader, same readers"),
                *("MegaDask", "of it not in ranks", "one copy", "above the engine / one copy"),
            ],
            rows,
        )
        names = ["sources", "ranks", "DataLoader, default readers", "DataLoader, same readers"]
        report.table("MB with the ranks themselves", [*names, "MegaDask"], with_ranks)
        ends = sorted(self._ranks)[0], sorted(self._ranks)[-1]
        growth = []
        for sources in self._sources:
            first, last = ((sources, ranks) for ranks in ends)
            whole = nets["MegaDask"][last] / nets["MegaDask"][first] - 1
            apart = np.median(self.server[last]) / np.median(self.server[first]) - 1
            growth.append((sources, f"{whole:+.1%}", f"{apart:+.1%}"))
        report.table(
            f"MegaDask: growth from {ends[0]} to {ends[1]} ranks",
            ["sources", "all", "of it not in ranks"],
            growth,
        )
        fewest = min(self._sources)
        opened = {n: np.median(mb) - np.median(self.engine) for n, mb in self.by_lanes.items()}
        report.table(
            f"MegaDask: lanes that each of {fewest} sources is read in, MB above the engine",
            ["lanes", "all sources", "a source"],
            [(n, f"{mb:,.0f}", f"{mb / fewest:.1f}") for n, mb in opened.items()],
        )
        report.say(
            f"The engine without sources (scheduler, nannies, {WORKERS} workers with planner and "
            f"constructor): {reporting.spread(self.engine, 0, ' MB')}. Bare ranks: "
            + ", ".join(f"{n}: {mb:,.0f} MB" for n, mb in self.bare.items())
            + "."
        )
        self._report_fits(report, nets)

    def _report_fits(
        self, report: reporting.Report, nets: Mapping[str, Mapping[tuple[int, int], float]]
    ) -> None:
        rows = []
        for way in ("default", "lean"):
            if len({sources for sources, _ in nets[way]}) < 2:
                continue
            worker, source = fitted(nets[way])
            rows += [
                (
                    *(way, sources, ranks),
                    f"{(worker + source * sources) * ranks * WORKERS:,.0f}",
                    f"{(worker + source * sources) * ranks * WORKERS / ours:.1f}",
                    f"{worker:.0f} + {source:.2f} x sources",
                )
                for (sources, ranks), ours in nets["MegaDask"].items()
                if (sources, ranks) not in nets[way]
            ]
        if rows:
            report.table(
                "Not measured, as they do not fit here: MB that a fit of the measured cells gives",
                ["DataLoader", "sources", "ranks", "MB", "over MegaDask", "fit: MB a worker"],
                rows,
            )


def _cell(mb: float | None, ours: float) -> str:
    return "does not fit" if mb is None else f"{mb:,.0f} ({mb / ours:.1f}x)"


def main() -> None:
    parser = reporting.arguments(__doc__)
    parser.add_argument("--sources", type=int, nargs="+", help="8, 64 and 306; 8 with --quick")
    parser.add_argument("--ranks", type=int, nargs="+", help="2, 4 and 8; 2 with --quick")
    options = parser.parse_args()
    sources = options.sources or ((8,) if options.quick else SOURCES)
    ranks = options.ranks or ((2,) if options.quick else RANKS)
    report = reporting.Report("memory", "Memory of loading", options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.parquet"
        written = write(file, 4 if options.quick else NUM_ROW_GROUPS, **LAYOUTS[LAYOUT])
        for line in (
            f"sources: links to one file, {LAYOUT}: {written}; packs of 4,096 bytes of one text "
            f"column, {PACKS_A_STEP} a step over all ranks",
            f"{WORKERS} workers a DataLoader, {WORKERS} Dask workers in all; Source(lanes=1)",
            "default readers: ParquetFile(path).iter_batches(64), all columns; the same readers: "
            "megadask.readers.Parquet of the one column, with the allocator of MegaDask's workers",
            "one copy: a process that has opened each source once with the same reader and reads "
            "them in turns, less one that has opened none",
            f"MB: 10^6 bytes of Pss, medians of {TIMES} steps",
        ):
            report.note(line)
        grid = Grid(Bench(Path(folder), file), sources, ranks)
        grid.measure()
    grid.report(report)
    report.figures |= {
        "bare": grid.bare,
        "engine": grid.engine,
        "floor": grid.floor,
        "loading": {
            variant: [[*at, mb] for at, mb in cells.items()]
            for variant, cells in grid.loading.items()
        },
        "server": [[*at, mb] for at, mb in grid.server.items()],
        "lanes": grid.by_lanes,
    }
    report.write()


if __name__ == "__main__":
    main()
