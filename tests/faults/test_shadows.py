"""Shadow loaders: they read the same, and take over without reading again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import megadask as md
from megadask.scheduling import hedging
from megadask.scheduling.source_loader import SourceLoader
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import WAIT_S, assert_nothing_is_left_on, disturbed, record_of
from tests.megadask.helpers.data import pipeline
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import Seen, drain, take

pytestmark = pytest.mark.timeout(150)


def shadowed(**options: Any) -> md.Pipeline:
    return make(shadows=1, **options)


def events(service: md.Service, kind: str) -> list[Mapping[str, Any]]:
    return [event for event in service.stats()["events"] if event["event"] == kind]


def test_shadows_live_elsewhere_and_change_nothing(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    with md.serve(shadowed(), client, name=name) as service:
        stats = service.stats()
        primaries = {(one["source"], *one["lanes"]): one["worker"] for one in stats["loaders"]}
        for shadow in stats["shadows"]:
            assert primaries.pop((shadow["source"], *shadow["lanes"])) != shadow["worker"]
        assert not primaries
        assert run(service, drain) == whole
        assert not service.stats()["events"]
    assert_nothing_is_left_on(client)


def test_a_shadow_takes_over_and_gets_one_of_its_own(
    cluster: LocalCluster,
    client: Client,
    name: str,
    pids: dict[str, int],
    whole: list[list[Seen]],
) -> None:
    with md.serve(shadowed(), client, name=name) as service:
        record = record_of(cluster, name)
        source = ("a", (0, 1, 2))
        before, standby = record.loaders[source], record.shadows[source][0]

        def kill() -> None:
            # Once the shadow has followed its primary as far as that was asked.
            assert wait_until(lambda: cached(service, "shadows", "a") > 0, WAIT_S)
            os.kill(pids[before.address], signal.SIGKILL)

        assert disturbed(service, 6, kill) == whole
        assert record.loaders[source] == standby
        moved = {event["role"] for event in events(service, "shadow promoted")}
        assert "loader of 'a'" in moved
        assert wait_until(lambda: len(record.shadows[source]) == 1, WAIT_S)
        assert record.shadows[source][0].address != standby.address
        assert service.audit()["ok"]


def cached(service: md.Service, kind: str, source: str) -> int:
    return sum(
        one.get("cached_samples", 0) for one in service.stats()[kind] if one["source"] == source
    )


def test_what_a_shadow_holds_is_not_read_again(
    cluster: LocalCluster, client: Client, name: str, pids: dict[str, int]
) -> None:
    """Both ranks stop in the middle; the loader dies; what comes next the shadow has ready."""
    limits = md.Limits(lead_steps=1)
    with md.serve(shadowed(), client, name=name, limits=limits) as service:
        record = record_of(cluster, name)
        run(service, lambda loader: take(loader, 4))
        held = cached(service, "loaders", "a")
        assert wait_until(lambda: cached(service, "shadows", "a") >= held > 0, WAIT_S)
        key = ("a", (0, 1, 2))
        standby = record.shadows[key][0]
        os.kill(pids[record.loaders[key].address], signal.SIGKILL)
        assert wait_until(lambda: record.loaders[key] == standby, WAIT_S)
        run(service, lambda loader: take(loader, 4))
        [promoted] = [one for one in service.stats()["loaders"] if one["source"] == "a"]
        assert promoted["rereads"] == 0


class Elsewhere:
    """A transform whose result depends on where it runs, as broken data on one host would."""

    def __call__(self, record: Mapping[str, int]) -> dict[str, Any]:
        first = os.getpid() if record["id"] == 7 else record["id"]
        return {"tokens": np.arange(first, first + record["length"])}


def test_a_shadow_that_reads_otherwise_is_dropped(
    client: Client, name: str, pids: dict[str, int]
) -> None:
    made = pipeline(DATA, epochs=1, sources={"shadows": 1, "transform": Elsewhere()})
    with md.serve(made, client, name=name) as service:
        run(service, lambda loader: sum(1 for _ in loader))
        assert wait_until(lambda: events(service, "shadow dropped"), WAIT_S)
        [event] = events(service, "shadow dropped")
        assert "source 'a'" in event["reason"]
        assert "checksum" in event["reason"]
        assert service.audit()["ok"]
    assert_nothing_is_left_on(client)


def test_without_a_second_worker_there_is_none(name: str) -> None:
    with (
        make_cluster(processes=False, n_workers=1) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(shadowed(), client, name=name) as service,
    ):
        assert not service.stats()["shadows"]
        cluster.scale(2)
        assert wait_until(lambda: len(service.stats()["shadows"]) == 3, WAIT_S)


def test_a_loader_that_hangs_is_not_waited_for(
    local_client: Client, name: str, whole: list[list[Seen]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread stands still to the end of the run; its shadow answers for it."""
    hangs, released = threading.Event(), threading.Event()

    def stop(self: SourceLoader) -> None:
        if hangs.is_set() and self.spec.name == "a" and not self.cache.standby:
            assert released.wait(2 * WAIT_S)

    for method in ("describe", "serve"):
        original = getattr(SourceLoader, method)

        def slow(self: SourceLoader, *arguments: Any, _original: Any = original) -> Any:
            stop(self)
            return _original(self, *arguments)

        monkeypatch.setattr(SourceLoader, method, slow)
    for constant in ("LEAST_S", "FIRST_S"):
        monkeypatch.setattr(hedging, constant, 0.2)
    limits = md.Limits(lead_steps=1)
    with md.serve(shadowed(), local_client, name=name, limits=limits) as service:
        try:
            assert disturbed(service, 4, hangs.set) == whole
        finally:
            released.set()
        assert service.audit()["ok"]
        assert sum(one["hedged"] for one in service.stats()["constructors"]) > 0
