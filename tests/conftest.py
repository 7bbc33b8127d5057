"""Clusters on the loopback device, and a check for what a test leaves behind."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import dask
import psutil
import pytest
from distributed import Client, LocalCluster
from hypothesis import settings

# No test depends on how fast the machine is.
settings.register_profile("laws", deadline=None)
settings.load_profile("laws")

#: How long a thing that is ending may take before it counts as left behind.
GRACE_S = 10.0


def pytest_collection_finish() -> None:
    """Let the collector look at what tests make, not at all tests and libraries, each time.

    Checks for what is left behind call it again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def patient_clusters() -> Iterator[None]:
    """Keep nannies whose workers tests kill again and again.

    Dask drops the nanny of a worker that is away 15 s after it was lost, even where it is away for
    the second time.
    """
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}):
        yield


def make_cluster(*, processes: bool, n_workers: int = 2, protocol: str = "tcp") -> LocalCluster:
    return LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        processes=processes,
        protocol=protocol,
        dashboard_address="127.0.0.1:0",
        host=None if protocol == "inproc" else "127.0.0.1",
        memory_limit=None,
        silence_logs=50,
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two workers, each a process of its own."""
    with make_cluster(processes=True) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    """The driver of `cluster`."""
    with Client(cluster, set_as_default=False) as made:
        yield made


@pytest.fixture(scope="module")
def local_cluster() -> Iterator[LocalCluster]:
    """Two workers in this process: quick to start, where nothing has to die."""
    with make_cluster(processes=False) as made:
        yield made


@pytest.fixture(scope="module")
def local_client(local_cluster: LocalCluster) -> Iterator[Client]:
    """The driver of `local_cluster`."""
    with Client(local_cluster, set_as_default=False) as made:
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A service name that no other test uses."""
    return re.sub(r"\W+", "-", request.node.nodeid.rpartition("::")[2])


@dataclass
class Footprint:
    """What a process holds that can be left behind."""

    threads: list[str] = field(default_factory=list)
    processes: set[int] = field(default_factory=set)
    num_fds: int = 0
    shared_memory: set[str] = field(default_factory=set)

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        process = psutil.Process()
        folder = "/dev/shm"
        # Pools that grow to their size and stay: asyncio.to_thread's, and Dask's own.
        pools = ("asyncio_", "Dask-Offload", "Dask-Default-Threads")
        return cls(
            threads=sorted(
                thread.name for thread in threading.enumerate() if not thread.name.startswith(pools)
            ),
            processes={child.pid for child in process.children(recursive=True)},
            num_fds=process.num_fds(),
            # Semaphores belong to the queues between a Dask nanny and its worker.
            shared_memory={
                file
                for file in (os.listdir(folder) if os.path.isdir(folder) else ())
                if not file.startswith("sem.mp-")
            },
        )

    def left_since(self, before: Footprint, spare_fds: int) -> list[str]:
        """Return what is there now and was not before."""
        threads = list(self.threads)
        for known in before.threads:
            if known in threads:
                threads.remove(known)
        left = [f"thread {thread}" for thread in threads]
        left += [f"process {pid}" for pid in self.processes - before.processes]
        left += [f"/dev/shm/{file}" for file in self.shared_memory - before.shared_memory]
        if self.num_fds > before.num_fds + spare_fds:
            left.append(f"{self.num_fds - before.num_fds} file descriptors")
        return left


def wait_until(ready: Callable[[], object], seconds: float = GRACE_S) -> bool:
    """Return whether something became true within a deadline."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class LeakCheck:
    """What was there when the check began; calling it begins anew from here.

    Connections of Dask's pools come and go; ``spare_fds`` file descriptors more are no leak.
    """

    def __init__(self) -> None:
        self()

    def __call__(self, spare_fds: int = 2) -> None:
        self._before = Footprint.now()
        self._spare_fds = spare_fds

    def left(self) -> list[str]:
        return Footprint.now().left_since(self._before, self._spare_fds)


@pytest.fixture
def no_leaks() -> Iterator[LeakCheck]:
    """Fail the test that leaves threads, processes, file descriptors or shared memory behind.

    Ask for it before everything that the test opens.
    """
    check = LeakCheck()
    yield check
    assert wait_until(lambda: not check.left()), f"left behind: {check.left()}"
