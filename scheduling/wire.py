"""Calls between roles: every one has a deadline and names what it waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, MutableMapping
from typing import Any, TypeVar

from megadask.scheduling.errors import DeadlineError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

#: Name of the handler that workers and clients call on the scheduler.
SUPERVISOR = "megadask"
#: Name of the handler on the scheduler that workers call once they can host loaders.
ARRIVAL = "megadask_arrival"
#: Name of the handler on every worker that hosts loaders.
LOADER_HOST = "megadask_loader"
#: What the keys of actors' futures begin with.
ACTOR = "megadask-actor-"
#: How long to wait before a call is made again whose connection was cut.
AGAIN_S = 0.1
#: For so long a constructor goes by what it has last heard of who has which rank.
TRUST_S = 15.0
#: The pipeline of a dict that trainers get when they name none.
MAIN = "train"


def run_name(service: str, pipeline: str | None) -> str:
    """Return the name of a pipeline's record at the supervisor."""
    return service if pipeline in (None, MAIN) else f"{service}/{pipeline}"


async def within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
    """Await with a deadline. Raises DeadlineError that names what was waited for."""
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineError(
            f"waited too long for {what}",
            limit=f"an answer within {seconds:g} s",
            remedy="See the logs of the Dask workers, or raise the timeout.",
        ) from error


async def side_by_side(
    works: Mapping[K, Callable[[], Awaitable[T]]], most: int, done: MutableMapping[K, T]
) -> None:
    """Carry out works, so many at a time, and put what each returns into ``done`` at once.

    In the end they are there in the order of the works. After one has failed no other is begun.
    Those that are under way go on to their end, and are done, too; then the error is raised of the
    first in this order that has failed.
    """
    room = asyncio.Semaphore(most)
    errors: dict[K, BaseException] = {}

    async def carry_out(key: K) -> None:
        async with room:
            if errors:
                return
            try:
                done[key] = await works[key]()
            except Exception as error:
                errors[key] = error

    await asyncio.gather(*map(carry_out, works))
    for key in works:
        if key in done:
            done[key] = done.pop(key)
    for key in works:
        if key in errors:
            raise errors[key]


class Signal:
    """Wakes those who wait for something once a change has brought it.

    Many changes at a time are looked at once, soon after: what they bring is asked in the event
    loop, beside whoever makes them. A change is never missed between check and wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], Any]] = {}
        self._looks = False

    def set(self) -> None:
        """Say that something has changed."""
        if self._waiting and not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    async def wait_until(self, ready: Callable[[], Any], seconds: float) -> Any:
        """Return the first true value of ``ready``, or its last value at the deadline.

        ready: asked with every change, so it has to be quick; what it raises is raised.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not (value := ready()) and (left := deadline - loop.time()) > 0:
            woken = loop.create_future()
            self._waiting[woken] = ready
            timer = loop.call_later(left, _wake, woken)
            try:
                await woken
            finally:
                timer.cancel()
                del self._waiting[woken]
        return value

    def _look(self) -> None:
        self._looks = False
        for woken, ready in self._waiting.items():
            if not woken.done() and _may_be(ready):
                woken.set_result(None)


def _may_be(ready: Callable[[], Any]) -> bool:
    """Whether somebody who waits for something has to look: it is there, or raises."""
    try:
        return bool(ready())
    except Exception:
        return True


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
