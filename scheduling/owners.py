"""Who owns which lanes, as one role sees it, and calls to them that outlive a replacement."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Worker
from distributed.comm.core import CommClosedError
from distributed.core import Status
from distributed.protocol.serialize import ToPickle

from megadask.scheduling.errors import (
    ClosedError,
    DeadlineError,
    ServiceError,
    StaleError,
)
from megadask.scheduling.hedging import SLOW_S, Usual
from megadask.scheduling.spec import Limits
from megadask.scheduling.wire import AGAIN_S, LOADER_HOST, SUPERVISOR, within

logger = logging.getLogger(__name__)

#: How often a call that takes long is checked for its loader having been replaced.
WATCH_S = 0.2
#: What a call to a lost or replaced partner fails with.
LOST = (OSError, CommClosedError, StaleError)


@dataclass(frozen=True)
class LoaderAddress:
    """The present life of the loader of some lanes."""

    lanes: tuple[int, ...]
    address: str
    incarnation: str


@dataclass(frozen=True, eq=False)
class Answer:
    """What a loader answered, or its shadow; and whether it was far slower than it is."""

    reply: Any
    by_shadow: bool
    was_slow: bool = False


class Partners:
    """Calls from one role, on a worker, to the supervisor and to the loaders of its pipeline."""

    def __init__(self, worker: Worker, run: str, limits: Limits) -> None:
        self._worker = worker
        self._run = run
        self._limits = limits
        self._version = -1
        self._num_casts = -1  # changes of who holds which role that are known of
        self._asking: asyncio.Task[None] | None = None  # who the owners are now
        self._usual: dict[tuple[str, str], Usual] = defaultdict(Usual)  # by source and call
        self._slow_until: dict[str, float] = {}  # by incarnation of a loader that was slow
        self.num_hedged = 0  # reads that a shadow was asked for, too
        self._loaders: dict[str, list[LoaderAddress]] = {}
        self._shadows: dict[str, list[LoaderAddress]] = {}

    def is_over(self, error: BaseException) -> bool:
        """Whether what a role ran into only says that its life is over, and another one begins.

        It was replaced or closed; or its worker is closing, when every call fails somehow.
        """
        ends = self._worker.status not in (Status.init, Status.running, Status.paused)
        return ends or isinstance(error, StaleError | ClosedError)

    async def supervisor(self, call: str, *, wait_s: float = 0.0, **arguments: Any) -> Any:
        """Call the supervisor; a call that may wait there for ``wait_s`` has so much longer.

        One whose connection is cut is made again: nothing that can be asked does more by that.
        """
        if wait_s:
            arguments["wait_s"] = wait_s
        handler = getattr(self._worker.scheduler, SUPERVISOR)

        async def ask() -> Any:
            while True:
                try:
                    return await handler(call=call, run=self._run, **arguments)
                except OSError as error:
                    if isinstance(error, TimeoutError) or self.is_over(error):
                        raise
                    await asyncio.sleep(AGAIN_S)

        return await within(self._limits.reply_s + wait_s, ask(), f"the supervisor's {call!r}")

    async def loaders(self, source: str) -> list[LoaderAddress]:
        """Return the loaders of a source."""
        if self._version < 0:
            await self.refresh()
        return self._loaders[source]

    async def learn(self, num_casts: int) -> None:
        """Learn of the owners if there were more changes of roles than are known of."""
        while num_casts > self._num_casts:
            await self.refresh()

    async def refresh(self) -> None:
        """Learn of the owners, waiting a while for newer ones than those known.

        However many calls wait for that, it is asked once.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_owners())
            # Who waits for it may be cancelled before it fails, as at the end of a service.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._asking)

    async def _ask_owners(self) -> None:
        known = {"newer_than": self._version, "num_casts": self._num_casts}
        reply = await self.supervisor("owners", wait_s=1.0, **known)
        self._version, self._num_casts = reply["version"], reply["num_casts"]
        if "loaders" in reply:
            self._loaders = _addresses(reply["loaders"])
            self._shadows = _addresses(reply["shadows"])

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

    async def read(self, source: str, lane: int, call: str, **arguments: Any) -> Answer:
        """Ask as `ask` does; where that takes much longer than usual, a shadow is asked too.

        The first answer counts. After a loader was slow its shadow is asked first, for a while.
        """
        now = asyncio.get_running_loop().time
        usual = self._usual[source, call]

        def noted(reply: Any, begin: float, *, by_shadow: bool) -> Answer:
            told = reply.get("read", {})
            return Answer(reply, by_shadow, was_slow=usual.note(now() - begin, **told))

        async def by_owner() -> Answer:
            begin = now()
            reply = await self.ask(source, lane, call, **arguments)
            return noted(reply, begin, by_shadow=False)

        shadow = next((one for one in self.shadows(source) if lane in one.lanes), None)
        if shadow is None:
            return await by_owner()

        async def by_shadow() -> Answer:
            begin = now()
            reply = await self.call(shadow, source, lane, call, arguments)
            return noted(reply, begin, by_shadow=True)

        owner = await self.owner_of(source, lane)
        is_slow = now() < self._slow_until.get(owner.incarnation, 0.0)
        ways = [by_shadow, by_owner] if is_slow else [by_owner, by_shadow]
        answer, num_asked = await _first_answer(ways, 1 if is_slow else 0, usual.patience_s)
        if num_asked > 1:
            self.num_hedged += 1
        if (answer.by_shadow and not is_slow) or (answer.was_slow and not answer.by_shadow):
            logger.warning("source %r: the loader on %s is slow", source, owner.address)
            self._slow_until[owner.incarnation] = now() + SLOW_S
        return answer

    async def call(
        self, owner: LoaderAddress, source: str, lane: int, call: str, packed: Mapping[str, Any]
    ) -> Any:
        """Call one loader, which may be lost; ``lane`` is for the error.

        One on the same worker is called, not sent to: packing what it serves, and sending it to
        oneself, takes more time than making it.
        """
        what = f"source {source!r}, lane {lane}, to {call} (loader on {owner.address})"
        whom = {"call": call, "incarnation": owner.incarnation}
        if owner.address == self._worker.address:
            asked = self._worker.handlers[LOADER_HOST](**whom, packed=packed)
            return (await within(self._limits.reply_s, asked, what))["packed"].data
        # Arrays travel as they lie in memory, beside the message. Dask would find out by failing
        # that they do not fit into it.
        sent = ToPickle(dict(packed))
        asked = getattr(self._worker.rpc(owner.address), LOADER_HOST)(**whom, packed=sent)
        return (await within(self._limits.reply_s, asked, what))["packed"]

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


