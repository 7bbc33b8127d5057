"""Declare how steps are mixed and balanced; and try it on a table of metadata.

A strategy is a function that calls primitives of a `DGraph`; they only record. `DGraph.freeze`
gives the `Strategy` that the planner follows, `DGraph.plan` the plan of one table.
Axes as in `problem`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megadask.planner.balance import (
    Method,
    Problem,
    balance,
    bucket_loads,
    check_options,
    lower_bound,
)
from megadask.planner.costs import Cost, Tokens, evaluate, unit_of
from megadask.planner.errors import ConfigError
from megadask.planner.fingerprint import fingerprint
from megadask.planner.metadata import Metadata, Ragged
from megadask.planner.schedule import Schedule, StepSchedule
from megadask.planner.tableplan import TablePlan
from megadask.planner.topology import Axis, ClientPlaceTree
from megadask.planner.weights import check_names

MixBy = Literal["samples", "tokens"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What a graph has recorded.

    Attributes
    ----------
    mix
        Weights of the sources by step; None: by size.
    mix_by
        Whether weights are shares of the samples or of the tokens.
    axis
        What buckets are for: an axis, several, or ``"world"``.
    microbatches
        Microbatches of a bucket; None: as the batching has it.
    cost
        What is balanced.
    method, options
        For `balance`.
    equal_counts
        Whether buckets get equal numbers of items; None: where nothing else fixes them.
    broadcast_axes
        Axes along which only the first rank fetches.
    """

    mix: StepSchedule | None = None
    mix_by: MixBy = "samples"
    axis: Axis = "dp"
    microbatches: int | None = None
    cost: Cost = field(default_factory=Tokens)
    method: Method = "assignment"
    options: Mapping[str, Any] = field(default_factory=dict)
    equal_counts: bool | None = None
    broadcast_axes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Return a hash of the strategy, equal in all processes that declare the same."""
        return fingerprint(self)


class DGraph:
    """Records a strategy. Every primitive checks its words at once, and returns the graph.

    A primitive that is called again replaces what it had recorded.

    Parameters
    ----------
    source_names
        Names of the sources that a mixture may weigh; None: any.
    topology
        The job that steps are planned for.
    """

    def __init__(
        self,
        source_names: Sequence[str] | None = None,
        topology: ClientPlaceTree | None = None,
    ) -> None:
        self.source_names = None if source_names is None else tuple(source_names)
        self.topology = topology if topology is not None else ClientPlaceTree()
        self.table: Metadata | None = None
        self._strategy = Strategy()

    @classmethod
    def from_metadata(
        cls, columns: Mapping[str, Any] | Metadata, topology: ClientPlaceTree | None = None
    ) -> DGraph:
        """Return a graph over the spans of one step, to try strategies on with `plan`.

        Parameters
        ----------
        columns
            ``"tokens"``, optionally ``"source"`` (names or indexes) and others, each (N,). A column
            of sequences holds the item lengths of a modality.
        topology
            The job that the step is planned for.
        """
        table = columns if isinstance(columns, Metadata) else _table(columns)
        tokens_N = table.columns.get("tokens")
        if tokens_N is None or tokens_N.ndim != 1 or tokens_N.dtype.kind not in "iu":
            raise ConfigError(
                'from_metadata: column "tokens"',
                got=f"columns {sorted(table.columns)}" if tokens_N is None else tokens_N.dtype,
                limit="integers of shape (N,)",
            )
        if (tokens_N < 0).any():
            raise ConfigError('from_metadata: column "tokens"', got=tokens_N.min(), limit=">= 0")
        names = None
        source_N = table.columns.get("source")
        if source_N is not None and source_N.dtype.kind not in "iu":
            names = [str(name) for name in np.unique(source_N)]
        graph = cls(names, topology)
        graph.table = table.with_columns(tokens=tokens_N.astype(np.int64))
        return graph

    def mix(self, schedule: StepSchedule | Mapping[str, float], by: MixBy = "samples") -> DGraph:
        """Set the weights of the sources: a schedule, or one dict for all steps.

        `plan` does not draw: its table is one step as it stands.
        """
        if isinstance(schedule, Mapping):
            schedule = Schedule.constant(schedule)
        if not isinstance(schedule, StepSchedule):
            raise ConfigError(
                "mix(schedule)", got=repr(schedule), limit="a schedule or a dict of weights"
            )
        if by not in get_args(MixBy):
            raise ConfigError("mix(by=)", got=repr(by), limit=f"one of {get_args(MixBy)}")
        if not schedule.source_names:
            raise ConfigError("mix(schedule)", got="a schedule of numbers", limit="one of weights")
        if self.source_names is not None:
            check_names(schedule.source_names, self.source_names)
        return self._record(mix=schedule, mix_by=by)

    def distribute(self, axis: Axis, microbatches: int | None = None) -> DGraph:
        """Set what buckets are for: an axis of the topology, a tuple of axes, or ``"world"``."""
        self.topology.axes(axis)
        if microbatches is not None and not _is_count(microbatches):
            raise ConfigError(
                "distribute(microbatches=)", got=repr(microbatches), limit="an integer >= 1"
            )
        axis = axis if isinstance(axis, str) else tuple(axis)
        self._check_axes(axis, self._strategy.broadcast_axes)
        return self._record(axis=axis, microbatches=microbatches)

    def cost(self, cost: Cost) -> DGraph:
        """Set what a span costs: a function of the metadata table, see `costs`."""
        if not _is_cost(cost):
            raise ConfigError(
                "cost(fn)",
                got=repr(cost),
                limit="a function of the metadata table to (N,) or (N, P)",
            )
        unit_of(cost)
        fingerprint(cost)
        return self._record(cost=cost)

    def balance(
        self, method: Method = "assignment", *, equal_counts: bool | None = None, **options: Any
    ) -> DGraph:
        """Set how spans are placed; see `balance.balance` for methods and options.

        Parameters
        ----------
        method
            ``"assignment"``, ``"greedy"``, ``"karmarkar_karp"`` or ``"none"``.
        equal_counts
            Whether buckets get equal numbers of items, give or take one. Plans of a table do
            unless told otherwise; packed steps do not.
        **options
            Options of the method.
        """
        check_options(method, options)
        if not isinstance(equal_counts, bool | None):
            raise ConfigError("balance(equal_counts=)", got=repr(equal_counts), limit="a bool")
        return self._record(method=method, options=dict(options), equal_counts=equal_counts)

    def broadcast_at(self, axis: str | tuple[str, ...]) -> DGraph:
        """Set the axes along which the first rank fetches and then broadcasts to the others."""
        if axis == "world":
            raise ConfigError("broadcast_at(axis)", got="'world'", limit="an axis or several")
        axes = self.topology.axes(axis)
        self._check_axes(self._strategy.axis, axes)
        return self._record(broadcast_axes=axes)

    def freeze(self) -> Strategy:
        """Return what was recorded."""
        return self._strategy

    def plan(self) -> TablePlan:
        """Place the spans of the table given to `from_metadata`."""
        if self.table is None:
            raise ConfigError(
                "this graph has no table to plan", remedy="Make it with DGraph.from_metadata."
            )
        strategy = self._strategy
        problem = Problem(
            cost_NP=evaluate(strategy.cost, self.table),
            num_buckets=self.topology.num_buckets(strategy.axis),
            num_microbatches=strategy.microbatches or 1,
            equal_counts=strategy.equal_counts is not False,
        )
        bin_N = balance(problem, strategy.method, **strategy.options)
        return TablePlan(
            table=self.table,
            assignment=bin_N // problem.num_microbatches,
            microbatch=bin_N % problem.num_microbatches,
            loads=bucket_loads(problem, bin_N) * np.float64(unit_of(strategy.cost)),
            bound=lower_bound(replace(problem, equal_counts=False)),
            method=strategy.method,
        )

    def _record(self, **fields: Any) -> DGraph:
        self._strategy = replace(self._strategy, **fields)
        return self

    def _check_axes(self, axis: Axis, broadcast_axes: tuple[str, ...]) -> None:
        both = sorted(set(self.topology.axes(axis)) & set(broadcast_axes))
        sized = [name for name in both if getattr(self.topology, name) > 1]
        if sized:
            raise ConfigError(
                f"broadcast_at({sized[0]!r}) and distribute({axis!r})",
                got="ranks with data of their own",
                limit="broadcast along axes that are not distributed over",
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_cost(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _table(columns: Mapping[str, Any]) -> Metadata:
    """Return a table of columns; those whose entries are sequences become modalities."""
    arrays: dict[str, NDArray[Any]] = {}
    items: dict[str, Ragged] = {}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            items[name] = column
        elif len(column) and isinstance(column[0], list | tuple | np.ndarray):
            counts = np.array([len(row) for row in column], np.int64)
            items[name] = Ragged(
                np.concatenate([np.asarray(row, np.int64) for row in column]),
                np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            )
        else:
            arrays[name] = _column(column)
    return Metadata(arrays, items)


def _column(column: ArrayLike) -> NDArray[Any]:
    array = np.asarray(column)
    return array.astype(np.int64) if not array.size else array
