"""Everybody who takes part: a scheduler, workers and ranks as processes, and the service."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Scheduler, SchedulerPlugin
from soaking.account import Account

import megadask as md
from megadask.service import Service
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import WAIT_S, supervisor_of
from tests.megadask.helpers.processes import Process, dask_worker

SERVICE = "soak"


class Rank(Process):
    """A rank's process, whose events are told to somebody as they come."""

    def __init__(self, on_event: Callable[[Rank, Mapping[str, Any]], None]) -> None:
        self._on_event = on_event
        self.heard: Counter[str] = Counter()  # events by kind
        program = Path(__file__).with_name("member.py")
        super().__init__(str(program))

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if not line.startswith("{"):  # torch or Dask complain
                self.output.append(line)
                continue
            event = json.loads(line)
            self._on_event(self, event)
            self.heard[event["event"]] += 1

    def wait_for_event(self, kind: str, more_than: int = 0) -> None:
        """Wait until it has told of so many."""
        if not wait_until(lambda: self.heard[kind] > more_than, 2 * WAIT_S):
            raise TimeoutError(f"a rank tells of no {kind}: {''.join(self.output[-20:])}")

    def order(self, do: str, **fields: Any) -> None:
        """Tell it what to do."""
        self.say(json.dumps({"do": do, **fields}))


class Notices(SchedulerPlugin):
    """When the scheduler noticed that a worker was gone."""

    name = "soak-notices"

    def __init__(self) -> None:
        self.gone_s: dict[str, float] = {}

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Note the time."""
        self.gone_s[worker] = time.monotonic()


class Moves(logging.Handler):
    """When roles came to others."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note the time."""
        self.at_s.append(time.monotonic())


