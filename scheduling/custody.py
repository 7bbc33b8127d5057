"""Which worker holds which role: casting at the start, and again when a worker is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megadask.scheduling.errors import ServiceError, pack_error
from megadask.scheduling.record import Owner, RunRecord
from megadask.scheduling.roles import Roles
from megadask.scheduling.run import Run

logger = logging.getLogger(__name__)


class Custody:
    """Casts the roles of runs on workers, by way of `Roles`."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles

    async def start(self, run: Run) -> None:
        """Create all roles: loaders by the bytes of their sources, actors apart."""
        async with run.custody:
            workers = self._roles.workers()
            record, header = run.record, run.header
            used: dict[str, int] = {}
            for source, lanes in record.lanes.items():
                count = min(header["loaders"][source], lanes)
                weight = max(1, header["source_bytes"][source] // count)
                for first, worker in enumerate(spread([weight] * count, workers, used)):
                    used[worker] = used.get(worker, 0) + weight
                    part = tuple(range(first, lanes, count))
                    record.loaders[source, part] = await self._new_loader(run, source, worker)
            buckets = range(record.topology.num_buckets(record.axis))
            count = min(header["constructors"], len(buckets))
            places = spread([1] * (count + 1), workers, {})
            for first in range(count):
                await self._new_constructor(run, tuple(buckets[first::count]), places[first])
            await self._new_planner(run, places[count])

    async def end(self, run: Run) -> None:
        """Let all roles go."""
        async with run.custody:
            record = run.record
            actors = [*record.constructors.values(), *([record.planner] if record.planner else [])]
            await asyncio.gather(
                *(self._roles.stop_actor(run.name, owner) for owner in actors),
                *(self._roles.stop_loader(owner) for owner in record.loaders.values()),
            )
            record.constructors.clear()
            record.loaders.clear()
            record.planner = None

    async def recover(self, run: Run, worker: str) -> None:
        """Re-create on other workers what a lost worker held; a run that cannot have it ends."""
        try:
            async with run.custody:
                await self._replace(run, worker)
        except Exception as error:  # whatever it is, the trainers must hear of it
            logger.exception("%s: cannot replace what %s held", run.name, worker)
            run.error = pack_error(error)
            run.close("a lost worker could not be replaced")

    async def status(self, run: Run) -> dict[str, Any]:
        """Return what loaders and constructors say of themselves."""
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
        planner = record.planner.address if record.planner else None
        return {"loaders": loaders, "constructors": constructors, "planner": planner}

    async def _replace(self, run: Run, worker: str) -> None:
        record = run.record
        if run.over:
            return
        for (source, lanes), owner in list(record.loaders.items()):
            if owner.address == worker:
                place = await self._place(run)
                record.loaders[source, lanes] = await self._new_loader(run, source, place)
                self._moved(run, f"loader of {source!r}", worker, place)
        for part, owner in list(record.constructors.items()):
            if owner.address == worker:
                place = await self._place(run)
                await self._roles.stop_actor(run.name, owner)
                await self._new_constructor(run, part, place)
                self._moved(run, "constructor", worker, place)
        if record.planner is not None and record.planner.address == worker:
            place = await self._place(run)
            await self._roles.stop_actor(run.name, record.planner)
            await self._new_planner(run, place)
            self._moved(run, "planner", worker, place)

    def _moved(self, run: Run, role: str, before: str, now: str) -> None:
        logger.warning("%s: %s moved from %s to %s", run.name, role, before, now)
        run.bump()

    async def _place(self, run: Run) -> str:
        """Return the worker that bears the fewest roles, waiting for one as long as partners do."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + run.header["recovery_s"]
        while not (workers := self._roles.workers()) and loop.time() < deadline:
            await self._roles.wait_for_worker(deadline - loop.time())
        [place] = spread([1], workers, _burden(run.record))
        return place

    async def _new_loader(self, run: Run, source: str, worker: str) -> Owner:
        blob, limit = run.header["source_blobs"][source], run.header["loader_bytes"]
        return await self._roles.start_loader(source, blob, limit, worker)

    async def _new_constructor(self, run: Run, buckets: tuple[int, ...], worker: str) -> None:
        owner = await self._roles.start_constructor(run.name, run.header["blob"], worker, buckets)
        run.record.constructors[buckets] = owner
        run.bump()

    async def _new_planner(self, run: Run, worker: str) -> None:
        run.record.planner = await self._roles.start_planner(run.name, run.header["blob"], worker)
        run.bump()


def spread(weights: Sequence[int], workers: Sequence[str], used: Mapping[str, int]) -> list[str]:
    """Return a worker for each of some roles: heaviest first, onto the least loaded.

    weights: what each role weighs; used: worker to the weight it bears already.
    """
    if not workers:
        raise ServiceError(
            "the cluster has no running worker",
            remedy="Start workers, or wait for them: client.wait_for_workers(n).",
        )
    load = {worker: used.get(worker, 0) for worker in workers}
    placed = [""] * len(weights)
    for role in sorted(range(len(weights)), key=lambda r: (-weights[r], r)):
        worker = min(workers, key=lambda w: (load[w], w))
        load[worker] += weights[role]
        placed[role] = worker
    return placed


def _burden(record: RunRecord) -> dict[str, int]:
    """Return how many roles every worker bears."""
    burden: dict[str, int] = {}
    owners = [*record.loaders.values(), *record.constructors.values()]
    for owner in [*owners, *([record.planner] if record.planner else [])]:
        burden[owner.address] = burden.get(owner.address, 0) + 1
    return burden
