"""Finds workers that hang without dying, and takes them back when they wake; and silent drivers.

Dask gives a silent worker up after minutes (``worker-ttl``), and calls to it hang for as long. Here
its roles move once it has sent no heartbeat for `Limits.silent_s`. What it says when it wakes is of
an earlier life, and ignored; loaders that it still has open are closed before it is used again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from distributed import Scheduler

from megadask.scheduling.custody import loaders_of
from megadask.scheduling.roles import Roles
from megadask.scheduling.run import Run
from megadask.scheduling.silence import Silence

logger = logging.getLogger(__name__)

#: Longest time between two looks.
LOOK_S = 1.0


class Watch:
    """Watches the workers of one cluster.

    Parameters
    ----------
    scheduler
        Takes the workers' heartbeats.
    roles
        Told of workers that come back.
    runs
        The services, by name; they change.
    give_up
        Called with a worker that has been silent for too long.
    lapse
        Called with the Dask client of a driver that has been silent for longer than its lease.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        roles: Roles,
        runs: Mapping[str, Run],
        give_up: Callable[[str], None],
        lapse: Callable[[str], None],
    ) -> None:
        self._scheduler = scheduler
        self._roles = roles
        self._runs = runs
        self._give_up = give_up
        self._lapse = lapse
        self._silence = Silence()
        self._drivers = Silence()

    async def watch(self) -> None:
        """Look again and again, for as long as the scheduler lives."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            limit_s = min(self._limits_s(), default=4 * LOOK_S)
            period_s = min(LOOK_S, limit_s / 4)
            await asyncio.sleep(period_s)
            now = loop.time()
            try:
                self._look(now - before, 2 * period_s)
                self._look_for_drivers(now - before, 2 * period_s)
                await asyncio.gather(*map(self._take_back, self._silence.awake))
            except Exception:  # a watch that ends would never be missed
                logger.exception("cannot watch the workers")
            before = now

    def _limits_s(self) -> list[float]:
        return [float(run.header["silent_s"]) for run in self._runs.values() if not run.over]

    def _look(self, elapsed_s: float, most_s: float) -> None:
        lost = self._silence.look(
            {one.address: one.last_seen for one in self._scheduler.workers.values()},
            elapsed_s=elapsed_s,
            most_s=most_s,
            limit_s=min(self._limits_s(), default=float("inf")),
        )
        for worker in lost:
            logger.warning("worker %s is silent; its roles move to others", worker)
            self._tell("worker silent", worker)
            self._give_up(worker)

    def _look_for_drivers(self, elapsed_s: float, most_s: float) -> None:
        runs = [r for r in self._runs.values() if not r.over and not r.header["detached"]]
        clients = self._scheduler.clients
        lost = self._drivers.look(
            {run.client: clients[run.client].last_seen for run in runs if run.client in clients},
            elapsed_s=elapsed_s,
            most_s=most_s,
            limit_s=min((run.header["lease_s"] for run in runs), default=float("inf")),
        )
        for client in lost:
            self._lapse(client)

    async def _take_back(self, worker: str) -> None:
        """Use a worker again, once it has let go of what was given to others."""
        keep = [
            owner.incarnation
            for run in self._runs.values()
            for owner in loaders_of(run.record)
            if owner.address == worker
        ]
        if await self._roles.take_back(worker, keep):
            logger.warning("worker %s answers again", worker)
            self._silence.welcome(worker)
            self._tell("worker awake", worker)

    def _tell(self, what: str, worker: str) -> None:
        for run in self._runs.values():
            run.record.note(what, worker=worker)
