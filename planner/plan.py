"""The plan of one step: frozen, columnar, digested, versioned.

Axes: N spans in the order drawn, B buckets, M microbatches, P cost parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner import columnar
from megadask.planner.cp import Layout
from megadask.planner.digests import array_digest
from megadask.planner.ids import SampleId
from megadask.planner.metadata import Metadata
from megadask.planner.problem import Sync
from megadask.planner.routing import Routing, digested
from megadask.planner.state import table_from_json, table_to_json
from megadask.planner.views import PlanView

VERSION = 3
_PLACED = ("bucket", "microbatch", "pack", "offset")
_PLAIN = (
    "step",
    "sources",
    "bound",
    "unit",
    "sync",
    "num_packs",
    "capacity_tokens",
    "cp_layout",
    "first_microbatch",
    "num_loss_tokens",
    "draw_digest",
    "assignment_digest",
    "state",
    "end",
)
_DRAWN = ("epoch", "lane", "position", "start", "stop", "loss_tokens", "checksum")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan(PlanView):
    """What every rank gets in one step.

    Attributes
    ----------
    step
        Number of the step.
    sources
        Names that column ``source`` of the table counts.
    table
        (N rows) the spans in the order drawn.
    bucket_N, microbatch_N, pack_N, offset_N
        Where each span goes; the offset is in padded tokens from the start of its pack. The bucket
        is -1 for a span that was delivered before the generation began (in the middle of a step).
    loads_BMP
        (B, M, P) int64 cost of every microbatch of every bucket.
    bound
        Lowest max / mean that any assignment could reach.
    num_packs
        Packs of one microbatch.
    capacity_tokens
        Tokens that the packs of all microbatches of all buckets have room for, pads included; from
        `first_microbatch` on.
    cp_layout
        How the ranks that share a bucket cut its packs; see `cp`.
    first_microbatch
        Where the step begins: above 0 only after resuming in its middle.
    num_loss_tokens
        Targets of the whole step that count in the loss.
    mixture
        Source name to its weight in force.
    draw_digest, assignment_digest
        What the step consists of, and where it goes. A step that is continued where it was going
        keeps its assignment digest.
    passed
        Verdicts committed with this plan: records that it passes over.
    state
        JSON of the planner state before the next step.
    end
        Whether the data ended before this step; then it has no spans.
    unit
        What one of the loads is, in the unit of the cost.
    speeds
        (B,) float64, relative speeds of the buckets; None where all are alike.
    sync
        Whether ranks meet after every part of the cost (``"part"``), or once a step.
    routing
        Modality to where its items are encoded, of those that were selected.
    """

    step: int
    sources: tuple[str, ...]
    table: Metadata
    bucket_N: NDArray[np.int64]
    microbatch_N: NDArray[np.int64]
    pack_N: NDArray[np.int64]
    offset_N: NDArray[np.int64]
    loads_BMP: NDArray[np.int64]
    bound: float
    num_packs: int
    capacity_tokens: int = 0
    cp_layout: Layout = "document"
    first_microbatch: int = 0
    num_loss_tokens: int
    mixture: Mapping[str, float]
    draw_digest: str
    assignment_digest: str = ""
    passed: Metadata
    state: str
    end: bool = False
    unit: float = 1.0
    speeds: NDArray[np.float64] | None = None
    sync: Sync = "part"
    routing: Mapping[str, Routing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.assignment_digest:
            return
        columns = [getattr(self, f"{name}_N") for name in _PLACED] + digested(self.routing)
        head = f"{self.loads_BMP.shape}{self.num_packs}"
        if self.cp_layout != "document":
            head += self.cp_layout
        digest = array_digest(head, columns)
        object.__setattr__(self, "assignment_digest", digest)

    def __repr__(self) -> str:
        return (
            f"Plan(step {self.step}: {self.table.num_rows} spans over {self.num_buckets} buckets x "
            f"{self.num_microbatches} microbatches: max/mean {self.imbalance:.4f}, "
            f"bound {self.bound:.4f})"
        )

    @property
    def num_tokens(self) -> int:
        """Real tokens of the spans that the plan places."""
        return int(self.table["tokens"][self.bucket_N >= 0].sum())

    @property
    def efficiency(self) -> float:
        """Real tokens over those that the packs have room for; 1.0 where there are no packs."""
        return self.num_tokens / self.capacity_tokens if self.capacity_tokens else 1.0

    @property
    def assignment(self) -> NDArray[np.int64]:
        """(N,) bucket of each span, -1 where it was not taken."""
        return self.bucket_N

    @property
    def microbatch(self) -> NDArray[np.int64]:
        """(N,) microbatch of each span within its bucket, -1 where it was not taken."""
        return self.microbatch_N

    @property
    def loads(self) -> NDArray[np.int64]:  # type: ignore[override]
        """(B, M, P) cost; M counts microbatches before `first_microbatch` too."""
        return self.loads_BMP

    def rows_of(self, bucket: int, microbatch: int) -> NDArray[np.int64]:
        """Return the rows of one microbatch of one bucket, pack after pack, by offset."""
        rows = np.flatnonzero((self.bucket_N == bucket) & (self.microbatch_N == microbatch))
        return rows[np.lexsort((self.offset_N[rows], self.pack_N[rows]))]

    def sample_ids(self, rows: NDArray[np.int64]) -> list[SampleId]:
        """Return the sample ids of the given rows."""
        columns = (
            self.table[name][rows].tolist() for name in ("source", "epoch", "lane", "position")
        )
        return [SampleId(self.sources[s], e, k, p) for s, e, k, p in zip(*columns, strict=True)]

    def to_arrow(self) -> bytes:
        """Return the plan as an Arrow IPC stream; `from_arrow` inverts it."""
        parts = {name: routing.to_arrow() for name, routing in self.routing.items()}
        return columnar.write("plan", VERSION, self._table, self._header, parts)

    def cutter(self) -> columnar.Cutter:
        """Return what writes plans of some rows each, for `from_cut`; there is no routing."""
        assert not self.routing
        return columnar.Cutter("plan", VERSION, self._table, self._header)

    @property
    def _table(self) -> Metadata:
        placed = {f"plan:{name}": getattr(self, f"{name}_N") for name in _PLACED}
        return self.table.with_columns(**placed)

    @property
    def _header(self) -> dict[str, Any]:
        return {
            "loads": self.loads_BMP.ravel().tolist(),
            "loads_shape": self.loads_BMP.shape,
            "mixture": dict(self.mixture),
            "passed": table_to_json(self.passed),
            "speeds": None if self.speeds is None else self.speeds.tolist(),
            **{name: getattr(self, name) for name in _PLAIN},
        }

    @classmethod
    def from_arrow(cls, data: bytes) -> Plan:
        """Read a plan back. Raises StateError for another version."""
        table, header, parts = columnar.read("plan", VERSION, data)
        routing = {name: Routing.from_arrow(part) for name, part in parts.items()}
        return cls._from(table, header, routing)

    @classmethod
    def from_cut(cls, data: bytes) -> Plan:
        """Read what `cutter` wrote. Raises StateError for another version."""
        return cls._from(*columnar.read_cut("plan", VERSION, data), {})

    @classmethod
    def _from(
        cls, table: Metadata, header: Mapping[str, Any], routing: Mapping[str, Routing]
    ) -> Plan:
        columns = dict(table.columns)
        placed: dict[str, Any] = {f"{name}_N": columns.pop(f"plan:{name}") for name in _PLACED}
        plain = {name: header[name] for name in _PLAIN}
        return cls(
            table=Metadata(columns, table.ragged),
            loads_BMP=np.array(header["loads"], np.int64).reshape(header["loads_shape"]),
            mixture=header["mixture"],
            passed=table_from_json(header["passed"]),
            speeds=None if header["speeds"] is None else np.array(header["speeds"], np.float64),
            routing=routing,
            **placed,
            **{**plain, "sources": tuple(plain["sources"])},
        )


def draw_digest(step: int, sources: Sequence[str], table: Metadata) -> str:
    """Return a hash of what a step consists of: spans, targets and payload, in order.

    Sources count by their names, so it is the same where a pipeline has others besides.
    """
    name_S = np.array([zlib.crc32(name.encode()) for name in sources], np.int64)
    return array_digest(str(step), [name_S[table["source"]], *(table[name] for name in _DRAWN)])
