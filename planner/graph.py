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
from megadask.planner.cp import Context, LayoutChoice
from megadask.planner.errors import ConfigError
from megadask.planner.fingerprint import fingerprint
from megadask.planner.hybrid import spread
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
    max_tokens
        Most tokens of one microbatch of a bucket; None: as the batching has it.
    context
        How packs are cut for context parallelism.
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
    max_tokens: int | None = None
    context: Context = field(default_factory=Context)
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

    def distribute(
        self, axis: Axis, microbatches: int | None = None, *, max_tokens: int | None = None
    ) -> DGraph:
        """Set what buckets are for: an axis of the topology, a tuple of axes, or ``"world"``.

        Over ``("dp", "cp")`` the plan of a table spreads long documents over 2, 4, ... neighbours
        along cp and leaves short ones whole (`hybrid`), if the balance is "assignment".

        Parameters
        ----------
        axis
            What consumes data of its own.
        microbatches, max_tokens
            For plans of a table: microbatches of a bucket, and the most tokens of one of them.
        """
        self.topology.axes(axis)
        for name, value in (("microbatches", microbatches), ("max_tokens", max_tokens)):
            if value is not None and not _is_count(value):
                raise ConfigError(f"distribute({name}=)", got=repr(value), limit="an integer >= 1")
        axis = axis if isinstance(axis, str) else tuple(axis)
        self._check_axes(axis, self._strategy.broadcast_axes)
        self._check_context(axis, self._strategy.context)
        return self._record(axis=axis, microbatches=microbatches, max_tokens=max_tokens)

    def context(self, layout: LayoutChoice = "auto", *, tile: int = 128) -> DGraph:
        """Set how packs are cut for the ranks of a context-parallel group; see `cp`.

        Parameters
        ----------
        layout
            ``"document"`` cuts every document, as without this primitive; ``"sequence"`` the pack
            as a whole; ``"auto"`` whichever costs a step less.
        tile
            Query tokens that the attention kernel computes together, for ``"auto"``.
        """
        context = Context(layout=layout, tile=tile)
        self._check_context(self._strategy.axis, context)
        return self._record(context=context)

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
            ``"assignment"``, ``"greedy"`` or ``"none"``.
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
        strategy, tree = self._strategy, self.topology
        cost_NP = evaluate(strategy.cost, self.table)
        axes = tree.axes(strategy.axis)
        if set(axes) == {"dp", "cp"} and tree.cp > 1 and strategy.method == "assignment":
            return self._plan_spread(self.table, cost_NP)
        problem = Problem(
            cost_NP=cost_NP,
            num_buckets=tree.num_buckets(strategy.axis),
            num_microbatches=strategy.microbatches or 1,
            size_N=self.table["tokens"],
            capacity=strategy.max_tokens,
            equal_counts=strategy.equal_counts is not False,
        )
        bin_N = balance(problem, strategy.method, **strategy.options)
        return TablePlan(
            table=self.table,
            assignment=bin_N // problem.num_microbatches,
            cp_degree=np.ones_like(bin_N),
            microbatch=bin_N % problem.num_microbatches,
            loads=bucket_loads(problem, bin_N) * np.float64(unit_of(strategy.cost)),
            bound=lower_bound(replace(problem, equal_counts=False)),
            method=strategy.method,
        )

    def _plan_spread(self, table: Metadata, cost_NP: NDArray[np.int64]) -> TablePlan:
        """Place spans on context-parallel ranks, the long ones on several."""
        strategy, tree = self._strategy, self.topology
        what = f"spreading documents by distribute({strategy.axis!r})"
        if tree.axes(strategy.axis) != ("dp", "cp"):
            raise ConfigError(what, got=f"order {tree.order}", limit="cp inside of dp")
        if cost_NP.shape[1] > 1:
            raise ConfigError(what, got=f"{cost_NP.shape[1]} parts of the cost", limit="one")
        if strategy.equal_counts:
            raise ConfigError(what, got="equal_counts=True", limit="counts that are free")
        hybrid = spread(
            cost_NP[:, 0],
            table["tokens"],
            dp=tree.dp,
            cp=tree.cp,
            microbatches=strategy.microbatches or 1,
            max_tokens=strategy.max_tokens,
        )
        return TablePlan(
            table=table,
            assignment=hybrid.group,
            cp_degree=hybrid.cp_degree,
            microbatch=hybrid.microbatch,
            loads=hybrid.loads[:, :, None] * np.float64(unit_of(strategy.cost)),
            bound=hybrid.bound,
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

    def _check_context(self, axis: Axis, context: Context) -> None:
        if context.layout != "document" and self.topology.num_slices(axis) < self.topology.cp:
            raise ConfigError(
                f"context({context.layout!r}) and distribute({axis!r})",
                got="context-parallel ranks with packs of their own",
                limit="a layout where ranks share packs",
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
