"""The plan of one step: frozen, columnar, digested, versioned.

Axes: N spans in the order drawn, B buckets, M microbatches, P cost parts.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.cp import Layout
from megadask.planner.errors import StateError
from megadask.planner.ids import SampleId
from megadask.planner.metadata import Metadata, Ragged
from megadask.planner.state import table_from_json, table_to_json

VERSION = 1
_PLACED = ("bucket", "microbatch", "pack", "offset")
_DRAWN = ("epoch", "lane", "position", "start", "stop", "loss_tokens", "checksum")


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
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
    cp_layout: Layout = "document"
    first_microbatch: int = 0
    num_loss_tokens: int
    mixture: Mapping[str, float]
    draw_digest: str
    assignment_digest: str = ""
    passed: Metadata
    state: str
    end: bool = False

    def __post_init__(self) -> None:
        if self.assignment_digest:
            return
        columns = [getattr(self, f"{name}_N") for name in _PLACED]
        head = f"{self.loads_BMP.shape}{self.num_packs}"
        if self.cp_layout != "document":
            head += self.cp_layout
        digest = array_digest(head, columns)
        object.__setattr__(self, "assignment_digest", digest)

    @property
    def assignment(self) -> NDArray[np.int64]:
        """(N,) bucket of each span, -1 where it was not taken."""
        return self.bucket_N

    @property
    def loads(self) -> NDArray[np.int64]:
        """(B, M, P) cost."""
        return self.loads_BMP

    @property
    def num_buckets(self) -> int:
        """B."""
        return int(self.loads_BMP.shape[0])

    @property
    def num_microbatches(self) -> int:
        """M, the same for every rank; counts those before `first_microbatch` too."""
        return int(self.loads_BMP.shape[1])

    @property
    def imbalance(self) -> float:
        """Max / mean bucket cost, of the worst part; 1.0 where there is no cost."""
        return imbalance(self.loads_BMP)

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
        import pyarrow as pa

        columns: dict[str, Any] = dict(self.table.columns)
        columns |= {f"plan:{name}": getattr(self, f"{name}_N") for name in _PLACED}
        arrays = {name: pa.array(column) for name, column in columns.items()}
        for name, ragged in self.table.ragged.items():
            arrays[f"items:{name}"] = pa.LargeListArray.from_arrays(
                pa.array(ragged.offsets), pa.array(ragged.lengths_I)
            )
        header = {
            "version": VERSION,
            "step": self.step,
            "sources": self.sources,
            "loads": self.loads_BMP.tolist(),
            "loads_shape": self.loads_BMP.shape,
            "bound": self.bound,
            "num_packs": self.num_packs,
            "cp_layout": self.cp_layout,
            "first_microbatch": self.first_microbatch,
            "num_loss_tokens": self.num_loss_tokens,
            "mixture": dict(self.mixture),
            "draw_digest": self.draw_digest,
            "assignment_digest": self.assignment_digest,
            "passed": table_to_json(self.passed),
            "state": self.state,
            "end": self.end,
        }
        batch = pa.RecordBatch.from_pydict(arrays).replace_schema_metadata(
            {"megadask": json.dumps(header)}
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue())

    @classmethod
    def from_arrow(cls, data: bytes) -> Plan:
        """Read a plan back. Raises StateError for another version."""
        import pyarrow as pa

        with pa.ipc.open_stream(data) as reader:
            batch = reader.read_all().combine_chunks()
        header = json.loads(batch.schema.metadata[b"megadask"])
        if header["version"] != VERSION:
            raise StateError(
                "the plan has another version",
                got=header["version"],
                limit=VERSION,
                remedy="Read it with the MegaDask version that wrote it.",
            )
        columns, items, placed = {}, {}, {}
        for name in batch.column_names:
            column = batch.column(name).combine_chunks()
            if name.startswith("items:"):
                lengths, offsets = (np.asarray(part) for part in (column.values, column.offsets))
                items[name.removeprefix("items:")] = Ragged(lengths, offsets)
            elif name.startswith("plan:"):
                placed[name.removeprefix("plan:") + "_N"] = column.to_numpy()
            else:
                columns[name] = column.to_numpy()
        return cls(
            step=header["step"],
            sources=tuple(header["sources"]),
            table=Metadata(columns, items),
            **placed,
            loads_BMP=np.array(header["loads"], np.int64).reshape(header["loads_shape"]),
            bound=header["bound"],
            num_packs=header["num_packs"],
            cp_layout=header.get("cp_layout", "document"),
            first_microbatch=header["first_microbatch"],
            num_loss_tokens=header["num_loss_tokens"],
            mixture=header["mixture"],
            draw_digest=header["draw_digest"],
            assignment_digest=header["assignment_digest"],
            passed=table_from_json(header["passed"]),
            state=header["state"],
            end=header["end"],
        )


def imbalance(loads_BMP: NDArray[np.int64]) -> float:
    """Return max / mean bucket cost of the worst part; 1.0 where a part costs nothing.

    loads_BMP: (B, M, P) cost.
    """
    bucket_BP = loads_BMP.sum(axis=1)
    mean_P = bucket_BP.mean(axis=0)
    costly_P = mean_P > 0
    if not costly_P.any():
        return 1.0
    return float((bucket_BP.max(axis=0)[costly_P] / mean_P[costly_P]).max())


def draw_digest(step: int, sources: Sequence[str], table: Metadata) -> str:
    """Return a hash of what a step consists of: spans, targets and payload, in order.

    Sources count by their names, so it is the same where a pipeline has others besides.
    """
    name_S = np.array([zlib.crc32(name.encode()) for name in sources], np.int64)
    return array_digest(str(step), [name_S[table["source"]], *(table[name] for name in _DRAWN)])


def array_digest(head: str, columns: list[NDArray[Any]]) -> str:
    """Return a hash of integer arrays, the same on every platform."""
    digest = hashlib.blake2b(head.encode(), digest_size=16)
    for column in columns:
        digest.update(np.ascontiguousarray(column, "<i8").tobytes())
    return digest.hexdigest()
