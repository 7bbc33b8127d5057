"""Who holds what, what is left behind, and disturbances in the middle of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from distributed import Client, LocalCluster

import megadask as md
from megadask.scheduling.life import Owner
from megadask.scheduling.record import RunRecord
from megadask.scheduling.supervisor import Supervisor
from megadask.scheduling.wire import SUPERVISOR
from tests.conftest import wait_until
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import Seen, see

#: How long a worker may take to come again on a busy machine, and what moves with it.
WAIT_S = 60.0


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
    assert wait_until(lambda: not left_on(client), WAIT_S), left_on(client)


def close_idle_connections(client: Client) -> None:
    """Empty the pools of a cluster: how many connections they keep depends on how busy it was."""
    client.run(lambda dask_worker: dask_worker.rpc.collect())
    client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.rpc.collect())

    async def collect() -> None:
        client.rpc.collect()

    client.sync(collect)


def holder(service: md.Service, role: str) -> str:
    """Return the worker that holds a role; of a loader, one that holds no actor if there is one."""
    stats = service.stats()
    if role == "planner":
        return str(stats["planner"])
    constructors = [str(one["worker"]) for one in stats["constructors"]]
    if role == "constructor":
        return constructors[0]
    loaders = [str(one["worker"]) for one in stats["loaders"]]
    alone = [worker for worker in loaders if worker not in {stats["planner"], *constructors}]
    return (alone or loaders)[0]


def supervisor_of(cluster: LocalCluster) -> Supervisor:
    """Return the supervisor of a cluster whose scheduler is in this process."""
    supervisor: Supervisor = cluster.scheduler.plugins["megadask-supervisor"]
    return supervisor


def record_of(cluster: LocalCluster, name: str) -> RunRecord:
    """Return the record that the supervisor of a cluster in this process guards."""
    return supervisor_of(cluster)._runs[name].record


def owners(record: RunRecord) -> dict[str, Owner]:
    """Return who holds what now, by role."""
    assert record.planner is not None
    loaders = {f"loader {source} {lanes}": own for (source, lanes), own in record.loaders.items()}
    constructors = {f"constructor {n}": o for n, o in enumerate(record.constructors.values())}
    return {**loaders, **constructors, "planner": record.planner}


def ask_supervisor(client: Client, name: str, call: str, **arguments: Any) -> Any:
    """Call the supervisor as a role does."""
    handler = getattr(client.scheduler, SUPERVISOR)
    return client.sync(handler, call=call, run=name, **arguments, callback_timeout=WAIT_S)


def disturbed(
    service: md.Service, at: int, disturb: Callable[[], None], **options: Any
) -> list[list[Seen]]:
    """Drain on both ranks; rank 0 disturbs after so many batches."""

    def body(loader: md.Loader) -> list[Seen]:
        seen = []
        for number, batch in enumerate(loader):
            if loader.rank == 0 and number == at:
                disturb()
            seen.append(see(batch))
        return seen

    return run(service, body, seconds=2 * WAIT_S, timeout=WAIT_S, **options)
