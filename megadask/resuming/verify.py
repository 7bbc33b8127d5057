"""Run a pipeline undisturbed, and again stopped and taken up elsewhere, and compare.

Everything runs on local clusters of its own, with the ranks in threads of this process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from megadask.pipeline import Pipeline
from megadask.planner.errors import ConfigError, MegaDaskError
from megadask.planner.topology import ClientPlaceTree
from megadask.resuming.report import (
    MORE_STEPS,
    Mark,
    Reading,
    ResumeCase,
    ResumeReport,
    Taken,
    differing_sources,
    join,
)

#: A pipeline of more ranks is verified with fewer.
MOST_RANKS = 16


def verify_resume(
    pipeline: Pipeline,
    *,
    steps: int = 8,
    at: int | None = None,
    dp: Sequence[int] | None = None,
    processes: bool = False,
    timeout: float = 60.0,
) -> ResumeReport:
    """Find out whether a pipeline resumes exactly.

    Runs it undisturbed, then stops it in the middle of a step, between two steps and after the last
    batch. Each state goes through JSON to a new cluster with other numbers of loaders and
    constructors, with the same topology and with others, and what comes is compared: the samples of
    every step, and all tensors where the topology is the same.

    Parameters
    ----------
    pipeline
        Read from its beginning; nothing of a service that is running is touched.
    steps
        How far to read before the last stop.
    at
        The step to stop in and before; half of ``steps`` when None.
    dp
        Data-parallel sizes to resume on besides the pipeline's own; half and twice that when None.
    processes
        Whether workers are processes of their own: slower, as in production.
    timeout
        Longest wait for a batch, in seconds.

    Returns
    -------
    ResumeReport
        Prints as a table; ``ok`` says whether all was the same.

    Raises
    ------
    ConfigError
        The pipeline cannot be resumed, or not run with such numbers.
    MegaDaskError
        The pipeline fails undisturbed.
    """
    if pipeline.restart:
        raise ConfigError("verify_resume(pipeline)", got="restart=True: it has no place to keep")
    for name, value in (("steps", steps), ("at", 1 if at is None else at)):
        if not 1 <= value <= max(steps, 1):
            raise ConfigError(f"verify_resume({name}=)", got=value, limit=f"1 to {steps}")
    base, notes = _small(pipeline)
    others = [_with_dp(base, size) for size in dp] if dp is not None else _nearby(base)
    lab = _Lab(base, processes=processes, timeout_s=timeout)
    with lab.cluster(2) as client:
        whole, _ = lab.read(client, base, _Order(steps=steps + MORE_STEPS))
    stops, ended = _stops(whole, steps, steps // 2 if at is None else at, notes)
    cases: list[ResumeCase] = []
    unsteady: dict[str, str] = {}
    for stop, mark in stops.items():
        with lab.cluster(2) as client:
            first, state = _tried(lab, client, base, _Order(stop=mark))
        for number, other in enumerate([base, *others]):
            case, rest = lab.resume(whole, first, state, stop, mark, other, ended=ended)
            cases.append(case)
            for part in (rest, *([first] if not number else [])):
                if isinstance(part, Reading):
                    unsteady = {**differing_sources(whole, part), **unsteady}
    return ResumeReport(
        num_steps=len(whole.steps()), ended=ended, cases=cases, unsteady=unsteady, notes=notes
    )


@dataclass(frozen=True, kw_only=True)
class _Order:
    """How far to read: so many steps, up to a place, or to the end of the data."""

    steps: int | None = None
    stop: Mark | None = None

    def is_done(self, after: Mark) -> bool:
        if self.stop is not None:
            return after >= self.stop
        return self.steps is not None and after >= (self.steps, 0)


class _Lab:
    """Clusters, and runs on them."""

    def __init__(self, base: Pipeline, *, processes: bool, timeout_s: float) -> None:
        self._base = base
        self._processes = processes
        self._timeout_s = timeout_s

    @contextlib.contextmanager
    def cluster(self, num_workers: int) -> Iterator[Any]:
        """Start a cluster of its own; yields its client."""
        import dask
        from distributed import Client, LocalCluster

        quiet = {"distributed.worker.profile.enabled": False}
        with (
            dask.config.set(quiet),
            LocalCluster(
                n_workers=num_workers,
                threads_per_worker=1,
                processes=self._processes,
                protocol="tcp",
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                memory_limit=None,
                silence_logs=50,
            ) as made,
            Client(made, set_as_default=False) as client,
        ):
            yield client

    def read(
        self,
        client: Any,
        pipeline: Pipeline,
        order: _Order,
        state: dict[str, Any] | None = None,
        constructors: int | None = None,
    ) -> tuple[Reading, dict[str, Any]]:
        """Run a service, read from it with all ranks; return that and where they stood.

        Raises StateError where the ranks' states differ.
        """
        from megadask.service import serve

        ranks = range(pipeline.topology.world_size)
        with serve(
            pipeline,
            client,
            name="megadask-verify",
            resume=state,
            constructors=constructors,
            timeout=self._timeout_s,
        ) as service:
            with ThreadPoolExecutor(len(ranks), "megadask-verify") as pool:
                reads = [
                    pool.submit(self._read_rank, service.address, rank, pipeline, order)
                    for rank in ranks
                ]
            done = [read.result() for read in reads]
        states = [json.dumps(state) for _, state in done]
        if len(set(states)) > 1:
            unlike = [rank for rank in ranks if states[rank] != states[0]]
            raise MegaDaskError(f"state_dict() differs: ranks {unlike} from rank 0")
        return Reading(tuple(tuple(taken) for taken, _ in done)), json.loads(states[0])

    def _read_rank(
        self, address: str, rank: int, pipeline: Pipeline, order: _Order
    ) -> tuple[list[Taken], dict[str, Any]]:
        from megadask.trainer.loader import connect

        axis = pipeline.frozen_strategy.axis
        bucket = pipeline.topology.bucket_of(rank, axis)
        taken: list[Taken] = []
        with connect(address, "megadask-verify", rank=rank, timeout=self._timeout_s) as loader:
            begins = loader.state_dict()
            if not order.is_done((begins["step"], begins["microbatch"])):
                for batch in loader:
                    taken.append(Taken.of(batch, bucket))
                    if order.is_done(taken[-1].next):
                        break
            return taken, loader.state_dict()

    def resume(
        self,
        whole: Reading,
        first: Reading | MegaDaskError,
        state: dict[str, Any],
        stop: str,
        mark: Mark,
        pipeline: Pipeline,
        *,
        ended: bool,
    ) -> tuple[ResumeCase, Reading | None]:
        """Take a run up; return how that went, and what came."""
        pipeline = _with_other_loaders(pipeline)
        buckets = pipeline.topology.num_buckets(pipeline.frozen_strategy.axis)
        constructors = min(2, buckets)
        case = ResumeCase(
            stop=stop,
            mark=mark,
            topology=_described(pipeline.topology),
            loaders=sum(source.first_loaders for source in pipeline.sources),
            constructors=constructors,
        )
        if isinstance(first, MegaDaskError):
            return replace(case, problem=f"before the stop: {first}"), None
        until = _Order() if ended else _Order(steps=max(whole.steps()) + 1)
        with self.cluster(3) as client:
            rest, _ = _tried(self, client, pipeline, until, state, constructors)
        if isinstance(rest, MegaDaskError):
            return replace(case, problem=str(rest)), None
        return self._compared(case, whole, first, rest, pipeline), rest

    def _compared(
        self, case: ResumeCase, whole: Reading, first: Reading, rest: Reading, pipeline: Pipeline
    ) -> ResumeCase:
        was, now = whole.steps(), join([first.steps(), rest.steps()])
        for step in sorted({*was, *now}):
            if was.get(step) != now.get(step):
                missing, more = (
                    len(set(a.get(step, ())) - set(b.get(step, ())))
                    for a, b in ((was, now), (now, was))
                )
                problem = f"step {step} has other samples: {missing} spans missing, {more} others"
                return replace(case, problem=problem)
        case = replace(case, num_steps=len(now))
        if pipeline.topology != self._base.topology:
            return case
        before, after = whole.digests(), {**first.digests(), **rest.digests()}
        for rank, step, microbatch in sorted({*before, *after}):
            place = (rank, step, microbatch)
            if before.get(place) != after.get(place):
                problem = f"rank {rank} got other tensors in step {step}, microbatch {microbatch}"
                return replace(case, problem=problem)
        return replace(case, num_digests=len(after))


def _tried(
    lab: _Lab, client: Any, *arguments: Any
) -> tuple[Reading | MegaDaskError, dict[str, Any]]:
    """Return what a run gave, or its error: that is a finding, too."""
    try:
        return lab.read(client, *arguments)
    except MegaDaskError as error:
        return error, {}


def _stops(whole: Reading, steps: int, at: int, notes: list[str]) -> tuple[dict[str, Mark], bool]:
    """Return where to stop, by a name, and whether the data ended."""
    marks = whole.marks()
    num_steps = marks[-1][0] if marks else 0
    ended = num_steps < steps + MORE_STEPS
    if not num_steps:
        raise ConfigError("verify_resume(pipeline)", got="no data")
    at = min(at, num_steps - 1)
    stops: dict[str, Mark] = {}
    inside = [mark for mark in marks if mark[1]]
    later = [mark for mark in inside if mark[0] >= at] or inside
    if later:
        # Not the first of its step, where it has several.
        same = [mark for mark in later if mark[0] == later[0][0]]
        stops["inside a step"] = same[len(same) // 2]
    else:
        notes.append("no step has two microbatches, so none can be stopped inside")
    if at:
        stops["between steps"] = (at, 0)
    stops["after the last"] = (num_steps if ended else steps, 0)
    return stops, ended


def _small(pipeline: Pipeline) -> tuple[Pipeline, list[str]]:
    """Return a pipeline of few enough ranks to run in threads, and what was changed."""
    if pipeline.topology.world_size <= MOST_RANKS:
        return pipeline, []
    for dp in (4, 2, 1):
        with contextlib.suppress(ConfigError):
            small = replace(pipeline, topology=ClientPlaceTree(dp=dp))
            return small, [f"verified with dp={dp}, not on {pipeline.topology}"]
    raise ConfigError(
        "verify_resume(pipeline): its topology",
        got=pipeline.topology,
        limit=f"at most {MOST_RANKS} ranks",
        remedy="Verify it with a smaller topology.",
    )


def _with_dp(pipeline: Pipeline, dp: int) -> Pipeline:
    return replace(pipeline, topology=replace(pipeline.topology, dp=dp))


def _nearby(pipeline: Pipeline) -> list[Pipeline]:
    """Return the pipeline on half and on twice its data-parallel ranks, where it can run there."""
    dp, found = pipeline.topology.dp, []
    for other in sorted({dp // 2, 2 * dp} - {0, dp}):
        with contextlib.suppress(ConfigError):
            found.append(_with_dp(pipeline, other))
    return found


def _with_other_loaders(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with another number of loaders for every source that can have one."""
    return replace(
        pipeline,
        sources=[
            replace(source, loaders=1 if source.first_loaders > 1 else min(2, source.num_lanes))
            for source in pipeline.sources
        ],
    )


def _described(topology: ClientPlaceTree) -> str:
    sizes = {axis: getattr(topology, axis) for axis in ("dp", "pp", "cp", "tp")}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if axis == "dp" or size > 1)
