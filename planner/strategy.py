"""What a graph records: how steps are mixed, what spans cost, and how they are placed.

Axes as in `problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megadask.planner.balance import Method, Problem, prepare
from megadask.planner.costs import Cost, Tokens, evaluate, unit_of
from megadask.planner.cp import Context
from megadask.planner.deferral import Deferral
from megadask.planner.errors import CostError
from megadask.planner.metadata import Metadata
from megadask.planner.names import display_name
from megadask.planner.problem import Sync
from megadask.planner.schedule import StepSchedule
from megadask.planner.topology import Axis, ClientPlaceTree
from megadask.planner.weights import MixBy

#: When the items of a modality are encoded: all before the first microbatch of their step, or each
#: before the microbatch that uses it.
Encode = Literal["step", "microbatch"]
#: Speeds are counted in steps of this.
SPEED_UNIT = 2.0**-10
#: What it costs more to place each row into each bucket: table, number of buckets -> (N, B).
Transfer = Callable[[Metadata, int], ArrayLike]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How the rows of a table are placed.

    Attributes
    ----------
    axis
        What buckets are for: an axis, several, or ``"world"``.
    group_size
        Neighbouring buckets that make up a group; rows go to groups first, then within them.
    microbatches
        Microbatches of a bucket; None: as the batching has it.
    cost
        What is balanced.
    method, options
        For `balance`.
    equal_counts
        Whether buckets get equal numbers of rows; None: where nothing else fixes them.
    max_tokens
        Most padded tokens of a microbatch; None: as the batching has it.
    sync
        Whether ranks meet after every part of the cost, or once a step.
    speeds
        Rank to its speed relative to the others; a bucket is as fast as its slowest rank.
    transfer
        What it costs more to place a row into a bucket, in the unit of the cost.
    """

    axis: Axis = "dp"
    group_size: int | None = None
    microbatches: int | None = None
    cost: Cost = field(default_factory=Tokens)
    method: Method = "assignment"
    options: Mapping[str, Any] = field(default_factory=dict)
    equal_counts: bool | None = None
    max_tokens: int | None = None
    sync: Sync = "part"
    speeds: Mapping[int, float] = field(default_factory=dict)
    transfer: Transfer | None = None

    def problem(self, table: Metadata, topology: ClientPlaceTree, **room: Any) -> Problem:
        """Return the balancing problem of a table, with ``room`` for fields of `Problem`."""
        num_buckets = topology.num_buckets(self.axis)
        return Problem(
            cost_NP=evaluate(self.cost, table),
            num_buckets=num_buckets,
            group_size=self.group_size,
            sync=self.sync,
            speed_B=self.speed_B(topology),
            transfer_NB=self._transfer_NB(table, num_buckets),
            **room,
        )

    def speed_B(self, topology: ClientPlaceTree) -> NDArray[np.int64] | None:
        """(B,) speed of each bucket, in steps of `SPEED_UNIT`; None if no speed is given."""
        if not self.speeds:
            return None
        speed_B = np.ones(topology.num_buckets(self.axis))
        for bucket in {topology.bucket_of(rank, self.axis) for rank in self.speeds}:
            ranks = topology.ranks_of(bucket, self.axis)
            speed_B[bucket] = min(self.speeds.get(rank, 1.0) for rank in ranks)
        return np.maximum(np.rint(speed_B / SPEED_UNIT), 1).astype(np.int64)

    def _transfer_NB(self, table: Metadata, num_buckets: int) -> NDArray[np.int64] | None:
        if self.transfer is None:
            return None
        values_NB = np.asarray(self.transfer(table, num_buckets))
        good = values_NB.shape == (table.num_rows, num_buckets) and values_NB.dtype.kind in "iuf"
        if not good or not ((values_NB >= 0) & (values_NB < np.inf)).all():
            raise CostError(
                f"transfer {display_name(self.transfer)}",
                got=f"{values_NB.dtype} {values_NB.shape}",
                limit=f"finite numbers >= 0 of shape ({table.num_rows}, {num_buckets})",
            )
        return np.rint(values_NB / unit_of(self.cost)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Selection(Placement):
    """How the items of one modality are placed, apart from the spans that they belong to.

    Attributes
    ----------
    encode
        When the items are encoded.
    """

    encode: Encode = "step"


@dataclass(frozen=True, kw_only=True)
class Strategy(Placement):
    """What a graph has recorded.

    Attributes
    ----------
    mix
        Weights of the sources by step; None: by size.
    mix_by
        Whether weights are shares of the samples or of the tokens.
    defer
        Steps that a span may wait for others as costly, and ways that steps are balanced over.
    broadcast_axes
        Axes along which only the first rank fetches.
    selections
        Modality to how its items are placed.
    context
        How packs are cut for context parallelism.
    """

    mix: StepSchedule | None = None
    mix_by: MixBy = "samples"
    defer: tuple[int, int] | None = None
    broadcast_axes: tuple[str, ...] = ()
    selections: Mapping[str, Selection] = field(default_factory=dict)
    context: Context = field(default_factory=Context)

    @property
    def deferral(self) -> Deferral | None:
        """What the draw has to know of it."""
        if self.defer is None:
            return None
        steps, ways = self.defer
        return Deferral(steps=steps, ways=ways, cost=self.cost)

    def prepare(self) -> None:
        """Load what placing will need; the first step that is placed waits for it otherwise."""
        for placement in (self, *self.selections.values()):
            prepare(placement.method)


def relative_speeds(speed_B: NDArray[np.int64] | None) -> NDArray[np.float64] | None:
    """Return the speeds of buckets as numbers to read, from those of a `Problem`."""
    return None if speed_B is None else speed_B * np.float64(SPEED_UNIT)
