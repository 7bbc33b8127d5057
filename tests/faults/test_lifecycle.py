"""What happens when something ends: a service, a loop, a driver, a trainer, a worker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from megadask.scheduling import trainer_link
from megadask.scheduling.record import RunRecord
from tests.conftest import LeakCheck, make_cluster, wait_until
from tests.megadask.helpers.data import pipeline, records
from tests.megadask.helpers.processes import Process, module
from tests.megadask.helpers.ranks import Ranks, connect, run, start
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import Seen, drain, every_token, see, take, tokens_delivered

pytestmark = pytest.mark.timeout(90)

ROWS = [row for rows in DATA.values() for row in rows]


@pytest.fixture(scope="module")
def whole(local_client: Client) -> list[list[Seen]]:
    """The undisturbed run."""
    with md.serve(make(), local_client, name="whole") as service:
        return run(service, drain)


# Ends that are asked for ------------------------------------------------------------------------


def num_actors(dask_worker: Any) -> int:
    return len(dask_worker.state.actors)


def loader_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("megadask-loader")]


def left_on(client: Client) -> list[Any]:
    """Return what services left on the workers and at the scheduler."""
    left: list[Any] = [count for count in client.run(num_actors).values() if count]
    left += [names for names in client.run(loader_threads).values() if names]
    keys = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
    left += [key for key in keys if "megadask" in key]
    left += client.run_on_scheduler(
        lambda dask_scheduler: [
            name for name in dask_scheduler.extensions["variables"].variables if "megadask" in name
        ]
    )
    return left


def assert_nothing_is_left_on(client: Client) -> None:
    assert wait_until(lambda: not left_on(client)), left_on(client)


@pytest.mark.parametrize("how", ["drained", "begun", "idle", "never connected"])
def test_a_closed_service_leaves_nothing(client: Client, name: str, how: str) -> None:
    service = md.serve(make(loaders=2), client, name=name)
    loaders = []
    if how == "drained":
        run(service, drain)
    elif how != "never connected":
        loaders = [connect(service, rank) for rank in range(2)]
        if how == "begun":
            Ranks([partial(take, loader, 3) for loader in loaders]).results()
    assert len(client.run(num_actors)) == 2
    assert sum(client.run(num_actors).values()) >= 2
    service.close()
    assert_nothing_is_left_on(client)
    service.close()
    for loader in loaders:
        loader.close()
        loader.close()


def test_a_service_that_could_not_start_leaves_nothing(client: Client, name: str) -> None:
    with (
        md.serve(make(), client, name=name),
        Client(client.scheduler.address, set_as_default=False) as other,
    ):
        for _ in range(2):
            with pytest.raises(md.errors.ServiceError):
                md.serve({"train": make(), "val": make()}, other, name=name)
    assert_nothing_is_left_on(client)


def test_trainers_of_a_closed_service_are_told(client: Client, name: str) -> None:
    """The one in its loop, the one that waits for others, the one that has not begun."""
    tree = md.ClientPlaceTree(dp=4)
    made = pipeline({"a": records([32] * 200)}, seq_len=32, global_batch=4, topology=tree)
    service = md.serve(made, client, name=name)
    loaders = [connect(service, rank) for rank in range(4)]
    begun = iter(loaders[0])
    next(begun)
    ahead = threading.Event()

    def run_ahead() -> None:
        for batch in loaders[1]:
            if batch["step"] == 3:
                ahead.set()  # the others have not begun: soon it has to wait for them

    waiting = Ranks([run_ahead])
    assert ahead.wait(30)
    service.close()
    (error,) = waiting.outcomes(15)
    assert isinstance(error, md.errors.ClosedError)
    assert "the driver closed it" in str(error)
    for batches in (begun, iter(loaders[0]), iter(loaders[2]), loaders[3].steps()):
        with pytest.raises(md.errors.ClosedError, match="closed"):
            list(batches)
    with pytest.raises(md.errors.ServiceError, match=name):
        connect(service, 0)
    for loader in loaders:
        loader.close()


def test_a_loader_closes_at_once_after_its_service(client: Client, name: str) -> None:
    """It has a batch to acknowledge, and nobody left to acknowledge it to."""
    for _ in range(8):
        service = md.serve(make(), client, name=name)
        loaders = [connect(service, rank) for rank in range(2)]
        Ranks([partial(take, loader, 3) for loader in loaders]).results()
        service.close()
        Ranks([loader.close for loader in loaders]).results(5)


@pytest.mark.parametrize("call", ["audit", "stats", "set_mixture"])
def test_calls_of_a_closed_service(client: Client, name: str, call: str) -> None:
    service = md.serve(make(), client, name=name)
    service.close()
    with pytest.raises(md.errors.MegaDaskError, match="closed"):
        getattr(service, call)(*([{"a": 1.0}] if call == "set_mixture" else []))


def test_a_closed_loader_says_so(client: Client, name: str) -> None:
    with md.serve(make(), client, name=name) as service:
        loader = connect(service, 0)
        batches = iter(loader)
        next(batches)
        loader.close()
        loader.close()
        for begin in (
            lambda: next(batches),
            lambda: next(iter(loader)),
            lambda: next(loader.steps()),
            lambda: loader.iterators(2),
            lambda: loader.load_state_dict(loader.state_dict()),
        ):
            with pytest.raises(md.errors.ServiceError, match="rank 0 is closed"):
                begin()


def test_an_error_in_the_loop_ends_everything(client: Client, name: str) -> None:
    class Boom(Exception):
        pass

    def body() -> None:
        with md.serve(make(dp=1), client, name=name) as service, connect(service, 0) as loader:
            for number, _ in enumerate(loader):
                if number == 2:
                    raise Boom

    for _ in range(2):  # and the next attempt is not in its way
        with pytest.raises(Boom):
            Ranks([body]).results(30)
        assert_nothing_is_left_on(client)


def test_one_of_several_services_closes_alone(client: Client, name: str) -> None:
    with md.serve(make(), client, name=f"{name}-1") as one:
        with md.serve(make(), client, name=f"{name}-2") as two:
            run(two, lambda loader: take(loader, 2))
        assert tokens_delivered(run(one, drain)) == every_token(ROWS, times=2)
    assert_nothing_is_left_on(client)


def test_services_and_loaders_do_not_leak(
    no_leaks: LeakCheck, local_client: Client, name: str
) -> None:
    """Threads, file descriptors, shared memory: in a process that is driver, trainer and worker."""

    def once() -> None:
        with md.serve(make(loaders=2), local_client, name=name) as service:
            run(service, lambda loader: take(loader, 3))

    for _ in range(2):
        once()
    no_leaks(spare_fds=8)
    for _ in range(6):  # one connection each would be 12, as both of its ends are here
        once()


def test_a_whole_cluster_leaves_nothing(no_leaks: LeakCheck, name: str) -> None:
    for number in range(2):
        if number:
            no_leaks()  # the first cluster made thread pools that stay
        with (
            make_cluster(processes=True) as cluster,
            Client(cluster, set_as_default=False) as client,
            md.serve(make(), client, name=name) as service,
        ):
            run(service, lambda loader: take(loader, 3))


# Slow ranks, small buffers ----------------------------------------------------------------------


def batch_bytes(loader: md.Loader) -> int:
    batch = next(iter(loader))
    return sum(value.nbytes for value in batch.values() if hasattr(value, "nbytes"))


@pytest.mark.parametrize("room", [0, 2, 5], ids=lambda room: f"{room}-microbatches")
def test_a_slow_rank_loses_nothing_and_fills_no_buffer(
    client: Client, name: str, whole: list[list[Seen]], room: int
) -> None:
    """Rank 0 pauses, rank 1 goes on as far as it may; what is held stays within the limit."""
    with md.serve(make(), client, name=f"{name}-size") as service:
        one = sum(run(service, batch_bytes))  # one microbatch of both ranks
    limits = md.Limits(constructor_bytes=room * one)
    held: list[int] = []
    with md.serve(make(), client, name=name, limits=limits) as service:
        slow = connect(service, 0)
        fast: list[Seen] = []

        def go_on() -> None:
            with connect(service, 1, timeout=4.0, prefetch=8) as loader:
                fast.extend(map(see, islice(loader, 1)))
                fast.extend(map(see, loader))

        begun = take(slow, 2)
        ahead = Ranks([go_on])
        while ahead._threads[0].is_alive():
            held += [part["held_bytes"] for part in service.stats()["constructors"]]
            ahead._threads[0].join(0.05)
        (error,) = ahead.outcomes()
        assert isinstance(error, md.errors.DeadlineError)
        assert fast == whole[1][: len(fast)]
        assert len(fast) >= 2
        both = Ranks([partial(drain, slow), partial(drain_again, service, 1)])
        slow_rest, fast_rest = both.results()
        assert [*begun, *slow_rest] == whole[0]
        assert fast_rest == whole[1][whole[1].index(fast_rest[0]) :]
        assert whole[1].index(fast_rest[0]) <= len(fast)
        assert service.audit()["ok"]
        slow.close()
    assert max(held) <= limits.constructor_bytes + one


def drain_again(service: md.Service, rank: int) -> list[Seen]:
    with connect(service, rank) as loader:
        return drain(loader)


def test_a_blocked_rank_says_whom_it_waits_for(client: Client, name: str) -> None:
    with (
        md.serve(make(), client, name=name) as service,
        connect(service, 0) as slow,
        connect(service, 1, timeout=3.0) as fast,
    ):
        take(slow, 2)
        with pytest.raises(md.errors.DeadlineError) as caught:
            drain(fast)
    assert "rank 1" in str(caught.value)
    assert "rank 0" in str(caught.value)
    assert "lead_steps=4" in str(caught.value)


@pytest.mark.parametrize("prefetch", [1, 8])
def test_a_small_buffer_never_stalls(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    """No batch may come only because a call that is held somewhere reaches its end."""
    monkeypatch.setattr(trainer_link, "HOLD_S", 60.0)
    limits = md.Limits(constructor_bytes=0, lead_steps=1)
    with md.serve(make(), client, name=name, limits=limits) as service:
        # With timeout=40 a constructor holds calls for 20 s.
        ranks = run(service, drain, prefetch=prefetch, timeout=40.0, seconds=15.0)
    assert tokens_delivered(ranks) == every_token(ROWS, times=2)


def test_iterators_run_ahead_of_a_small_buffer(
    client: Client, name: str, whole: list[list[Seen]]
) -> None:
    """A virtual pipeline: one cursor is five microbatches ahead, then the other one 29.

    Nothing is acknowledged meanwhile that only one of them has passed.
    """

    def body(loader: md.Loader) -> Any:
        first, second = loader.iterators(2)
        ahead = [see(batch) for batch in islice(first, 5)]
        behind = [see(batch) for batch in second]
        return [*ahead, *map(see, first)], behind

    limits = md.Limits(constructor_bytes=0, lead_steps=30)
    with md.serve(make(), client, name=name, limits=limits) as service:
        for rank, cursors in enumerate(run(service, body, timeout=15.0)):
            assert cursors == (whole[rank], whole[rank])
        assert service.audit()["ok"]


# Drivers and trainers that die ------------------------------------------------------------------


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
    with md.serve(make(), local_client, name=name) as service:
        other = start(service, drain, ranks=[1])
        with module("trainer", service.address, name, "0", "gated") as trainer:
            for _ in range(3):
                trainer.wait_for("batch")
                trainer.say()
            trainer.wait_for("batch 0 3")
            trainer.kill()
            assert wait_until(lambda: "0" not in service.stats()["trainers"])
        (rest,) = run(service, drain, ranks=[0])
        assert rest == whole[0][whole[0].index(rest[0]) :]
        assert whole[0].index(rest[0]) <= 3
        assert other.results() == [whole[1]]
        assert service.audit()["ok"]


# Workers that die -------------------------------------------------------------------------------


@pytest.fixture
def pids(client: Client) -> Iterator[dict[str, int]]:
    """The process of every worker by its address; two workers are there again after the test."""
    yield client.run(os.getpid)
    assert wait_until(lambda: len(client.scheduler_info()["workers"]) == 2, 30)
    client.wait_for_workers(2, timeout=30)


def holder(service: md.Service, role: str) -> str:
    """Return the worker that holds a role."""
    stats = service.stats()
    if role == "planner":
        return str(stats["planner"])
    return str(stats[{"loader": "loaders", "constructor": "constructors"}[role]][0]["worker"])


def disturbed(service: md.Service, at: int, disturb: Callable[[], None]) -> list[list[Seen]]:
    """Drain on both ranks; rank 0 disturbs after so many batches."""

    def body(loader: md.Loader) -> list[Seen]:
        seen = []
        for number, batch in enumerate(loader):
            if loader.rank == 0 and number == at:
                disturb()
            seen.append(see(batch))
        return seen

    return run(service, body)


@pytest.mark.parametrize("role", ["planner", "loader", "constructor"])
@pytest.mark.parametrize("at", [0, 9])
def test_a_worker_that_is_killed(
    client: Client,
    name: str,
    pids: dict[str, int],
    whole: list[list[Seen]],
    role: str,
    at: int,
) -> None:
    """The run goes on, with the same batches."""
    with md.serve(make(loaders=2), client, name=name) as service:
        lost = holder(service, role)
        ranks = disturbed(service, at, lambda: os.kill(pids[lost], signal.SIGKILL))
        audit = service.audit()
        assert holder(service, role) != lost
    assert ranks == whole
    assert audit["ok"]
    assert audit["total"]["samples"]["delivered"] == 2 * len(ROWS)
    assert audit["total"]["samples"]["repeated"] == audit["total"]["samples"]["lost"] == 0


def test_all_workers_are_killed_at_once(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    def kill_all() -> None:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)

    with md.serve(make(loaders=2), client, name=name) as service:
        assert disturbed(service, 6, kill_all) == whole
        assert service.audit()["ok"]


def test_workers_that_die_one_after_the_other(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    """The second one as soon as it holds everything."""
    first, second = pids

    def kill_both() -> None:
        os.kill(pids[first], signal.SIGKILL)
        assert wait_until(lambda: holder(service, "planner") == second, 20)
        assert wait_until(lambda: holder(service, "constructor") == second, 20)
        os.kill(pids[second], signal.SIGKILL)

    with md.serve(make(), client, name=name) as service:
        assert disturbed(service, 5, kill_both) == whole
        assert service.audit()["ok"]


def test_a_worker_that_dies_between_steps_of_an_idle_service(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    """Nobody is iterating: trainers that come afterwards see nothing of it."""
    with md.serve(make(), client, name=name) as service:
        loaders = [connect(service, rank) for rank in range(2)]
        begun = Ranks([partial(take, loader, 4) for loader in loaders]).results()
        lost = holder(service, "constructor")
        os.kill(pids[lost], signal.SIGKILL)
        assert wait_until(lambda: holder(service, "constructor") != lost, 20)
        rest = Ranks([partial(drain, loader) for loader in loaders]).results()
        assert [[*a, *b] for a, b in zip(begun, rest, strict=True)] == whole
        for loader in loaders:
            loader.close()
        assert service.audit()["ok"]


def test_a_state_is_loaded_after_a_worker_died(
    client: Client, name: str, pids: dict[str, int], whole: list[list[Seen]]
) -> None:
    with md.serve(make(), client, name=name) as service:
        loaders = [connect(service, rank) for rank in range(2)]

        def begin(loader: md.Loader) -> Any:
            take(loader, 5)
            state = loader.state_dict()
            take(loader, 5)
            return state

        states = Ranks([partial(begin, loader) for loader in loaders]).results()
        os.kill(pids[holder(service, "planner")], signal.SIGKILL)

        def go_back(loader: md.Loader) -> list[Seen]:
            loader.load_state_dict(states[0])
            return drain(loader)

        rest = Ranks([partial(go_back, loader) for loader in loaders]).results()
        assert rest == [seen[5:] for seen in whole]
        for loader in loaders:
            loader.close()
        assert service.audit()["ok"]


def test_a_worker_that_is_killed_when_the_service_closes(
    client: Client, name: str, pids: dict[str, int]
) -> None:
    service = md.serve(make(), client, name=name)
    run(service, lambda loader: take(loader, 2))
    os.kill(pids[holder(service, "constructor")], signal.SIGKILL)
    Ranks([service.close]).results(20)
    assert_nothing_is_left_on(client)


# Earlier lives ----------------------------------------------------------------------------------


def record_of(cluster: LocalCluster, name: str) -> RunRecord:
    """Return the record that the supervisor of a cluster in this process guards."""
    supervisor = cluster.scheduler.plugins["megadask-supervisor"]
    record: RunRecord = supervisor._runs[name].record
    return record


def supervisor(client: Client, name: str, call: str, **arguments: Any) -> Any:
    return client.sync(client.scheduler.megadask, call=call, run=name, **arguments)


def test_earlier_lives_are_ignored(
    cluster: LocalCluster,
    client: Client,
    name: str,
    pids: dict[str, int],
    whole: list[list[Seen]],
) -> None:
    """What the old planner, constructor and loaders say after their successors came is refused."""
    with md.serve(make(), client, name=name) as service:
        record = record_of(cluster, name)
        planner, constructors = record.planner, dict(record.constructors)
        loaders = dict(record.loaders)
        assert planner is not None
        loaders_now = [connect(service, rank) for rank in range(2)]
        begun = Ranks([partial(take, loader, 3) for loader in loaders_now]).results()
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        old = {planner.incarnation, *(o.incarnation for o in constructors.values())}

        def replaced() -> bool:
            now = {o.incarnation for o in record.constructors.values()}
            return record.planner is not None and not old & {record.planner.incarnation, *now}

        assert wait_until(replaced, 30)
        generation, step = record.generation, record.next_step
        with pytest.raises(md.errors.StaleError):
            supervisor(
                client,
                name,
                "pull",
                incarnation=planner.incarnation,
                generation=generation,
                next_step=step,
                wait_s=1.0,
            )
        with pytest.raises(md.errors.StaleError):
            supervisor(
                client,
                name,
                "commit",
                incarnation=planner.incarnation,
                generation=generation,
                step=step,
                num_events=0,
                plan=b"a plan",
                unread={},
            )
        for owner in constructors.values():
            with pytest.raises(md.errors.StaleError):
                supervisor(
                    client,
                    name,
                    "plans",
                    incarnation=owner.incarnation,
                    generation=generation,
                    from_step=0,
                    newer_than=-1,
                    wait_s=1.0,
                )
        supervisor(client, name, "fail", incarnation=planner.incarnation, error=b"nonsense")
        assert wait_until(lambda: not set(record.loaders.values()) & set(loaders.values()), 20)
        for owner in loaders.values():
            for now in client.scheduler_info()["workers"]:
                with pytest.raises(md.errors.StaleError):
                    client.sync(
                        client.rpc(now).megadask_loader,
                        call="status",
                        incarnation=owner.incarnation,
                    )
        rest = Ranks([partial(drain, loader) for loader in loaders_now]).results()
        assert [[*a, *b] for a, b in zip(begun, rest, strict=True)] == whole
        for loader in loaders_now:
            loader.close()
        assert service.audit()["ok"]


@pytest.mark.parametrize("role", ["planner", "constructor"])
def test_a_worker_that_was_only_asleep(name: str, whole: list[list[Seen]], role: str) -> None:
    """Dask gives a stopped worker up; it wakes when its roles have moved, and is ignored."""
    with (
        make_cluster(processes=True) as cluster,  # of its own: Dask does not take it back
        Client(cluster, set_as_default=False) as client,
        md.serve(make(), client, name=name) as service,
    ):
        asleep = holder(service, role)
        pid = client.run(os.getpid)[asleep]

        def stop() -> None:
            os.kill(pid, signal.SIGSTOP)
            cluster.sync(cluster.scheduler.remove_worker, asleep, stimulus_id="test", close=False)
            assert wait_until(lambda: holder(service, role) != asleep, 20)

        try:
            ranks = disturbed(service, 5, stop)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert ranks == whole
        # What it asks for and answers now is of an earlier life.
        assert run(service, drain) == [[], []]
        assert service.audit()["ok"]
        assert holder(service, role) != asleep


# Schedulers that die ----------------------------------------------------------------------------


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


def test_a_cluster_of_separate_processes(name: str, whole: list[list[Seen]]) -> None:
    """Scheduler, worker and driver share no process; then the scheduler is killed."""
    scheduler = Process(
        *("-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"),
        *("--no-dashboard", "--dashboard-address", "127.0.0.1:0"),
    )
    worker = None
    try:
        line = scheduler.wait_for("", seconds=40)
        while "Scheduler at:" not in line:
            line = scheduler.wait_for("", seconds=40)
        address = line.split()[-1]
        worker = Process(
            *("-m", "distributed.cli.dask_worker", address, "--no-nanny", "--no-dashboard"),
            *("--host", "127.0.0.1", "--nthreads", "1"),
        )
        with Client(address, set_as_default=False, timeout=20) as client:
            client.wait_for_workers(1, timeout=40)
            with md.serve(make(), client, name=name) as service:
                assert run(service, drain) == whole
                assert service.audit()["ok"]
            service = md.serve(make(), client, name=name)
            loader = connect(service, 0, timeout=10.0)
            take(loader, 2)
            state = loader.state_dict()
            scheduler.kill()
            (error,) = Ranks([partial(drain, loader)]).outcomes(60)
            assert isinstance(error, md.errors.MegaDaskError), repr(error)
            assert loader.state_dict()["step"] >= state["step"]
            Ranks([loader.close, service.close]).results(60)
    finally:
        for process in (scheduler, worker):
            if process is not None:
                process.kill()
                process._reader.join(5)
                for stream in (process.popen.stdin, process.popen.stdout):
                    if stream is not None:
                        stream.close()
