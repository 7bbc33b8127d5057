"""What the cells of one layout say: tables, a plot, and apart from them what only a fit tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import reporting
from weighing.cells import WORKERS
from weighing.grid import WAYS, Grid, fitted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: In the order of `WAYS`, and then MegaDask.
TITLES = {
    "lean": "DataLoader, same readers",
    "default": "DataLoader, default readers",
    "MegaDask": "MegaDask",
}
#: From so many sources on default readers are to take far more.
BIG = (64, 306)


def report_grid(report: reporting.Report, layout: str, grid: Grid, engine_mb: float) -> None:
    """Report what was measured; engine_mb: what a service takes that reads next to nothing."""
    nets = {variant: grid.net(variant) for variant in TITLES}
    rows, with_ranks = [], []
    for at, mb in nets["MegaDask"].items():
        floor = float(np.median(grid.floor[at[0]]))
        above = float(np.median(grid.server[at])) - engine_mb
        shown = [_cell(nets[way].get(at), mb) for way in WAYS]
        of_cluster = (f"{above:,.0f}", f"{floor:,.0f}", f"{above / floor:.2f}")
        rows.append((*at, *shown, f"{mb:,.0f}", *of_cluster))
        bare = grid.bare[at[1]]
        all_of = [nets[way][at] + bare if at in nets[way] else None for way in WAYS]
        with_ranks.append((*at, *(_cell(x, mb + bare) for x in all_of), f"{mb + bare:,.0f}"))
    names = ["sources", "ranks", *TITLES.values()]
    report.table(
        f"{layout}: MB of all that loads, bare ranks subtracted; in brackets over MegaDask",
        [*names, "its cluster above the engine", "one copy", "above the engine / one copy"],
        rows,
    )
    report.table(f"{layout}: MB with the ranks themselves", names, with_ranks)
    first, last = min(grid.ranks), max(grid.ranks)
    if first < last:
        _report_growth(report, layout, grid)
    if len(grid.lanes) > 1:
        fewest = min(grid.sources)
        report.table(
            f"{layout}: MB above the engine by lanes, {fewest} sources, {first} ranks",
            ["lanes", "all sources", "a source"],
            [
                (lanes, f"{np.median(mb) - engine_mb:,.0f}", _each(mb, engine_mb, fewest))
                for lanes, mb in grid.lanes.items()
            ],
        )
    _report_fits(report, layout, grid)
    _goals(report, layout, grid, engine_mb)


def _report_growth(report: reporting.Report, layout: str, grid: Grid) -> None:
    """Report what more ranks take, and which part of it they hold themselves."""
    first, last = min(grid.ranks), max(grid.ranks)
    ours = grid.net("MegaDask")
    served = {at: float(np.median(mb)) for at, mb in grid.server.items()}
    rows = []
    for sources in grid.sources:
        few, many = (sources, first), (sources, last)
        own = ours[many] - ours[few] - (served[many] - served[few])
        rows.append(
            (
                sources,
                f"{ours[many] / ours[few] - 1:+.1%}",
                f"{served[many] / served[few] - 1:+.1%}",
                f"{own / (last - first):,.0f}",
            )
        )
    report.table(
        f"{layout}: growth of MegaDask from {first} to {last} ranks",
        ["sources", "all, bare ranks subtracted", "its cluster", "MB a rank beside the cluster"],
        rows,
    )


def _goals(report: reporting.Report, layout: str, grid: Grid, engine_mb: float) -> None:
    """Say what was to be reached, of what was measured."""
    nets = {variant: grid.net(variant) for variant in TITLES}
    ours, first, last = nets["MegaDask"], min(grid.ranks), max(grid.ranks)
    most = max(grid.sources)
    above = float(np.median(grid.server[most, last])) - engine_mb
    what = f"{layout}, {most} sources"
    copies = above / float(np.median(grid.floor[most]))
    report.goal(f"{what}: above the engine / one copy", copies, most=1.2)
    if first < last:
        grown = ours[most, last] / ours[most, first]
        report.goal(f"{what}: MB with {last} ranks / with {first}", grown, most=1.05)
    for way, sources, least in (("lean", most, 12.0), *(("default", n, 13.5) for n in BIG)):
        at = (sources, last)
        if at in nets[way] and at in ours:
            named = f"{layout}, {sources} sources, {last} ranks: {TITLES[way]} / MegaDask"
            report.goal(named, nets[way][at] / ours[at], least=least)
    if (most, last) in nets["lean"]:
        bare = grid.bare[last]
        ratio = (nets["lean"][most, last] + bare) / (ours[most, last] + bare)
        report.goal(f"{what}: the same with {last} ranks themselves", ratio, least=7.0)


def plot(layout: str, grid: Grid) -> Figure:
    """Return MB over the number of sources at the most ranks, of what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    most = max(grid.ranks)
    for variant, title in TITLES.items():
        cells = {s: mb for (s, ranks), mb in grid.net(variant).items() if ranks == most}
        if cells:
            axes.plot(list(cells), list(cells.values()), marker="o", label=title)
    floor = {sources: float(np.median(mb)) for sources, mb in grid.floor.items()}
    axes.plot(list(floor), list(floor.values()), "k:", marker=".", label="one copy")
    axes.set(xscale="log", yscale="log", xlabel="sources", ylabel="MB, bare ranks subtracted")
    axes.set_title(f"{most} ranks; files {layout}", fontsize=10)
    axes.legend()
    return figure


def _report_fits(report: reporting.Report, layout: str, grid: Grid) -> None:
    ours = grid.net("MegaDask")
    rows = []
    for way in WAYS:
        known = grid.net(way)
        if len({sources for sources, _ in known}) < 2:
            continue
        worker, source = fitted(known)
        for (sources, ranks), mb in ours.items():
            if (sources, ranks) in known:
                continue
            expected = (worker + source * sources) * ranks * WORKERS
            fit = f"{worker:.0f} + {source:.2f} x sources"
            numbers = (f"{expected:,.0f}", f"{expected / mb:.1f}")
            rows.append((TITLES[way], sources, ranks, *numbers, fit))
    if rows:
        report.table(
            f"{layout}: not measured, as they do not fit here; what a fit of the others gives",
            ["", "sources", "ranks", "MB", "over MegaDask", "fit: MB a worker"],
            rows,
        )


def _each(mb: list[float], engine_mb: float, sources: int) -> str:
    return f"{(float(np.median(mb)) - engine_mb) / sources:.1f}"


def _cell(mb: float | None, ours: float) -> str:
    return "does not fit" if mb is None else f"{mb:,.0f} ({mb / ours:.1f}x)"
