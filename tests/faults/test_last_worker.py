"""Everything but one worker goes at once, in processes that no nanny starts again."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from distributed import Client

import megadask as md
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import WAIT_S, disturbed, owners, record_of
from tests.megadask.helpers.processes import dask_worker
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen

pytestmark = pytest.mark.timeout(150)


def test_all_workers_but_one_are_killed_at_once(name: str, whole: list[list[Seen]]) -> None:
    """The one that is left holds everything, and no shadow is where its primary is."""
    with (
        make_cluster(processes=True, n_workers=0) as cluster,
        Client(cluster, set_as_default=False) as client,
        ExitStack() as stack,
    ):
        workers = {
            f"worker-{n}": dask_worker(cluster.scheduler_address, f"worker-{n}", nanny=False)
            for n in range(3)
        }
        for worker in workers.values():
            stack.callback(worker.end)
        client.wait_for_workers(3, timeout=WAIT_S)
        made = make(loaders=2, shadows=1)
        with md.serve(made, client, name=name, limits=md.Limits(lead_steps=1)) as service:
            last = cluster.scheduler.aliases["worker-2"]

            def kill() -> None:
                for one in ("worker-0", "worker-1"):
                    workers[one].popen.kill()

            assert disturbed(service, 5, kill) == whole
            record = record_of(cluster, name)
            assert {owner.address for owner in owners(record).values()} == {last}
            assert wait_until(lambda: not service.stats()["shadows"], WAIT_S)
            assert service.audit()["ok"]
