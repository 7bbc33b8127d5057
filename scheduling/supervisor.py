"""The Supervisor: a Dask scheduler plugin that guards the committed record of every pipeline.

Roles, trainers and drivers call its one handler. `calls` says what they can ask, `RunRecord`
decides, `Custody` re-creates what a lost worker held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.comm.core import Comm
from distributed.metrics import time
from distributed.scheduler import WorkerState

from megadask.scheduling.autosize import Autosize
from megadask.scheduling.calls import CALLS
from megadask.scheduling.custody import Custody
from megadask.scheduling.errors import ClosedError, ServiceError
from megadask.scheduling.quiet import keep_quiet
from megadask.scheduling.resharding import reshard
from megadask.scheduling.retiring import holders, retire
from megadask.scheduling.roles import Roles
from megadask.scheduling.run import Run, new_run
from megadask.scheduling.watch import Watch
from megadask.scheduling.wire import ARRIVAL, SUPERVISOR, Signal

#: So many services that have ended are remembered, for trainers that ask about them.
MOST_ENDED = 1000
#: How often all claims are looked at for trainers that are gone, while free ranks are taken.
SWEEP_S = 1.0
#: How long a trainer or driver whose connection ends has to make another one.
RECONNECT_S = 2.0


class Supervisor(SchedulerPlugin):
    """Guards the records of all services of one Dask cluster."""

    name = "megadask-supervisor"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Answer calls."""
        keep_quiet()
        self._scheduler = scheduler
        self._runs: dict[str, Run] = {}
        self._clients = Signal()  # that one came
        self._ended: dict[str, str] = {}  # name of a run that is gone to why it ended
        self._roles = Roles(scheduler)
        self._custody = Custody(self._roles)
        self._roles.on_arrival = self._worker_came
        self._tasks: set[asyncio.Task[None]] = set()
        watch = Watch(
            scheduler, self._roles, self._runs, self._worker_is_lost, self._driver_is_lost
        )
        autosize = Autosize(self._roles, self._custody, self._runs)
        self._watching = [
            asyncio.create_task(watch.watch(), name="megadask watch"),
            asyncio.create_task(autosize.follow(), name="megadask autosize"),
        ]
        scheduler.handlers[SUPERVISOR] = self.handle
        scheduler.handlers[ARRIVAL] = self._roles.worker_came

    async def before_close(self) -> None:
        """Tell the trainers that the cluster goes."""
        for run in self._runs.values():
            run.close("the Dask scheduler was closed")
        for watching in self._watching:
            watching.cancel()
        await self._roles.close()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Re-create what a lost worker held."""
        self._worker_is_lost(worker)

    def _worker_is_lost(self, worker: str) -> None:
        self._roles.worker_left(worker)
        for run in self._runs.values():
            if not run.over:
                self._spawn(self._custody.recover(run, worker))

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Keep adaptive scaling from closing workers that hold roles."""
        held = holders(self._runs.values())
        return [worker for worker in workers if worker.address not in held]

    def _worker_came(self) -> None:
        """Let shadows begin that had no worker."""
        for run in self._runs.values():
            if not run.over and any(run.header["shadows"].values()):
                self._spawn(self._custody.tend(run))

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Go on with a client whose connection was cut, as it is back."""
        self._clients.set()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Wait for a client that may only have been cut off; Dask's clients connect again."""
        self._spawn(self._client_left(client))

    async def _client_left(self, client: str) -> None:
        """Free the ranks of a trainer that is gone; close the services of a driver that is."""
        known = self._scheduler.clients
        if await self._clients.wait_until(lambda: client in known, RECONNECT_S):
            return
        self._driver_is_lost(client, "is gone")
        for run in list(self._runs.values()):
            if run.drop_client(client) and not run.over:
                self._spawn(run.turn_pass())

    def _driver_is_lost(
        self, client: str, what: str = "was silent for longer than lease_s"
    ) -> None:
        """Close the services of a driver, but for those that are to outlive it."""
        for run in list(self._runs.values()):
            if run.client == client and not run.header["detached"] and not run.over:
                run.close(f"the driver that called serve() {what}")
                self._spawn(self._end(run))

    async def handle(self, comm: Comm, call: str, run: str, **arguments: Any) -> Any:
        """Carry out one call about one pipeline."""
        try:
            return await self._carry_out(call, run, **arguments)
        except ServiceError:
            if not comm.closed():
                raise
            return None  # whoever asked is gone; Dask would only log that nobody can be told

    async def _carry_out(
        self, call: str, run: str, ident: str | None = None, **arguments: Any
    ) -> Any:
        """Carry out a call; ``ident`` says about which pipeline of that name."""
        if call == "start":
            return await self._start(run, **arguments)
        if call == "close":
            return await self._close(run, ident, **arguments)
        if run not in self._runs and run in self._ended and call != "join":
            raise ClosedError(
                f"{run} is closed: {self._ended[run]}",
                remedy="Serve it again and connect anew, or resume from the last state_dict().",
            )
        known = self._known(run)
        if ident not in (None, known.header["ident"]):
            raise ClosedError(
                f"{run} is closed: another service took its name",
                remedy="Connect again for the new one; to have both, give one another name: "
                "md.serve(..., name=...).",
            )
        if call == "audit":
            return known.record.audit()
        if call == "stats":
            return await self._stats(known)
        if call == "reshard":
            return await reshard(known, self._custody, **arguments)
        if call == "scale":
            return await self._custody.scale(known, **arguments)
        if call == "level":
            return await self._custody.level(known)
        if call == "retire":
            runs = list(self._runs.values())
            return await retire(
                scheduler=self._scheduler,
                roles=self._roles,
                custody=self._custody,
                runs=runs,
                **arguments,
            )
        if call == "join":
            self._drop_lapsed(known, arguments["rank"])
        return await CALLS[call](known, **arguments)

    def _known(self, name: str) -> Run:
        run = self._runs.get(name)
        if run is None:
            names = sorted(other for other, one in self._runs.items() if not one.over)
            raise ServiceError(
                "there is no such service on this cluster",
                got=name,
                limit=f"one of {names}" if names else "none is running",
                remedy="Call md.serve(pipeline, client, name=...) first, or check the name.",
            )
        return run

    async def _start(self, name: str, header: Mapping[str, Any], client: str) -> bool:
        """Start a pipeline; return whether it took the place of one of the same driver that ran."""
        old = self._runs.get(name)
        replaces = old is not None and not old.over
        if old is not None:
            lives = not old.over and old.client in self._scheduler.clients
            if lives and old.client != client:
                raise ServiceError(
                    "a service of this name is running",
                    got=name,
                    remedy="Close it, or give this one another name: md.serve(..., name=...).",
                )
            await self._close(name, None, "another service took its name")
        run = await asyncio.to_thread(new_run, name, header, client)
        self._runs[name] = run
        try:
            await self._custody.start(run)
        except BaseException:
            await self._close(name, None, "it could not be started")
            raise
        return replaces

    async def _close(self, name: str, ident: str | None, reason: str) -> None:
        """End a pipeline: trainers are told first, then its roles go."""
        run = self._runs.get(name)
        if run is not None and ident in (None, run.header["ident"]):
            run.close(reason)
            await self._end(run)
            if self._runs.get(name) is run:
                del self._runs[name]
                self._ended[name] = run.closed or reason
                while len(self._ended) > MOST_ENDED:
                    del self._ended[next(iter(self._ended))]

    async def _end(self, run: Run) -> None:
        """Let the roles of a closed pipeline go; its record stays for whoever still asks."""
        await self._custody.end(run)

    async def _stats(self, run: Run) -> dict[str, Any]:
        record = run.record
        workers = self._scheduler.workers
        return {
            "generation": record.generation,
            "next_step": record.next_step,
            "ended": record.ended,
            "closed": run.closed,
            "draw_digest": record.draw_digest,
            "assignment_digest": record.assignment_digest,
            "packing": {
                "num_tokens": record.num_tokens,
                "capacity_tokens": record.capacity_tokens,
                "efficiency": record.num_tokens / (record.capacity_tokens or 1),
            },
            "steps": list(record.history),
            "watermarks": {str(rank): list(mark) for rank, mark in record.watermarks.items()},
            "trainers": {str(rank): claim.process for rank, claim in record.claims.items()},
            "workers": {
                address: {"memory_bytes": int(state.metrics.get("memory", 0))}
                for address, state in workers.items()
            },
            **await self._custody.status(run),
        }

    def _drop_lapsed(self, run: Run, rank: int) -> None:
        """Free the ranks of trainers that Dask has not heard of for longer than the lease.

        Ranks come by the thousand: not every one looks at all others, if the one it wants is free.
        """
        known, now = self._scheduler.clients, time()
        if rank not in run.record.claims and now - run.lapses_looked_at < SWEEP_S:
            return
        run.lapses_looked_at = now
        for client in {claim.client for claim in run.record.claims.values()}:
            state = known.get(client)
            if state is None or now - state.last_seen > run.header["lease_s"]:
                run.drop_client(client)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
