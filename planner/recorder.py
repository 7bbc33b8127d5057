"""The primitives that a graph and the sub-graph of a modality share; they check and record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np

from megadask.planner.balance import Method, check_options
from megadask.planner.costs import Cost, unit_of
from megadask.planner.errors import ConfigError
from megadask.planner.problem import Sync
from megadask.planner.strategy import Transfer
from megadask.planner.tables import MOST_TOKENS
from megadask.planner.topology import Axis, ClientPlaceTree

if TYPE_CHECKING:
    from megadask.planner.graph import DGraph

Self = TypeVar("Self", bound="Recorder")


class Recorder:
    """Records how rows are placed. Every primitive checks its words at once."""

    def __init__(self, topology: ClientPlaceTree) -> None:
        self.topology = topology

    def distribute(
        self: Self,
        axis: Axis,
        group_size: int | None = None,
        *,
        microbatches: int | None = None,
    ) -> Self:
        """Set what buckets are for.

        Over ``("dp", "cp")`` the plan of a table spreads long documents over 2, 4, ... neighbours
        along cp and leaves short ones whole (`hybrid`), if the balance is "assignment".

        Parameters
        ----------
        axis
            An axis of the topology, a tuple of axes, or ``"world"``.
        group_size
            Place over groups of this many neighbouring buckets first (a node, say), then within
            each group. It must divide the number of buckets.
        microbatches
            Microbatches of a bucket, for plans of a table.
        """
        num_buckets = self.topology.num_buckets(axis)
        for name, value in (("microbatches", microbatches), ("group_size", group_size)):
            if value is not None and not _is_count(value):
                raise ConfigError(f"distribute({name}=)", got=repr(value), limit="an integer >= 1")
        if group_size is not None and num_buckets % group_size:
            raise ConfigError(
                "distribute(group_size=)",
                got=group_size,
                limit=f"a divisor of the {num_buckets} buckets along {axis!r}",
            )
        axis = axis if isinstance(axis, str) else tuple(axis)
        self._check_axis(axis)
        counts = {"group_size": group_size, "microbatches": microbatches}
        plain = {name: None if count is None else int(count) for name, count in counts.items()}
        return self._record(axis=axis, **plain)

    def cost(self: Self, cost: Cost) -> Self:
        """Set what a row costs: a function of the metadata table, see `costs`."""
        if not _is_cost(cost):
            raise ConfigError(
                "cost(fn)",
                got=repr(cost),
                limit="a function of the metadata table to (N,) or (N, P)",
            )
        unit_of(cost)
        return self._record(cost=cost)

    def balance(
        self: Self,
        method: Method = "assignment",
        *,
        equal_counts: bool | None = None,
        max_tokens: int | None = None,
        sync: Sync = "part",
        speeds: Mapping[int, float] | None = None,
        transfer: Transfer | None = None,
        **options: Any,
    ) -> Self:
        """Set how rows are placed; see `balance.balance` for methods and options.

        Parameters
        ----------
        method
            ``"assignment"``, ``"greedy"``, ``"karmarkar_karp"`` or ``"none"``.
        equal_counts
            Whether buckets get equal numbers of rows, give or take one. Plans of a table do unless
            told otherwise; steps of `Padded` may, those of packs do not.
        max_tokens
            Most tokens of a microbatch, for plans of a table; packs have their `seq_len`.
        sync
            With several cost parts: ``"part"`` when ranks meet after each (their slowest ranks add
            up), ``"step"`` when they meet once (the slowest sum counts).
        speeds
            Rank to its speed relative to the others, such as ``{3: 0.8}`` for a known straggler.
        transfer
            Function of (table, number of buckets) to (N, B): what it costs more to place a row into
            a bucket, in the unit of the cost.
        **options
            Options of the method.
        """
        if not isinstance(method, str):
            raise ConfigError("balance(method)", got=repr(method), limit="a name")
        check_options(method, options)
        if not isinstance(equal_counts, bool | None):
            raise ConfigError("balance(equal_counts=)", got=repr(equal_counts), limit="a bool")
        if max_tokens is not None and not _is_count(max_tokens):
            raise ConfigError("balance(max_tokens=)", got=repr(max_tokens), limit="an integer >= 1")
        if sync not in get_args(Sync):
            raise ConfigError("balance(sync=)", got=repr(sync), limit=f"one of {get_args(Sync)}")
        if transfer is not None and not _is_cost(transfer):
            raise ConfigError(
                "balance(transfer=)",
                got=repr(transfer),
                limit="a function of (table, number of buckets) to (N, B)",
            )
        return self._record(
            method=method,
            options=dict(options),
            equal_counts=equal_counts,
            max_tokens=None if max_tokens is None else min(int(max_tokens), MOST_TOKENS),
            sync=sync,
            speeds=self._speeds(speeds or {}),
            transfer=transfer,
        )

    def _speeds(self, speeds: Mapping[int, float]) -> dict[int, float]:
        last = self.topology.world_size - 1
        if not isinstance(speeds, Mapping):
            raise ConfigError("balance(speeds=)", got=repr(speeds), limit="rank to speed")
        for rank, speed in speeds.items():
            if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank <= last:
                raise ConfigError("balance(speeds=): rank", got=repr(rank), limit=f"0 to {last}")
            if not isinstance(speed, int | float) or not 0 < speed < float("inf"):
                raise ConfigError(
                    f"balance(speeds=): speed of rank {rank}", got=repr(speed), limit="above 0"
                )
        return {rank: float(speeds[rank]) for rank in sorted(speeds)}

    def _check_axis(self, axis: Axis) -> None:
        """Raise ConfigError if the axis does not go with what else was recorded."""

    def _record(self: Self, **fields: Any) -> Self:
        raise NotImplementedError


class ItemGraph(Recorder):
    """The part of a graph that places the items of one modality; see `DGraph.select`."""

    def __init__(self, parent: DGraph, modality: str) -> None:
        super().__init__(parent.topology)
        self._parent, self._modality = parent, modality

    def _record(self, **fields: Any) -> ItemGraph:
        for primitive, word in (("distribute", "microbatches"), ("balance", "max_tokens")):
            if fields.get(word) is not None:
                raise ConfigError(
                    f"{primitive}({word}=) of the items of {self._modality!r}",
                    got=fields[word],
                    limit=f"no {word}",
                    remedy="select(encode=) says in how many turns items are encoded.",
                )
        self._parent._record_selection(self._modality, **fields)
        return self


def _is_count(value: Any) -> bool:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and bool(value >= 1)


def _is_cost(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)
