"""Create and end the roles of a pipeline on Dask workers. The Supervisor's hands.

Runs in the scheduler's process, beside the Supervisor, with a client of its own there: so roles do
not depend on the life of whoever called `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import Any

from distributed import Client, Scheduler, Variable

from megadask.scheduling.constructor_actor import ConstructorActor
from megadask.scheduling.errors import WorkerError
from megadask.scheduling.planner_actor import PlannerActor
from megadask.scheduling.record import Owner
from megadask.scheduling.wire import LOADER_HOST, Signal, within

logger = logging.getLogger(__name__)

#: Deadline for a role to come up.
START_S = 30.0


class Roles:
    """Starts planners, constructors and loaders, and lets them go."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._client: Client | None = None
        self._actors: dict[str, tuple[Any, Any]] = {}  # incarnation to future and actor
        self._lock = asyncio.Lock()
        self._arrival = Signal()

    async def client(self) -> Client:
        """Return the client in the scheduler's process, connected."""
        async with self._lock:
            if self._client is None:
                self._client = await Client(
                    self._scheduler.address,
                    asynchronous=True,
                    set_as_default=False,
                    name="megadask-supervisor",
                    security=self._scheduler.security,
                )
            return self._client

    def workers(self) -> list[str]:
        """Return the addresses of running workers, in a fixed order."""
        states = self._scheduler.workers.values()
        return sorted(state.address for state in states if state.status.name == "running")

    def worker_came(self) -> None:
        """Note that a worker joined the cluster."""
        self._arrival.set()

    async def wait_for_worker(self, seconds: float) -> None:
        """Wait until a worker runs, or the time is over."""
        await self._arrival.wait_until(self.workers, seconds)

    async def start_planner(self, run: str, blob: bytes, address: str) -> Owner:
        """Start a Planner on a worker."""
        return await self._start_actor(PlannerActor, run, blob, address)

    async def start_constructor(
        self, run: str, blob: bytes, address: str, buckets: tuple[int, ...]
    ) -> Owner:
        """Start a Data Constructor on a worker and publish its future, by `actor_key`."""
        owner = await self._start_actor(ConstructorActor, run, blob, address, buckets)
        future, _ = self._actors[owner.incarnation]
        # A variable, since a published dataset hands out the publisher's own future object to
        # clients in the same process, and breaks it.
        await Variable(actor_key(owner.incarnation), client=await self.client()).set(future)
        return owner

    async def start_loader(self, source: str, blob: bytes, limit_bytes: int, address: str) -> Owner:
        """Open a Source Loader on a worker."""
        incarnation = uuid.uuid4().hex
        call = getattr(self._scheduler.rpc(address), LOADER_HOST)(
            call="open", incarnation=incarnation, blob=blob, limit_bytes=limit_bytes
        )
        problem = await within(START_S, call, f"a loader on {address} to open")
        if problem is not None:
            raise WorkerError(
                f"source {source!r}: its reader or transform cannot be unpickled on {address}",
                got=problem,
                remedy="Install the module that defines it where the workers run.",
            )
        return Owner(address, incarnation)

    async def loader_status(self, owner: Owner) -> dict[str, Any]:
        """Return what a loader says of itself; empty when it does not answer."""
        with contextlib.suppress(Exception):  # a lost loader has no status
            call = getattr(self._scheduler.rpc(owner.address), LOADER_HOST)(
                call="status", incarnation=owner.incarnation
            )
            status: dict[str, Any] = await within(5.0, call, "a loader's status")
            return status
        return {}

    async def actor_status(self, owner: Owner) -> dict[str, Any]:
        """Return what a constructor says of itself; empty when it does not answer."""
        with contextlib.suppress(Exception):  # a lost actor has no status
            status: dict[str, Any] = await within(
                5.0, self._actors[owner.incarnation][1].status(), "an actor's status"
            )
            return status
        return {}

    async def stop_actor(self, run: str, owner: Owner) -> None:
        """Close an actor and forget it; one that is lost already is only forgotten."""
        future, actor = self._actors.pop(owner.incarnation, (None, None))
        if future is None:
            return
        if owner.address in self._scheduler.workers:
            with contextlib.suppress(Exception):  # it may be lost at this very moment
                await within(5.0, actor.close(), f"an actor of {run} to close")
        client = await self.client()
        Variable(actor_key(owner.incarnation), client=client).delete()
        # Not release: handles of the actor, here and in trainers, hold futures of their own.
        await client.cancel([future], force=True)

    async def stop_loader(self, owner: Owner) -> None:
        """Let a loader go; one that is lost already is gone."""
        if owner.address in self._scheduler.workers:
            with contextlib.suppress(Exception):  # it may be lost at this very moment
                call = getattr(self._scheduler.rpc(owner.address), LOADER_HOST)(
                    call="release", incarnation=owner.incarnation
                )
                await within(5.0, call, f"a loader on {owner.address} to close")

    async def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close(timeout=2)
            # An asynchronous client starts the loop's runner but never stops it, and a cluster in
            # this process would wait for it for ever.
            client._loop_runner.stop()

    async def _start_actor(
        self, cls: type, run: str, blob: bytes, address: str, *args: Any
    ) -> Owner:
        """Start an actor pinned to one worker, under a key that was never used."""
        incarnation = uuid.uuid4().hex
        client = await self.client()
        what = f"{cls.__name__} of {run} on {address}"
        # An actor's handle attaches itself to the current client, which in this process may be
        # somebody else's, or nobody's.
        with client.as_current():
            future = client.submit(
                cls,
                run,
                incarnation,
                blob,
                *args,
                actor=True,
                workers=[address],
                allow_other_workers=False,
                pure=False,
                key=actor_key(incarnation),
            )
            actor = await within(START_S, _result(future), what)
        self._actors[incarnation] = (future, actor)
        await within(START_S, actor.start(), what)
        return Owner(address, incarnation)


async def _result(future: Any) -> Any:
    return await future


def actor_key(incarnation: str) -> str:
    """Return the Dask key of an actor's future, and the name of the variable that holds it."""
    return f"megadask-actor-{incarnation}"
