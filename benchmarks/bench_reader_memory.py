"""How much memory does an open Parquet source take, by how it was written and how it is read?

Writes files of 38 columns, see `parquet_files`, and opens ``--sources`` of them at
once, each way in a process of its own: ``python benchmarks/bench_reader_memory.py``. Reports
megabytes (10^6 bytes) of proportional set size an open source, above what the process took before
it opened any.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import reporting
from parquet_files import LAYOUTS, write

from megadask.readers import Parquet

NUM_SOURCES = 16
#: Rows read of every source before memory is measured.
ROWS_READ = 100


def opened(path: Path) -> Iterator[Any]:
    """Hold a file with its footer, read nothing."""
    with pq.ParquetFile(path) as file:
        while True:
            yield file.metadata


def reader(path: Path, **options: Any) -> Iterator[Any]:
    yield from Parquet(path, **options).read(0)


def naive(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(64):
            yield from batch.to_pylist()


def row_group(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        group = file.read_row_group(0)
        for row in range(group.num_rows):
            yield group.slice(row, 1)


WAYS: dict[str, tuple[str, Callable[[Path], Iterator[Any]]]] = {
    "opened": ("opened only", opened),
    "default": ("readers.Parquet, defaults", reader),
    "text": (
        "readers.Parquet, two columns",
        lambda path: reader(path, columns=["text", "caption"]),
    ),
    "naive": ("iter_batches(64)", naive),
    "group": ("read_row_group, held", row_group),
}


def pss_bytes() -> int:
    gc.collect()
    pa.default_memory_pool().release_unused()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure(way: str, path: Path, num_sources: int) -> float:
    """Return megabytes an open source."""
    _, read = WAYS[way]
    warm = read(path)
    for _ in range(ROWS_READ):
        next(warm)
    warm.close()  # type: ignore[attr-defined]
    before = pss_bytes()
    held = [read(path) for _ in range(num_sources)]
    for rows in held:
        for _ in range(ROWS_READ):
            next(rows)
    return (pss_bytes() - before) / num_sources / 1e6


def main() -> None:
    parser = reporting.arguments(__doc__)
    parser.add_argument("--sources", type=int, help=f"{NUM_SOURCES}, or 4 with --quick")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sources = options.sources or (4 if options.quick else NUM_SOURCES)
    if options.way:
        print(measure(options.way, options.path, sources))
        return
    report = reporting.Report("reader-memory", "Memory of an open Parquet source", options)
    report.note(f"{sources} sources of the same file, {ROWS_READ} rows read of each")
    report.note("MB: 10^6 bytes of proportional set size an open source")
    found: dict[str, list[str]] = {title: [title] for title, _ in WAYS.values()}
    for layout, how in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "typical.parquet"
            report.note(f"{layout}: {write(path, **how)}")
            for way, (title, _) in WAYS.items():
                reporting.progress(f"{layout}: {title}")
                command = [sys.executable, __file__, "--way", way, "--path", str(path)]
                command += ["--sources", str(sources)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[title].append(f"{float(done.stdout):.1f} MB")
    report.table("An open source", ["read by", *LAYOUTS], list(found.values()))
    report.write()


if __name__ == "__main__":
    main()
