"""Declare how steps are mixed and balanced; and try it on a table of metadata.

A strategy is a function that calls primitives of a `DGraph`; they only record. `DGraph.freeze`
gives the `Strategy` that the planner follows, `DGraph.plan` the plan of one table.
Axes as in `problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from megadask.planner.balance import balance, bucket_loads, lower_bound
from megadask.planner.costs import evaluate, unit_of
from megadask.planner.cp import Context, LayoutChoice
from megadask.planner.deferral import Deferral
from megadask.planner.errors import ConfigError
from megadask.planner.hybrid import spread
from megadask.planner.metadata import Metadata
from megadask.planner.recorder import ItemGraph, Recorder
from megadask.planner.routing import route_all
from megadask.planner.schedule import Schedule, StepSchedule
from megadask.planner.strategy import Encode, Selection, Strategy, relative_speeds
from megadask.planner.tableplan import TablePlan
from megadask.planner.tables import table_of
from megadask.planner.topology import Axis, ClientPlaceTree
from megadask.planner.weights import MixBy, check_names


class DGraph(Recorder):
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
        if not isinstance(topology, ClientPlaceTree | None):
            raise ConfigError("topology", got=repr(topology), limit="a ClientPlaceTree")
        super().__init__(topology if topology is not None else ClientPlaceTree())
        self.table: Metadata | None = None
        self._strategy = Strategy()

    @classmethod
    def from_metadata(cls, columns: Any, topology: ClientPlaceTree | None = None) -> DGraph:
        """Return a graph over the spans of one step, to try strategies on with `plan`.

        Parameters
        ----------
        columns
            A mapping, a data frame or an Arrow table: ``"tokens"``, optionally ``"source"`` (names
            or indexes) and others, each (N,). A column of sequences holds the item lengths of a
            modality.
        topology
            The job that the step is planned for.
        """
        table = table_of(columns)
        names = None
        source_N = table.columns.get("source")
        if source_N is not None and source_N.dtype.kind not in "iu":
            names = [str(name) for name in np.unique(source_N)]
        graph = cls(names, topology)
        graph.table = table
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

    def defer(self, steps: int, ways: int) -> DGraph:
        """Let spans that cost too much for a step wait, so that long ones meet long ones.

        No span costs more than 1 / ``ways`` of its step, unless it has waited ``steps`` steps, or
        one that could wait no longer costs as much; see `deferral`. By the cost of this graph.

        Parameters
        ----------
        steps
            K, most steps that a span waits.
        ways
            W, buckets up to which steps are to be balanced. It is not taken from the topology: what
            a step consists of must not change with that.
        """
        Deferral(steps=steps, ways=ways)
        return self._record(defer=(steps, ways))

    def select(self, modality: str, encode: Encode = "step") -> ItemGraph:
        """Return a graph of its own for the items of one modality: an encoder beside the backbone.

        Spans keep their buckets, where their items are used. ``distribute`` ("world" unless told
        otherwise), ``cost`` and ``balance`` of the returned graph say where each item is encoded.

        Parameters
        ----------
        modality
            Name of the items, whose lengths are a ragged column of the metadata.
        encode
            ``"step"``: all items of a step are encoded before its first microbatch.
            ``"microbatch"``: each before the microbatch that uses it, which needs less memory and
            leaves less to balance.
        """
        if not isinstance(modality, str) or not modality:
            raise ConfigError("select(modality)", got=repr(modality), limit="a name")
        if encode not in get_args(Encode):
            raise ConfigError(
                "select(encode=)", got=repr(encode), limit=f"one of {get_args(Encode)}"
            )
        if self.table is not None and modality not in self.table.ragged:
            raise ConfigError(
                "select(modality)",
                got=repr(modality),
                limit=f"one of the table's modalities {sorted(self.table.ragged)}",
            )
        self._record_selection(modality, encode=encode)
        return ItemGraph(self, modality)

    def broadcast_at(self, axis: str | tuple[str, ...]) -> DGraph:
        """Set the axes along which the first rank fetches and then broadcasts to the others."""
        if axis == "world":
            raise ConfigError("broadcast_at(axis)", got="'world'", limit="an axis or several")
        axes = self.topology.axes(axis)
        self._check_axes(self._strategy.axis, axes)
        return self._record(broadcast_axes=axes)

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
        spreads = set(self.topology.axes(strategy.axis)) == {"dp", "cp"} and self.topology.cp > 1
        plan = self._plan_spread if spreads and strategy.method == "assignment" else self._plan
        placed = plan(self.table, strategy.microbatches or 1)
        routing = route_all(
            strategy.selections,
            self.topology,
            self.table,
            placed.assignment,
            placed.microbatch,
            placed.num_microbatches,
        )
        return replace(placed, routing=routing)

    def _plan(self, table: Metadata, num_microbatches: int) -> TablePlan:
        strategy = self._strategy
        problem = strategy.problem(
            table,
            self.topology,
            num_microbatches=num_microbatches,
            equal_counts=strategy.equal_counts is not False,
            size_N=table["tokens"],
            capacity=strategy.max_tokens,
        )
        bin_N = balance(problem, strategy.method, **strategy.options)
        return TablePlan(
            table=table,
            assignment=bin_N // num_microbatches,
            cp_degree=np.ones_like(bin_N),
            microbatch=bin_N % num_microbatches,
            loads=bucket_loads(problem, bin_N) * np.float64(unit_of(strategy.cost)),
            bound=lower_bound(replace(problem, equal_counts=False), bin_N),
            method=strategy.method,
            topology=self.topology,
            axis=strategy.axis,
            speeds=relative_speeds(problem.speed_B),
            sync=strategy.sync,
        )

    def _plan_spread(self, table: Metadata, num_microbatches: int) -> TablePlan:
        """Place spans on context-parallel ranks, the long ones on several."""
        strategy, tree = self._strategy, self.topology
        what = f"spreading documents by distribute({strategy.axis!r})"
        if tree.axes(strategy.axis) != ("dp", "cp"):
            raise ConfigError(what, got=f"order {tree.order}", limit="cp inside of dp")
        cost_NP = evaluate(strategy.cost, table)
        if cost_NP.shape[1] > 1:
            raise ConfigError(what, got=f"{cost_NP.shape[1]} parts of the cost", limit="one")
        for word in ("group_size", "equal_counts", "speeds", "transfer", "options"):
            value = getattr(strategy, word)
            if value:
                raise ConfigError(what, got=f"{word}={value!r}", limit=f"no {word}")
        hybrid = spread(
            cost_NP[:, 0],
            table["tokens"],
            dp=tree.dp,
            cp=tree.cp,
            microbatches=num_microbatches,
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
            topology=tree,
            axis=strategy.axis,
        )

    def _record(self, **fields: Any) -> DGraph:
        self._strategy = replace(self._strategy, **fields)
        return self

    def _record_selection(self, modality: str, **fields: Any) -> None:
        selections = dict(self._strategy.selections)
        recorded = selections.get(modality, Selection(axis="world"))
        selections[modality] = replace(recorded, **fields)
        self._record(selections=selections)

    def _check_axis(self, axis: Axis) -> None:
        self._check_axes(axis, self._strategy.broadcast_axes)
        self._check_context(axis, self._strategy.context)

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


def recorded(
    strategy: Callable[[DGraph], Any] | None, source_names: Sequence[str], topology: ClientPlaceTree
) -> Strategy:
    """Return what a strategy records when it is called; None: what a graph has from the start."""
    graph = DGraph(source_names, topology)
    if strategy is not None:
        strategy(graph)
    return graph.freeze()
