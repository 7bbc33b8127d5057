"""Calls from a role to loaders: by message, or at once where both live on one worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status
from distributed.protocol.serialize import ToPickle

from megadask.scheduling.errors import DeadlineError, StaleError
from megadask.scheduling.owners import LoaderAddress, Partners
from megadask.scheduling.spec import Limits
from megadask.scheduling.wire import LOADER_HOST, SUPERVISOR

HERE, THERE = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"


class Hosts:
    """The workers of a role and of another loader, and how each was reached."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.address = HERE
        self.handlers = {LOADER_HOST: self._handler("called")}
        self.scheduler = SimpleNamespace(**{SUPERVISOR: self._owners})
        self.status = Status.running
        self.read = {"num_records": 1_000_000, "is_short": False}

    async def _owners(self, **_: Any) -> Any:
        return {
            "version": 1,
            "num_casts": 1,
            "loaders": {"web": [[[0], HERE, "life"]]},
            "shadows": {"web": [[[0], THERE, "shadow"]]},
        }

    def rpc(self, address: str) -> Any:
        return SimpleNamespace(**{LOADER_HOST: self._handler(f"sent to {address}")})

    def _handler(self, way: str) -> Any:
        async def handle(call: str, incarnation: str, packed: Any) -> Any:
            self.reached.append(way)
            if call == "stale":
                raise StaleError("no such loader", got=incarnation)
            if call == "hang":
                await asyncio.Event().wait()
            if call == "describe":
                told = {"read": self.read}
                return {"packed": ToPickle(told) if way == "called" else told}
            if way == "called":
                return {"packed": ToPickle({"got": packed})}
            return {"packed": {"got": packed.data}}  # Dask unpacks what travels

        return handle


def partners_of(hosts: Hosts) -> Partners:
    limits = Limits(reply_s=0.2, silent_s=0.1, journal_s=0.1)
    return Partners(hosts, "run", limits)  # type: ignore[arg-type]


def call(hosts: Hosts, address: str, what: str) -> Any:
    partners = partners_of(hosts)
    owner = LoaderAddress((0,), address, "life")
    return asyncio.run(partners.call(owner, "web", 0, what, {"wanted": 1}))


@pytest.mark.parametrize("address", [HERE, THERE])
def test_a_loader_answers_alike_wherever_it_is(address: str) -> None:
    assert call(Hosts(), address, "serve") == {"got": {"wanted": 1}}
    with pytest.raises(StaleError, match="life"):
        call(Hosts(), address, "stale")
    with pytest.raises(DeadlineError, match="lane 0, to hang"):
        call(Hosts(), address, "hang")


def test_no_message_is_sent_to_oneself() -> None:
    hosts = Hosts()
    call(hosts, HERE, "serve")
    call(hosts, THERE, "serve")
    assert hosts.reached == ["called", f"sent to {THERE}"]


def test_the_shadow_of_a_loader_whose_records_take_long_is_asked_first() -> None:
    """Though it answers in time: with few of the records that were asked for."""

    async def read(times: int) -> list[bool]:
        return [(await partners.read("web", 0, "describe")).by_shadow for _ in range(times)]

    async def reads() -> list[bool]:
        before = await read(3)
        hosts.read = {"num_records": 1, "is_short": True}
        return before + await read(2)

    hosts = Hosts()
    partners = partners_of(hosts)
    assert asyncio.run(reads()) == [False, False, False, False, True]
