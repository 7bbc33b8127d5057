"""What a plan says of single samples and ranks: where a sample went, what made up a rank's step.

For a `Plan` and for a `TablePlan`: a table is step 0, each of its microbatches one pack, and where
its rows have no sample ids their numbers stand for them.

Axes: N spans of the plan, n of them, R ranks of a topology, B buckets, S ranks of one bucket, D
buckets that share a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.ids import SampleId
from megadask.planner.metadata import Metadata

if TYPE_CHECKING:
    from megadask.planner.topology import Axis, ClientPlaceTree

_ID_COLUMNS = ("source", "epoch", "lane", "position")


class Planned(Protocol):
    """What both kinds of plan have."""

    @property
    def table(self) -> Metadata:
        """(N rows) the spans."""

    @property
    def assignment(self) -> NDArray[np.int64]:
        """(N,) bucket of each span, -1 where it was not taken."""

    @property
    def num_buckets(self) -> int:
        """Consumers along the distributed axis."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a bucket."""


class Place(NamedTuple):
    """Where one span of a sample went.

    Attributes
    ----------
    step
        Number of the step.
    bucket, microbatch, pack
        Where in the step; all -1 for a span that the plan does not place.
    span
        The part [start, stop) of the sample, in tokens.
    row
        Row of the plan's table.
    cp_degree
        Buckets that share the span, from `bucket` on.
    """

    step: int
    bucket: int
    microbatch: int
    pack: int
    span: tuple[int, int]
    row: int
    cp_degree: int = 1


def where(plan: Planned, sample: SampleId | tuple[str, int, int, int] | int) -> list[Place]:
    """Return where a sample went, span after span; nothing if it is not in the plan.

    Parameters
    ----------
    sample
        A sample id, or the number of a row of the table.

    Raises
    ------
    ConfigError
        The plan has no such row or source, or its rows have no ids.
    """
    columns = _columns(plan)
    if isinstance(sample, tuple):
        is_of_N = _is_of(plan, columns, sample)
        rows = np.flatnonzero(is_of_N)
        rows = rows[np.argsort(columns["start"][rows], kind="stable")]
    else:
        try:
            row = index(sample)
        except TypeError as error:
            raise ConfigError(
                "sample of a plan", got=repr(sample), limit="a sample id, or the number of a row"
            ) from error
        if not 0 <= row < plan.table.num_rows:
            raise ConfigError("row of a plan", got=row, limit=f"0 to {plan.table.num_rows - 1}")
        rows = np.array([row])
    names = ("step", "bucket", "microbatch", "pack", "start", "stop", "row", "cp_degree")
    places = zip(*(columns[name][rows].tolist() for name in names), strict=True)
    return [
        Place(step, bucket, microbatch, pack, (start, stop), row, cp_degree)
        for step, bucket, microbatch, pack, start, stop, row, cp_degree in places
    ]


def made_of(plan: Planned, bucket: int, microbatch: int | None = None) -> NDArray[np.int64]:
    """Return the rows that make up a bucket, or one of its microbatches, in the order of delivery.

    What a rank got is what its bucket did: ``made_of(plan, tree.bucket_of(rank, axis))``.

    Returns
    -------
    rows
        (n,) microbatch after microbatch, pack after pack, by offset.
    """
    for name, value, count in (
        ("bucket", bucket, plan.num_buckets),
        ("microbatch", microbatch, plan.num_microbatches),
    ):
        if value is not None and not 0 <= value < count:
            raise ConfigError(f"{name} of a plan", got=value, limit=f"0 to {count - 1}")
    columns = _columns(plan)
    first_N = columns["bucket"]
    is_in_N = (first_N >= 0) & (first_N <= bucket) & (bucket < first_N + columns["cp_degree"])
    if microbatch is not None:
        is_in_N &= columns["microbatch"] == microbatch
    rows = np.flatnonzero(is_in_N)
    order = np.lexsort([columns[name][rows] for name in ("offset", "pack", "microbatch")])
    return rows[order]


