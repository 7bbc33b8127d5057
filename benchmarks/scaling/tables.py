"""How the figures of bench_scale.py are told: by size, and how they grow with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from reporting import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "ranks",
    "sources",
    "step",
    "planning",
    "loop busy",
    "scheduler CPU",
    "workers CPU",
    "metadata in",
    "plan out",
    "start-up",
    "all ranks join",
)


def row(one: Mapping[str, Any]) -> list[object]:
    """Return a line of the table."""
    return [
        f"{one['ranks']:,}",
        f"{one['sources']:,}",
        f"{one['step_s'] * 1e3:,.0f} ms",
        f"{one['plan_s'] * 1e3:,.0f} ms",
        f"{one['busy_s'] * 1e3:,.0f} ms",
        f"{one['scheduler_cpu_s'] * 1e3:,.0f} ms",
        f"{one['workers_cpu_s'] * 1e3:,.0f} ms",
        f"{one['bytes_in'] / 1e3:,.0f} kB",
        f"{one['bytes_out'] / 1e3:,.0f} kB",
        f"{one['start_s']:.1f} s",
        f"{one['join_s']:.1f} s",
    ]


#: What growth is told of: the name in the table, and what is measured.
GROWING = {
    "step": "step_s",
    "scheduler CPU": "scheduler_cpu_s",
    "workers CPU": "workers_cpu_s",
    "plan out": "bytes_out",
    "start-up": "start_s",
    "all ranks join": "join_s",
}


def exponents(found: Sequence[Mapping[str, Any]], along: str) -> list[dict[str, Any]]:
    """Return, for each size and the next, n where what grows does so like size to the power n."""
    growth = []
    for small, large in pairwise(found):
        ratio = math.log(large[along] / small[along])
        one: dict[str, Any] = {"from": small[along], "to": large[along]}
        for label, name in GROWING.items():
            one[label] = math.log(max(large[name], 1e-9) / max(small[name], 1e-9)) / ratio
        growth.append(one)
    return growth


def word(exponent: float) -> str:
    """Say in words how something grows."""
    bounds = ((0.25, "flat"), (0.85, "less than linear"), (1.2, "linear"))
    return next((name for bound, name in bounds if exponent < bound), "worse than linear")


#: Why anything grows, by axis.
REASONS = {
    "ranks": "A step has as many more spans as there are ranks, each of which is read, drawn, "
    "placed and audited once; and every constructor (one for eight ranks) is told its part of the "
    "plan, and passes on what was acknowledged. So linear is what can be had. Ranks that join are "
    "news for their own constructor alone.",
    "sources": "Here steps have the same spans, of more sources. What grows is what there is of "
    "each source: its window, of which the draw looks at all, and its place in the state, which "
    "goes to every constructor, packed. Sources that a step takes nothing from cost little.",
}


def tell_growth(report: Report, found: Sequence[Mapping[str, Any]], fixed: str, along: str) -> None:
    """Report how everything grows along one axis."""
    growth = exponents(found, along)
    rows = [
        [f"{one['from']:,} to {one['to']:,}", *(f"{one[label]:.2f}" for label in GROWING)]
        for one in growth
    ]
    report.table(f"Growth by {along}, {fixed}: n of size^n", [along, *GROWING], rows)
    said = ", ".join(f"{label} {word(growth[-1][label])}" for label in GROWING)
    last = growth[-1]
    report.say(f"From {last['from']:,} to {last['to']:,} {along}: {said}. {REASONS[along]}")
    report.plot(plot(found, fixed, along), f"by {along}")


def plot(found: Sequence[Mapping[str, Any]], fixed: str, along: str) -> Figure:
    """Return the times of a step along one axis, with lines of slope 1 to compare."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    x = [one[along] for one in found]
    for name, label in (
        ("step_s", "step"),
        ("plan_s", "planning"),
        ("scheduler_cpu_s", "scheduler CPU"),
        ("workers_cpu_s", "CPU of all workers"),
    ):
        axes.plot(x, [one[name] * 1e3 for one in found], marker="o", label=label)
    last = found[-1]["step_s"] * 1e3
    axes.plot(x, [last * n / x[-1] for n in x], color="0.7", linestyle="--", label="linear")
    axes.set(xscale="log", yscale="log", xlabel=along, ylabel=f"ms a step, {fixed}")
    axes.legend()
    return figure
