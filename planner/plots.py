"""Figures of plans. Matplotlib is imported when one is drawn, and only here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from megadask.planner.views import PlanView


def new_axes(width: float = 7.0, height: float = 3.2) -> Axes:
    """Return the axes of a new figure, in inches."""
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return ax


def plot_loads(plan: PlanView, ax: Axes | None = None) -> Axes:
    """Draw the time of every bucket over the mean, slowest first, stacked by part."""
    ax = new_axes() if ax is None else ax
    load_BP = plan.times.sum(axis=1).astype(np.float64)
    total_B = load_BP.sum(axis=1)
    scale = 1.0 / total_B.mean() if total_B.any() else 1.0
    order = np.argsort(-total_B, kind="stable")
    place_B, base_B = np.arange(len(order)), np.zeros(len(order))
    num_parts = load_BP.shape[1]
    for part in range(num_parts):
        height_B = load_BP[order, part] * scale
        name = "cost" if num_parts == 1 else f"part {part}"
        ax.bar(place_B, height_B, bottom=base_B, width=0.9, label=name)
        base_B = base_B + height_B
    ax.axhline(1.0, color="black", linewidth=0.9, label="mean")
    if plan.bound > 1.0:
        ax.axhline(plan.bound, color="black", linewidth=0.9, linestyle="--", label="lower bound")
    slowest = float(total_B.max(initial=0.0)) * scale
    ax.set(
        title=f"Load of {len(order)} buckets: the slowest has {slowest:.3f} x the mean",
        xlabel="bucket, slowest first",
        ylabel="load / mean load",
    )
    ax.legend(loc="lower left")
    return ax