def lineage(plan: Planned, topology: ClientPlaceTree | None = None, axis: Axis = "dp") -> Metadata:
    """Return the whole way of every span: its sample, its part, its microbatch and its ranks.

    Parameters
    ----------
    plan
        The plan.
    topology, axis
        The job, and what buckets are for; without a topology the way ends at the bucket.

    Returns
    -------
    table
        Columns source (a name where the plan knows it), epoch, lane, position, as far as the table
        has them; row, start, stop, tokens, step, bucket, cp_degree, microbatch, pack and, with a
        topology, rank. One row for every span, in the order drawn, or one for each of the ranks
        that consume it, rising; -1 stands for where a span was not taken.
    """
    columns = _columns(plan)
    del columns["offset"]
    if topology is None:
        return Metadata(columns)
    num_buckets = topology.num_buckets(axis)
    if num_buckets != plan.num_buckets:
        raise ConfigError(
            f"lineage of a plan for {plan.num_buckets} buckets",
            got=f"a topology of {num_buckets} along {axis!r}",
            remedy="Pass the topology and the axis that it was planned for.",
        )
    bucket_R = np.array([topology.bucket_of(rank, axis) for rank in range(topology.world_size)])
    rank_BS = np.argsort(bucket_R, kind="stable").reshape(num_buckets, -1)
    rows, ranks = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for degree in np.unique(columns["cp_degree"]).tolist():
        mine = np.flatnonzero((columns["cp_degree"] == degree) & (columns["bucket"] >= 0))
        bucket_nD = columns["bucket"][mine, None] + np.arange(degree)
        rank_nR = np.sort(rank_BS[bucket_nD].reshape(len(mine), degree * rank_BS.shape[1]), axis=1)
        rows.append(np.repeat(mine, rank_nR.shape[1]))
        ranks.append(rank_nR.ravel())
    left = np.flatnonzero(columns["bucket"] < 0)
    row, rank = np.concatenate([*rows, left]), np.concatenate([*ranks, np.full(len(left), -1)])
    order = np.argsort(row, kind="stable")
    along = {name: column[row[order]] for name, column in columns.items()}
    return Metadata({**along, "rank": rank[order]})


def _columns(plan: Planned) -> dict[str, NDArray[Any]]:
    """Return what is known of every span of a plan, by column."""
    table, num_rows = plan.table, plan.table.num_rows
    zero_N = np.zeros(num_rows, np.int64)
    columns: dict[str, NDArray[Any]] = {name: table[name] for name in _ID_COLUMNS if name in table}
    names: Sequence[str] | None = getattr(plan, "sources", None)
    if names is not None and "source" in columns:
        columns["source"] = np.array(names)[table["source"]]
    columns["row"] = np.arange(num_rows)
    columns["start"] = table.columns.get("start", zero_N)
    columns["stop"] = table.columns.get("stop", columns["start"] + table["tokens"])
    columns["tokens"] = table["tokens"]
    columns["step"] = zero_N + int(getattr(plan, "step", 0))
    bucket_N = plan.assignment
    columns["bucket"] = bucket_N
    columns["cp_degree"] = getattr(plan, "cp_degree", np.ones_like(zero_N))
    taken_N = bucket_N >= 0
    for name in ("microbatch", "pack", "offset"):
        column = getattr(plan, f"{name}_N", getattr(plan, name, zero_N))
        columns[name] = np.where(taken_N, column, -1)
    return columns


def _is_of(
    plan: Planned,
    columns: dict[str, NDArray[Any]],
    sample: tuple[str, int, int, int],
) -> NDArray[np.bool_]:
    """Return (N,) whether each span belongs to a sample."""
    lacking = [name for name in _ID_COLUMNS if name not in columns]
    if lacking:
        raise ConfigError(
            "sample id in a plan of a table without ids",
            got=f"no column {lacking}",
            remedy="Ask for a row by its number.",
        )
    if len(sample) != len(_ID_COLUMNS):
        raise ConfigError("sample id", got=sample, limit=f"{_ID_COLUMNS}")
    names: Sequence[str] | None = getattr(plan, "sources", None)
    if names is not None and sample[0] not in names:
        raise ConfigError("source of a sample id", got=repr(sample[0]), limit=f"among {names}")
    matches = [columns[name] == value for name, value in zip(_ID_COLUMNS, sample, strict=True)]
    is_of_N: NDArray[np.bool_] = np.all(np.stack(matches), axis=0)
    return is_of_N
