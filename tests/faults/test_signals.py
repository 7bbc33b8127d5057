"""Ctrl-C, SIGTERM and SIGKILL of every party: nothing of it is left, and the others live."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from distributed import Client

import megadask as md
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import WAIT_S, assert_nothing_is_left_on
from tests.megadask.helpers.processes import Process, dask_worker, module
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, take

pytestmark = pytest.mark.timeout(200)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def family(process: Process) -> list[psutil.Process]:
    own = psutil.Process(process.popen.pid)
    return [own, *own.children(recursive=True)]


def shared() -> set[str]:
    """Return what there is in shared memory of ours."""
    folder = Path("/dev/shm")
    return {file.name for file in folder.glob("*megadask*")} if folder.is_dir() else set()


def end(process: Process, signum: int) -> None:
    """Send a signal, and see that the process ends, with all that it started."""
    members = family(process)
    os.kill(process.popen.pid, signum)
    process.popen.wait(WAIT_S)
    assert wait_until(lambda: not [one for one in members if one.is_running()], WAIT_S)


@pytest.mark.parametrize("signum", SIGNALS, ids=lambda signum: signum.name)
def test_a_trainer_that_gets_a_signal(
    local_client: Client, name: str, whole: list[list[Seen]], signum: signal.Signals
) -> None:
    """Its rank is free, and the other one has lost nothing."""
    before = shared()
    with md.serve(make(), local_client, name=name) as service:
        with module("trainer", service.address, name, "0", "gated") as trainer:
            trainer.wait_for("batch")
            end(trainer, signum)
        assert wait_until(lambda: not service.stats()["trainers"], WAIT_S)
        # After Ctrl-C it has closed its loader, and with that acknowledged the batch in its hands.
        done = int(signum == signal.SIGINT)
        assert run(service, drain, timeout=WAIT_S) == [whole[0][done:], whole[1]]
        assert service.audit()["ok"]
    assert_nothing_is_left_on(local_client)
    assert wait_until(lambda: shared() <= before, WAIT_S)


@pytest.mark.parametrize("signum", SIGNALS, ids=lambda signum: signum.name)
def test_a_driver_that_gets_a_signal(
    local_client: Client, name: str, signum: signal.Signals
) -> None:
    """Its service ends, and leaves nothing on the workers."""
    with module("driver", local_client.scheduler.address, name) as driver:
        driver.wait_for("serving")
        with md.connect(local_client.scheduler.address, name, rank=0, timeout=WAIT_S) as loader:
            take(loader, 1)
            end(driver, signum)
            with pytest.raises(md.errors.ClosedError):
                drain(loader)
    assert_nothing_is_left_on(local_client)


@pytest.mark.parametrize("nanny", [True, False], ids=["nanny", "worker"])
def test_a_worker_that_gets_a_signal(name: str, whole: list[list[Seen]], nanny: bool) -> None:
    """It ends with its nanny; the last one of them leaves the run waiting for another one."""
    before = shared()
    with (
        make_cluster(processes=True, n_workers=0) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        worker = dask_worker(cluster.scheduler_address, "first", nanny=nanny)
        try:
            client.wait_for_workers(1, timeout=WAIT_S)
            with md.serve(make(), client, name=name) as service:
                ranks = run(service, lambda loader: take(loader, 3), timeout=WAIT_S)
                for number, signum in enumerate(SIGNALS):
                    old, worker = worker, None
                    try:
                        end(old, signum)
                    finally:
                        old.end()
                    address = cluster.scheduler_address
                    worker = dask_worker(address, f"later-{number}", nanny=nanny)
                    more = run(
                        service, lambda loader: take(loader, 2), timeout=WAIT_S, seconds=2 * WAIT_S
                    )
                    ranks = [[*a, *b] for a, b in zip(ranks, more, strict=True)]
                assert ranks == [seen[:9] for seen in whole]
                assert service.audit()["ok"]
        finally:
            if worker is not None:
                worker.end()
    assert wait_until(lambda: shared() <= before, WAIT_S)
