"""What is simulated for bench_scale.py, and what counts in the workers: all of it runs in them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

import megadask as md
from megadask.scheduling.constructor_actor import ConstructorActor
from megadask.scheduling.planner_actor import PlannerActor
from megadask.scheduling.reading import Shard
from megadask.scheduling.shelf import Slot

SEQ_LEN = 8192
#: Packs a rank gets in a step, each of about nine documents.
PACKS = 2
#: How often the planner's event loop is asked whether it is free.
LISTEN_S = 0.01


@dataclass(frozen=True)
class Lengths:
    """A reader of documents of which only the lengths exist."""

    seed: int
    rows: int
    num_shards: int = 4

    def shards(self) -> list[Shard]:
        """Return the shards, each of `rows` documents."""
        return [Shard(f"lengths-{self.seed}#{n}", self.rows) for n in range(self.num_shards)]

    def read(self, shard: int, start: int = 0) -> Iterator[Mapping[str, Any]]:
        """Yield the lengths of a shard's documents."""
        law = md.lengths.Lognormal(500, 1.1, clip=SEQ_LEN)
        rng = np.random.default_rng([self.seed, shard])
        for length in law.sample(rng, self.rows)["tokens"].tolist()[start:]:
            yield {"length": length}

    @property
    def columns(self) -> None:
        """All of them."""
        return None

    def project(self, columns: Collection[str]) -> Lengths:
        """Return itself: there is one column."""
        return self

    def fingerprint(self) -> str:
        """Return what the lengths depend on."""
        return f"{self.seed} {self.rows} {self.num_shards}"

    def paths(self) -> list[str]:
        """Return no file."""
        return []


def absent(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Never called: there is no payload."""
    raise AssertionError(record)


def declared(ranks: int, sources: int) -> md.Pipeline:
    """Return a pipeline with so many ranks and sources."""
    rows = max(64, 40 * ranks * PACKS // sources)
    return md.Pipeline(
        sources=[
            md.Source(f"source{n}", Lengths(n, rows), transform=absent, length_column="length")
            for n in range(sources)
        ],
        topology=md.ClientPlaceTree(dp=ranks),
        strategy=lambda graph: graph.cost(md.costs.Transformer(5120, 40)),
        batching=md.Packed(SEQ_LEN, ranks * PACKS, micro_batch=1),
    )


class CountedPlanner(PlannerActor):
    """A planner that counts what goes through it, and listens how long its event loop is busy."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plan_s: list[float] = []
        self.commit_s: list[float] = []  # when steps were committed
        self.busy_s: list[float] = []  # the longest that the loop was busy, of each step
        self.bytes_in = self.bytes_out = 0
        ask, supervisor = self._partners.ask, self._partners.supervisor

        async def counted_ask(*given: Any, **named: Any) -> Any:
            reply = await ask(*given, **named)
            self.bytes_in += sum(getattr(part, "nbytes", 0) for part in _flat(reply))
            return reply

        async def counted_supervisor(call: str, **named: Any) -> Any:
            self.bytes_out += len(named.get("plan", b""))
            reply = await supervisor(call, **named)
            if call == "commit":
                self.commit_s.append(time.perf_counter())
            return reply

        self._partners.ask = counted_ask  # type: ignore[method-assign]
        self._partners.supervisor = counted_supervisor  # type: ignore[method-assign]

    async def _plan(self, state: Any) -> Any:
        begin = time.perf_counter()
        listening = asyncio.create_task(self._listen())
        try:
            return await super()._plan(state)
        finally:
            listening.cancel()
            self.plan_s.append(time.perf_counter() - begin)

    async def _listen(self) -> None:
        self.busy_s.append(0.0)
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(LISTEN_S)
            late_s = time.perf_counter() - begin - LISTEN_S
            self.busy_s[-1] = max(self.busy_s[-1], late_s)


class SilentConstructor(ConstructorActor):
    """A constructor that fetches and builds nothing, and acknowledges for all its ranks."""

    async def _build_on(self) -> None:
        self.rests = False  # then it acknowledges nothing
        while self._closed is None:
            step = await self._changed.wait_until(self._next_step, 5.0)
            if step is not None:
                mark: Slot = (step + 1, 0)
                for rank in self._bucket_of:
                    self._heard.hear(rank, mark)
                self._free()

    def _next_step(self) -> int | None:
        steps = (step for step, one in self._portions.items() if not one.plan.end)
        return None if self.rests else min(steps, default=None)


def counts(dask_worker: Any) -> dict[str, Any]:
    """Return what a worker's planner has counted, and the CPU time of its process."""
    found: dict[str, Any] = {"workers_cpu_s": cpu_s(os.getpid())}
    for actor in dask_worker.state.actors.values():
        if isinstance(actor, CountedPlanner):
            names = ("plan_s", "commit_s", "busy_s", "bytes_in", "bytes_out")
            found |= {name: getattr(actor, name) for name in names}
    return found


def rest(dask_worker: Any) -> None:
    """Let a worker's constructors acknowledge nothing any more."""
    for actor in dask_worker.state.actors.values():
        if isinstance(actor, SilentConstructor):
            actor.rests = True


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _flat(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
