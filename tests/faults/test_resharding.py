"""Workers that die while a run is given another topology."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from distributed import Client, LocalCluster

import megadask as md
from megadask.scheduling.run import Run
from tests.faults.helpers import WAIT_S, holder, record_of
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.resharding import resharded
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, spans_by_step

pytestmark = pytest.mark.timeout(200)


def test_old_constructors_hear_nothing_of_a_smaller_mesh(
    local_cluster: LocalCluster,
    local_client: Client,
    name: str,
    whole: list[list[Seen]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They ask for news while the commit is written, and would find ranks missing."""
    begin = Run._begin_generation

    async def begin_slowly(self: Run) -> None:
        self.bump()
        await asyncio.sleep(0.5)
        await begin(self)

    with md.serve(make(), local_client, name=name) as service:
        record = record_of(local_cluster, name)
        monkeypatch.setattr(Run, "_begin_generation", begin_slowly)
        before, _, _ = resharded(service, record, 1)
        after = run(service, drain)
        assert service.audit()["ok"]
    assert spans_by_step([*before, *after]) == spans_by_step(whole)


@pytest.mark.parametrize("role", ["planner", "loader", "constructor"])
def test_a_worker_is_killed_meanwhile(
    cluster: LocalCluster,
    client: Client,
    name: str,
    pids: dict[str, int],
    whole: list[list[Seen]],
    role: str,
) -> None:
    with md.serve(make(), client, name=name) as service:
        record, lost = record_of(cluster, name), holder(service, role)
        before, _, step = resharded(
            service,
            record,
            4,
            lambda: os.kill(pids[lost], signal.SIGKILL),
            seconds=2 * WAIT_S,
            timeout=WAIT_S,
        )
        after = run(service, drain, seconds=2 * WAIT_S, timeout=WAIT_S)
        assert service.audit()["ok"]
    assert {batch.step for rank in before for batch in rank} == set(range(step))
    assert spans_by_step([*before, *after]) == spans_by_step(whole)
