"""Who owns which lanes, as one role sees it, and calls to them that outlive a replacement."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Worker
from distributed.comm.core import CommClosedError
from distributed.core import Status

from megadask.scheduling.errors import (
    ClosedError,
    DeadlineError,
    ServiceError,
    StaleError,
)
from megadask.scheduling.spec import Limits
from megadask.scheduling.wire import LOADER_HOST, SUPERVISOR, within

#: How often a call that takes long is checked for its loader having been replaced.
WATCH_S = 2.0
#: What a call to a lost or replaced partner fails with.
LOST = (OSError, CommClosedError, StaleError)


@dataclass(frozen=True)
class LoaderAddress:
    """The present life of the loader of some lanes."""

    lanes: tuple[int, ...]
    address: str
    incarnation: str


class Partners:
    """Calls from one role, on a worker, to the supervisor and to the loaders of its pipeline."""

    def __init__(self, worker: Worker, run: str, limits: Limits) -> None:
        self._worker = worker
        self._run = run
        self._limits = limits
        self._version = -1
        self._num_casts = -1  # changes of who holds which role that are known of
        self._loaders: dict[str, list[LoaderAddress]] = {}
        self._shadows: dict[str, list[LoaderAddress]] = {}

    def is_over(self, error: BaseException) -> bool:
        """Whether what a role ran into only says that its life is over, and another one begins.

        It was replaced or closed; or its worker is closing, when every call fails somehow.
        """
        ends = self._worker.status not in (Status.init, Status.running, Status.paused)
        return ends or isinstance(error, StaleError | ClosedError)

    async def supervisor(self, call: str, *, wait_s: float = 0.0, **arguments: Any) -> Any:
        """Call the supervisor; a call that may wait there for ``wait_s`` has so much longer."""
        if wait_s:
            arguments["wait_s"] = wait_s
        asked = getattr(self._worker.scheduler, SUPERVISOR)(call=call, run=self._run, **arguments)
        return await within(self._limits.reply_s + wait_s, asked, f"the supervisor's {call!r}")

    async def loaders(self, source: str) -> list[LoaderAddress]:
        """Return the loaders of a source."""
        if self._version < 0:
            await self.refresh()
        return self._loaders[source]

    async def learn(self, num_casts: int) -> None:
        """Learn of the owners if there were more changes of roles than are known of."""
        if num_casts > self._num_casts:
            await self.refresh()

    async def refresh(self) -> None:
        """Learn of the owners, waiting until there are newer ones than those known."""
        reply = await self.supervisor("owners", newer_than=self._version, wait_s=1.0)
        if reply["version"] < self._version:
            return  # another call was quicker, and knows more
        self._version, self._num_casts = reply["version"], reply["num_casts"]
        self._loaders, self._shadows = _addresses(reply["loaders"]), _addresses(reply["shadows"])

    def shadows(self, source: str) -> list[LoaderAddress]:
        """Return the standbys of a source, as far as they are known."""
        return self._shadows.get(source, [])

    async def owner_of(self, source: str, lane: int) -> LoaderAddress:
        """Return the loader that owns a lane."""
        return next(owner for owner in await self.loaders(source) if lane in owner.lanes)

    async def ask(self, source: str, lane: int, call: str, **arguments: Any) -> Any:
        """Call the owner of a lane; when it is lost, its successor, within `Limits.recovery_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.recovery_s
        while True:
            owner = await self.owner_of(source, lane)
            asked = asyncio.create_task(self.call(owner, source, lane, call, arguments))
            watched = asyncio.create_task(self._watch(owner, source, lane, asked))
            try:
                return await asked
            except asyncio.CancelledError:
                if not watched.done():  # it was not the watch that cancelled it
                    asked.cancel()
                    raise
            except DeadlineError:
                raise
            except LOST as error:
                if loop.time() > deadline:
                    raise DeadlineError(
                        f"source {source!r} has no loader",
                        got=f"{type(error).__name__}: {error}",
                        limit=f"a new one within {self._limits.recovery_s:g} s",
                        remedy="See whether the cluster has workers left.",
                    ) from error
                await self.refresh()
            finally:
                watched.cancel()

    async def call(
        self, owner: LoaderAddress, source: str, lane: int, call: str, arguments: Mapping[str, Any]
    ) -> Any:
        """Call one loader, which may be lost; ``lane`` is for the error."""
        asked = getattr(self._worker.rpc(owner.address), LOADER_HOST)(
            call=call, incarnation=owner.incarnation, **arguments
        )
        what = f"source {source!r}, lane {lane}, to {call} (loader on {owner.address})"
        return await within(self._limits.reply_s, asked, what)

    async def _watch(
        self, owner: LoaderAddress, source: str, lane: int, asked: asyncio.Task[Any]
    ) -> None:
        """Cancel a call whose loader was replaced: connecting to a dead worker takes long."""
        try:
            while (await self.owner_of(source, lane)).incarnation == owner.incarnation:
                await asyncio.sleep(WATCH_S)
                await self.refresh()
        except (ServiceError, DeadlineError, OSError):
            return  # then the call itself will fail, or is the last that is answered
        asked.cancel()


def _addresses(reply: Mapping[str, Any]) -> dict[str, list[LoaderAddress]]:
    return {
        source: [LoaderAddress(tuple(lanes), *owner) for lanes, *owner in owners]
        for source, owners in reply.items()
    }


def by_owner(owners: list[LoaderAddress], lanes: Mapping[int, Any]) -> list[dict[int, Any]]:
    """Split what belongs to lanes into one part for each owner."""
    parts = [{lane: lanes[lane] for lane in owner.lanes if lane in lanes} for owner in owners]
    return [part for part in parts if part]
