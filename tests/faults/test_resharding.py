"""Workers that die while a run is given another topology."""

from __future__ import annotations

import os
import signal

import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.faults.helpers import WAIT_S, holder, record_of
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.resharding import resharded
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, spans_by_step

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("role", ["planner", "loader", "constructor"])
def test_a_worker_is_killed_meanwhile(
    cluster: LocalCluster, client: Client, name: str, whole: list[list[Seen]], role: str
) -> None:
    client.wait_for_workers(2, timeout=WAIT_S)
    pids = client.run(os.getpid)
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
