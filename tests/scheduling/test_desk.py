"""Finding a constructor that goes while it is looked for."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Client, Event, Future, Variable

from megadask.scheduling.desk import Desk


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
