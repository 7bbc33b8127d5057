"""A trainer's line to its constructor: calls with plain arguments, answered in any order.

Dask's own handle of an actor packs every argument by itself, which costs more than the call. What
is sent here are numbers, texts and lists, which travel in the message as they are.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from distributed import Client, Future

from megadask.scheduling.courier import Courier
from megadask.scheduling.delivery import Reply

T = TypeVar("T")


class Line:
    """The line to one actor.

    Parameters
    ----------
    client
        A client with ``direct_to_workers``.
    key
        Of the actor.
    actor, future
        Its handle, and the future that it is the result of; it lives as long as that.
    """

    def __init__(self, client: Client, key: str, actor: Any, future: Future[Any]) -> None:
        self._client = client
        self.key = key
        self._actor = actor  # its client knows by it whether its worker is lost
        self._future = future

    def check(self) -> None:
        """Raise RuntimeError if the actor is known to be lost."""
        if self._future.status not in ("finished", "pending"):
            raise RuntimeError(f"the worker of {self.key} was lost ({self._future.status})")

    def call(
        self,
        method: str,
        *plain: Any,
        then: Callable[[Reply], T],
        courier: Courier | None = None,
    ) -> concurrent.futures.Future[T]:
        """Call a method of the actor. Its answer raises OSError or RuntimeError if it is lost.

        Parameters
        ----------
        method, *plain
            Its name and arguments.
        then
            Makes of the reply what the answer is, as soon as it is there: in the client's thread.
        courier
            Takes the call to the client's thread, where given. Whoever wakes that thread may lose
            the interpreter to it for milliseconds, and has better things to do.

        Raises
        ------
        RuntimeError
            The actor is known to be lost.
        """
        self.check()
        loop: asyncio.AbstractEventLoop = self._client.loop.asyncio_loop  # type: ignore[union-attr]
        if courier is None:
            return asyncio.run_coroutine_threadsafe(self._answer(method, plain, then), loop)
        answered: concurrent.futures.Future[T] = concurrent.futures.Future()

        def carry() -> None:
            call = self._answer(method, plain, then)
            try:
                begun = asyncio.run_coroutine_threadsafe(call, loop)
            except RuntimeError as error:  # the client has closed meanwhile
                call.close()
                answered.set_exception(error)
            else:
                begun.add_done_callback(partial(_pass_on, answered))

        courier.send(carry)
        return answered

    async def _answer(self, method: str, plain: tuple[Any, ...], then: Callable[[Reply], T]) -> T:
        worker = self._client.rpc(self._actor._address)
        try:
            answer = await worker.actor_execute(function=method, actor=self.key, args=plain)
        except (KeyError, TimeoutError) as error:
            raise OSError(f"{self.key} is not there: {type(error).__name__}") from error
        if answer["status"] == "OK":
            return then(answer["result"])
        raise answer["exception"]


def _pass_on(answered: concurrent.futures.Future[T], done: concurrent.futures.Future[T]) -> None:
    """Give one future the outcome of another one."""
    if done.cancelled():
        answered.cancel()
    elif error := done.exception():
        answered.set_exception(error)
    else:
        answered.set_result(done.result())
