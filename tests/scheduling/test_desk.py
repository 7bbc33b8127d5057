"""A trainer's questions: finding a constructor that goes meanwhile, and ending them at a close."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from distributed import Client, Event, Future, Variable

from megadask.scheduling.desk import Desk
from megadask.scheduling.errors import DeadlineError


def test_a_constructor_that_goes_while_it_is_looked_for(
    local_client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer asks the supervisor then, as for any that is lost."""
    gate = Event(name, client=local_client)
    future = local_client.submit(gate.wait, pure=False)
    Variable(name, client=local_client).set(future)
    wait = Future.result

    def cancelled(self: Future[Any], timeout: float) -> Any:
        local_client.cancel([future], force=True)
        return wait(self, timeout)

    monkeypatch.setattr(Future, "result", cancelled)
    try:
        with pytest.raises(RuntimeError, match=f"{name} was let go of"):
            Desk(local_client, "run", 0).line_to(name)
    finally:
        gate.set()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Return an event loop that runs in a thread, as that of a client does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.timeout(15)  # a question may take longer
def test_a_question_without_an_answer_ends_when_its_loader_is_closed(
    loop: asyncio.AbstractEventLoop,
) -> None:
    is_asked = threading.Event()

    async def unanswered(**asked: Any) -> None:
        is_asked.set()
        await asyncio.Event().wait()

    scheduler = SimpleNamespace(megadask=unanswered)
    client = SimpleNamespace(loop=SimpleNamespace(asyncio_loop=loop), scheduler=scheduler)
    desk = Desk(cast(Client, client), "run", 3)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(desk.ask, "look")
        is_asked.wait()
        desk.close()
        for ask in (waits.result, lambda: desk.ask("look")):
            with pytest.raises(DeadlineError, match="'look' of rank 3"):
                ask()
