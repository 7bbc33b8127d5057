"""Workers that close in order, as on SIGTERM: what they hold moves, as if they were lost."""

from __future__ import annotations

import os
import signal

import pytest
from distributed import Client, LocalCluster

import megadask as md
from megadask.scheduling.wire import LOADER_HOST
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import WAIT_S, disturbed, holder, record_of
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("role", ["planner", "loader", "constructor"])
def test_a_worker_that_closes(name: str, whole: list[list[Seen]], role: str) -> None:
    """Again and again, as what it is in the middle of differs; no error of its end is told."""
    with (
        make_cluster(processes=False, n_workers=5) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(make(loaders=2, shadows=1), client, name=name) as service,
    ):

        def close_some() -> None:
            for _ in range(3):
                lost = holder(service, role)
                [worker] = [one for one in cluster.workers.values() if one.address == lost]
                cluster.sync(worker.close, timeout=0, executor_wait=False, nanny=False)
                assert wait_until(lambda lost=lost: holder(service, role) != lost, WAIT_S)

        assert disturbed(service, 5, close_some) == whole
        assert not [one for one in service.stats()["events"] if one["event"] == "shadow dropped"]
        assert service.audit()["ok"]


def test_loaders_of_a_worker_that_closes_refuse(
    local_cluster: LocalCluster, local_client: Client, name: str
) -> None:
    """A call that nobody handles would be answered with None."""
    with md.serve(make(), local_client, name=name):
        owner = next(iter(record_of(local_cluster, name).loaders.values()))
        [worker] = [one for one in local_cluster.workers.values() if one.address == owner.address]
        host = worker.plugins["megadask-loader-host"]
        host.teardown(worker)
        with pytest.raises(md.errors.StaleError):
            local_client.sync(
                getattr(local_client.rpc(owner.address), LOADER_HOST),
                call="status",
                incarnation=owner.incarnation,
            )


def test_a_worker_process_that_is_terminated(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    """As a preempted loader job is."""
    with md.serve(make(), client, name=name) as service:
        lost = holder(service, "constructor")
        assert disturbed(service, 5, lambda: os.kill(pids[lost], signal.SIGTERM)) == whole
        assert service.audit()["ok"]
