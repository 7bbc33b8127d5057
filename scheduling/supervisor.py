"""The Supervisor: a Dask scheduler plugin that guards the committed record of every pipeline.

Roles and clients call its one handler. It decides by the `RunRecord`, writes the journal before it
answers, wakes those who wait for news, and has `Roles` re-create what a lost worker held.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from megadask.planner.errors import ConfigError
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.errors import ClosedError, ServiceError, StaleError, pack_error
from megadask.scheduling.journal import Journal, acknowledged_step
from megadask.scheduling.point import Point
from megadask.scheduling.record import Owner, RunRecord
from megadask.scheduling.roles import Roles, actor_key, spread
from megadask.scheduling.wire import SUPERVISOR, Signal

logger = logging.getLogger(__name__)


@dataclass
class _Run:
    """One running pipeline: its record, and what it takes to act on it."""

    record: RunRecord
    header: Mapping[str, Any]
    client: str
    journal: Journal | None
    active: bool
    changed: Signal = field(default_factory=Signal)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: int = 0
    finished: set[int] = field(default_factory=set)
    closed: str | None = None
    error: bytes | None = None

    def bump(self) -> None:
        """Tell everybody who waits that something changed."""
        self.version += 1
        self.changed.set()


class Supervisor(SchedulerPlugin):
    """Guards the records of all services of one Dask cluster."""

    name = "megadask-supervisor"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Answer calls."""
        self._scheduler = scheduler
        self._runs: dict[str, _Run] = {}
        self._roles = Roles(scheduler)
        self._tasks: set[asyncio.Task[None]] = set()
        scheduler.handlers[SUPERVISOR] = self.handle

    async def before_close(self) -> None:
        """Tell the trainers that the cluster goes."""
        for run in self._runs.values():
            self._close_record(run, "the Dask scheduler was closed")
        await self._roles.close()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Re-create what a lost worker held."""
        for run in self._runs.values():
            if run.closed is None:
                self._spawn(self._recover(run, worker))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Free the ranks of a trainer that is gone; close the services of a driver that is."""
        for run in list(self._runs.values()):
            run.record.drop_client(client)
            if run.client == client and not run.header["detached"]:
                reason = "the driver that called serve() is gone"
                self._spawn(self._close(run.record.name, reason))
            run.bump()

    async def handle(self, call: str, run: str, **arguments: Any) -> Any:
        """Carry out one call about one pipeline."""
        if call == "start":
            return await self._start(run, **arguments)
        if call == "close":
            return await self._close(run, **arguments)
        known = self._runs.get(run)
        if known is None:
            names = sorted(name for name, one in self._runs.items() if one.closed is None)
            raise ServiceError(
                "there is no such service on this cluster",
                got=run,
                limit=f"one of {names}" if names else "none is running",
                remedy="Call md.serve(pipeline, client, name=...) first, or check the name.",
            )
        method = getattr(self, f"_on_{call}")
        return await method(known, **arguments)

    # The driver -------------------------------------------------------------------------------

    async def _start(self, run: str, header: Mapping[str, Any], client: str) -> dict[str, Any]:
        """Start a pipeline: record, journal, then its roles."""
        await self._make_room(run, client)
        point = Point.from_json(header["origin"])
        record = RunRecord(
            name=run,
            topology=ClientPlaceTree.from_dict(header["topology"]),
            axis=_axis(header["axis"]),
            lanes=header["lanes"],
            origin=point,
        )
        journal = None
        if header["checkpoint"]:
            journal = await asyncio.to_thread(_open_journal, header, record)
        started = _Run(record, header, client, journal, active=not header["restart"])
        self._runs[run] = started
        try:
            await self._start_roles(started)
        except BaseException:
            await self._close(run, "it could not be started")
            raise
        return {"generation": record.generation}

    async def _make_room(self, run: str, client: str) -> None:
        """Close an older service of the same name if it is the caller's own or over."""
        old = self._runs.get(run)
        if old is None:
            return
        if old.closed is None and old.client != client and old.client in self._scheduler.clients:
            raise ServiceError(
                "a service of this name is running",
                got=run,
                remedy="Close it, or give this one another name: md.serve(..., name=...).",
            )
        await self._close(run, "another service took its name")

    async def _start_roles(self, run: _Run) -> None:
        workers = self._roles.workers()
        record, header = run.record, run.header
        used: dict[str, int] = {}
        for source, lanes in record.lanes.items():
            count = min(header["loaders"][source], lanes)
            parts = [tuple(range(first, lanes, count)) for first in range(count)]
            weight = max(1, header["source_bytes"][source] // count)
            for part, worker in zip(parts, spread([weight] * count, workers, used), strict=True):
                used[worker] = used.get(worker, 0) + weight
                record.loaders[source, part] = await self._new_loader(run, source, worker)
        blob = header["blob"]
        buckets = range(record.topology.num_buckets(record.axis))
        count = min(header["constructors"], len(buckets))
        places = spread([1] * (count + 1), workers, {})
        for first in range(count):
            part = tuple(buckets[first::count])
            owner = await self._roles.start_constructor(record.name, blob, places[first], part)
            record.constructors[part] = owner
        # The planner is known before it can speak.
        await self._new_planner(run, places[count])
        run.bump()

    async def _new_loader(self, run: _Run, source: str, worker: str) -> Owner:
        blob, limit = run.header["source_blobs"][source], run.header["loader_bytes"]
        return await self._roles.start_loader(blob, limit, worker)

    async def _new_planner(self, run: _Run, worker: str) -> None:
        owner = await self._roles.start_planner(run.record.name, run.header["blob"], worker)
        run.record.planner = owner
        run.bump()

    async def _close(self, run: str, reason: str) -> None:
        """End a pipeline: trainers are told first, then its roles go."""
        ended = self._runs.get(run)
        if ended is None:
            return
        self._close_record(ended, reason)
        async with ended.lock:
            record = ended.record
            actors = [*record.constructors.values(), *([record.planner] if record.planner else [])]
            await asyncio.gather(
                *(self._roles.stop_actor(run, owner) for owner in actors),
                *(self._roles.stop_loader(owner) for owner in record.loaders.values()),
            )
            record.constructors.clear()
            record.loaders.clear()
            record.planner = None
        if self._runs.get(run) is ended:
            del self._runs[run]

    def _close_record(self, run: _Run, reason: str) -> None:
        run.closed = run.closed or reason
        run.bump()

    async def _on_event(
        self, run: _Run, weights: Mapping[str, float], at_step: int | None
    ) -> int:
        self._check_open(run)
        step = run.record.add_event(weights, at_step)
        await self._write(run, "event", json.dumps({"step": step, "weights": weights}).encode())
        run.bump()
        return step

    async def _on_audit(self, run: _Run) -> dict[str, Any]:
        return run.record.audit()

    async def _on_stats(self, run: _Run) -> dict[str, Any]:
        record = run.record
        loaders = [
            {"source": source, "lanes": list(lanes), "worker": owner.address}
            | await self._roles.loader_status(owner)
            for (source, lanes), owner in record.loaders.items()
        ]
        constructors = [
            {"worker": owner.address} | await self._roles.actor_status(owner)
            for owner in record.constructors.values()
        ]
        states = self._scheduler.workers
        return {
            "generation": record.generation,
            "next_step": record.next_step,
            "ended": record.ended,
            "draw_digest": record.draw_digest,
            "assignment_digest": record.assignment_digest,
            "steps": list(record.history),
            "watermarks": {str(rank): list(mark) for rank, mark in record.watermarks.items()},
            "trainers": {str(rank): claim.process for rank, claim in record.claims.items()},
            "loaders": loaders,
            "constructors": constructors,
            "planner": record.planner.address if record.planner else None,
            "workers": {
                address: {"memory_bytes": state.metrics.get("memory", 0)}
                for address, state in states.items()
            },
            "closed": run.closed,
        }

    # The planner ------------------------------------------------------------------------------

    async def _on_pull(
        self, run: _Run, incarnation: str, generation: int, next_step: int | None, wait_s: float
    ) -> dict[str, Any]:
        record = run.record

        def may_plan() -> bool:
            lead = record.next_step - record.low[0]
            return run.closed is not None or (
                run.error is None and run.active and not record.ended and lead <= run.header["lead_steps"]
            )

        def is_current() -> bool:
            return record.planner is not None and record.planner.incarnation == incarnation

        # A planner speaks before its start is recorded; wait for that, then refuse a stale one.
        await run.changed.wait_until(lambda: run.closed or is_current(), 5.0)
        if not await run.changed.wait_until(lambda: may_plan() or not is_current(), wait_s):
            return {"status": "wait"}
        if run.closed is not None:
            return {"status": "closed"}
        if not is_current():
            raise StaleError(f"{record.name}: this planner was replaced", got=incarnation)
        order: dict[str, Any] = {
            "status": "plan",
            "generation": record.generation,
            "events": [[event.step, dict(event.weights)] for event in record.events],
        }
        if generation != record.generation or next_step != record.next_step:
            order["point"] = record.planner_point.to_json()
        return order

    async def _on_commit(
        self,
        run: _Run,
        incarnation: str,
        generation: int,
        step: int,
        num_events: int,
        plan: bytes,
        unread: Mapping[str, int | None],
    ) -> bool:
        self._check_open(run)
        try:
            committed = run.record.commit(generation, incarnation, step, num_events, plan)
        except StaleError:
            if run.record.planner and run.record.planner.incarnation == incarnation:
                return False  # the same planner, overtaken by a new generation: it pulls again
            raise
        if committed:
            run.record.unread = dict(unread)
            await self._write(run, "plan", plan)
            run.bump()
        return committed

    async def _on_fail(self, run: _Run, incarnation: str, error: bytes) -> None:
        """A role cannot go on: the trainers get its error, behind what is committed already."""
        record = run.record
        owners = [*record.constructors.values(), *([record.planner] if record.planner else [])]
        if run.closed is None and any(owner.incarnation == incarnation for owner in owners):
            logger.error("%s failed at step %d", record.name, record.next_step)
            run.error = error
            run.bump()

    # The constructors -------------------------------------------------------------------------

    async def _on_plans(
        self, run: _Run, incarnation: str, generation: int, from_step: int, newer_than: int, wait_s: float
    ) -> dict[str, Any]:
        record = run.record
        await run.changed.wait_until(lambda: run.version > newer_than, wait_s)
        if run.closed is not None:
            return self._closed(run)
        first = from_step if generation == record.generation else 0
        return {
            "status": "plans",
            "version": run.version,
            "generation": record.generation,
            "tokens": [[rank, claim.token] for rank, claim in record.claims.items()],
            "marks": [[rank, *mark] for rank, mark in record.watermarks.items()],
            "error": run.error,
            "plans": [record.plans[step].data for step in sorted(record.plans) if step >= first],
        }

    async def _on_acknowledge(self, run: _Run, generation: int, marks: list[list[int]]) -> None:
        record = run.record
        before = record.low
        record.acknowledge(generation, {rank: (step, micro) for rank, step, micro in marks})
        if record.low > before:
            await self._write(run, "marks", json.dumps({"low": record.low}).encode())
            run.bump()

    async def _on_owners(self, run: _Run, newer_than: int, wait_s: float) -> dict[str, Any]:
        """Return who owns which lanes, waiting for news where the caller knows as much."""
        await run.changed.wait_until(lambda: run.version > newer_than, wait_s)
        self._check_open(run)
        loaders: dict[str, list[list[Any]]] = {source: [] for source in run.record.lanes}
        for (source, lanes), owner in run.record.loaders.items():
            loaders[source].append([list(lanes), owner.address, owner.incarnation])
        return {"version": run.version, "loaders": loaders}

    # The trainers -----------------------------------------------------------------------------

    async def _on_join(
        self, run: _Run, rank: int, client: str, process: str, force: bool
    ) -> dict[str, Any]:
        self._check_open(run)
        self._drop_lapsed(run)
        claim = run.record.join(rank, client, process, force=force)
        run.bump()
        return {
            "token": claim.token,
            "sources": list(run.record.lanes),
            "components": run.header["components"],
            "restart": run.header["restart"],
            "world_size": run.record.topology.world_size,
            **self._standing(run, rank),
        }

    async def _on_look(self, run: _Run, rank: int, token: str) -> dict[str, Any]:
        """Return where a rank stands and who serves it now."""
        if run.closed is not None:
            return self._closed(run)
        run.record.check_token(rank, token)
        return self._standing(run, rank)

    async def _on_leave(self, run: _Run, rank: int, token: str) -> None:
        run.record.leave(rank, token)
        run.bump()

    async def _on_rewind(
        self,
        run: _Run,
        rank: int,
        token: str,
        point: str | None,
        refusals: int,
        wait_s: float,
    ) -> dict[str, Any]:
        """Go back to a point, or to the pipeline's own beginning, with all other ranks.

        refusals: how many refused attempts the caller knows of, -1 when it asks for the first time.
        """
        if run.closed is not None or run.error is not None:
            return self._closed(run)
        record = run.record
        asked = Point.from_json(run.header["origin"] if point is None else point)
        generation = record.generation
        if refusals < 0:
            refusals = record.refused[0]
        if record.refused[0] != refusals:
            record.refuse()
        done = record.rewind(rank, token, asked)
        if done:
            await self._opened(run, generation)
        else:
            await run.changed.wait_until(
                lambda: record.generation != generation
                or record.refused[0] != refusals
                or run.closed is not None,
                wait_s,
            )
            if record.refused[0] != refusals:
                record.refuse()
            done = record.generation != generation and record.origin == asked
        if run.closed is not None:
            return self._closed(run)
        status = {"status": "done" if done else "wait", "refusals": record.refused[0]}
        return {**status, **self._standing(run, rank)}

    async def _on_finish(self, run: _Run, rank: int, token: str) -> None:
        """A rank is done with its pass over a pipeline that restarts; free what is held for it."""
        run.record.check_token(rank, token)
        run.finished.add(rank)
        if run.header["restart"] and len(run.finished) == run.record.topology.world_size:
            generation = run.record.generation
            run.record.open_generation(Point.from_json(run.header["origin"]))
            await self._opened(run, generation, active=False)

    async def _opened(self, run: _Run, before: int, *, active: bool = True) -> None:
        """Note that a generation was opened, or taken up where it stood."""
        run.active = active
        run.finished.clear()
        if run.record.generation != before and run.journal is not None:
            body = _open_body(run.header, run.record)
            await asyncio.to_thread(run.journal.begin, run.record.generation, body)
        run.bump()

    def _standing(self, run: _Run, rank: int) -> dict[str, Any]:
        record = run.record
        bucket = record.topology.bucket_of(rank, record.axis)
        owner = next((o for part, o in record.constructors.items() if bucket in part), None)
        mark = record.watermarks[rank]
        return {
            "generation": record.generation,
            "origin": record.origin.digest,
            "mark": list(mark),
            "point": record.point_at(mark).to_json(),
            "constructor": actor_key(owner.incarnation) if owner else None,
        }

    def _drop_lapsed(self, run: _Run) -> None:
        """Free the ranks of trainers that Dask has not heard of for longer than the lease."""
        clients = self._scheduler.clients
        for claim in list(run.record.claims.values()):
            state = clients.get(claim.client)
            silent_s = None if state is None else _now() - state.last_seen
            if silent_s is None or silent_s > run.header["lease_s"]:
                run.record.drop_client(claim.client)

    # Faults -----------------------------------------------------------------------------------

    async def _recover(self, run: _Run, worker: str) -> None:
        """Re-create on other workers what a lost worker held."""
        try:
            async with run.lock:
                await self._replace(run, worker)
        except Exception as error:  # whatever it is, the trainers must hear of it
            logger.exception("%s: cannot replace what %s held", run.record.name, worker)
            run.error = pack_error(error)
            self._close_record(run, "a lost worker could not be replaced")

    async def _replace(self, run: _Run, worker: str) -> None:
        record = run.record
        if run.closed is not None:
            return
        for (source, lanes), owner in list(record.loaders.items()):
            if owner.address == worker:
                [place] = spread([1], await self._some_workers(run), _load(record))
                record.loaders[source, lanes] = await self._new_loader(run, source, place)
                logger.warning("%s: loader of %r moved from %s to %s", record.name, source, worker, place)
                run.bump()
        for part, owner in list(record.constructors.items()):
            if owner.address == worker:
                [place] = spread([1], await self._some_workers(run), _load(record))
                await self._roles.stop_actor(record.name, owner)
                new = await self._roles.start_constructor(record.name, run.header["blob"], place, part)
                record.constructors[part] = new
                logger.warning("%s: constructor moved from %s to %s", record.name, worker, place)
                run.bump()
        if record.planner is not None and record.planner.address == worker:
            [place] = spread([1], await self._some_workers(run), _load(record))
            await self._roles.stop_actor(record.name, record.planner)
            await self._new_planner(run, place)
            logger.warning("%s: planner moved from %s to %s", record.name, worker, place)

    async def _some_workers(self, run: _Run) -> list[str]:
        """Return the running workers, waiting for one as long as roles wait for lost partners."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + run.header["recovery_s"]
        while not (workers := self._roles.workers()) and loop.time() < deadline:
            await asyncio.sleep(0.1)
        return workers

    # Common -----------------------------------------------------------------------------------

    def _check_open(self, run: _Run) -> None:
        if run.closed is not None:
            raise ClosedError(f"{run.record.name} is closed: {run.closed}")

    def _closed(self, run: _Run) -> dict[str, Any]:
        return {"status": "closed", "reason": run.closed or "it failed", "error": run.error}

    async def _write(self, run: _Run, kind: Any, body: bytes) -> None:
        """Write to the journal before the caller gets its answer."""
        if run.journal is not None:
            try:
                await asyncio.to_thread(run.journal.append, kind, body)
            except ServiceError as error:
                run.error = pack_error(error)
                self._close_record(run, "its journal cannot be written")
                raise

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _open_journal(header: Mapping[str, Any], record: RunRecord) -> Journal:
    """Open the journal of a run. Refuses one whose acknowledged steps no state accounts for."""
    journal = Journal(header["checkpoint"])
    generations = journal.generations()
    if generations:
        last = journal.read(generations[-1])
        done = acknowledged_step(last)
        if done and not header["resumed"]:
            raise ConfigError(
                f"the checkpoint path {header['checkpoint']} holds a run",
                got=f"generation {generations[-1]}, acknowledged up to step {done}",
                remedy="Pass serve(resume=state) with the trainers' state, or use another path.",
            )
        record.generation = generations[-1] + 1
    journal.begin(record.generation, _open_body(header, record))
    return journal


def _open_body(header: Mapping[str, Any], record: RunRecord) -> bytes:
    body = {"components": header["components"], "origin": record.origin.to_json(), "run": record.name}
    return json.dumps(body).encode()


def _load(record: RunRecord) -> dict[str, int]:
    """Return how many roles every worker bears."""
    load: dict[str, int] = {}
    owners = [*record.loaders.values(), *record.constructors.values()]
    for owner in [*owners, *([record.planner] if record.planner else [])]:
        load[owner.address] = load.get(owner.address, 0) + 1
    return load


def _axis(axis: Any) -> Any:
    return tuple(axis) if isinstance(axis, list) else axis


def _now() -> float:
    from distributed.metrics import time

    return time()


