"""Which worker holds which role: casting at the start, and again when a worker is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megadask.scheduling.errors import LostError, pack_error
from megadask.scheduling.life import Owner
from megadask.scheduling.record import RunRecord
from megadask.scheduling.roles import Roles
from megadask.scheduling.run import Run
from megadask.scheduling.splitting import Part, level, resplit, spread
from megadask.scheduling.wire import side_by_side

logger = logging.getLogger(__name__)

#: Starts a role and returns who holds it.
Start = Callable[[], Awaitable[Owner]]

#: Roles that are started at a time.
MOST_STARTS = 32


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
            starts: dict[tuple[str, Part], Start] = {}
            for source, lanes in record.lanes.items():
                count = min(header["loaders"][source], lanes)
                weight = max(1, header["source_bytes"][source] // count)
                for first, worker in enumerate(spread([weight] * count, workers, used)):
                    used[worker] = used.get(worker, 0) + weight
                    part = tuple(range(first, lanes, count))
                    start = partial(self._new_loader, run, source, part)
                    starts[source, part] = partial(self._cast, run, start, worker)
            await side_by_side(starts, MOST_STARTS, record.loaders)
            await self._tend(run)
            await self._cast_actors(run, workers)

    async def recast(self, run: Run) -> None:
        """Create actors where there are none; for whoever holds ``run.custody``."""
        try:
            await self._cast_actors(run, self._roles.workers())
        except Exception as error:
            run.error = pack_error(error)
            run.close("its roles could not be started on the new topology")
            raise

    def dismiss(self, run: Run) -> list[Owner]:
        """Take their roles from the constructors and the planner, and return them."""
        record = run.record
        actors = _actors(record)
        record.constructors.clear()
        record.planner = None
        return actors

    async def stop(self, run: Run, actors: Sequence[Owner]) -> None:
        """Let actors go that have no role any more."""
        await asyncio.gather(*(self._roles.stop_actor(run.name, owner) for owner in actors))

    async def end(self, run: Run) -> None:
        """Let all roles go."""
        async with run.custody:
            record = run.record
            await asyncio.gather(
                self.stop(run, self.dismiss(run)),
                self._roles.stop_loaders(loaders_of(record)),
                self._close_dropped(run),
            )
            record.loaders.clear()
            record.shadows.clear()

    async def recover(self, run: Run, worker: str) -> None:
        """Re-create on other workers what a lost worker held; a run that cannot have it ends."""
        try:
            async with run.custody:
                await self._replace(run, worker)
                await self._tend(run)
        except Exception as error:  # whatever it is, the trainers must hear of it
            logger.exception("%s: cannot replace what %s held", run.name, worker)
            run.error = pack_error(error)
            run.close("a lost worker could not be replaced")

    async def vacate(self, run: Run, worker: str) -> None:
        """Move what a worker holds to others, while it goes on until they have it.

        Raises LostError if nobody can take it; what has not moved by then stays.
        """
        async with run.custody:
            await self._replace(run, worker, is_lost=False)
            await self._tend(run)

    async def scale(self, run: Run, counts: Mapping[str, int]) -> None:
        """Split the lanes of sources over so many loaders each, while those that read go on.

        Raises LostError or ServiceError where no worker takes a new one; then nothing has changed.
        """
        async with run.custody:
            run.check_open()
            burden = _burden(run.record)
            splits: dict[str, list[tuple[Part | None, Part]]] = {}
            for source, count in counts.items():
                owners = {
                    part: o for (name, part), o in run.record.loaders.items() if name == source
                }
                light = sorted(owners, key=lambda part: burden[owners[part].address])
                splits[source] = resplit(light, count)
            opened = await self._open_new(run, splits, burden)
            gone = self._resplit(run, splits, opened)
            told = [
                self._roles.keep_lanes(owner, lanes)
                for source, split in splits.items()
                for _, lanes in split
                for owner in _group(run.record, (source, lanes))
            ]
            await asyncio.gather(*told, *map(self._roles.stop_loader, gone))
            await self._tend(run)

    async def level(self, run: Run) -> None:
        """Spread the roles evenly over the workers that there are; as few move as that takes."""
        async with run.custody:
            run.check_open()
            record = run.record
            owners = [*loaders_of(record), *_actors(record)]  # loaders move before actors do
            key_of = {o.incarnation: key for key in record.loaders for o in _group(record, key)}
            apart = [key_of.get(owner.incarnation, owner) for owner in owners]
            workers = self._roles.workers()
            places = level([owner.address for owner in owners], workers, apart)
            for owner, worker in zip(owners, places, strict=True):
                if owner.address != worker and not run.over:
                    await self._move(run, owner, worker)
            await self._tend(run)

    async def tend(self, run: Run) -> None:
        """Give loaders the shadows that they lack, as far as there are workers for them."""
        async with run.custody:
            await self._tend(run)

    async def status(self, run: Run) -> dict[str, Any]:
        """Return what loaders and constructors say of themselves."""
        record, roles = run.record, self._roles

        async def of_loader(source: str, lanes: tuple[int, ...], owner: Owner) -> dict[str, Any]:
            known = {"source": source, "lanes": list(lanes), "worker": owner.address}
            return known | await roles.loader_status(owner)

        async def of_actor(owner: Owner) -> dict[str, Any]:
            return {"worker": owner.address} | await roles.actor_status(owner)

        # All at once: those on a worker that hangs are waited for once.
        loaders, shadows, constructors = await asyncio.gather(
            asyncio.gather(*(of_loader(*key, owner) for key, owner in record.loaders.items())),
            asyncio.gather(
                *(of_loader(*key, one) for key, own in record.shadows.items() for one in own)
            ),
            asyncio.gather(*map(of_actor, record.constructors.values())),
        )
        planner = record.planner.address if record.planner else None
        return {
            "loaders": loaders,
            "shadows": shadows,
            "constructors": constructors,
            "planner": planner,
            "events": list(record.news),
        }

    async def _cast_actors(self, run: Run, workers: Sequence[str]) -> None:
        """Create the constructors and the planner, spread over workers."""
        record = run.record
        buckets = range(record.topology.num_buckets(record.axis))
        count = min(run.header["constructors"], len(buckets))
        places = spread([1] * (count + 1), workers, {})
        starts: dict[Part, Start] = {}
        for first in range(count):
            part = tuple(buckets[first::count])
            start = partial(self._new_constructor, run, part)
            starts[part] = partial(self._cast, run, start, places[first])
        await side_by_side(starts, MOST_STARTS, record.constructors)
        record.planner = await self._cast(run, partial(self._new_planner, run), places[count])
        run.bump()

    async def _replace(self, run: Run, worker: str, *, is_lost: bool = True) -> None:
        """Put others in the place of all roles of a worker.

        Actors that are lost end first: where they are pinned to, one may come again. Those of a
        worker that lives go on until their successor is there.
        """
        record = run.record
        if run.over:
            return
        gone = [owner for owner in loaders_of(record) if owner.address == worker]
        promoted = self._promote(run, worker)
        await asyncio.gather(*(self._roles.promote_loader(owner) for owner in promoted))
        kept = loaders_of(record)
        await asyncio.gather(*(self._roles.stop_loader(one) for one in gone if one not in kept))
        for owner in [*record.loaders.values(), *_actors(record)]:
            if owner.address == worker:
                await self._move(run, owner, is_lost=is_lost)

    async def _move(
        self, run: Run, owner: Owner, worker: str | None = None, *, is_lost: bool = False
    ) -> None:
        """Put another in the place of one that holds a role; worker: as `_cast` takes it."""
        record, roles = run.record, self._roles
        for key, found in record.loaders.items():
            if found == owner:
                now = await self._cast(run, partial(self._new_loader, run, *key), worker)
                record.loaders[key] = now
                self._moved(run, f"loader of {key[0]!r}", owner, now)
                return await roles.stop_loader(owner)
        for standbys in record.shadows.values():
            if owner in standbys:  # whoever tends them makes another
                standbys.remove(owner)
                return await roles.stop_loader(owner)
        if is_lost:
            await roles.stop_actor(run.name, owner)
        for part, found in record.constructors.items():
            if found == owner:
                now = await self._cast(run, partial(self._new_constructor, run, part), worker)
                record.constructors[part] = now
                self._moved(run, "constructor", owner, now)
        if record.planner == owner:
            now = record.planner = await self._cast(run, partial(self._new_planner, run), worker)
            self._moved(run, "planner", owner, now)
        await roles.stop_actor(run.name, owner)

    async def _open_new(
        self,
        run: Run,
        splits: Mapping[str, Sequence[tuple[Part | None, Part]]],
        burden: Mapping[str, int],
    ) -> dict[tuple[str, Part], Owner]:
        """Open the loaders that a split needs besides the present ones; all of them, or none."""
        wanted = [(s, lanes) for s, split in splits.items() for old, lanes in split if old is None]
        places = spread([1] * len(wanted), self._roles.workers(), burden)
        opened: dict[tuple[str, Part], Owner] = {}
        try:
            for key, worker in zip(wanted, places, strict=True):
                opened[key] = await self._cast(run, partial(self._new_loader, run, *key), worker)
        except BaseException:
            await asyncio.gather(*map(self._roles.stop_loader, opened.values()))
            raise
        return opened

    def _resplit(
        self,
        run: Run,
        splits: Mapping[str, Sequence[tuple[Part | None, Part]]],
        opened: Mapping[tuple[str, Part], Owner],
    ) -> list[Owner]:
        """Let lanes change hands, all at once; return the loaders and standbys that have none."""
        record, gone = run.record, []
        for source, split in splits.items():
            keys = [key for key in record.loaders if key[0] == source]
            before = {key[1]: record.loaders.pop(key) for key in keys}
            standbys = {key[1]: record.shadows.pop(key, []) for key in keys}
            for old, lanes in split:
                new = opened[source, lanes] if old is None else before.pop(old)
                record.loaders[source, lanes] = new
                record.shadows[source, lanes] = [] if old is None else standbys.pop(old)
            gone += [*before.values(), *(one for own in standbys.values() for one in own)]
            record.note("scaled", source=source, loaders=len(split))
        record.num_casts += 1
        run.bump()
        return gone

    def _promote(self, run: Run, worker: str) -> list[Owner]:
        """Put shadows in the place of loaders on a lost worker, and return them."""
        record, promoted = run.record, []
        for key, standbys in record.shadows.items():
            record.shadows[key] = [owner for owner in standbys if owner.address != worker]
            record.num_casts += len(standbys) - len(record.shadows[key])
        for key, owner in list(record.loaders.items()):
            if owner.address == worker and record.shadows.get(key):
                now = record.loaders[key] = record.shadows[key].pop(0)
                self._moved(run, f"loader of {key[0]!r}", owner, now, "shadow promoted")
                promoted.append(now)
        return promoted

    async def _close_dropped(self, run: Run) -> None:
        dropped, run.dropped = run.dropped, []
        await asyncio.gather(*map(self._roles.stop_loader, dropped))

    async def _tend(self, run: Run) -> None:
        record = run.record
        await self._close_dropped(run)
        for (source, lanes), owner in list(record.loaders.items()):
            standbys = record.shadows.setdefault((source, lanes), [])
            while not run.over and len(standbys) < run.header["shadows"][source]:
                taken = {owner.address, *(one.address for one in standbys)}
                free = [worker for worker in self._roles.workers() if worker not in taken]
                hosts = {self._roles.host_of(address) for address in taken}
                elsewhere = [worker for worker in free if self._roles.host_of(worker) not in hosts]
                if not free:
                    logger.info("%s: no worker is left for a shadow of %r", run.name, source)
                    return
                [worker] = spread([1], elsewhere or free, _burden(record))
                try:
                    standbys.append(
                        await self._new_loader(run, source, lanes, worker, standby=True)
                    )
                except LostError as error:  # whoever comes next brings this here again
                    logger.info("%s: %s", run.name, error)
                    return
                record.num_casts += 1
                run.bump()

    def _moved(
        self, run: Run, role: str, before: Owner, now: Owner, what: str = "role moved"
    ) -> None:
        logger.warning("%s: %s moved from %s to %s", run.name, role, before.address, now.address)
        run.record.note(what, role=role, before=before.address, now=now.address)
        run.record.num_casts += 1
        run.bump()

    async def _cast(
        self, run: Run, start: Callable[[str], Awaitable[Owner]], worker: str | None = None
    ) -> Owner:
        """Start a role on a worker; on another one as often as that is lost meanwhile.

        worker: where to try first; None for the one that bears the fewest roles. Waits for workers
        as long as partners wait for the role.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + run.header["recovery_s"]
        lost: set[str] = set()
        while True:
            if worker is None:
                workers = await self._roles.other_workers(lost, deadline - loop.time())
                [worker] = spread([1], workers, _burden(run.record))
            try:
                return await start(worker)
            except LostError as error:
                logger.info("%s: %s", run.name, error)
                if loop.time() > deadline:
                    raise
                lost.add(worker)
                worker = None

    async def _new_loader(
        self, run: Run, source: str, lanes: Part, worker: str, *, standby: bool = False
    ) -> Owner:
        blob, limit = run.header["source_blobs"][source], run.header["loader_bytes"]
        return await self._roles.start_loader(source, blob, limit, worker, lanes, standby=standby)

    async def _new_constructor(self, run: Run, buckets: tuple[int, ...], worker: str) -> Owner:
        return await self._roles.start_constructor(run.name, run.header["blob"], worker, buckets)

    async def _new_planner(self, run: Run, worker: str) -> Owner:
        return await self._roles.start_planner(run.name, run.header["blob"], worker)


def loaders_of(record: RunRecord) -> list[Owner]:
    """Return the loaders of all sources, and the standbys."""
    return [*record.loaders.values(), *(one for own in record.shadows.values() for one in own)]


def owners_of(record: RunRecord) -> list[Owner]:
    """Return who holds any role."""
    return [*loaders_of(record), *_actors(record)]


def _actors(record: RunRecord) -> list[Owner]:
    return [*record.constructors.values(), *([record.planner] if record.planner else [])]


def _group(record: RunRecord, key: tuple[str, Part]) -> list[Owner]:
    """Return the loader of some lanes, and its standbys."""
    return [record.loaders[key], *record.shadows.get(key, ())]


def _burden(record: RunRecord) -> dict[str, int]:
    """Return how many roles every worker bears."""
    burden: dict[str, int] = {}
    for owner in owners_of(record):
        burden[owner.address] = burden.get(owner.address, 0) + 1
    return burden
