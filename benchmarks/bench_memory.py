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

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import reporting
from parquet_files import LAYOUTS, NUM_ROW_GROUPS, write
from weighing.cells import PACKS_A_STEP, WORKERS, Bench
from weighing.grid import Grid
from weighing.tables import plot, report_grid

SOURCES, RANKS = (8, 64, 306), (2, 4, 8)
#: The default of `megadask.Source`, and what to compare it with where there are few sources.
LANES, FEWER_LANES = 16, 1
#: Sources with which it is compared.
COMPARED = SOURCES[:1]
#: As pyarrow writes when it is told nothing, first.
ORDERED = sorted(LAYOUTS, key=lambda layout: bool(LAYOUTS[layout]))
#: A cell is weighed so often, after one more step each time.
TIMES, QUICK_TIMES = 5, 2


def main() -> None:
    parser = reporting.arguments(__doc__)
    parser.add_argument("--sources", type=int, nargs="+", help="8, 64 and 306; 2 with --quick")
    parser.add_argument("--ranks", type=int, nargs="+", help="2, 4 and 8; 1 with --quick")
    parser.add_argument("--layout", choices=range(len(ORDERED)), type=int, help="one of them only")
    options = parser.parse_args()
    sources = options.sources or ((2,) if options.quick else SOURCES)
    ranks = options.ranks or ((1,) if options.quick else RANKS)
    times = QUICK_TIMES if options.quick else TIMES
    report = reporting.Report("memory", "Memory of loading", options)
    for line in (
        f"sources: links to one file; packs of 4,096 bytes of one text column, {PACKS_A_STEP} a "
        "step over all ranks",
        f"{WORKERS} workers a DataLoader, {WORKERS} Dask workers in all; Source(lanes={LANES}), "
        "the default, but where lanes are compared",
        "default readers: ParquetFile(path).iter_batches(64), all columns; the same readers: "
        "megadask.readers.Parquet of the one column, with the allocators of MegaDask's workers",
        "one copy: a process that has opened each source once with the same reader and reads "
        "them in turns, less one that has opened none",
        "the engine: a service with one source of 64 rows on each of its workers",
        "a rank beside the cluster: the Dask client that its batches come by, with the modules "
        "that it imports, and the batches that are on their way",
        f"MB: 10^6 bytes of Pss, medians of {times} steps",
    ):
        report.note(line)
    report.figures["layouts"] = figures = {}
    bare: dict[int, float] = {}
    engine: list[float] = []
    layouts = ORDERED if options.layout is None else ORDERED[options.layout :][:1]
    for layout in layouts[:1] if options.quick else layouts:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "file.parquet"
            written = write(file, 4 if options.quick else NUM_ROW_GROUPS, **LAYOUTS[layout])
            report.note(f"{layout}: {written}")
            bench = Bench(Path(folder), file, times)
            if not engine:
                for count in ranks:
                    bare[count] = float(np.median(bench.ranks("bare", 0, count).total_mb))
                engine = bench.engine(min(ranks)).server_mb
                report_engine(report, engine, bare)
            grid = Grid(bench, sources, ranks, bare, LANES)
            grid.measure()
            if min(sources) in COMPARED:
                grid.compare(FEWER_LANES)
        report_grid(report, layout, grid, float(np.median(engine)))
        report.plot(plot(layout, grid), f"Memory over the number of sources, files {layout}")
        figures[layout] = grid.figures()
        report.write()  # what was measured so far: a whole run takes long


def report_engine(report: reporting.Report, mb: list[float], bare: Mapping[int, float]) -> None:
    of_ranks = ", ".join(f"{count}: {rank_mb:,.0f} MB" for count, rank_mb in bare.items())
    report.say(
        f"The engine (scheduler, nannies, {WORKERS} workers with planner and constructor): "
        f"{reporting.spread(mb, 0, ' MB')}. Bare ranks: {of_ranks}."
    )
    report.goal("MB of the engine", float(np.median(mb)), most=300)
    report.figures |= {"bare": bare, "engine": mb}


if __name__ == "__main__":
    main()
