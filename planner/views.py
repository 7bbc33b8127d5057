"""What all plans can say of themselves: how even they are, as a number, a text and a figure.

Axes: N spans, B buckets, M microbatches, P parts of the cost.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner import lineage
from megadask.planner.ids import SampleId
from megadask.planner.lineage import Place, Planned
from megadask.planner.problem import Sync

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BARS = 512  # of a figure in HTML; more buckets are thinned out evenly
_WIDTH = 640


class PlanView:
    """The views of a plan that has ``loads``, a ``bound`` and perhaps ``speeds`` of its buckets.

    loads: (B, M, P) cost; speeds: (B,) float64, relative, None where all are alike; sync: whether
    ranks meet after every part, or once a step.
    """

    loads: NDArray[Any]
    bound: float
    speeds: NDArray[np.float64] | None
    sync: Sync

    @property
    def unit(self) -> float:
        """What one of `loads` is, in the unit of the cost."""
        return 1.0

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
        """Max / mean bucket cost, of the worst part; 1.0 where there is no cost.

        Where ranks meet once a step, that of the sum of the parts. With uneven speeds, the time of
        the slowest bucket over that of a step whose cost is spread evenly, by speed.
        """
        return imbalance(self.joined(self.loads), self.speeds)

    @property
    def times(self) -> NDArray[Any]:
        """(B, M, P) float64 cost of every microbatch, by its function, over the bucket's speed."""
        cost_BMP = self.loads * np.float64(self.unit)
        return cost_BMP if self.speeds is None else cost_BMP / self.speeds[:, None, None]

    def joined(self, value_BMP: NDArray[Any]) -> NDArray[Any]:
        """Return loads or times (B, M, P), or (B, M, 1) their sums where parts do not meet."""
        return value_BMP if self.sync == "part" else value_BMP.sum(axis=2, keepdims=True)

    def where(self: Planned, sample: SampleId | tuple[str, int, int, int] | int) -> list[Place]:
        """Return where a sample (its id, or its row) went, span after span; see `lineage.where`."""
        return lineage.where(self, sample)

    def made_of(self: Planned, bucket: int, microbatch: int | None = None) -> NDArray[np.int64]:
        """Return the rows that a bucket, or one of its microbatches, is made of, in their order.

        What a rank got is what its bucket did: ``plan.made_of(tree.bucket_of(rank, axis))``.
        """
        return lineage.made_of(self, bucket, microbatch)

    def plot(self, ax: Axes | None = None) -> Figure:
        """Return a figure of the load of every bucket, slowest first; needs matplotlib.

        ax: where to draw; a new figure by default.
        """
        from megadask.planner.plots import plot_plan

        return plot_plan(self, ax)

    def _repr_html_(self) -> str:
        """Show the time of every bucket, slowest first, as bars stacked by part."""
        load_BP = self.times.sum(axis=1).astype(np.float64)
        order = np.argsort(-load_BP.sum(axis=1), kind="stable")
        shown = order[np.unique(np.linspace(0, len(order) - 1, _MOST_BARS).astype(int))]
        top = float(load_BP.sum(axis=1).max(initial=0.0)) or 1.0
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
            f"<div><code>{escape(repr(self))}</code><br>load of each bucket, slowest first; "
            "the line is the mean</div>"
            f'<svg width="{_WIDTH}" height="100" role="img" '
            f'aria-label="load of each bucket">{"".join(bars)}{line}</svg>'
        )


def imbalance(loads_BMP: NDArray[Any], speed_B: NDArray[np.float64] | None = None) -> float:
    """Return max / mean bucket time of the worst part; 1.0 where there is no cost.

    loads_BMP: (B, M, P) cost; speed_B: (B,), by which costs are divided, and the mean weighs them.
    """
    load_BP = loads_BMP.sum(axis=1)
    if speed_B is None:
        speed_B = np.ones(len(load_BP))
    even_P = load_BP.sum(axis=0) / speed_B.sum()
    slowest_P = (load_BP / speed_B[:, None]).max(axis=0, initial=0)
    costly_P = even_P > 0
    return float((slowest_P[costly_P] / even_P[costly_P]).max(initial=1.0))
