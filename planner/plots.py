"""Figures of plans and simulations. Matplotlib is imported when one is drawn, and only here.

In a notebook a figure shows itself once `matplotlib.pyplot` has been imported.

Axes: B buckets, M microbatches, P parts of the cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from megadask.planner.pipelining import one_forward_one_backward

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megadask.planner.simulation import Simulation
    from megadask.planner.stream_report import StreamReport
    from megadask.planner.views import PlanView

_MOST_BARS = 256
_FORWARD, _BACKWARD, _IDLE = "#4c78a8", "#f58518", "#e8e8e8"


def plot_plan(plan: PlanView, ax: Axes | None = None) -> Figure:
    """Draw the time of every bucket over the mean, slowest first, stacked by part.

    Draws on ``ax``, on a new figure without it.
    """
    from matplotlib.figure import Figure

    is_own = ax is None
    if ax is None:
        ax = Figure(figsize=(8, 3.2), layout="constrained").add_subplot()
    load_BP = plan.times.sum(axis=1).astype(np.float64)
    total_B = load_BP.sum(axis=1)
    scale = 1.0 / total_B.mean() if total_B.any() else 1.0
    _stack(ax, load_BP[np.argsort(-total_B, kind="stable")] * scale)
    ax.axhline(1.0, color="black", linewidth=0.9, label="mean")
    if plan.bound > 1.0:
        ax.axhline(plan.bound, color="black", linewidth=0.9, linestyle="--", label="lower bound")
    slowest = float(total_B.max(initial=0.0)) * scale
    ax.set(
        title=f"Load of {len(total_B)} buckets: the slowest has {slowest:.3f} x the mean",
        xlabel="bucket, slowest first",
        ylabel="load / mean load",
    )
    if is_own:
        _legend_beside(ax)
    else:  # there may be no room beside it
        ax.legend(loc="lower left")
    return cast("Figure", ax.figure)


def plot_simulation(simulation: Simulation) -> Figure:
    """Draw one step: the time of every bucket, or the pipeline of the slowest one.

    Without a pipeline, a bar for each bucket, heaviest first, stacked by part, with the ideal and
    the step time as lines. With one, the passes of every stage of the slowest bucket over time.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.add_subplot()
    trainer = simulation.trainer
    if trainer.pp == 1:
        _bars(axes, simulation)
    else:
        _pipeline(axes, simulation)
    figure.suptitle(
        f"One step, sync={trainer.sync!r}, pp={trainer.pp}: efficiency {simulation.efficiency:.1%}"
    )
    return figure


def plot_stream(report: StreamReport) -> Figure:
    """Draw a stream: efficiency and max / mean of its steps, lengths, and planning times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle(
        f"{report.num_steps} steps over {report.num_buckets} buckets, "
        f"sync={report.trainer.sync!r}, pp={report.trainer.pp}"
    )
    (efficiency, imbalance), (lengths, planning) = figure.subplots(2, 2)
    for name, placed in report.placed.items():
        ratio_T = report.ideal_T / placed.step_time_T
        efficiency.hist(ratio_T, bins=np.linspace(0, 1, 41), alpha=0.6, label=name)
        imbalance.hist(placed.imbalance_T, bins=30, alpha=0.6, label=name)
        planning.plot(1e3 * (report.draw_seconds_T + placed.seconds_T), label=name)
    efficiency.axvline(1 / report.bound, color="black", linestyle=":", label="bound")
    efficiency.set(xlabel="ideal / step time", ylabel="steps", title="Efficiency of each step")
    imbalance.set(xlabel="max / mean bucket cost", ylabel="steps", title="Imbalance of each step")
    planning.set(xlabel="step", ylabel="ms", title="Time to draw and place a step", ylim=(0, None))
    edges = 2.0 ** np.arange(len(report.length_counts_L) + 1)
    lengths.stairs(report.length_counts_L, edges, fill=True, label="spans")
    lengths.set(xlabel="tokens", ylabel="spans", xscale="log", title="Lengths")
    for axes in (efficiency, imbalance, planning, lengths):
        axes.legend()
    return figure


def _bars(axes: Axes, simulation: Simulation) -> None:
    order = np.argsort(-simulation.alone, kind="stable")
    _stack(axes, simulation.load_BMP.sum(axis=1)[order])
    axes.axhline(simulation.ideal, color="black", linestyle=":", label="ideal")
    axes.axhline(simulation.step_time, color="black", label="step time")
    unit = _scale(axes.yaxis, simulation.step_time)
    axes.set(xlabel="buckets, slowest first", ylabel=f"time ({unit})")
    _legend_beside(axes)


def _pipeline(axes: Axes, simulation: Simulation) -> None:
    trainer, begin = simulation.trainer, 0.0
    for part in range(simulation.load_BMP.shape[2]):
        load_BM = simulation.load_BMP[:, :, part]
        if trainer.sync == "microbatch":
            load_BM = load_BM.max(axis=0, keepdims=True)
            bucket = 0
        else:
            bucket = simulation.slowest
        line = one_forward_one_backward(load_BM[[bucket]], trainer.pp, trainer.backward)
        for stage in range(trainer.pp):
            for ends_SMB, time_BM, colour in (
                (line.forward_SMB, line.forward_BM, _FORWARD),
                (line.backward_SMB, line.backward_BM, _BACKWARD),
            ):
                end_M, time_M = ends_SMB[stage, :, 0], time_BM[0]
                spans = list(zip(begin + end_M - time_M, time_M, strict=True))
                axes.broken_barh(
                    spans, (stage - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.5
                )
        begin += float(line.end_B[0])
    who = "all buckets" if trainer.sync == "microbatch" else f"bucket {simulation.slowest}"
    unit = _scale(axes.xaxis, simulation.step_time)
    axes.set(
        xlabel=f"time ({unit}), {who}",
        ylabel="stage",
        yticks=range(trainer.pp),
        ylim=(trainer.pp - 0.5, -0.5),
        xlim=(0, simulation.step_time or 1),
        facecolor=_IDLE,
    )
    for colour, label in ((_FORWARD, "forward"), (_BACKWARD, "backward"), (_IDLE, "idle")):
        axes.bar([0], [0], color=colour, label=label)
    _legend_beside(axes)


def _legend_beside(axes: Axes) -> None:
    """Put the legend where it covers nothing: right of the axes, of a figure that makes room."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _scale(axis: Any, largest: float) -> str:
    """Leave a power of ten out of the numbers of an axis; return the unit that has it."""
    power = 3 * int(np.log10(largest) // 3) if largest >= 1e4 else 0
    if power:
        axis.set_major_formatter(lambda value, _: f"{value / 10.0**power:g}")
    return f"1e{power} x unit of the cost" if power else "unit of the cost"


def _stack(axes: Axes, load_BP: NDArray[np.float64]) -> None:
    """Draw a bar for each bucket, its parts one upon the other."""
    base_B, (num_buckets, num_parts) = np.zeros(len(load_BP)), load_BP.shape
    for part in range(num_parts):
        label = "cost" if num_parts == 1 else f"part {part}"
        top_B = base_B + load_BP[:, part]
        if num_buckets > _MOST_BARS:  # an outline: thousands of bars take many seconds
            edges = np.arange(num_buckets + 1) - 0.5
            axes.stairs(top_B, edges, baseline=base_B, fill=True, label=label)
        else:
            axes.bar(np.arange(num_buckets), load_BP[:, part], 0.9, bottom=base_B, label=label)
        base_B = top_B
