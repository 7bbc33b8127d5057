"""A Dask cluster of separate processes on this machine, reachable from this machine alone."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import dask.config
from distributed import LocalCluster, Nanny

#: An idle worker then takes 0.4% of a core instead of 3%, of which the trainers need every bit.
_QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.monitor-interval": "1 s",
    "distributed.admin.tick.interval": "500 ms",
    "distributed.admin.system-monitor.interval": "5 s",
}


@contextlib.contextmanager
def local_cluster(num_workers: int, folder: Path) -> Iterator[LocalCluster]:
    """Start a cluster and close it again; no dashboard, temporary files in ``folder``."""
    loopback = "127.0.0.1:0"
    with dask.config.set(_QUIET):
        # Ctrl-C reaches every process in the foreground. Workers inherit the mask of the thread
        # that starts them, and end when this process says so. The tracker comes before them since
        # whoever starts it is left with the signal unblocked.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            cluster = LocalCluster(
                n_workers=num_workers,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address=loopback,  # of /health and /metrics; None would take port 8787
                scheduler_kwargs={"dashboard": False},
                silence_logs=logging.CRITICAL,
                local_directory=str(folder),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with cluster:
            yield cluster


def let_end(cluster: LocalCluster) -> None:
    """Let no worker that ends be started again."""
    for nanny in _nannies(cluster):
        nanny.close_gracefully()


def kill_workers(cluster: LocalCluster) -> None:
    """End the worker processes at once."""
    for nanny in _nannies(cluster):
        if nanny.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(nanny.pid, signal.SIGKILL)


def worker_pids(cluster: LocalCluster) -> list[int]:
    """Return the ids of the worker processes."""
    return [nanny.pid for nanny in _nannies(cluster) if nanny.pid is not None]


def _nannies(cluster: LocalCluster) -> list[Nanny]:
    return [worker for worker in cluster.workers.values() if isinstance(worker, Nanny)]
