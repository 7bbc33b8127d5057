"""The Planner alone, over many steps: draws from lengths in memory, as a run would from its data.

Axis: S sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.batching import Batching
from megadask.planner.checks import check_integer
from megadask.planner.draw import Draw, DrawRules, Starved, Stop, draw
from megadask.planner.errors import ConfigError
from megadask.planner.graph import DGraph, recorded
from megadask.planner.mesh import check_mesh
from megadask.planner.onward import again, joined, next_shares, shares_of
from megadask.planner.schedule import Schedule, StepSchedule
from megadask.planner.state import PlannerState
from megadask.planner.strategy import Strategy
from megadask.planner.supply import Feed, SourceLike, Supply
from megadask.planner.topology import ClientPlaceTree

#: Tells the time in seconds. The planner has no clock of its own.
Clock = Callable[[], float]


@dataclass(frozen=True, eq=False)
class Drawn:
    """A step of a stream.

    Attributes
    ----------
    draw
        What it consists of.
    share_S
        (S,) int64, shares of the sources in force; they sum to 2**32.
    seconds
        Time that the draw took, 0 without a clock.
    """

    draw: Draw
    share_S: NDArray[np.int64]
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class Stream:
    """Steps of a training job of which nothing is known but lengths.

    Memory does not grow with the number of steps.

    Parameters
    ----------
    sources
        Name to lengths (N,), to a table with a column ``tokens``, or to a law such as
        `lengths.Lognormal`. What lies in memory is read again and again, in its order; a law never
        ends.
    topology
        The mesh of the trainers.
    strategy
        As in a pipeline, a function that is called with a `DGraph`; or the graph, or what it has
        recorded. None: balanced over "dp" by tokens. Without a mixture, sources weigh as many
        records as they have; where one is a law, all weigh the same.
    batching
        How samples become batches.
    steps
        Steps to plan, fewer where the data ends.
    seed
        Of what laws give.
    epochs
        How often sources in memory are read; None for ever.
    stop
        As in a pipeline.

    Raises
    ------
    ConfigError
        Naming what cannot work.
    """

    sources: Mapping[str, SourceLike]
    topology: ClientPlaceTree = field(default_factory=ClientPlaceTree, kw_only=True)
    strategy: Callable[[DGraph], Any] | DGraph | Strategy | None = field(default=None, kw_only=True)
    batching: Batching = field(kw_only=True)
    steps: int = field(default=100, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    epochs: int | None = field(default=None, kw_only=True)
    stop: Stop = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.sources, Mapping) or not self.sources:
            raise ConfigError("Stream(sources)", got=repr(self.sources), limit="name to lengths")
        for name, least in (("steps", 1), ("seed", 0)):
            check_integer(f"Stream({name}=)", getattr(self, name), least)
        if isinstance(self.strategy, DGraph) and self.strategy.topology != self.topology:
            raise ConfigError(
                "Stream(topology=)",
                got=self.topology,
                limit=f"that of the graph, {self.strategy.topology}",
            )
        if not isinstance(self.topology, ClientPlaceTree):
            raise ConfigError(
                "Stream(topology=)", got=repr(self.topology), limit="a ClientPlaceTree"
            )
        is_known = isinstance(self.strategy, DGraph | Strategy | None)
        if not is_known and not callable(self.strategy):
            raise ConfigError(
                "Stream(strategy=)", got=repr(self.strategy), limit="a function of a DGraph"
            )
        _ = self.rules
        check_mesh(self.topology, self.frozen_strategy, self.batching, self._modalities)
        self.mixture.weights_at(0, list(self.sources))
        scalars = {name: supply.scalars for name, supply in self._supplies.items()}
        if len({tuple(names) for names in scalars.values()}) > 1:
            raise ConfigError("sources of a stream differ in their columns", got=scalars)

    def __repr__(self) -> str:
        return (
            f"Stream of {', '.join(map(str, self.sources))}: {self.steps} steps over "
            f"{self.num_buckets} buckets; {self.batching}"
        )

    @cached_property
    def frozen_strategy(self) -> Strategy:
        """What the strategy recorded."""
        if isinstance(self.strategy, Strategy):
            return self.strategy
        if isinstance(self.strategy, DGraph):
            return self.strategy.freeze()
        return recorded(self.strategy, list(self.sources), self.topology)

    @cached_property
    def mixture(self) -> StepSchedule:
        """Weights of the sources by step."""
        if self.frozen_strategy.mix is not None:
            return self.frozen_strategy.mix
        counts = {name: supply.num_records for name, supply in self._supplies.items()}
        endless = None in counts.values()
        return Schedule.constant({name: 1 if endless else n or 0 for name, n in counts.items()})

    @cached_property
    def rules(self) -> DrawRules:
        """What the draw goes by."""
        return DrawRules(
            batching=self.batching,
            mix_by=self.frozen_strategy.mix_by,
            epochs=self.epochs,
            stop=self.stop,
            deferral=self.frozen_strategy.deferral,
        )

    @property
    def undeferred(self) -> Stream:
        """The same stream without deferral."""
        return replace(self, strategy=replace(self.frozen_strategy, defer=None))

    @property
    def num_buckets(self) -> int:
        """Buckets that a step is placed on."""
        return self.topology.num_buckets(self.frozen_strategy.axis)

    def draws(self, clock: Clock | None = None) -> Iterator[Drawn]:
        """Draw step after step, up to `steps` of them or the end of the data."""
        names = list(self.sources)
        state = PlannerState.initial(dict.fromkeys(names, 1))
        epochs = None if self.stop == "repeat" else self.epochs
        feeds = {
            name: Feed(supply, at, self.batching, epochs, state.sources[name], self._modalities)
            for at, (name, supply) in enumerate(self._supplies.items())
        }
        last_S = np.zeros(len(names), np.int64)
        for _ in range(self.steps):
            at, share_S = shares_of(state, self.mixture, self.rules)
            drawn, seconds = self._draw(state, share_S, feeds, last_S, clock)
            while (later := next_shares(drawn, self.mixture, self.rules, at)) is not None:
                at, share_S = later
                before = again(state, drawn, share_S)
                more, took = self._draw(before, share_S, feeds, last_S, clock)
                drawn, seconds = joined(drawn, more, share_S), seconds + took
            if not drawn.table.num_rows:
                return
            state = drawn.state
            last_S = drawn.taken_S
            for name, feed in feeds.items():
                feed.trim(state.sources[name])
            yield Drawn(drawn, share_S, seconds)

    def _draw(
        self,
        state: PlannerState,
        share_S: NDArray[np.int64],
        feeds: Mapping[str, Feed],
        last_S: NDArray[np.int64],
        clock: Clock | None,
    ) -> tuple[Draw, float]:
        """Draw one step; return it, and the seconds that the draw took that had enough rows."""
        active = [name for name, share in zip(feeds, share_S.tolist(), strict=True) if share]
        # About what the last step took, so that few draws find too little and begin again.
        wanted_S = np.where(share_S > 0, self.rules.window + last_S + last_S // 8, 0)
        for feed, wanted in zip(feeds.values(), wanted_S.tolist(), strict=True):
            feed.fill(wanted)
        while True:
            rows = {name: feeds[name].rows for name in active}
            began = clock() if clock else 0.0
            drawn = draw(state, rows, share_S, self.rules)
            seconds = clock() - began if clock else 0.0
            if not isinstance(drawn, Starved):
                return drawn, seconds
            for name, num_spans in drawn.wanted.items():
                feeds[name].fetch(num_spans)

    @property
    def _modalities(self) -> list[str]:
        return sorted({name for supply in self._supplies.values() for name in supply.modalities})

    @cached_property
    def _supplies(self) -> dict[str, Supply]:
        return {name: Supply(name, source, self.seed) for name, source in self.sources.items()}
