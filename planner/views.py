"""What all plans can say of themselves: how even they are, as a number, a text and a figure.

Axes: N spans, B buckets, M microbatches, P parts of the cost.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BARS = 512  # of a figure in HTML; more buckets are thinned out evenly
_WIDTH = 640


class PlanView:
    """The views of a plan that has ``loads`` (B, M, P) and a ``bound``."""

    loads: NDArray[Any]
    bound: float

    @property
    def num_buckets(self) -> int:
        """B."""
        return int(self.loads.shape[0])

    @property
    def num_microbatches(self) -> int:
        """M, the same for every rank."""
        return int(self.loads.shape[1])

    @property
    def imbalance(self) -> float:
        """Max / mean bucket cost, of the worst part; 1.0 where there is no cost."""
        return imbalance(self.loads)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the load of every bucket, heaviest first; needs matplotlib.

        Parameters
        ----------
        ax
            Axes to draw on; new ones by default.

        Returns
        -------
        matplotlib.axes.Axes
        """
        from megadask.planner.plots import plot_loads

        return plot_loads(self, ax)

    def _repr_html_(self) -> str:
        """Show the load of every bucket, heaviest first, as bars stacked by part."""
        load_BP = self.loads.sum(axis=1).astype(np.float64)
        order = np.argsort(-load_BP.sum(axis=1), kind="stable")
        shown = order[np.unique(np.linspace(0, len(order) - 1, _MOST_BARS).astype(int))]
        top = max(float(load_BP.sum(axis=1).max(initial=0.0)), np.finfo(float).tiny)
        step = _WIDTH / max(1, len(shown))
        bars = []
        for place, bucket in enumerate(shown.tolist()):
            y = 100.0
            for part, load in enumerate((load_BP[bucket] * (100.0 / top)).tolist()):
                y -= load
                bars.append(
                    f'<rect x="{place * step:.2f}" y="{y:.2f}" width="{0.9 * step:.2f}" '
                    f'height="{load:.2f}" fill="hsl({210 + 110 * part}, 55%, 50%)">'
                    f"<title>bucket {bucket}, part {part}: {load_BP[bucket, part]:.4g}</title>"
                    "</rect>"
                )
        mean = 100.0 - float(load_BP.sum(axis=1).mean()) * 100.0 / top
        line = f'<line x1="0" x2="{_WIDTH}" y1="{mean:.2f}" y2="{mean:.2f}" stroke="#333"/>'
        return (
            f"<div><code>{escape(repr(self))}</code><br>load of each bucket, heaviest first; "
            "the line is the mean</div>"
            f'<svg width="{_WIDTH}" height="100" role="img" '
            f'aria-label="load of each bucket">{"".join(bars)}{line}</svg>'
        )


def imbalance(loads_BMP: NDArray[Any]) -> float:
    """Return max / mean bucket cost of the worst part; 1.0 where a part costs nothing.

    loads_BMP: (B, M, P) cost.
    """
    load_BP = loads_BMP.sum(axis=1)
    mean_P = load_BP.mean(axis=0)
    costly_P = mean_P > 0
    return float((load_BP.max(axis=0)[costly_P] / mean_P[costly_P]).max(initial=1.0))
