"""Loaders that become more or fewer, and roles that move to new workers, while ranks train."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from megadask.scheduling import autosize, sizing
from megadask.scheduling.custody import Custody
from megadask.scheduling.loader_host import LoaderHost
from megadask.scheduling.owners import Partners
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import (
    WAIT_S,
    assert_nothing_is_left_on,
    disturbed,
    holder,
    loader_threads,
    record_of,
)
from tests.megadask.helpers.data import pipeline, unfold
from tests.megadask.helpers.ranks import Ranks, run, start
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import Seen, drain, see, take

pytestmark = pytest.mark.timeout(200)

LANES = {"a": 3, "b": 3, "c": 3}


def parts(service: md.Service, kind: str = "loaders") -> dict[str, list[list[int]]]:
    """Return which lanes the loaders of each source have, by what the service says."""
    found: dict[str, list[list[int]]] = {name: [] for name in LANES}
    for one in service.stats()[kind]:
        found[one["source"]].append(one["lanes"])
    return {name: sorted(lanes) for name, lanes in found.items()}


def assert_whole(service: md.Service, counts: dict[str, int]) -> None:
    """Every lane has one loader, and sources have as many as they were given."""
    found = parts(service)
    assert {name: len(lanes) for name, lanes in found.items()} == counts
    for name, num_lanes in LANES.items():
        assert sorted(lane for part in found[name] for lane in part) == list(range(num_lanes))


@pytest.mark.parametrize("shadows", [0, 1])
def test_more_and_fewer_loaders_while_ranks_train(
    local_client: Client, name: str, whole: list[list[Seen]], shadows: int
) -> None:
    limits = md.Limits(lead_steps=1)  # so that most is still to be read
    with md.serve(make(shadows=shadows), local_client, name=name, limits=limits) as service:
        assert_whole(service, {"a": 1, "b": 1, "c": 1})

        def scale() -> None:
            service.scale({"a": 3, "b": 2})
            assert_whole(service, {"a": 3, "b": 2, "c": 1})
            service.scale({"a": 2, "c": 3})
            assert_whole(service, {"a": 2, "b": 2, "c": 3})
            if shadows:
                assert parts(service, "shadows") == parts(service)

        def scale_back() -> None:
            service.scale({"a": 1, "b": 1, "c": 1})
            assert_whole(service, {"a": 1, "b": 1, "c": 1})

        def body(loader: md.Loader) -> list[Seen]:
            seen = []
            for change in (scale, scale_back) if loader.rank == 0 else ():
                seen += take(loader, 4)
                change()
            return seen + drain(loader)

        assert run(service, body, seconds=WAIT_S) == whole
        assert service.audit()["ok"]
        threads = len(local_client.run(loader_threads).popitem()[1])
        assert threads == 3 * (1 + shadows)
    assert_nothing_is_left_on(local_client)


def test_what_has_moved_is_not_held_where_it_was(
    local_cluster: LocalCluster, local_client: Client, name: str, whole: list[list[Seen]]
) -> None:
    """Files and samples of lanes that another loader has now; that one reads them again."""
    limits = md.Limits(lead_steps=1)
    with md.serve(make(), local_client, name=name, limits=limits) as service:
        run(service, lambda loader: take(loader, 4))
        [(key, owner)] = [
            (key, owner)
            for key, owner in record_of(local_cluster, name).loaders.items()
            if key[0] == "a"
        ]
        hosts = [worker.plugins[LoaderHost.name] for worker in local_cluster.workers.values()]
        [loader] = [
            host._hosted[owner.incarnation].loader
            for host in hosts
            if owner.incarnation in host._hosted
        ]
        held = {lane for _, lane, _ in loader.cache._fresh}
        assert held == set(key[1]) == {0, 1, 2}
        service.scale({"a": 3})
        assert {lane for _, lane, _ in loader.cache._fresh} <= {0}
        assert set(loader._open) <= {0}
        assert run(service, drain) == [rank[4:] for rank in whole]
        assert service.audit()["ok"]
        assert set(loader._open) <= {0}


def test_the_loader_of_a_lane_that_moved_still_answers_whoever_does_not_know(
    local_cluster: LocalCluster,
    local_client: Client,
    name: str,
    whole: list[list[Seen]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is told of the new split: planner and constructors find it where loaders are gone."""

    async def learn_nothing(self: Partners, num_casts: int) -> None:
        return

    with md.serve(make(), local_client, name=name, limits=md.Limits(lead_steps=1)) as service:
        monkeypatch.setattr(Partners, "learn", learn_nothing)

        def scale() -> None:
            service.scale({"a": 3, "b": 3})
            service.scale({"a": 1})

        assert disturbed(service, 4, scale) == whole
        assert service.audit()["ok"]


