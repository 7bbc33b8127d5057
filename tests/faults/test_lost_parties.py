"""Drivers, trainers and schedulers that die."""

from __future__ import annotations

import signal
from functools import partial

import pytest
from distributed import Client

import megadask as md
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import WAIT_S, assert_nothing_is_left_on
from tests.megadask.helpers.processes import Process, dask_worker, module
from tests.megadask.helpers.ranks import Ranks, connect, run, start
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, see, take

pytestmark = pytest.mark.timeout(150)


def test_a_driver_that_is_killed_closes_its_service(local_client: Client, name: str) -> None:
    address = local_client.scheduler.address
    with module("driver", address, name) as driver:
        driver.wait_for("serving")
        loader = md.connect(address, name, rank=0, timeout=20)
        batches = iter(loader)
        next(batches)
        driver.kill()
        with pytest.raises(md.errors.ClosedError, match=r"driver.*gone"):
            Ranks([lambda: list(batches)]).results(20)
        loader.close()
    assert_nothing_is_left_on(local_client)
    # The name is free.
    with md.serve(make(), local_client, name=name) as service:
        assert len(run(service, lambda lo: take(lo, 1))) == 2


def test_a_driver_that_hangs_closes_its_service(local_client: Client, name: str) -> None:
    """Without a sign of life for longer than its lease; what it does when it wakes is too late."""
    address = local_client.scheduler.address
    with module("driver", address, name, "leased") as driver:
        driver.wait_for("serving")
        with md.connect(address, name, rank=0, timeout=WAIT_S) as loader:
            batches = iter(loader)
            next(batches)
            driver.popen.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(md.errors.ClosedError, match=r"driver.*silent.*lease_s"):
                    Ranks([lambda: list(batches)]).results(WAIT_S)
            finally:
                driver.popen.send_signal(signal.SIGCONT)
    assert_nothing_is_left_on(local_client)


def test_a_detached_service_lives_on(
    local_client: Client, name: str, whole: list[list[Seen]]
) -> None:
    address = local_client.scheduler.address
    with module("driver", address, name, "detached") as driver:
        driver.wait_for("serving")
        loaders = [md.connect(address, name, rank=rank, timeout=20) for rank in range(2)]
        begun = Ranks([partial(take, loader, 2) for loader in loaders]).results()
        driver.kill()
    rest = Ranks([partial(drain, loader) for loader in loaders]).results()
    assert [[*a, *b] for a, b in zip(begun, rest, strict=True)] == whole
    for loader in loaders:
        loader.close()
    # Taken over by another driver, which ends it.
    md.serve(make(), local_client, name=name).close()
    assert_nothing_is_left_on(local_client)


def test_a_trainer_that_is_killed_frees_its_rank(
    local_client: Client, name: str, whole: list[list[Seen]]
) -> None:
    """Another one goes on at the batch that was never acknowledged."""
    with md.serve(make(), local_client, name=name) as service:
        other = start(service, drain, ranks=[1])
        with module("trainer", service.address, name, "0", "gated") as trainer:
            for number in range(3):
                if number:
                    trainer.say()
                due = tuple(map(int, trainer.wait_for("batch").split()[1:]))
            assert wait_until(lambda: tuple(service.stats()["watermarks"]["0"]) == due, WAIT_S)
            trainer.kill()
            assert wait_until(lambda: "0" not in service.stats()["trainers"], WAIT_S)
        assert run(service, drain, ranks=[0]) == [whole[0][2:]]
        assert other.results() == [whole[1]]
        assert service.audit()["ok"]


def test_a_scheduler_that_closes(name: str) -> None:
    with make_cluster(processes=False) as cluster:
        with Client(cluster, set_as_default=False) as client:
            service = md.serve(make(), client, name=name)
            loaders = [connect(service, rank, timeout=10.0) for rank in range(2)]
            Ranks([partial(take, loader, 2) for loader in loaders]).results()
            states = [loader.state_dict() for loader in loaders]
            cluster.close()
        errors = Ranks([partial(drain, loader) for loader in loaders]).outcomes(40)
        for error in errors:
            assert isinstance(error, md.errors.ClosedError | md.errors.DeadlineError), error
            assert "cheduler" in str(error)
        for loader, state in zip(loaders, states, strict=True):
            assert loader.state_dict() == state
        Ranks([loader.close for loader in loaders]).results(30)
        Ranks([service.close]).results(30)


@pytest.mark.timeout(300)
def test_a_cluster_of_separate_processes(
    local_client: Client, name: str, whole: list[list[Seen]]
) -> None:
    """Scheduler, worker and driver share no process; then the scheduler is killed."""
    scheduler = Process(
        *("-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"),
        *("--no-dashboard", "--dashboard-address", "127.0.0.1:0"),
    )
    worker = None
    try:
        line = scheduler.wait_for("")
        while "Scheduler at:" not in line:
            line = scheduler.wait_for("")
        address = line.split()[-1]
        worker = dask_worker(address, "0", nanny=False)
        with Client(address, set_as_default=False, timeout=WAIT_S) as client:
            client.wait_for_workers(1, timeout=WAIT_S)
            with md.serve(make(), client, name=name) as service:
                assert run(service, drain) == whole
                assert service.audit()["ok"]
            service = md.serve(make(), client, name=name)
            loader = connect(service, 0, timeout=10.0)
            seen = take(loader, 2)
            scheduler.kill()
            (error,) = Ranks([lambda: seen.extend(map(see, loader))]).outcomes(60)
            assert isinstance(error, md.errors.MegaDaskError), repr(error)
            state = loader.state_dict()
            Ranks([loader.close, service.close]).results(60)
        # And on another cluster all ranks go on from there.
        with md.serve(make(), local_client, name=name, resume=state) as service:
            assert run(service, drain) == [one[len(seen) :] for one in whole]
    finally:
        for process in (scheduler, worker):
            if process is not None:
                process.end()