class Party:
    """A cluster with its service and its ranks; all of it ends with the block.

    Parameters
    ----------
    pipeline
        For any number of ranks.
    workers
        So many Dask workers; every other one has a nanny.
    nannies
        Whether all of them have one.
    limits, checkpoint
        Of the service.
    batch_s
        How long a rank takes for a microbatch.
    """

    def __init__(
        self,
        pipeline: Callable[[int], md.Pipeline],
        *,
        workers: int,
        limits: md.Limits,
        checkpoint: str | None = None,
        batch_s: float,
        nannies: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._num_workers = workers
        self._limits = limits
        self._checkpoint = checkpoint
        self._batch_s = batch_s
        self._all_nannies = nannies
        self._num_started = 0
        self._life = ExitStack()  # of a cluster and its service
        self.account = Account()
        self.waits: list[tuple[float, float, int, int]] = []  # asked, got, rank, step
        self.states: dict[int, dict[int, str]] = {}  # by step and rank
        self._state = ""  # the last one that all had told when the ranks became others
        self.errors: list[str] = []
        self.hosts: dict[str, Process] = {}
        self.nannies: set[str] = set()
        self.asleep: dict[str, int] = {}
        self.ranks: list[Rank] = []
        self._spare: list[Rank] = []
        self.moves = Moves()

    def __enter__(self) -> Party:
        logging.getLogger("megadask.scheduling.custody").addHandler(self.moves)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("megadask.scheduling.custody").removeHandler(self.moves)
        for rank in [*self.ranks, *self._spare]:
            rank.end()
        self._life.close()

    # The cluster ------------------------------------------------------------------------------

    def open(self, ranks: int, state: Mapping[str, Any] | None = None) -> None:
        """Start a cluster, the service on it, and so many ranks."""
        self._life.enter_context(dask.config.set({"distributed.worker.profile.enabled": False}))
        self.cluster = self._life.enter_context(make_cluster(processes=True, n_workers=0))
        self.client: Client = self._life.enter_context(Client(self.cluster, set_as_default=False))
        self.notices = Notices()
        self.cluster.scheduler.add_plugin(self.notices)
        self._life.callback(self._end_workers)
        self.top_up(wait=False)
        self.client.wait_for_workers(self._num_workers, timeout=2 * WAIT_S)
        self.service: Service = self._life.enter_context(
            md.serve(
                self._pipeline(ranks),
                self.client,
                name=SERVICE,
                checkpoint=self._checkpoint,
                resume=state,
                limits=self._limits,
            )
        )
        self.begin(0 if state is None else state["step"], ranks)

    def crash(self) -> Mapping[str, Any]:
        """End everything at once; return the last state that all ranks have told."""
        for rank in self.ranks:
            rank.kill()
        text = self._last_state()
        assert text, "no state was told by all ranks"
        for rank in self.ranks:
            rank.end()
        self.ranks = []
        self._life.close()
        self._life = ExitStack()
        state: Mapping[str, Any] = json.loads(text)
        return state

    def _last_state(self) -> str:
        """Return the last state that all ranks have told, maybe before they were others."""
        told = [s for s, by_rank in self.states.items() if set(by_rank) == set(range(self.dp))]
        if told:
            states = set(self.states[max(told)].values())
            assert len(states) == 1, "the ranks' states differ"
            self._state = states.pop()
        return self._state

    def top_up(self, *, wait: bool = True) -> None:
        """Start the workers that are missing."""
        while len(self.hosts) < self._num_workers:
            name = f"worker-{self._num_started}"
            nanny = self._all_nannies or bool(self._num_started % 2)
            self._num_started += 1
            if nanny:
                self.nannies.add(name)
            self.hosts[name] = dask_worker(self.cluster.scheduler_address, name, nanny=nanny)
        if wait:
            self.wait_for_workers()

    def wait_for_workers(self) -> None:
        """Wait until all that are not stopped can hold roles."""
        awake = set(self.hosts) - set(self.asleep)
        if not wait_until(lambda: awake <= self.able(), 2 * WAIT_S):
            raise TimeoutError(f"workers {sorted(awake - self.able())} do not come")

    def wait_for_loss(self, address: str) -> None:
        """Wait until the scheduler knows that a worker is gone."""
        if not wait_until(lambda: not self.name_of(address), WAIT_S):
            raise TimeoutError(f"the scheduler does not notice that {address} is gone")

    def able(self) -> set[str]:
        """Return the names of the workers that can hold roles."""
        roles = supervisor_of(self.cluster)._roles
        return {self.name_of(address) for address in roles.workers()}

    def name_of(self, address: str) -> str:
        """Return the name of a worker; "" if there is none at that address."""
        known = self.cluster.scheduler.workers.get(address)
        return "" if known is None else str(known.name)

    def address_of(self, name: str) -> str:
        """Return the address of a worker that is there."""
        return str(self.cluster.scheduler.aliases[name])

    def pid_of(self, name: str) -> int:
        """Return the process of a worker that is there."""
        address = self.address_of(name)
        return int(self.client.run(os.getpid, workers=[address])[address])

    def kill(self, name: str, *, host: bool = False) -> tuple[str, float]:
        """Kill a worker, with its nanny or alone; return its address, and when that was."""
        address, pid = self.address_of(name), self.asleep.pop(name, None) or self.pid_of(name)
        began_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if host or name not in self.nannies:
            self.hosts.pop(name).end()
        return address, began_s

    def _end_workers(self) -> None:
        for name in list(self.asleep):  # else they would not see that their nanny has gone
            os.kill(self.asleep.pop(name), signal.SIGCONT)
        for host in self.hosts.values():
            host.end()
        self.hosts = {}

    # The ranks --------------------------------------------------------------------------------

    @property
    def dp(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def begin(self, step: int, ranks: int) -> None:
        """Let so many ranks train from a step on."""
        self.account.begin(step, ranks)
        self._last_state()
        self.states = {}
        self._spare += self.ranks
        self.ranks = []
        for rank in range(ranks):
            self.ranks.append(self._spare.pop() if self._spare else Rank(self._heard))
            self.put_to_work(rank)

    def replace(self, rank: int) -> None:
        """Kill a trainer, and let another one take its rank."""
        self.ranks[rank].end()
        self.account.succeed(rank)
        self.ranks[rank] = Rank(self._heard)
        self.put_to_work(rank)

    def put_to_work(self, rank: int) -> None:
        """Let a trainer connect."""
        address = self.cluster.scheduler_address
        self.ranks[rank].order(
            "connect", address=address, service=SERVICE, rank=rank, batch_s=self._batch_s
        )

    def wait_for_batches(self) -> None:
        """Wait until every rank has got one that it asked for now or later."""
        now_s = time.monotonic()

        def have_all() -> bool:
            new = {rank for asked_s, _, rank, _ in reversed(self.waits) if asked_s > now_s}
            return bool(self.errors) or new >= set(range(self.dp))

        if not wait_until(have_all, 4 * WAIT_S):
            raise TimeoutError("a rank gets no batches any more")

    def finish(self) -> None:
        """Let all ranks end behind the same step, one that none of them has begun."""
        last = max((step for _, _, _, step in self.waits), default=0)
        before = [rank.heard["stopped"] for rank in self.ranks]
        for rank in self.ranks:
            rank.order("stop", step=last + self._limits.lead_steps + 4)
        for rank, count in zip(self.ranks, before, strict=True):
            rank.wait_for_event("stopped", count)

    def _heard(self, rank: Rank, event: Mapping[str, Any]) -> None:
        """Take up what a rank tells; called in that rank's own thread."""
        if event["event"] == "batch":
            step, microbatch = event["mark"]
            spans = [tuple(span) for span in event["spans"]]
            self.account.note(event["rank"], (step, microbatch), spans)
            self.waits.append((event["asked_s"], event["got_s"], event["rank"], step))
        elif event["event"] == "state":
            text = json.dumps(event["state"], sort_keys=True)
            self.states.setdefault(event["step"], {})[event["rank"]] = text
        elif event["event"] == "error":
            self.errors.append(event["what"])
