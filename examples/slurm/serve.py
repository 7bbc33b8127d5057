"""The data service of a job: a Dask scheduler here, loaders in CPU jobs of their own.

Runs until it is told to end (SIGTERM). Needs megadask[slurm].
"""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from announce import announce
from dask_jobqueue import SLURMCluster
from distributed import Client
from pipelines import pipelines

import megadask as md


def make_cluster(options: argparse.Namespace) -> SLURMCluster:
    """Start the scheduler, on one network interface; its jobs come with ``scale``."""
    return SLURMCluster(
        queue=options.partition,
        walltime=options.walltime,
        cores=1,  # loaders read in threads of their own, whatever Dask's number of threads
        processes=1,  # one worker a job: what is preempted together should be small
        memory=options.memory,
        job_mem=options.job_memory,
        interface=options.interface,
        nanny=True,
        scheduler_options={"dashboard_address": "127.0.0.1:0"},
        log_directory=str(options.folder / "loaders"),
        # Jobs that end are submitted again below; Dask does not know one that SLURM requeued.
        job_extra_directives=["--no-requeue"],
        job_script_prologue=[
            "export DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED=False",
            "export DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL='500 ms'",
        ],
    )


def serve(options: argparse.Namespace, stop: threading.Event) -> None:
    """Serve until told to stop; keep as many loader jobs as were asked for."""
    with make_cluster(options) as cluster, Client(cluster) as client:
        cluster.scale(jobs=options.loaders)
        # Roles are spread over the workers that are there when the service starts.
        client.wait_for_workers(options.loaders, timeout=options.queue_s)
        with md.serve(pipelines(options.ranks), client) as service:
            announce(service.address, options.folder)
            while not stop.wait(options.look_s):
                cluster.scale(jobs=options.loaders)  # those that were preempted, again
            total = service.audit()["total"]["samples"]
            print(*(f"{word} {total[word]}" for word in ("delivered", "repeated", "lost")))


def main() -> None:
    """Run the service."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    serve(parser().parse_args(), stop)


def parser() -> argparse.ArgumentParser:
    """Return the options of the service."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--folder", type=Path, required=True, help="folder that all nodes see")
    made.add_argument("--ranks", type=int, required=True, help="trainer processes, in all")
    made.add_argument("--interface", required=True, help="network of the cluster, such as ib0")
    made.add_argument("--loaders", type=int, default=4, help="jobs that load")
    made.add_argument("--partition", help="where these run; the default one if not given")
    made.add_argument("--walltime", default="24:00:00", help="of a loader job")
    made.add_argument("--memory", default="8GB", help="at 95% of it Dask restarts a worker")
    made.add_argument("--job-memory", default="9GB", help="what SLURM grants: room for the nanny")
    made.add_argument("--queue-s", type=float, default=3600.0, help="longest wait for the jobs")
    made.add_argument("--look-s", type=float, default=5.0, help="between looks for lost jobs")
    return made


if __name__ == "__main__":
    main()
