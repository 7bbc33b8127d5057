"""Whether the workers of a cluster can run MegaDask."""

from __future__ import annotations

from distributed import Client

import megadask
from megadask.scheduling.errors import DeadlineError, WorkerError


def check_workers(client: Client, timeout_s: float) -> None:
    """Raise WorkerError unless every worker can import this MegaDask version in time."""
    # Not scheduler_info: what it returns is overwritten with a shorter list now and then.
    workers = client.nthreads()
    if not workers:
        raise WorkerError(
            "the cluster has no running worker",
            remedy="Start workers, or wait for them: client.wait_for_workers(n).",
        )
    try:
        answers = client.sync(
            client._run, _version_here, on_error="return", callback_timeout=timeout_s
        )
    except TimeoutError as error:
        raise DeadlineError(
            "the workers do not answer",
            limit=f"{timeout_s:g} s",
            remedy=f"Look at the workers {sorted(workers)}.",
        ) from error
    wrong = {address: got for address, got in answers.items() if got != megadask.__version__}
    if wrong:
        raise WorkerError(
            "workers cannot run this MegaDask",
            got="; ".join(f"{address}: {got!r}" for address, got in sorted(wrong.items())),
            limit=f"version {megadask.__version__} on every worker",
            remedy="Install the same version where the workers run, and restart them.",
        )


def _version_here() -> str:
    """Return the version that this process imports, having imported what loaders need."""
    import megadask
    import megadask.scheduling.loader_host

    return megadask.__version__
