"""Ends that are asked for: of a service, of a loop, of a loader. Nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from distributed import Client

import megadask as md
from tests.conftest import LeakCheck, make_cluster, wait_until
from tests.faults.helpers import assert_nothing_is_left_on, close_idle_connections, num_actors
from tests.megadask.helpers.data import pipeline, records
from tests.megadask.helpers.ranks import Ranks, connect, run
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import drain, every_token, take, tokens_delivered

pytestmark = pytest.mark.timeout(150)

ROWS = [row for rows in DATA.values() for row in rows]


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
    assert len(client.run(num_actors)) == 3
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


def reload(loader: md.Loader) -> None:
    """Go back to where it stands, which waits for the other ranks to do the same."""
    take(loader, 2)
    loader.load_state_dict(loader.state_dict())
    next(iter(loader))


#: Ways to wait for a rank that does nothing.
WAITS: dict[str, Callable[[md.Loader], object]] = {
    "batches": list,
    "steps": lambda loader: [list(step) for step in loader.steps()],
    "iterators": lambda loader: list(loader.iterators(2)[0]),
    "a state": reload,
    "a pass": lambda loader: [list(loader) for _ in range(2)],
}


@pytest.mark.parametrize("what", WAITS)
def test_a_loader_that_is_closed_under_a_waiting_thread_says_so(
    client: Client, name: str, what: str
) -> None:
    made = make(restart=what == "a pass", epochs=1)
    limits = md.Limits(lead_steps=1000 if what == "a pass" else 1)
    with md.serve(made, client, name=name, limits=limits) as service, connect(service, 1):
        loader = connect(service, 0)
        waiting = Ranks([partial(WAITS[what], loader)])
        assert wait_until(lambda: has_stopped(loader))
        begin = time.monotonic()
        loader.close()
        (error,) = waiting.outcomes(15)
        assert time.monotonic() - begin < 15
        assert type(error) is md.errors.ServiceError
        assert "this loader of rank 0 is closed" in str(error)
        assert set(service.stats()["trainers"]) == {"1"}


def has_stopped(loader: md.Loader) -> bool:
    """Whether it has given batches, and gives no more for a second."""
    batches = loader.stats()["batches"]
    return bool(batches) and not wait_until(lambda: loader.stats()["batches"] > batches, 1.0)


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
        close_idle_connections(local_client)

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
