"""Simulate a plan, or a stream of them, on an idealised trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from megadask.planner.balance import Method, check_options
from megadask.planner.costs import evaluate
from megadask.planner.drift import SPAN, Drift, drift
from megadask.planner.errors import ConfigError
from megadask.planner.metadata import Metadata
from megadask.planner.place import place
from megadask.planner.plan import Plan
from megadask.planner.sequences import padded_table
from megadask.planner.simulation import Simulation, Sync, Trainer
from megadask.planner.strategy import Strategy
from megadask.planner.stream import Clock, Drawn, Stream
from megadask.planner.stream_report import Placed, StreamReport
from megadask.planner.tableplan import TablePlan
from megadask.planner.weights import TOTAL_SHARE

#: Length classes of a report: powers of two.
_CLASSES = 2 ** np.arange(48)
#: Spans that are kept to compare a deferred stream with the undeferred one.
_DRIFT_SPANS = 2**20
_DRIFT_COLUMNS = (*SPAN, "tokens")


@overload
def simulate(
    what: Plan | TablePlan, *, sync: Sync = ..., pp: int = ..., backward: float = ...
) -> Simulation: ...


@overload
def simulate(
    what: Stream,
    *,
    sync: Sync = ...,
    pp: int | None = ...,
    backward: float = ...,
    against: Sequence[Method] = ...,
    clock: Clock | None = ...,
) -> StreamReport: ...


def simulate(
    what: Plan | TablePlan | Stream,
    *,
    sync: Sync = "step",
    pp: int | None = None,
    backward: float = 2.0,
    against: Sequence[Method] = ("none",),
    clock: Clock | None = None,
) -> Simulation | StreamReport:
    """Return how long a step takes on a trainer that does nothing but the planned work.

    Parameters
    ----------
    what
        A plan, whose costs are the times of its microbatches, and of the turns of its encoders; or
        a stream, of which every step is drawn, placed and simulated.
    sync, pp, backward
        Of the `Trainer`. Without `pp` a plan has one stage, a stream those of its topology.
    against
        Of a stream: other ways of placing the same draws.
    clock
        Of a stream: what tells the time in seconds, to measure planning by.
    """
    if isinstance(what, Stream):
        stages = what.topology.pp if pp is None else pp
        return _simulate_stream(
            what, Trainer(sync=sync, pp=stages, backward=backward), against, clock
        )
    if not isinstance(what, Plan | TablePlan):
        raise ConfigError("simulate(what)", got=repr(what), limit="a plan or a Stream")
    trainer = Trainer(sync=sync, pp=1 if pp is None else pp, backward=backward)
    return _run(trainer, what)


def _run(trainer: Trainer, plan: Plan | TablePlan) -> Simulation:
    encoders = [routing.loads for _, routing in sorted(plan.routing.items())]
    return trainer.run(plan.joined(plan.times), speeds=plan.speeds, encoders=encoders)


def _simulate_stream(
    stream: Stream, trainer: Trainer, against: Sequence[Method], clock: Clock | None
) -> StreamReport:
    strategy = stream.frozen_strategy
    ways = {method: replace(strategy, method=method, options={}) for method in against}
    for method in ways:
        check_options(method, {})
    ways.pop(strategy.method, None)  # to come last, with its options
    ways[strategy.method] = strategy
    steps, tallies = _Steps(stream), {method: _Tally() for method in ways}
    drifting = _Drifting(stream)
    for drawn in stream.draws(clock):
        drifting.add(drawn)
        for method, way in ways.items():
            began = clock() if clock else 0.0
            plan = place(drawn.draw, way, stream.batching, stream.topology, {})
            seconds = clock() - began if clock else 0.0
            done = _run(trainer, plan)
            tallies[method].add(done, plan.imbalance, seconds)
        bound = _bound(strategy, stream, plan, trainer.pp)
        steps.add(drawn, done.ideal, bound, plan.capacity_tokens)
    if not steps.ideal:
        raise ConfigError("the stream has no step", remedy="Its sources have nothing to plan.")
    return StreamReport(
        trainer=trainer,
        method=strategy.method,
        num_buckets=stream.num_buckets,
        placed={method: tally.placed() for method, tally in tallies.items()},
        ideal_T=np.array(steps.ideal),
        bound_T=np.array(steps.bound),
        tokens_T=np.array(steps.tokens, np.int64),
        spans_T=np.array(steps.spans, np.int64),
        packs_T=np.array(steps.packs, np.int64),
        capacity_T=np.array(steps.capacity, np.int64),
        length_counts_L=np.trim_zeros(steps.length_counts, "b"),
        mix_by=strategy.mix_by,
        mixture_error=steps.mixture_error,
        draw_seconds_T=np.array(steps.seconds),
        drift=drifting.drift(),
    )


def _bound(strategy: Strategy, stream: Stream, plan: Plan, pp: int) -> float:
    """Return a time that the slowest buckets of all parts, and of all encoders, take at least."""
    speed_B = np.ones(plan.num_buckets) if plan.speeds is None else plan.speeds
    part_P = plan.joined(plan.loads).sum(axis=(0, 1)) * np.float64(plan.unit) / speed_B.sum()
    if len(part_P) == 1:
        least = float(part_P[0]) * plan.bound
    else:
        # The bound of a plan is that of its worst part.
        cost_NP = evaluate(strategy.cost, padded_table(plan.table, stream.batching))
        largest_P = cost_NP.max(axis=0) * np.float64(plan.unit) / speed_B.max()
        least = float(np.maximum(part_P, largest_P).sum())
    encoders = [r.loads.mean(axis=0).sum() * r.bound for r in plan.routing.values()]
    return least / pp + float(sum(encoders))


class _Drifting:
    """The first steps of a deferred stream beside those of the undeferred one."""

    def __init__(self, stream: Stream) -> None:
        self._plain = iter(stream.undeferred.draws()) if stream.rules.deferral else iter(())
        self._pairs: list[tuple[Metadata, Metadata]] = []
        self._left = _DRIFT_SPANS

    def add(self, drawn: Drawn) -> None:
        if self._left > 0 and (plain := next(self._plain, None)) is not None:
            tables = (drawn.draw.table, plain.draw.table)
            # These columns are all that matters; the rest would fill the memory.
            one, other = (Metadata({n: table[n] for n in _DRIFT_COLUMNS}) for table in tables)
            self._pairs.append((one, other))
            self._left -= one.num_rows

    def drift(self) -> Drift | None:
        if not self._pairs:
            return None
        deferred, plain = zip(*self._pairs, strict=True)
        return drift(deferred, plain)


class _Tally:
    """What came of one way of placing so far."""

    def __init__(self) -> None:
        self._step_time: list[float] = []
        self._imbalance: list[float] = []
        self._bubble: list[float] = []
        self._seconds: list[float] = []

    def add(self, done: Simulation, imbalance: float, seconds: float) -> None:
        self._step_time.append(done.step_time)
        self._imbalance.append(imbalance)
        self._bubble.append(done.bubble)
        self._seconds.append(seconds)

    def placed(self) -> Placed:
        return Placed(
            step_time_T=np.array(self._step_time),
            imbalance_T=np.array(self._imbalance),
            bubble_T=np.array(self._bubble),
            seconds_T=np.array(self._seconds),
        )


class _Steps:
    """What the steps so far consist of."""

    def __init__(self, stream: Stream) -> None:
        self.ideal: list[float] = []
        self.bound: list[float] = []
        self.tokens: list[int] = []
        self.spans: list[int] = []
        self.packs: list[int] = []
        self.capacity: list[int] = []
        self.seconds: list[float] = []
        self.length_counts = np.zeros(len(_CLASSES), np.int64)
        self.mixture_error = 0.0
        self._by_tokens = stream.frozen_strategy.mix_by == "tokens"
        self._ahead_S: NDArray[np.float64] = np.zeros(len(stream.sources))

    def add(self, drawn: Drawn, ideal: float, bound: float, capacity_tokens: int) -> None:
        draw = drawn.draw
        tokens_N = draw.table["tokens"]
        self.ideal.append(ideal)
        self.bound.append(bound)
        self.tokens.append(int(tokens_N.sum()))
        self.spans.append(len(tokens_N))
        self.packs.append(draw.num_packs)
        self.capacity.append(capacity_tokens)
        self.seconds.append(drawn.seconds)
        classes_N = np.searchsorted(_CLASSES, tokens_N, side="right") - 1
        self.length_counts += np.bincount(np.maximum(classes_N, 0), minlength=len(_CLASSES))
        size_S = np.bincount(
            draw.table["source"],
            weights=tokens_N if self._by_tokens else None,
            minlength=len(self._ahead_S),
        )
        self._ahead_S += size_S - drawn.share_S / TOTAL_SHARE * size_S.sum()
        self.mixture_error = max(self.mixture_error, float(np.abs(self._ahead_S).max()))
