"""What all benchmarks share: their options, the table on the terminal, and the dated report.

A benchmark makes its options with `arguments`, prints through a `Report`, and ends with `write`,
which leaves DATE-NAME.md, DATE-NAME.json and its plots in benchmarks/reports. With ``--quick`` they
go to build/bench instead: small sizes say that it runs, not how fast anything is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megadask.demo.report import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKOUT = Path(__file__).resolve().parents[1]
REPORTS = CHECKOUT / "benchmarks" / "reports"
QUICK_REPORTS = CHECKOUT / "build" / "bench"

PACKAGES = ("megadask", "dask", "distributed", "numpy", "scipy", "pyarrow", "torch")


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, in under 50 seconds")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where the report goes: benchmarks/reports, or build/bench with --quick",
    )
    return parser


def progress(line: str) -> None:
    """Say how far a benchmark is, apart from its tables."""
    print(line, file=sys.stderr, flush=True)


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """Return the median, and the least and the largest behind it."""
    middle, *ends = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle}{unit} ({' - '.join(ends)})"


def hardware() -> dict[str, Any]:
    """Return the processor, its cores that this process may use, and the memory."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    }


def versions() -> dict[str, str]:
    """Return the version of Python and of each of `PACKAGES` that is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of the checkout, and whether files differ from it."""
    git = ["git", "-C", str(CHECKOUT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return head.stdout.strip() + (" and uncommitted changes" if changed.stdout else "")


def command() -> str:
    """Return what was typed, from the checkout; without where the report goes."""
    script = Path(sys.argv[0]).resolve()
    if script.is_relative_to(CHECKOUT):
        script = script.relative_to(CHECKOUT)
    kept, skip = [], False
    for word in sys.argv[1:]:
        if not skip and not word.startswith("--output="):
            kept.append(word)
        skip = word == "--output"
        if skip:
            kept.pop()
    return shlex.join(["python", str(script), *kept])


class Report:
    """Prints tables as they are made, and writes all of them at the end.

    name: of the files. title: heading of the page. options: what `arguments` has parsed.
    figures: what else goes into the JSON, by name; raw numbers behind the cells of the tables.
    """

    def __init__(self, name: str, title: str, options: argparse.Namespace) -> None:
        self.figures: dict[str, Any] = {}
        self._name, self._title = name, title
        self._folder = options.output or (QUICK_REPORTS if options.quick else REPORTS)
        self._began = datetime.now(UTC)
        self._load_before = os.getloadavg()[0]
        self._commit = commit()
        self._notes: list[str] = []
        self._parts: list[str] = []
        self._tables: list[dict[str, Any]] = []
        self._plots: list[tuple[Path, Figure]] = []
        self._goals: list[tuple[str, str, str, str]] = []
        self._is_quick = options.quick

    @property
    def stem(self) -> str:
        """Return the name of the files without their endings."""
        return f"{self._began.date().isoformat()}-{self._name}"

    def note(self, line: str) -> None:
        """Add a line to the head of the page: what was measured, and how."""
        self._notes.append(line)

    def goal(
        self, what: str, got: float, *, least: float | None = None, most: float | None = None
    ) -> None:
        """Keep what a figure was to reach, at least or at most, whether it does or not."""
        assert (least is None) != (most is None)
        reaches = got >= least if least is not None else got <= (most or 0.0)
        asked = f">= {least:g}" if least is not None else f"<= {most:g}"
        self._goals.append((what, asked, f"{got:.3g}", "yes" if reaches else "no"))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table and keep it; cells are shown as `str` makes them."""
        cells = [[str(cell) for cell in row] for row in rows]
        self._tables.append({"title": title, "columns": list(columns), "rows": cells})
        print(f"\n{title}\n{render([tuple(columns), *map(tuple, cells)])}", flush=True)
        lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *cells]
        page = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        self._parts.append(f"## {title}\n\n{page}")

    def text(self, title: str, block: str) -> None:
        """Print text of fixed width and keep it."""
        print(f"\n{title}\n{block}", flush=True)
        self._parts.append(f"## {title}\n\n```\n{block}\n```")

    def say(self, paragraph: str) -> None:
        """Print a paragraph of the page and keep it: what follows from the figures."""
        print(f"\n{paragraph}", flush=True)
        self._parts.append(paragraph)

    def plot(self, figure: Figure, what: str) -> None:
        """Keep a figure; ``what`` says what is drawn."""
        ending = f"-{len(self._plots) + 1}" if self._plots else ""
        path = self._folder / f"{self.stem}{ending}.png"
        self._plots.append((path, figure))
        self._parts.append(f"![{what}]({path.name})")

    def write(self) -> Path:
        """Write all that was kept; return the page."""
        machine, found = hardware(), versions()
        goals = ["what", "asked for", "seen", "reached"]
        parts = self._parts
        if self._goals and not self._is_quick:  # small sizes say nothing of it
            self._parts = []
            self.table("What was to be reached", goals, self._goals)
            parts, self._parts = self._parts + parts, parts
        load = {"before": self._load_before, "after": os.getloadavg()[0]}
        seconds = (datetime.now(UTC) - self._began).total_seconds()
        record = {
            "name": self._name,
            "title": self._title,
            "began": self._began.isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "command": command(),
            "commit": self._commit,
            "hardware": machine,
            "versions": found,
            "load": load,
            "notes": self._notes,
            "tables": self._tables,
            "figures": self.figures,
        }
        head = [
            f"- command: `{record['command']}`, {seconds:,.0f} s",
            f"- commit: {self._commit}",
            f"- machine: {machine['processor']}, {machine['cores']} cores, "
            f"{machine['memory_gib']} GiB; load average "
            f"{load['before']:.1f} before, {load['after']:.1f} after",
            f"- versions: {', '.join(f'{name} {version}' for name, version in found.items())}",
            *(f"- {line}" for line in self._notes),
        ]
        page = [f"# {self._title}, {self._began.date().isoformat()}", "\n".join(head)]
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self.stem}.md"
        path.write_text("\n\n".join([*page, *parts]) + "\n", encoding="utf-8")
        data = json.dumps(record, indent=1, default=lambda array: array.tolist())
        path.with_suffix(".json").write_text(data + "\n", encoding="utf-8")
        for target, figure in self._plots:
            figure.savefig(target, dpi=90)
        print(f"\n{path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path}")
        return path


def _field(path: str, name: str) -> str:
    """Return the first value of a file of lines ``name : value``; nothing if there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((x.partition(":")[2].strip() for x in lines if x.startswith(name)), "")
