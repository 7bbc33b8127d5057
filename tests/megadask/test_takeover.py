"""A rank that is taken over: what its earlier trainer still says counts for nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from functools import partial
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from megadask.scheduling import constructor_actor
from megadask.scheduling import run as run_module
from megadask.scheduling.owners import Partners
from tests.conftest import wait_until
from tests.faults.helpers import record_of
from tests.megadask.helpers.processes import module
from tests.megadask.helpers.ranks import Ranks, connect, run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, take

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def whole(local_client: Client) -> list[list[Seen]]:
    """The uninterrupted run."""
    with md.serve(make(), local_client, name="whole") as service:
        return run(service, drain)


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_acknowledgements_of_an_earlier_trainer_are_refused(
    local_cluster: LocalCluster,
    local_client: Client,
    name: str,
    whole: list[list[Seen]],
    monkeypatch: pytest.MonkeyPatch,
    is_cut_off: bool,
) -> None:
    """It stood still, was taken over, and acknowledges as soon as its heir has joined.

    Cut off, the constructor does not hear of the heir before that.
    """
    if is_cut_off:
        for party in (run_module, constructor_actor):
            monkeypatch.setattr(party, "TRUST_S", 1.0)
    gate, held = threading.Event(), threading.Event()
    gate.set()
    ask = Partners.supervisor

    async def late(self: Partners, call: str, **arguments: Any) -> Any:
        answer = await ask(self, call, **arguments)
        if call == "plans" and not gate.is_set():
            held.set()
            while not gate.is_set():
                await asyncio.sleep(0.01)
        return answer

    monkeypatch.setattr(Partners, "supervisor", late)
    with md.serve(make(), local_client, name=name) as service, connect(service, 1) as other:
        record = record_of(local_cluster, name)
        stale = connect(service, 0)
        begun = take(stale, 3)
        assert wait_until(lambda: record.watermarks[0] == (0, 2))
        if is_cut_off:
            gate.clear()
        with connect(service, 0, force=True) as heir:
            stale._link.consume(stale._link.position)
            with pytest.raises(md.errors.ClaimError):
                stale._link._look()
            answer = stale._link._send_mark(stale._link._desk.line).result(timeout=20)
            assert answer[0]["status"] == "claim"
            assert record.watermarks[0] == (0, 2)
            gate.set()
            both = Ranks([partial(drain, heir), partial(drain, other)]).results()
        assert both == [whole[0][2:], whole[1]]
        assert begun == whole[0][:3]
        assert service.audit()["ok"]
        stale.close()
    assert held.is_set() == is_cut_off


def test_a_trainer_that_was_stopped_wakes_to_nothing(
    local_cluster: LocalCluster, local_client: Client, name: str, whole: list[list[Seen]]
) -> None:
    """A process under SIGSTOP is taken over; when it goes on, it has no say any more."""
    with (
        md.serve(make(), local_client, name=name) as service,
        connect(service, 1) as other,
        module("trainer", service.address, name, "0", "gated") as stopped,
    ):
        record = record_of(local_cluster, name)
        for _ in range(3):
            stopped.wait_for("batch")
            stopped.say()
        stopped.wait_for("batch")
        # It has asked for the fourth batch, and with that acknowledged the third.
        assert wait_until(lambda: record.watermarks[0] == (0, 3))
        os.kill(stopped.popen.pid, signal.SIGSTOP)
        try:
            heir = connect(service, 0, force=True)
        finally:
            os.kill(stopped.popen.pid, signal.SIGCONT)
        for _ in range(20):  # it may have some batches that came before
            stopped.say()
            if stopped.wait_for("batch", "error", "end").startswith("error"):
                break
        assert stopped.output[-1].startswith("error ClaimError")
        assert record.watermarks[0] == (0, 3)
        both = Ranks([partial(drain, heir), partial(drain, other)]).results()
        heir.close()
        assert both == [whole[0][3:], whole[1]]
        assert service.audit()["ok"]
