"""The placement of one table of spans, to look at: what `DGraph.plan` returns.

Axes: N spans, B buckets, M microbatches, P parts of the cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megadask.planner import columnar
from megadask.planner.digests import array_digest
from megadask.planner.metadata import Metadata
from megadask.planner.problem import Sync
from megadask.planner.routing import Routing, digested
from megadask.planner.topology import Axis, ClientPlaceTree
from megadask.planner.views import PlanView

VERSION = 1
_PLACED = ("assignment", "cp_degree", "microbatch")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TablePlan(PlanView):
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
    topology, axis
        The job that was planned for, and what its buckets are for.
    speeds
        (B,) float64, relative speeds of the buckets; None where all are alike.
    sync
        Whether ranks meet after every part of the cost (``"part"``), or once a step.
    routing
        Modality to where its items are encoded, of those that were selected.
    """

    table: Metadata
    assignment: NDArray[np.int64]
    cp_degree: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    loads: NDArray[np.float64]
    bound: float
    method: str
    topology: ClientPlaceTree
    axis: Axis
    speeds: NDArray[np.float64] | None = None
    sync: Sync = "part"
    routing: Mapping[str, Routing] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A hash of where every span and every item goes, the same on every platform."""
        columns = [getattr(self, name) for name in _PLACED] + digested(self.routing)
        return array_digest(f"{self.loads.shape}", columns)

    def __repr__(self) -> str:
        routed = "".join(
            f"; {name}: {len(routing.span_I)} items over {len(routing.loads)} encoders, "
            f"max/mean {routing.imbalance:.4f}"
            for name, routing in sorted(self.routing.items())
        )
        return (
            f"TablePlan({len(self.assignment)} spans over {self.num_buckets} buckets x "
            f"{self.num_microbatches} microbatches by {self.method!r}: "
            f"max/mean {self.imbalance:.4f}, bound {self.bound:.4f}{routed})"
        )

    def to_arrow(self) -> bytes:
        """Return the plan as an Arrow IPC stream; `from_arrow` inverts it."""
        placed = {f"plan:{name}": getattr(self, name) for name in _PLACED}
        header = {
            "shape": self.loads.shape,
            "loads": self.loads.ravel().tolist(),
            "bound": self.bound,
            "method": self.method,
            "topology": self.topology.to_dict(),
            "axis": self.axis,
            "sync": self.sync,
            "speeds": None if self.speeds is None else self.speeds.tolist(),
        }
        parts = {name: routing.to_arrow() for name, routing in self.routing.items()}
        return columnar.write(
            "table plan", VERSION, self.table.with_columns(**placed), header, parts
        )

    @classmethod
    def from_arrow(cls, data: bytes) -> TablePlan:
        """Read a plan back. Raises StateError for another version."""
        table, header, parts = columnar.read("table plan", VERSION, data)
        columns = dict(table.columns)
        axis = header["axis"]
        return cls(
            **{name: columns.pop(f"plan:{name}") for name in _PLACED},
            table=Metadata(columns, table.ragged),
            loads=np.array(header["loads"], np.float64).reshape(header["shape"]),
            bound=header["bound"],
            method=header["method"],
            topology=ClientPlaceTree.from_dict(header["topology"]),
            axis=axis if isinstance(axis, str) else tuple(axis),
            sync=header["sync"],
            speeds=None if header["speeds"] is None else np.array(header["speeds"], np.float64),
            routing={name: Routing.from_arrow(part) for name, part in parts.items()},
        )
