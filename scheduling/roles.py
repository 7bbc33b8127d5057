"""Create and end the roles of a pipeline on Dask workers. The Supervisor's hands.

Runs in the scheduler's process, beside the Supervisor, with a client of its own there: so roles do
not depend on the life of whoever called `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, TypeVar

from distributed import Client, Scheduler, Variable

from megadask.scheduling.constructor_actor import ConstructorActor
from megadask.scheduling.errors import LostError, WorkerError
from megadask.scheduling.life import Owner
from megadask.scheduling.planner_actor import PlannerActor
from megadask.scheduling.wire import ACTOR, LOADER_HOST, Signal, within

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Deadline for a role to come up.
START_S = 30.0


class Roles:
    """Starts planners, constructors and loaders, and lets them go."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._client: Client | None = None
        self._actors: dict[str, tuple[Any, Any]] = {}  # incarnation to future and actor
        self._lock = asyncio.Lock()
        self._hosts: set[str] = set()  # workers that said that they can host loaders
        self._retiring: set[str] = set()  # workers that get no roles any more
        self._changes = Signal()
        self.on_arrival: Callable[[], None] = lambda: None  # called when a worker can hold roles

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
        """Return the addresses of the workers that can hold roles, in a fixed order."""
        known = self._scheduler.workers
        hosts = [known[one] for one in self._hosts - self._retiring if one in known]
        # What a worker says itself may come before Dask's own news that it is running.
        return sorted(host.address for host in hosts if host.status.name in ("init", "running"))

    def worker_came(self, worker: str) -> None:
        """Note that a worker can hold roles from now on."""
        self._retiring.discard(worker)  # one of that address before it
        self._arrived(worker)

    def worker_left(self, worker: str) -> None:
        """Note that a worker is lost."""
        self._hosts.discard(worker)
        self._changes.set()

    async def take_back(self, worker: str, keep: Collection[str]) -> bool:
        """Use a worker again that was given up, once it has closed what it lost meanwhile.

        keep: incarnations of the loaders that are still its own. Returns whether it answers.
        """
        call = getattr(self._scheduler.rpc(worker), LOADER_HOST)(
            call="retain", incarnations=list(keep)
        )
        try:
            await within(5.0, call, f"{worker} to close its loaders")
        except Exception as error:  # it may be lost, or stopped again, at this very moment
            logger.info("%s does not answer: %s", worker, error)
            return False
        if worker in self._scheduler.workers:
            self._arrived(worker)
        return True

    def retire(self, worker: str) -> None:
        """Give a worker no roles from now on; those that it has are somebody else's to move."""
        self._retiring.add(worker)

    def keep_on(self, worker: str) -> None:
        """Give a worker roles as before."""
        self._retiring.discard(worker)

    def _arrived(self, worker: str) -> None:
        self._hosts.add(worker)
        self._changes.set()
        self.on_arrival()

    async def other_workers(self, avoid: Collection[str], seconds: float) -> list[str]:
        """Return `workers` but for some, waiting until there is one or the time is over."""

        def others() -> list[str]:
            return [worker for worker in self.workers() if worker not in avoid]

        found: list[str] = await self._changes.wait_until(others, seconds)
        return found

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

    async def start_loader(
        self,
        source: str,
        blob: bytes,
        limit_bytes: int,
        address: str,
        lanes: tuple[int, ...],
        *,
        standby: bool = False,
    ) -> Owner:
        """Open a Source Loader of some lanes on a worker."""
        incarnation = uuid.uuid4().hex
        call = getattr(self._scheduler.rpc(address), LOADER_HOST)(
            call="open",
            incarnation=incarnation,
            blob=blob,
            limit_bytes=limit_bytes,
            lanes=lanes,
            standby=standby,
        )
        problem = await self._answer(address, call, f"a loader on {address} to open")
        if problem is not None:
            raise WorkerError(
                f"source {source!r}: its reader or transform cannot be unpickled on {address}",
                got=problem,
                remedy="Install the module that defines it where the workers run.",
            )
        return Owner(address, incarnation)

    async def promote_loader(self, owner: Owner) -> None:
        """Tell a standby that it is followed by nobody any more; it serves in any case."""
        await self._tell_loader(owner, "promote")

    async def keep_lanes(self, owner: Owner, lanes: tuple[int, ...]) -> None:
        """Tell a loader which lanes are its own from now on; others it serves in any case."""
        await self._tell_loader(owner, "keep", lanes=lanes)

    def host_of(self, worker: str) -> str:
        """Return the host that a worker runs on; "" for one that is not there."""
        known = self._scheduler.workers.get(worker)
        return "" if known is None else str(known.host)

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
        if owner.address in self._hosts:
            with contextlib.suppress(Exception):  # it may be lost at this very moment
                await within(5.0, actor.close(), f"an actor of {run} to close")
        client = await self.client()
        Variable(actor_key(owner.incarnation), client=client).delete()
        # Not release: handles of the actor, here and in trainers, hold futures of their own.
        await client.cancel([future], force=True)

    async def stop_loader(self, owner: Owner) -> None:
        """Let a loader go; one that is lost already is gone."""
        await self.stop_loaders([owner])

    async def stop_loaders(self, owners: Iterable[Owner]) -> None:
        """Let loaders go, all of a worker in one call."""
        lives: dict[str, list[str]] = {}
        for owner in owners:
            if owner.address in self._hosts:
                lives.setdefault(owner.address, []).append(owner.incarnation)
        calls = [self._tell_host(one, "release", incarnations=own) for one, own in lives.items()]
        await asyncio.gather(*calls)

    async def _tell_loader(self, owner: Owner, call: str, **arguments: Any) -> None:
        """Call a loader that may be lost at this very moment."""
        await self._tell_host(owner.address, call, incarnation=owner.incarnation, **arguments)

    async def _tell_host(self, address: str, call: str, **arguments: Any) -> None:
        """Call the host of loaders on a worker that may be lost at this very moment."""
        with contextlib.suppress(Exception):
            told = getattr(self._scheduler.rpc(address), LOADER_HOST)(call=call, **arguments)
            await within(5.0, told, f"{address} to {call} loaders")

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
            try:
                what = f"{cls.__name__} of {run} on {address} to start"
                actor = await self._answer(address, _started(future), what)
            except BaseException:
                await client.cancel([future], force=True)
                raise
        self._actors[incarnation] = (future, actor)
        return Owner(address, incarnation)

    async def _answer(self, address: str, asked: Awaitable[T], what: str) -> T:
        """Return what a worker answers. Raises LostError once it is lost, or does not answer."""
        answer = asyncio.ensure_future(asked)
        loss = asyncio.create_task(
            self._changes.wait_until(lambda: address not in self._hosts, START_S)
        )
        try:
            await asyncio.wait((answer, loss), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            got = "it is gone" if loss.result() else f"no answer within {START_S:g} s"
        except Exception as error:
            if not isinstance(error, OSError) and address in self._hosts:
                raise
            got = f"{type(error).__name__}: {error}"
        finally:
            answer.cancel()
            loss.cancel()
        raise LostError(f"a worker was lost while waiting for {what}", got=got)


async def _started(future: Any) -> Any:
    actor = await future
    await actor.start()
    return actor


def actor_key(incarnation: str) -> str:
    """Return the Dask key of an actor's future, and the name of the variable that holds it."""
    return f"{ACTOR}{incarnation}"