@pytest.mark.parametrize("role", ["planner", "loader", "constructor"])
def test_a_worker_is_killed_while_lanes_change_hands(
    cluster: LocalCluster,
    client: Client,
    name: str,
    pids: dict[str, int],
    whole: list[list[Seen]],
    monkeypatch: pytest.MonkeyPatch,
    role: str,
) -> None:
    """When the new loaders are open and the record does not know of them yet."""
    open_new = Custody._open_new

    async def kill_before(self: Custody, *arguments: Any) -> Any:
        opened = await open_new(self, *arguments)
        os.kill(pids[lost], signal.SIGKILL)
        while lost in self._roles.workers():  # the test has a deadline
            await asyncio.sleep(0.01)
        return opened

    with md.serve(make(shadows=1), client, name=name, limits=md.Limits(lead_steps=1)) as service:
        lost = holder(service, role)
        monkeypatch.setattr(Custody, "_open_new", kill_before)

        def scale() -> None:
            service.scale({"a": 3, "b": 2})

        assert disturbed(service, 5, scale) == whole
        assert wait_until(lambda: lost not in roles(service), WAIT_S)
        assert_whole(service, {"a": 3, "b": 2, "c": 1})
        assert service.audit()["ok"]
        assert record_of(cluster, name).num_casts


