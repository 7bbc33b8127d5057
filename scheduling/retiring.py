"""Planned ends of workers: what they hold moves first, and nothing is read a second time for it."""

from __future__ import annotations

from collections.abc import Iterable

from distributed import Scheduler

from megadask.scheduling.custody import Custody, owners_of
from megadask.scheduling.errors import ServiceError
from megadask.scheduling.roles import Roles
from megadask.scheduling.run import Run


async def retire(
    worker: str | int, scheduler: Scheduler, roles: Roles, custody: Custody, runs: Iterable[Run]
) -> str:
    """Move all roles of a worker to others and give it no new ones; return its address.

    worker: its address or its name in Dask.

    Raises
    ------
    ServiceError
        There is no such worker, or no other one to take its roles.
    LostError
        The others were lost meanwhile. Then it goes on with what has not moved.
    """
    address = str(scheduler.aliases.get(worker, worker))
    others = [one for one in roles.workers() if one != address]
    if address not in scheduler.workers:
        raise ServiceError(
            "the cluster has no such worker to retire", got=worker, limit=f"one of {others}"
        )
    if not others:
        raise ServiceError(
            "no other worker can take the roles of the one to retire",
            got=worker,
            remedy="Start workers first, and wait for them: client.wait_for_workers(n).",
        )
    roles.retire(address)
    try:
        for run in runs:
            if not run.over:
                await custody.vacate(run, address)
    except BaseException:
        roles.keep_on(address)
        raise
    return address


def holders(runs: Iterable[Run]) -> set[str]:
    """Return the addresses of the workers that hold roles."""
    return {owner.address for run in runs for owner in owners_of(run.record)}
