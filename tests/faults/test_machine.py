"""Whatever befalls a run, in whatever order: every span once, batches as in an undisturbed run.

Rule-based machines over the real runtime, in one process and over processes of workers. They always
try the same few runs; ``MEGADASK_MACHINE=100`` tries so many others.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial

import pytest
from distributed import Client
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.conftest import LeakCheck, make_cluster, wait_until
from tests.faults.helpers import WAIT_S, supervisor_of
from tests.faults.machine import DEADLINE_S, MOST_WORKERS, Machine, try_runs
from tests.megadask.helpers.processes import Process, dask_worker


class OneProcess(Machine):
    """Workers are threads."""

    workers: list[str]  # those that can be lost

    @precondition(lambda self: len(self.workers) > 1)
    @rule(which=st.integers(0, MOST_WORKERS), asleep=st.booleans(), meanwhile=st.booleans())
    def lose_a_worker(self, which: int, asleep: bool, meanwhile: bool) -> None:
        """It closes without a word, or is given up and goes on as if nothing were."""
        # Not what is present now: what can be lost must not depend on how fast others go.
        lost = self.workers.pop(which % len(self.workers))
        self.disturb(partial(self.lose, lost, asleep), meanwhile)

    @precondition(lambda self: len(self.workers) < MOST_WORKERS)
    @rule()
    def add_a_worker(self) -> None:
        before = self.present()
        self.cluster.scale(len(self.cluster.worker_spec) + 1)
        assert wait_until(lambda: self.present() - before, 30)
        self.workers += self.present() - before

    @precondition(lambda self: len(self.workers) > 1)
    @rule(which=st.integers(0, MOST_WORKERS), meanwhile=st.booleans())
    def retire_a_worker(self, which: int, meanwhile: bool) -> None:
        worker = self.workers[which % len(self.workers)]

        def retire() -> None:
            self.service.retire(worker)
            self.client.retire_workers([worker])
            assert worker not in self.present()

        self.disturb(retire, meanwhile)
        self.workers.remove(worker)

    def start_cluster(self, workers: int) -> None:
        self.cluster = self.life.enter_context(make_cluster(processes=False, n_workers=workers))
        self.client = self.life.enter_context(Client(self.cluster, set_as_default=False))
        self.workers = list(self.present())

    def present(self) -> set[str]:
        return set(self.client.nthreads())

    def lose(self, address: str, asleep: bool) -> None:
        if asleep:
            self.cluster.sync(
                self.cluster.scheduler.remove_worker, address, stimulus_id="test", close=False
            )
            return
        [worker] = [one for one in self.cluster.workers.values() if one.address == address]
        self.cluster.sync(worker.close, timeout=0, executor_wait=False, nanny=False)


class Processes(Machine):
    """Each worker is a process, every other one with a nanny; the scheduler is in this one."""

    limits = replace(Machine.limits, silent_s=2.0)
    check: LeakCheck  # of what was there before

    def __init__(self) -> None:
        super().__init__()
        self.hosts: dict[str, Process] = {}  # by the workers' names
        self.asleep: dict[str, int] = {}  # the processes that are stopped
        self.nannies: set[str] = set()  # the workers that have one
        self.num_started = 0

    @precondition(lambda self: len(self.awake) > 1)
    @rule(which=st.integers(0, MOST_WORKERS), host=st.booleans(), meanwhile=st.booleans())
    def kill_a_worker(self, which: int, host: bool, meanwhile: bool) -> None:
        """With its nanny, or so that it comes again if it has one."""
        name = sorted(self.hosts)[which % len(self.hosts)]
        if name in self.asleep and len(self.awake) < 2:
            return
        pid = self.asleep.pop(name, None) or self.pid_of(name)
        gone = host or name not in self.nannies

        def kill() -> None:
            if gone:
                self.hosts.pop(name).end()
            else:
                os.kill(pid, signal.SIGKILL)

        self.disturb(kill, meanwhile)
        if not gone:
            assert wait_until(lambda: self.find_pid(name) not in (None, pid), WAIT_S)

    @precondition(lambda self: len(self.awake) > 1)
    @rule(which=st.integers(0, MOST_WORKERS), meanwhile=st.booleans())
    def stop_a_worker(self, which: int, meanwhile: bool) -> None:
        """It hangs, and is given up by and by."""
        name = self.awake[which % len(self.awake)]
        self.asleep[name] = self.pid_of(name)
        self.disturb(partial(os.kill, self.asleep[name], signal.SIGSTOP), meanwhile)

    @precondition(lambda self: self.asleep)
    @rule(which=st.integers(0, MOST_WORKERS), meanwhile=st.booleans())
    def wake_a_worker(self, which: int, meanwhile: bool) -> None:
        """It goes on where it was stopped, as if nothing were."""
        name = sorted(self.asleep)[which % len(self.asleep)]
        self.disturb(partial(os.kill, self.asleep.pop(name), signal.SIGCONT), meanwhile)

    @precondition(lambda self: len(self.hosts) < MOST_WORKERS)
    @rule()
    def add_a_worker(self) -> None:
        self.start_worker()
        self.wait_for_workers()

    @precondition(lambda self: len(self.awake) > 1)
    @rule(which=st.integers(0, MOST_WORKERS), meanwhile=st.booleans())
    def retire_a_worker(self, which: int, meanwhile: bool) -> None:
        name = self.awake[which % len(self.awake)]
        self.wait_for_workers()

        def retire() -> None:
            self.client.retire_workers([self.service.retire(name)])
            assert self.find_pid(name) is None

        self.disturb(retire, meanwhile)
        host = self.hosts.pop(name)
        assert host.popen.wait(WAIT_S) == 0
        host.end()

    def start_cluster(self, workers: int) -> None:
        self.cluster = self.life.enter_context(make_cluster(processes=True, n_workers=0))
        self.client = self.life.enter_context(Client(self.cluster, set_as_default=False))
        self.life.callback(self.end_workers)
        for _ in range(workers):
            self.start_worker()
        self.client.wait_for_workers(workers, timeout=WAIT_S)

    def close(self) -> None:
        super().close()
        assert wait_until(lambda: not self.check.left()), f"left behind: {self.check.left()}"

    @property
    def awake(self) -> list[str]:
        return sorted(set(self.hosts) - set(self.asleep))

    def start_worker(self) -> None:
        name = f"worker-{self.num_started}"
        if nanny := bool(self.num_started % 2):
            self.nannies.add(name)
        self.num_started += 1
        self.hosts[name] = dask_worker(self.cluster.scheduler_address, name, nanny=nanny)

    def end_workers(self) -> None:
        for pid in self.asleep.values():
            os.kill(pid, signal.SIGCONT)
        self.asleep = {}
        for host in self.hosts.values():
            host.end()
        self.hosts = {}
        assert wait_until(lambda: not self.cluster.scheduler.workers, WAIT_S)

    def wait_for_workers(self) -> None:
        """All that are awake can hold roles again."""
        assert wait_until(lambda: set(self.awake) <= self.able(), WAIT_S)

    def able(self) -> set[str]:
        """Return the names of the workers that can hold roles."""
        scheduler = self.cluster.scheduler
        known = {address: str(worker.name) for address, worker in scheduler.workers.items()}
        return {known[one] for one in supervisor_of(self.cluster)._roles.workers() if one in known}

    def find_pid(self, name: str) -> int | None:
        """Return the process of a worker, None while it is away."""
        address = self.cluster.scheduler.aliases.get(name)
        if address is None:
            return None
        try:
            return self.client.run(os.getpid, workers=[address])[address]
        except OSError:
            return None  # it was killed, and the scheduler is about to know it

    def pid_of(self, name: str) -> int:
        assert wait_until(lambda: self.find_pid(name), WAIT_S)
        pid = self.find_pid(name)
        assert pid is not None
        return pid


@pytest.mark.timeout(DEADLINE_S)
def test_whatever_happens_to_processes(no_leaks: LeakCheck) -> None:
    Processes.check = no_leaks
    with make_cluster(processes=False):
        pass  # leaves thread pools that stay
    no_leaks(spare_fds=8)
    try_runs(Processes, examples=3, rules=8)


@pytest.mark.timeout(DEADLINE_S)
def test_whatever_happens_in_one_process() -> None:
    try_runs(OneProcess, examples=5, rules=10)
