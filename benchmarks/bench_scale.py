"""How does the control plane bear more ranks and more sources?

Runs the real scheduler, supervisor, planner, loaders and constructors on a local cluster of three
worker processes, with real metadata; only payload and trainers are simulated: sources know the
lengths of their documents and have no texts, and constructors acknowledge for their ranks what they
would have built. ``python benchmarks/bench_scale.py``, or ``--quick``.

Wall time of a step is that of the whole control plane on this machine's cores, which the
constructors and loaders of hundreds of hosts share here. CPU time of the scheduler is that of its
process, with the supervisor in it, beyond what it takes when idle. At last all ranks join at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from distributed import Client, LocalCluster
from reporting import Report, arguments, progress

import megadask as md
from megadask.scheduling import roles
from megadask.scheduling.constructor_actor import ConstructorActor
from megadask.scheduling.errors import unpack_error
from megadask.scheduling.planner_actor import PlannerActor
from megadask.scheduling.reading import Shard
from megadask.scheduling.run import Run
from megadask.scheduling.shelf import Slot
from megadask.scheduling.wire import SUPERVISOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEQ_LEN = 8192
#: Packs a rank gets in a step, each of about nine documents.
PACKS = 2
#: Ranks at few sources, and sources at few ranks.
RANKS = ((16, 8), (64, 8), (256, 8), (1024, 8), (4096, 8))
SOURCES = ((64, 8), (64, 64), (64, 306), (64, 1000))
QUICK_RANKS = ((16, 8), (64, 8))
QUICK_SOURCES = ((16, 8), (16, 64))
#: Steps before measuring, and the least that are measured.
WARM_STEPS, STEPS = 4, 6
WAIT_S = 600.0
#: Ranks that join at a time.
JOINS = 64
#: How long the idle cluster is looked at, after it had time to settle.
IDLE_S, SETTLE_S = 3.0, 3.0
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


# Runs in the workers ------------------------------------------------------------------------------


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


# Measuring ----------------------------------------------------------------------------------------


#: What `look` counts, reported for a step.
PER_STEP = ("bytes_in", "bytes_out", "scheduler_cpu_s", "workers_cpu_s")


def started() -> LocalCluster:
    """Return the cluster that all sizes run on, one after the other."""
    return LocalCluster(
        n_workers=3,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        host="127.0.0.1",
        memory_limit=None,
        silence_logs=50,
    )


def idle_share() -> float:
    """Return how much of a core this process takes while nothing is served."""
    time.sleep(SETTLE_S)
    begin, before = time.perf_counter(), cpu_s(os.getpid())
    time.sleep(IDLE_S)
    return (cpu_s(os.getpid()) - before) / (time.perf_counter() - begin)


def measure(
    cluster: LocalCluster, client: Client, ranks: int, sources: int, seconds: float, idle: float
) -> dict[str, Any]:
    """Return what a step takes, over at least so many seconds; idle: as of `idle_share`."""
    roles.PlannerActor, roles.ConstructorActor = CountedPlanner, SilentConstructor  # type: ignore[misc]
    begin, cpu_before = time.perf_counter(), cpu_s(os.getpid())
    with md.serve(declared(ranks, sources), client, timeout=WAIT_S) as service:
        start_s = time.perf_counter() - begin
        start_cpu_s = cpu_s(os.getpid()) - cpu_before
        reach(cluster, service, WARM_STEPS)
        before = after = look(cluster, client, service)
        while (
            after["seconds"] - before["seconds"] < seconds or after["step"] < before["step"] + STEPS
        ):
            reach(cluster, service, after["step"] + STEPS)
            after = look(cluster, client, service)
        join_s = join(cluster, client, service, ranks)
        begin = time.perf_counter()
    steps = after["step"] - before["step"]
    took = {name: (after[name] - before[name]) / steps for name in PER_STEP}
    took["scheduler_cpu_s"] -= idle * (after["seconds"] - before["seconds"]) / steps
    medians = {
        name: statistics.median(after[name][len(before[name]) :]) for name in ("plan_s", "busy_s")
    }
    commit_s = after["commit_s"][len(before["commit_s"]) - 1 :]
    return {
        "ranks": ranks,
        "sources": sources,
        "start_s": start_s,
        "start_cpu_s": start_cpu_s,
        "step_s": statistics.median(later - earlier for earlier, later in pairwise(commit_s)),
        "join_s": join_s,
        "close_s": time.perf_counter() - begin,
        "steps": steps,
        **medians,
        **took,
    }


def join(cluster: LocalCluster, client: Client, service: md.Service, ranks: int) -> float:
    """Let all ranks join, many at a time, while nothing is planned; return the seconds it took."""
    client.run(rest)
    deadline = time.monotonic() + WAIT_S
    record = run_of(cluster, service).record
    lead_steps = md.Limits().lead_steps
    while record.next_step - record.low[0] <= lead_steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"steps are planned after {WAIT_S:g} s still")
        time.sleep(0.02)
    assert client.scheduler is not None
    handler = getattr(client.scheduler, SUPERVISOR)

    async def join_all() -> None:
        room = asyncio.Semaphore(JOINS)

        async def join_one(rank: int) -> None:
            who = {"client": client.id, "process": f"trainer-{rank}", "force": False}
            async with room:
                await handler(call="join", run=service.name, rank=rank, **who)

        await asyncio.gather(*map(join_one, range(ranks)))

    begin = time.perf_counter()
    client.sync(join_all, callback_timeout=WAIT_S)
    return time.perf_counter() - begin


def reach(cluster: LocalCluster, service: md.Service, step: int) -> None:
    """Wait until so many steps are committed."""
    deadline, run = time.monotonic() + WAIT_S, run_of(cluster, service)
    while run.record.next_step < step:
        if run.error is not None:
            raise unpack_error(run.error)
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} was not planned within {WAIT_S:g} s")
        time.sleep(0.02)


def run_of(cluster: LocalCluster, service: md.Service) -> Run:
    """Return the run that the supervisor holds, which is in this process."""
    supervisor = cluster.scheduler.plugins["megadask-supervisor"]
    run: Run = supervisor._runs[service.name]
    return run


def look(cluster: LocalCluster, client: Client, service: md.Service) -> dict[str, Any]:
    """Return where everybody stands."""
    found: dict[str, Any] = {"workers_cpu_s": 0.0}
    for one in client.run(counts).values():
        one["workers_cpu_s"] += found["workers_cpu_s"]
        found |= one
    return found | {
        "seconds": time.perf_counter(),
        "step": run_of(cluster, service).record.next_step,
        "scheduler_cpu_s": cpu_s(os.getpid()),
    }


# Reporting ----------------------------------------------------------------------------------------

COLUMNS = (
    "ranks",
    "sources",
    "step",
    "planning",
    "loop busy",
    "scheduler CPU",
    "workers CPU",
    "metadata in",
    "plan out",
    "start-up",
    "all ranks join",
)


def row(one: Mapping[str, Any]) -> list[object]:
    """Return a line of the table."""
    return [
        f"{one['ranks']:,}",
        f"{one['sources']:,}",
        f"{one['step_s'] * 1e3:,.0f} ms",
        f"{one['plan_s'] * 1e3:,.0f} ms",
        f"{one['busy_s'] * 1e3:,.0f} ms",
        f"{one['scheduler_cpu_s'] * 1e3:,.0f} ms",
        f"{one['workers_cpu_s'] * 1e3:,.0f} ms",
        f"{one['bytes_in'] / 1e3:,.0f} kB",
        f"{one['bytes_out'] / 1e3:,.0f} kB",
        f"{one['start_s']:.1f} s",
        f"{one['join_s']:.1f} s",
    ]


#: What growth is told of: the name in the table, and what is measured.
GROWING = {
    "step": "step_s",
    "scheduler CPU": "scheduler_cpu_s",
    "workers CPU": "workers_cpu_s",
    "plan out": "bytes_out",
    "start-up": "start_s",
    "all ranks join": "join_s",
}


def exponents(found: Sequence[Mapping[str, Any]], along: str) -> list[dict[str, Any]]:
    """Return, for each size and the next, n where what grows does so like size to the power n."""
    growth = []
    for small, large in pairwise(found):
        ratio = math.log(large[along] / small[along])
        one: dict[str, Any] = {"from": small[along], "to": large[along]}
        for label, name in GROWING.items():
            one[label] = math.log(max(large[name], 1e-9) / max(small[name], 1e-9)) / ratio
        growth.append(one)
    return growth


def word(exponent: float) -> str:
    """Say in words how something grows."""
    bounds = ((0.25, "flat"), (0.85, "less than linear"), (1.2, "linear"))
    return next((name for bound, name in bounds if exponent < bound), "worse than linear")


#: Why anything grows, by axis.
REASONS = {
    "ranks": "A step has as many more spans as there are ranks, each of which is read, drawn, "
    "placed and audited once; and every constructor (one for eight ranks) is told its part of the "
    "plan, and passes on what was acknowledged. So linear is what can be had. Ranks that join are "
    "news for their own constructor alone.",
    "sources": "Here steps have the same spans, of more sources. What grows is what there is of "
    "each source: its window, of which the draw looks at all, and its place in the state, which "
    "goes to every constructor, packed. Sources that a step takes nothing from cost little.",
}


def tell_growth(report: Report, found: Sequence[Mapping[str, Any]], fixed: str, along: str) -> None:
    """Report how everything grows along one axis."""
    growth = exponents(found, along)
    rows = [
        [f"{one['from']:,} to {one['to']:,}", *(f"{one[label]:.2f}" for label in GROWING)]
        for one in growth
    ]
    report.table(f"Growth by {along}, {fixed}: n of size^n", [along, *GROWING], rows)
    said = ", ".join(f"{label} {word(growth[-1][label])}" for label in GROWING)
    last = growth[-1]
    report.say(f"From {last['from']:,} to {last['to']:,} {along}: {said}. {REASONS[along]}")
    report.plot(plot(found, fixed, along), f"by {along}")


def plot(found: Sequence[Mapping[str, Any]], fixed: str, along: str) -> Figure:
    """Return the times of a step along one axis, with lines of slope 1 to compare."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    x = [one[along] for one in found]
    for name, label in (
        ("step_s", "step"),
        ("plan_s", "planning"),
        ("scheduler_cpu_s", "scheduler CPU"),
        ("workers_cpu_s", "CPU of all workers"),
    ):
        axes.plot(x, [one[name] * 1e3 for one in found], marker="o", label=label)
    last = found[-1]["step_s"] * 1e3
    axes.plot(x, [last * n / x[-1] for n in x], color="0.7", linestyle="--", label="linear")
    axes.set(xscale="log", yscale="log", xlabel=along, ylabel=f"ms a step, {fixed}")
    axes.legend()
    return figure


