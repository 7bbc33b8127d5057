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
import os
import statistics
import time
from itertools import pairwise
from typing import Any

from distributed import Client, LocalCluster
from reporting import Report, arguments, progress
from scaling.simulated import (
    PACKS,
    SEQ_LEN,
    CountedPlanner,
    SilentConstructor,
    counts,
    cpu_s,
    declared,
    rest,
)
from scaling.tables import COLUMNS, row, tell_growth

import megadask as md
from megadask.scheduling import roles
from megadask.scheduling.errors import unpack_error
from megadask.scheduling.run import Run
from megadask.scheduling.wire import SUPERVISOR

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
