"""One rank's calls to the supervisor, and the line to the constructor that it is referred to."""

from __future__ import annotations

import asyncio
import os
import socket
from concurrent.futures import CancelledError, Future
from copy import copy
from typing import Any

from distributed import Client, Variable

from megadask.planner.errors import MegaDaskError
from megadask.scheduling.errors import ClosedError, DeadlineError, ServiceError, unpack_error
from megadask.scheduling.line import Line
from megadask.scheduling.wire import AGAIN_S, SUPERVISOR

#: How long a call may take beyond what it is allowed to wait before its party counts as lost.
GRACE_S = 20.0
#: How long finding an actor may take; a lost one is never found.
FIND_S = 2.0


class Desk:
    """Where a trainer asks for what it needs to know.

    Parameters
    ----------
    client
        A client with ``direct_to_workers``.
    run
        Name of the pipeline's record.
    rank
        The rank that asks.
    """

    def __init__(self, client: Client, run: str, rank: int) -> None:
        self.client = client
        self.run = run
        self.rank = rank
        #: Of the service that gave this rank; another one may take its name. None before `join`.
        self.ident: str | None = None
        self.is_over = False  # whether the run is known to have ended
        self._is_closed = False
        self._asked: set[Future[Any]] = set()  # what is being asked, in whatever thread
        #: The line to the constructor that was found last, if any.
        self.line: Line | None = None

    def ask(self, call: str, *, wait_s: float | None = None, **arguments: Any) -> Any:
        """Call the supervisor; ``wait_s`` is how long it may wait for something to change.

        Raises ClosedError, or what the run failed with, if the answer is that the run is over.
        """
        if wait_s is not None:
            arguments["wait_s"] = wait_s
        limit_s = GRACE_S + (wait_s or 0.0)
        try:
            reply, error = self._answer(limit_s, call=call, **arguments)
        except (TimeoutError, OSError, CancelledError) as lost:
            raise DeadlineError(
                f"the Dask scheduler does not answer {call!r} of rank {self.rank}",
                got=f"{type(lost).__name__}: {lost}",
                limit=f"{limit_s:g} s",
                remedy="See whether the scheduler is alive; after its loss, start a new cluster "
                "and serve(resume=state).",
            ) from lost
        if error is not None:
            try:
                raise error
            finally:
                del error  # it leads to this frame, too
        if call == "join" and reply is None:  # what Dask answers where nobody handles the call
            raise ServiceError(
                "the Dask scheduler has no MegaDask service",
                got=getattr(self.client.scheduler, "address", None),
                remedy="Call md.serve(pipeline, client) first.",
            )
        if isinstance(reply, dict) and reply.get("status") == "closed":
            self.refuse(reply["reason"], reply["error"])
        return reply

    def close(self) -> None:
        """Ask nothing more; who waits for an answer in another thread gets none."""
        self._is_closed = True
        for asked in list(self._asked):
            asked.cancel()

    def _answer(self, limit_s: float, **arguments: Any) -> tuple[Any, MegaDaskError | None]:
        """Return what `_ask` does, which runs in the client's thread.

        That thread ends with the client, and then leaves unanswered whatever was asked last.
        """
        asking = self._ask(**arguments)
        loop: asyncio.AbstractEventLoop = self.client.loop.asyncio_loop  # type: ignore[union-attr]
        try:
            asked = asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError as error:
            asking.close()
            raise OSError("the Dask client of this loader has closed") from error
        self._asked.add(asked)
        if self._is_closed:
            asked.cancel()
        try:
            return asked.result(limit_s)
        finally:
            asked.cancel()
            self._asked.remove(asked)

    async def _ask(self, **arguments: Any) -> tuple[Any, MegaDaskError | None]:
        """Return an answer, or else a copy of the supervisor's error.

        The error itself Dask ties to the frames that it went through. Raised in the trainer it
        would tie all frames there to them, too, and the batches that are in these: until garbage is
        collected, which training loops may have switched off.
        """
        try:
            return await self._call(**arguments), None
        except MegaDaskError as error:
            return None, copy(error).with_traceback(None)

    async def _call(self, **arguments: Any) -> Any:
        """Call once; a second time where the connection was cut, if the client is still there."""
        if self.client.scheduler is None:
            raise OSError("the Dask client of this loader has closed")
        handler = getattr(self.client.scheduler, SUPERVISOR)
        told = {"run": self.run, "ident": self.ident, "rank": self.rank, **arguments}
        try:
            return await handler(**told)
        except TimeoutError:
            raise
        except OSError as error:
            await asyncio.sleep(AGAIN_S)
            try:
                return await handler(**told)
            except RuntimeError:
                if self.client.status in ("closing", "closed"):
                    raise error from None
                raise

    def refuse(self, reason: str, error: bytes | None) -> None:
        """Raise what a run failed with, else that it is closed."""
        self.is_over = True
        if error:
            raise unpack_error(error)
        raise ClosedError(
            f"{self.run} is closed: {reason}",
            remedy="Serve it again and connect anew, or resume from the last state_dict().",
        )

    def line_to(self, key: str) -> Line:
        """Return the line to the constructor of a key, found once.

        Raises TimeoutError if it is gone, RuntimeError if it went while it was looked for.
        """
        if self.line is None or self.line.key != key:
            # Futures and actors attach themselves to the current client, which need not be ours.
            with self.client.as_current():
                future = Variable(key, client=self.client).get(timeout=FIND_S)
                try:
                    actor = future.result(timeout=FIND_S)
                except CancelledError as error:
                    raise RuntimeError(f"{key} was let go of") from error
                self.line = Line(self.client, key, actor, future)
        return self.line

    def check_line(self) -> None:
        """Raise RuntimeError if the constructor that was found last is known to be lost."""
        if self.line is not None:
            self.line.check()

    def forget_constructor(self) -> None:
        """Forget a constructor that does not answer."""
        self.line = None


def process_name() -> str:
    """Return a name of this process for claims."""
    return f"{socket.gethostname()}:{os.getpid()}"
