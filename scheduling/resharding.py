"""Give a running pipeline another topology (rule 10): hold, find a step, finish before it, commit.

First every constructor stops handing out, and says of which step it has handed out nothing. The
highest of these becomes the first step on the new topology: before it the run goes on as it was,
and of it and what follows nobody has anything yet. When all ranks have acknowledged what is before
it, a new generation begins there, with new constructors and a new planner; the loaders stay. Until
then nothing has changed: at the deadline the hold is lifted, and the run goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.custody import Custody
from megadask.scheduling.errors import DeadlineError, ServiceError
from megadask.scheduling.record import RunRecord
from megadask.scheduling.run import Run


async def reshard(run: Run, custody: Custody, changes: Mapping[str, Any], wait_s: float) -> int:
    """Change the topology of a run; return the first step that is placed on the new one.

    Parameters
    ----------
    changes
        The fields of the run's header that depend on the topology.
    wait_s
        How long the ranks may take to finish the steps that they have begun.

    Raises
    ------
    DeadlineError
        Some ranks did not; they are named, and nothing has changed.
    ServiceError
        The pipeline restarts with every pass, has ended, or is being resharded already.
    """
    record = run.record
    _check(run)
    deadline = asyncio.get_running_loop().time() + wait_s
    hold = record.hold_delivery()
    run.bump()
    try:
        await _until(
            run, lambda: hold.is_known(record.constructor_lives), deadline, _unheard(record)
        )
        step = hold.begin(record.constructor_lives, record.first_whole_step)
        run.bump()
        await _until(run, lambda: record.low >= (step, 0), deadline, _behind(record, step))
        if record.is_end(step):
            raise ServiceError(
                f"{run.name}: the data ends at step {step}; nothing is left to place"
            )
        async with run.custody:
            run.check_open()
            topology = ClientPlaceTree.from_dict(changes["topology"])
            # Before the commit: they know nothing of the new mesh, and must hear nothing of it.
            actors = custody.dismiss(run)
            try:
                await run.reshard(step, topology, changes)
            finally:
                await custody.stop(run, actors)
            await custody.recast(run)
    finally:
        if record.hold is hold:
            record.hold = None
        run.bump()
    return step


def _check(run: Run) -> None:
    run.check_open()
    if run.header["restart"]:
        raise ServiceError(
            f"{run.name} begins anew with every pass",
            remedy="Serve it again with the new topology: it has no place to keep.",
        )
    if run.record.hold is not None:
        raise ServiceError(f"{run.name} is being resharded already", remedy="Wait for that.")


async def _until(
    run: Run, ready: Callable[[], bool], deadline: float, waiting_for: Callable[[], str]
) -> None:
    left = deadline - asyncio.get_running_loop().time()
    if await run.changed.wait_until(lambda: run.over or ready(), left):
        run.check_open()
        return
    raise DeadlineError(
        f"{run.name} was not resharded, and goes on as before",
        got=f"still waiting for {waiting_for()}",
        limit="every rank to finish the steps that it has begun",
        remedy="See whether the ranks are alive, or allow more time: reshard(timeout=).",
    )


def _unheard(record: RunRecord) -> Callable[[], str]:
    def text() -> str:
        assert record.hold is not None
        said = record.hold.reached
        parts = [part for part, own in record.constructors.items() if own.incarnation not in said]
        buckets = {bucket for part in parts for bucket in part}
        ranks = [rank for rank in sorted(record.claims) if record.bucket_of(rank) in buckets]
        return f"ranks {ranks} to ask for a batch"

    return text


def _behind(record: RunRecord, step: int) -> Callable[[], str]:
    def text() -> str:
        ranks = [rank for rank, mark in record.watermarks.items() if mark < (step, 0)]
        return f"ranks {ranks} to finish what is before step {step}"

    return text