def test_new_loaders_that_cannot_be_opened_change_nothing(
    local_client: Client, name: str, whole: list[list[Seen]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    async def full(
        self: LoaderHost, incarnation: str, blob: bytes, *arguments: Any, **options: Any
    ) -> Any:
        opened.append(incarnation)
        if len(opened) == 2:
            return "no room"
        return await open_loader(self, incarnation, blob, *arguments, **options)

    with md.serve(make(), local_client, name=name) as service:
        open_loader = LoaderHost._open
        before = parts(service)
        with monkeypatch.context() as patch:
            patch.setattr(LoaderHost, "_open", full)
            with pytest.raises(md.errors.WorkerError, match="no room"):
                service.scale({"a": 3})
        assert len(opened) == 2
        assert parts(service) == before
        assert len(local_client.run(loader_threads).popitem()[1]) == len(LANES)
        assert run(service, drain) == whole


@pytest.mark.parametrize(
    ("loaders", "named"),
    [
        ({"d": 1}, "'d'"),
        ({"a": 0}, "'a'"),
        ({"a": 4}, "from 1 to 3"),
        ({"a": 1.5}, "1.5"),
        ({"a": True}, "True"),
        ({}, "a dict of source to number"),
        (3, "a dict of source to number"),
    ],
)
def test_what_cannot_be_is_refused_at_once(shared: md.Service, loaders: Any, named: str) -> None:
    before = parts(shared)
    with pytest.raises(md.errors.ConfigError, match=named):
        shared.scale(loaders)
    with pytest.raises(md.errors.ConfigError, match="other"):
        shared.scale({"a": 2}, "other")
    assert parts(shared) == before


@pytest.fixture(scope="module")
def shared(local_client: Client) -> Iterator[md.Service]:
    with md.serve(make(), local_client, name="shared") as service:
        yield service


def roles(service: md.Service) -> Counter[str]:
    """Return how many roles each worker bears."""
    stats = service.stats()
    held = [one["worker"] for kind in ("loaders", "shadows", "constructors") for one in stats[kind]]
    return Counter([*held, stats["planner"]])


@pytest.mark.parametrize("shadows", [0, 1])
def test_workers_that_come_later_get_their_share(
    name: str, whole: list[list[Seen]], shadows: int
) -> None:
    with (
        make_cluster(processes=False) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(make(loaders=2, shadows=shadows), client, name=name) as service,
    ):
        old = set(client.nthreads())

        def grow() -> None:
            cluster.scale(4)
            client.wait_for_workers(4, timeout=WAIT_S)
            before = roles(service)
            assert set(before) == old
            service.spread()
            now = roles(service)
            assert set(now) == set(client.nthreads())
            assert sum(now.values()) == sum(before.values())
            assert max(now.values()) - min(now.values()) <= 1 + 2 * shadows
            stats = service.stats()
            apart = [
                (one["source"], tuple(one["lanes"]), one["worker"])
                for kind in ("loaders", "shadows")
                for one in stats[kind]
            ]
            assert len(set(apart)) == len(apart)
            events = len(stats["events"])
            service.spread()  # there is nothing more to do
            assert roles(service) == now
            assert len(service.stats()["events"]) == events

        assert disturbed(service, 5, grow) == whole
        assert service.audit()["ok"]


def test_two_who_scale_at_once_take_turns(
    local_client: Client, name: str, whole: list[list[Seen]]
) -> None:
    with md.serve(make(), local_client, name=name) as service:

        def both() -> None:
            scale: list[Callable[[], None]] = [
                lambda: service.scale({"a": 3}),
                lambda: service.scale({"b": 3, "c": 2}),
                service.spread,
            ]
            Ranks(scale).results(WAIT_S)

        assert disturbed(service, 5, both) == whole
        assert_whole(service, {"a": 3, "b": 3, "c": 2})


def slow_a(record: dict[str, int]) -> dict[str, Any]:
    """A transform that takes long for records of the first source."""
    if record["id"] < len(DATA["a"]):
        time.sleep(0.05)
    return unfold(record)


def test_loaders_follow_what_reading_takes(
    local_client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody does anything but wait for the slow source; then it gets no weight any more."""
    monkeypatch.setattr(autosize, "LOOK_S", 0.2)
    monkeypatch.setattr(sizing, "LOOKS_TO_SHRINK", 2)
    options = {"transform": slow_a, "loaders": "auto"}
    made = pipeline(DATA, sources=options, epochs=None)
    limits = md.Limits(lead_steps=1, loader_bytes=0)
    with md.serve(made, local_client, name=name, limits=limits) as service:
        assert_whole(service, {"a": 1, "b": 1, "c": 1})
        changed = threading.Event()

        def body(loader: md.Loader) -> list[Seen]:
            seen = []
            for batch in loader:
                seen.append(see(batch))
                if changed.is_set():
                    return seen
            raise AssertionError("the data has no end")

        ranks = start(service, body, timeout=WAIT_S)
        try:
            # As many as there are workers.
            assert wait_until(lambda: len(parts(service)["a"]) == 2, WAIT_S)
            service.set_mixture({"b": 1.0, "c": 1.0})
            assert wait_until(lambda: len(parts(service)["a"]) == 1, WAIT_S)
        finally:
            changed.set()
            seen = ranks.outcomes(2 * WAIT_S)
        assert service.audit()["ok"]
        assert_whole(service, {name: len(part) for name, part in parts(service).items()})
    assert all(isinstance(rank, list) for rank in seen), seen


@pytest.mark.parametrize("loaders", ["many", 0, 1.5, None])
def test_loaders_are_a_number_or_auto(loaders: Any) -> None:
    with pytest.raises(md.errors.ConfigError, match=r"'a', loaders="):
        make(loaders=loaders)
