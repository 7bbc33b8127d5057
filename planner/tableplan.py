"""The placement of one table of spans, to look at: what `DGraph.plan` returns.

Axes: N spans, B buckets, M microbatches, P parts of the cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from megadask.planner.metadata import Metadata


@dataclass(frozen=True, kw_only=True, eq=False)
class TablePlan:
    """Where every span of a table goes, and how even that is.

    Attributes
    ----------
    table
        (N rows) the spans.
    assignment
        (N,) int64, bucket of each span, -1 where it was not taken.
    cp_degree
        (N,) int64, buckets that share each span, from `assignment` on; 1 where it stays whole.
    microbatch
        (N,) int64, microbatch of each span within its bucket.
    loads
        (B, M, P) float64 cost of every microbatch, as the cost function counts it.
    bound
        Lowest max / mean that any assignment could reach: max(1, largest indivisible cost / mean).
    method
        How spans were placed.
    """

    table: Metadata
    assignment: NDArray[np.int64]
    cp_degree: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    loads: NDArray[np.float64]
    bound: float
    method: str

    @property
    def num_buckets(self) -> int:
        """B."""
        return int(self.loads.shape[0])

    @property
    def num_microbatches(self) -> int:
        """M."""
        return int(self.loads.shape[1])

    @property
    def imbalance(self) -> float:
        """Max / mean bucket cost, of the worst part; 1.0 where there is no cost."""
        load_BP = self.loads.sum(axis=1)
        mean_P = load_BP.mean(axis=0)
        costly_P = mean_P > 0
        return float((load_BP.max(axis=0)[costly_P] / mean_P[costly_P]).max(initial=1.0))

    def __repr__(self) -> str:
        return (
            f"TablePlan({len(self.assignment)} spans over {self.num_buckets} buckets x "
            f"{self.num_microbatches} microbatches by {self.method!r}: "
            f"max/mean {self.imbalance:.4f}, bound {self.bound:.4f})"
        )

    def _repr_html_(self) -> str:
        """Show the load of every bucket, heaviest first, as bars stacked by part."""
        load_BP = self.loads.sum(axis=1)
        order = np.argsort(-load_BP.sum(axis=1), kind="stable")
        scale = 100.0 / max(float(load_BP.sum(axis=1).max(initial=0.0)), np.finfo(float).tiny)
        width = max(1, 640 // max(1, len(order)))
        bars = []
        for place, bucket in enumerate(order.tolist()):
            top = 100.0
            for part, load in enumerate(load_BP[bucket].tolist()):
                top -= load * scale
                bars.append(
                    f'<rect x="{place * width}" y="{top:.2f}" width="{max(1, width - 1)}" '
                    f'height="{load * scale:.2f}" fill="hsl({210 + 110 * part}, 55%, 50%)">'
                    f"<title>bucket {bucket}, part {part}: {load:.4g}</title></rect>"
                )
        mean = 100.0 - float(load_BP.sum(axis=1).mean()) * scale if len(order) else 100.0
        right = len(order) * width
        line = f'<line x1="0" x2="{right}" y1="{mean:.2f}" y2="{mean:.2f}" stroke="#333"/>'
        return (
            f"<div><code>{escape(repr(self))}</code></div>"
            f'<svg width="{right}" height="100" role="img" '
            f'aria-label="cost of each bucket">{"".join(bars)}{line}</svg>'
        )
