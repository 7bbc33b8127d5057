"""Ranks of an emulated accelerator: threads of a few processes, which wait instead of computing.

Every microbatch takes the time that the table of step times gives. At the end of a step the rank
meets the others, at a barrier in its process, and the processes at an all-reduce of gloo.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from throughput.steptimes import StepTimes
from throughput.systems import Batch, Feed, Steps, lengths_of
from torch import distributed

from megadask.demo.group import Placement, join_group
from megadask.demo.trainers import free_port

#: Processes of a slot; each has half of the ranks.
PROCESSES = 2
#: Longest wait of ranks for each other, and of the benchmark for a whole pass, in seconds.
MEET_S, PASS_S = 180.0, 1800.0


@dataclass
class Log:
    """What one rank did.

    Attributes
    ----------
    first_wait_s
        Seconds until its first batch was there.
    began_s, ended_s
        By the clock that all processes share: when all ranks had their first batch, and when they
        met for the last time.
    busy_s
        Of every step and microbatch the seconds that it takes the accelerator.
    wait_s
        Of every step the seconds of waiting for batches; without those for the first.
    tokens
        Tokens of all batches.
    lengths
        Of every step and microbatch those of the documents.
    """

    first_wait_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0
    busy_s: list[list[float]] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    tokens: int = 0
    lengths: list[list[list[int]]] = field(default_factory=list)


class Meeting:
    """Where the threads of all processes of a slot meet."""

    def __init__(self, num_threads: int) -> None:
        self._word = torch.zeros(1)
        self._barrier = threading.Barrier(num_threads, self._reduce, MEET_S)

    def wait(self) -> None:
        """Return when all are here."""
        self._barrier.wait()

    def abort(self) -> None:
        """Let nobody wait any longer: one of them does not come."""
        self._barrier.abort()

    def _reduce(self) -> None:
        distributed.all_reduce(self._word)


class Accelerator(Protocol):
    """What a rank computes with; one for every rank."""

    def compute(self, batch: Batch) -> float:
        """Do the work of a microbatch; return the seconds that it takes undisturbed."""

    def meet(self, meeting: Meeting) -> None:
        """Meet the other ranks, at the end of a step."""


@dataclass(frozen=True)
class Emulated:
    """Waits as long as a real model takes."""

    times: StepTimes

    def compute(self, batch: Batch) -> float:
        came = time.perf_counter()
        busy_s = self.times.of_microbatch(lengths_of(batch))
        time.sleep(max(0.0, busy_s - (time.perf_counter() - came)))
        return busy_s

    def meet(self, meeting: Meeting) -> None:
        meeting.wait()


def train(steps: Steps, accelerator: Accelerator, meeting: Meeting) -> Log:
    """Go through all steps of a rank."""
    log = Log()
    asked = time.perf_counter()
    for step in steps:
        log.busy_s.append([])
        log.wait_s.append(0.0)
        log.lengths.append([])
        for batch in step:
            came = time.perf_counter()
            if log.began_s:
                log.wait_s[-1] += came - asked
            else:
                log.first_wait_s = came - asked
                meeting.wait()
                log.began_s = time.perf_counter()
            log.lengths[-1].append(lengths_of(batch).tolist())
            log.tokens += sum(log.lengths[-1][-1])
            log.busy_s[-1].append(accelerator.compute(batch))
            asked = time.perf_counter()
        accelerator.meet(meeting)
        asked = time.perf_counter()
    log.ended_s = asked
    return log


class Slot:
    """Processes that host ranks, one pass after another, while entered."""

    def __init__(self, processes: int = PROCESSES) -> None:
        # Spawned: they have threads, and some fork loader processes.
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._members: list[tuple[BaseProcess, Connection]] = []
        for index in range(processes):
            own, other = context.Pipe()
            placement = Placement(rank=index, world_size=processes, port=port)
            process = context.Process(target=_host, args=(other, placement), name="ranks")
            process.start()
            other.close()
            self._members.append((process, own))

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by their number."""
        return tuple(process.pid for process, _ in self._members if process.pid is not None)

    def run(self, feed: Feed, ranks: int, make: Callable[[], Accelerator]) -> list[Log]:
        """Let so many ranks go through all that a feed gives them; return their logs.

        make: called in their processes for the accelerator of each.

        Raises
        ------
        RuntimeError
            One of them failed; it has the traceback.
        """
        shares = np.array_split(np.arange(ranks), len(self._members))
        for (_, connection), share in zip(self._members, shares, strict=True):
            connection.send((feed, share.tolist(), make))
        logs: list[Log] = []
        failures: list[str] = []
        deadline = time.monotonic() + PASS_S
        for process, connection in self._members:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"ranks say nothing for {PASS_S:g} s")
            try:
                answer = connection.recv()
            except EOFError:
                answer = f"the process ended: exit status {process.exitcode}"
            if isinstance(answer, str):
                failures.append(answer)
            else:
                logs += answer
        if failures:
            raise RuntimeError("ranks failed:\n" + "\n".join(failures))
        return logs

    def close(self) -> None:
        """End the processes."""
        for _, connection in self._members:
            connection.close()
        deadline = time.monotonic() + 5.0  # of all: they may be amid a pass
        for process, _ in self._members:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _host(connection: Connection, placement: Placement) -> None:
    """Host ranks, pass after pass, until the other side of the connection is gone."""
    torch.set_num_threads(1)
    # Where other engines look for it.
    os.environ |= {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.rank),
        "LOCAL_WORLD_SIZE": str(placement.world_size),
    }
    join_group(placement, timeout_s=MEET_S)
    while True:
        try:
            feed, ranks, make = connection.recv()
        except EOFError:
            return
        try:
            answer: list[Log] | str = _pass(feed, ranks, make)
        except BaseException:
            answer = traceback.format_exc()
        connection.send(answer)


def _pass(feed: Feed, ranks: list[int], make: Callable[[], Accelerator]) -> list[Log]:
    meeting = Meeting(len(ranks))
    logs: dict[int, Any] = {}
    with ExitStack() as stack:
        steps = [stack.enter_context(feed.open(rank)) for rank in ranks]

        def run(rank: int, mine: Steps) -> None:
            try:
                logs[rank] = train(mine, make(), meeting)
            except BaseException:
                meeting.abort()
                logs[rank] = traceback.format_exc()

        threads = [
            threading.Thread(target=run, args=pair, daemon=True, name=f"rank {pair[0]}")
            for pair in zip(ranks, steps, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PASS_S)
    failed = [log for log in logs.values() if isinstance(log, str)]
    if failed or len(logs) < len(ranks):
        # Who was told by the barrier only says that another one failed.
        own = [text for text in failed if "BrokenBarrierError" not in text]
        raise RuntimeError("\n".join((own or failed or ["a rank did not end"])[:1]))
    return [logs[rank] for rank in ranks]
