"""The figure of a `Look`. Matplotlib is imported when it is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megadask.looking.looks import Look


def plot_look(look: Look) -> Figure:
    """Draw how long samples are, which lengths the tokens are in, and how long items are."""
    from matplotlib.figure import Figure

    items = {
        f"{name}, {modality}": ragged.lengths_I
        for name, source in look.items()
        for modality, ragged in source.items.items()
        if len(ragged.lengths_I)
    }
    lengths = {name: source.lengths for name, source in look.items() if len(source.lengths)}
    count = 3 if items else 2
    # Legends are below the axes: what is drawn reaches into all corners.
    lines = max(1, len(lengths), len(items))
    figure = Figure(figsize=(4.2 * count, 3.2 + 0.2 * lines), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, count, squeeze=False)[0])
    _histogram(axes[0], lengths)
    axes[0].set(title="Lengths", xlabel="tokens of a sample", ylabel="samples")
    for name, length_N in lengths.items():
        rising_N = np.sort(length_N)
        axes[1].plot(rising_N, np.cumsum(rising_N) / max(1, rising_N.sum()), label=name)
    axes[1].set(
        title="Where the tokens are",
        xlabel="tokens of a sample, at most",
        ylabel="share of the tokens",
        xscale="log",
        ylim=(0, 1),
    )
    if items:
        _histogram(axes[2], items)
        axes[2].set(title="Items", xlabel="length of an item", ylabel="items")
    for ax in axes:
        if ax.get_legend_handles_labels()[1]:
            ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return figure


def _histogram(ax: Axes, series: dict[str, NDArray[np.int64]]) -> None:
    """Draw histograms over one logarithmic axis."""
    ax.set(xscale="log")
    if not series:
        return
    low = max(1, min(int(values.min()) for values in series.values()))
    high = max(int(values.max()) for values in series.values())
    bins = np.geomspace(low, max(high, low + 1), 40).tolist()
    for name, values in series.items():
        ax.hist(values, bins, histtype="step", label=f"{name}: median {np.median(values):,.0f}")
