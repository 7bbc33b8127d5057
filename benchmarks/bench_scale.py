"""How does the control plane bear more ranks and more sources?

Runs the real scheduler, supervisor, planner, loaders and constructors on a local cluster of three
worker processes, with real metadata; only payload and trainers are simulated: sources know the
lengths of their documents and have no texts, and constructors acknowledge for their ranks what they
would have built. ``python benchmarks/bench_scale.py``, or ``--quick``.

Wall time of a step is that of the whole control plane on this machine's cores. CPU time of the
scheduler is that of its process, with the supervisor in it. Trainers and constructors of a real run
are spread over many hosts; here all constructors share one process, whose CPU time is reported for
one constructor.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from distributed import Client, LocalCluster
from reporting import Report, arguments, progress

import megadask as md
from megadask.scheduling import roles
from megadask.scheduling.constructor_actor import ConstructorActor
from megadask.scheduling.planner_actor import PlannerActor
from megadask.scheduling.reading import Shard
from megadask.scheduling.shelf import Slot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEQ_LEN = 8192
#: Packs a rank gets in a step, each of about nine documents.
PACKS = 2
#: Ranks at few sources, and sources at few ranks.
RANKS = ((16, 8), (64, 8), (256, 8), (1024, 8), (4096, 8))
SOURCES = ((64, 8), (64, 64), (64, 306), (64, 1000))
QUICK = ((16, 8), (64, 8), (16, 64))
#: Steps before measuring, and the least that are measured.
WARM_STEPS, STEPS = 3, 5
WAIT_S = 300.0


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
    """A planner that counts what goes through it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plan_s: list[float] = []
        self.bytes_in = self.bytes_out = 0
        ask, supervisor = self._partners.ask, self._partners.supervisor

        async def counted_ask(*given: Any, **named: Any) -> Any:
            reply = await ask(*given, **named)
            self.bytes_in += sum(getattr(part, "nbytes", 0) for part in _flat(reply))
            return reply

        async def counted_supervisor(call: str, **named: Any) -> Any:
            self.bytes_out += len(named.get("plan", b""))
            return await supervisor(call, **named)

        self._partners.ask = counted_ask  # type: ignore[method-assign]
        self._partners.supervisor = counted_supervisor  # type: ignore[method-assign]

    async def _plan(self, state: Any) -> Any:
        begin = time.perf_counter()
        planned = await super()._plan(state)
        self.plan_s.append(time.perf_counter() - begin)
        return planned


class SilentConstructor(ConstructorActor):
    """A constructor that fetches and builds nothing, and acknowledges for all its ranks."""

    async def _build_on(self) -> None:
        while self._closed is None:
            step = await self._changed.wait_until(self._next_step, 5.0)
            if step is not None:
                mark: Slot = (step + 1, 0)
                for rank in self._bucket_of:
                    self._marks[rank] = max(mark, self._marks[rank])
                self._free()

    def _next_step(self) -> int | None:
        return min((step for step, one in self._portions.items() if not one.plan.end), default=None)


def counts(dask_worker: Any) -> dict[str, Any]:
    """Return what a worker's planner has counted, and the CPU time of its process."""
    found: dict[str, Any] = {"workers_cpu_s": cpu_s(os.getpid())}
    for actor in dask_worker.state.actors.values():
        if isinstance(actor, PlannerActor) and hasattr(actor, "plan_s"):
            found |= {"plan_s": actor.plan_s}
            found |= {"bytes_in": actor.bytes_in, "bytes_out": actor.bytes_out}
    return found


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
PER_STEP = ("seconds", "bytes_in", "bytes_out", "scheduler_cpu_s", "workers_cpu_s")