def main() -> None:
    """Measure all sizes and write the report."""
    options = arguments(__doc__).parse_args()
    report = Report("scale", "Control plane by ranks and sources", options)
    report.note(f"{PACKS} packs of {SEQ_LEN:,} tokens a rank and step, about 9 documents each")
    report.note("payload and trainers are simulated; all else is real, on this one machine")
    report.note("step, planning and loop busy: medians; CPU and bytes: means of a step")
    report.note(f"all ranks join, {JOINS} at a time, while nothing is planned")
    by_ranks, by_sources = (QUICK_RANKS, QUICK_SOURCES) if options.quick else (RANKS, SOURCES)
    found = {}
    with started() as cluster, Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(3, WAIT_S)
        idle, seconds = idle_share(), 1.0 if options.quick else 8.0
        report.note(f"an idle scheduler process takes {100 * idle:.1f}% of a core: not counted")
        for ranks, sources in dict.fromkeys(by_ranks + by_sources):
            progress(f"{ranks} ranks, {sources} sources")
            one = found[ranks, sources] = measure(cluster, client, ranks, sources, seconds, idle)
            progress("  ".join(map(str, row(one))))
    report.table("A step of the control plane", COLUMNS, [row(one) for one in found.values()])
    tell_growth(report, [found[size] for size in by_ranks], "8 sources", "ranks")
    fixed = f"{by_sources[0][0]} ranks"
    tell_growth(report, [found[size] for size in by_sources], fixed, "sources")
    report.figures["sizes"] = list(found.values())
    report.write()


if __name__ == "__main__":
    main()