async def _first_answer(
    ways: Sequence[Callable[[], Coroutine[Any, Any, Answer]]], decisive: int, patience_s: float
) -> tuple[Answer, int]:
    """Return the first answer that comes, and how many ways were gone for it.

    The second way is gone where the first has no answer for so long, or fails. What the decisive
    one raises is raised, but for a deadline while the other may still answer.
    """
    tasks = [asyncio.create_task(ways[0]())]
    try:
        await asyncio.wait(tasks, timeout=patience_s)
        failed = tasks[0].done() and tasks[0].exception() is not None
        if not tasks[0].done() or (failed and decisive == 1):
            tasks.append(asyncio.create_task(ways[1]()))
        pending = set(tasks)
        while pending:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for number, task in enumerate(tasks):
                error = task.exception() if task.done() else None
                if task.done() and error is None:
                    return task.result(), len(tasks)
                if number == decisive and error and not isinstance(error, DeadlineError):
                    raise error
        return tasks[decisive].result(), len(tasks)  # raises what kept it
    finally:
        for task in tasks:
            task.cancel()


def _addresses(reply: Mapping[str, Any]) -> dict[str, list[LoaderAddress]]:
    return {
        source: [LoaderAddress(tuple(lanes), *owner) for lanes, *owner in owners]
        for source, owners in reply.items()
    }


def by_owner(owners: list[LoaderAddress], lanes: Mapping[int, Any]) -> list[dict[int, Any]]:
    """Split what belongs to lanes into one part for each owner."""
    parts = [{lane: lanes[lane] for lane in owner.lanes if lane in lanes} for owner in owners]
    return [part for part in parts if part]