def measure(ranks: int, sources: int, seconds: float) -> dict[str, Any]:
    """Return what a step takes, over at least so many seconds."""
    roles.PlannerActor, roles.ConstructorActor = CountedPlanner, SilentConstructor  # type: ignore[misc]
    begin = time.perf_counter()
    with (
        LocalCluster(
            n_workers=3,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            host="127.0.0.1",
            memory_limit=None,
            silence_logs=50,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(declared(ranks, sources), client, timeout=WAIT_S) as service,
    ):
        reach(cluster, service, WARM_STEPS)
        ready_s = time.perf_counter() - begin
        before = after = look(cluster, client, service)
        while (
            after["seconds"] - before["seconds"] < seconds or after["step"] < before["step"] + STEPS
        ):
            reach(cluster, service, after["step"] + STEPS)
            after = look(cluster, client, service)
    steps = after["step"] - before["step"]
    took = {name: (after[name] - before[name]) / steps for name in PER_STEP}
    plan_s = statistics.median(after["plan_s"][len(before["plan_s"]) :])
    return {"ranks": ranks, "sources": sources, "ready_s": ready_s, "plan_s": plan_s, **took}


def reach(cluster: LocalCluster, service: md.Service, step: int) -> None:
    """Wait until so many steps are committed."""
    deadline = time.monotonic() + WAIT_S
    while committed(cluster, service) < step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} was not planned within {WAIT_S:g} s")
        time.sleep(0.02)


def committed(cluster: LocalCluster, service: md.Service) -> int:
    """Return how many steps are committed; looks into the supervisor, which is in this process."""
    supervisor = cluster.scheduler.plugins["megadask-supervisor"]
    return int(supervisor._runs[service.name].record.next_step)


def look(cluster: LocalCluster, client: Client, service: md.Service) -> dict[str, Any]:
    """Return where everybody stands."""
    found: dict[str, Any] = {"workers_cpu_s": 0.0}
    for one in client.run(counts).values():
        one["workers_cpu_s"] += found["workers_cpu_s"]
        found |= one
    return found | {
        "seconds": time.perf_counter(),
        "step": committed(cluster, service),
        "scheduler_cpu_s": cpu_s(os.getpid()),
    }


# Reporting ----------------------------------------------------------------------------------------

COLUMNS = (
    "ranks",
    "sources",
    "step",
    "planning",
    "scheduler CPU",
    "workers CPU",
    "metadata in",
    "plan out",
    "until step 3",
)


def row(one: Mapping[str, Any]) -> list[object]:
    """Return a line of the table."""
    return [
        f"{one['ranks']:,}",
        f"{one['sources']:,}",
        f"{one['seconds'] * 1e3:,.0f} ms",
        f"{one['plan_s'] * 1e3:,.0f} ms",
        f"{one['scheduler_cpu_s'] * 1e3:,.0f} ms",
        f"{one['workers_cpu_s'] * 1e3:,.0f} ms",
        f"{one['bytes_in'] / 1e3:,.0f} kB",
        f"{one['bytes_out'] / 1e3:,.0f} kB",
        f"{one['ready_s']:.1f} s",
    ]


def plot(found: Sequence[Mapping[str, Any]], fixed: str, along: str) -> Figure:
    """Return the times of a step along one axis, with lines of slope 1 to compare."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    x = [one[along] for one in found]
    for name, label in (
        ("seconds", "step"),
        ("plan_s", "planning"),
        ("scheduler_cpu_s", "scheduler CPU"),
        ("workers_cpu_s", "CPU of all workers"),
    ):
        axes.plot(x, [one[name] * 1e3 for one in found], marker="o", label=label)
    last = found[-1]["seconds"] * 1e3
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
    sizes = dict.fromkeys(QUICK if options.quick else RANKS + SOURCES)
    found = {}
    for ranks, sources in sizes:
        progress(f"{ranks} ranks, {sources} sources")
        found[ranks, sources] = measure(ranks, sources, 1.0 if options.quick else 5.0)
        progress("  ".join(map(str, row(found[ranks, sources]))))
    report.table("A step of the control plane", COLUMNS, [row(one) for one in found.values()])
    if not options.quick:
        report.plot(plot([found[size] for size in RANKS], "8 sources", "ranks"), "by ranks")
        report.plot(plot([found[size] for size in SOURCES], "64 ranks", "sources"), "by sources")
    report.figures["sizes"] = list(found.values())
    report.write()


if __name__ == "__main__":
    main()
