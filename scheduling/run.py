"""One running pipeline as the Supervisor holds it: record, journal, and who waits for news."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megadask.planner.errors import ConfigError
from megadask.planner.state import MixtureEvent
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.bulletin import Bulletin
from megadask.scheduling.checkpoint import Checkpoint
from megadask.scheduling.errors import ClosedError, JournalError, ServiceError, pack_error
from megadask.scheduling.journal import Journal, StorageError
from megadask.scheduling.kept import Kept, last
from megadask.scheduling.life import Owner
from megadask.scheduling.point import Point
from megadask.scheduling.record import RunRecord
from megadask.scheduling.wire import TRUST_S, Signal

logger = logging.getLogger(__name__)

#: Storage that fails is tried again after so many seconds, then after twice as many, and so on.
RETRY_S = 0.1


@dataclass
class Run:
    """A record and what it takes to act on it.

    Attributes
    ----------
    header
        What `megadask.serve` sent: plain values, and pickles that are never opened here.
    client
        The Dask client that started it.
    checkpoint
        Writes the journal, if there is one.
    active
        Whether the planner may plan; a pipeline that restarts rests between its passes.
    changed
        Wakes those who wait for anything, with every change; not for what ranks wait in thousands.
    turned
        Wakes those who wait for what concerns all ranks: roles, generations, passes, the end.
    bulletin
        What constructors have to hear of.
    commits
        Held while something is committed: journal first, then the record.
    custody
        Held while roles are created or ended.
    closed
        Why it was closed.
    error
        Packed error of a role that cannot go on.
    dropped
        Standbys that are none any more, and still open.
    mixtures
        All that were ever set: a run that goes back comes by them again.
    failing_since
        When storage began to fail, by the event loop's clock; None while it works.
    lapses_looked_at
        When claims were last looked at for trainers that are gone, by Dask's clock.
    """

    record: RunRecord
    header: Mapping[str, Any]
    client: str
    checkpoint: Checkpoint | None
    active: bool
    changed: Signal = field(default_factory=Signal)
    turned: Signal = field(default_factory=Signal)
    bulletin: Bulletin = field(default_factory=Bulletin)
    commits: asyncio.Lock = field(default_factory=asyncio.Lock)
    custody: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: str | None = None
    error: bytes | None = None
    dropped: list[Owner] = field(default_factory=list)
    mixtures: list[MixtureEvent] = field(default_factory=list)
    failing_since: float | None = None
    lapses_looked_at: float = 0.0

    @property
    def name(self) -> str:
        """Name of the record."""
        return self.record.name

    @property
    def version(self) -> int:
        """Grows with every change that somebody may wait for."""
        return self.bulletin.version

    @property
    def over(self) -> bool:
        """Whether it is closed."""
        return self.closed is not None

    def bump(self) -> None:
        """Tell everybody who waits that something changed."""
        self.bulletin.change()
        self.changed.set()
        self.turned.set()

    @cached_property
    def beginning(self) -> Point:
        """Where the pipeline begins, and each of its passes."""
        return Point.from_json(self.header["origin"])

    def bump_for(self, rank: int) -> None:
        """Tell everybody who waits of a change that only one rank's constructor has to hear of."""
        owner = self.record.constructor_of(rank)
        if owner is not None:  # a new one hears of everything
            self.bulletin.change_for(owner.incarnation)
        self.changed.set()

    def drop_client(self, client: str) -> bool:
        """Free the ranks of a trainer that is gone; return whether there were any."""
        lost = self.record.drop_client(client)
        if lost and not self.record.claims:
            self.bump()  # all ranks take up another pass
        for rank in lost:
            self.bump_for(rank)
        return bool(lost)

    async def fence(self, rank: int) -> None:
        """Wait until what earlier trainers of a rank acknowledge counts for nothing any more.

        Its constructor then knows the new one; or it is so long that it has not asked that it
        trusts nobody before it has (`TRUST_S`).
        """
        version, now = self.version, asyncio.get_running_loop().time
        deadline = now() + TRUST_S
        while (owner := self.record.constructor_of(rank)) is not None and now() < deadline:

            def is_over(asked: Owner = owner) -> bool:
                ends = self.over or self.error is not None  # then constructors no longer ask
                return ends or self.record.constructor_of(rank) != asked

            life = owner.incarnation
            await self.bulletin.wait_until_heard(life, version, is_over, deadline - now())
            if not is_over() or self.over or self.error is not None:
                return

    def close(self, reason: str) -> None:
        """Close it for everybody who calls from now on; the first reason stays."""
        self.closed = self.closed or reason
        self.bump()

    def check_open(self) -> None:
        """Raise ClosedError if it is closed."""
        if self.closed is not None:
            raise ClosedError(f"{self.name} is closed: {self.closed}")

    def farewell(self) -> dict[str, Any]:
        """Return the answer to calls about a run that is closed or has failed."""
        return {"status": "closed", "reason": self.closed or "it failed", "error": self.error}

    async def commit(self, incarnation: str, plan: bytes, unread: Mapping[str, int | None]) -> None:
        """Commit the next step, whose turn it is; for whoever holds ``commits``."""
        record = self.record
        if self.checkpoint is not None:
            await self._write(self.checkpoint.step, record.planner_point.state, plan)
        # What the journal has is committed, also if the planner was replaced meanwhile.
        life = incarnation if record.planner is None else record.planner.incarnation
        record.commit(record.generation, life, record.next_step, len(record.events), plan)
        record.unread = dict(unread)
        if self.checkpoint is not None and self.checkpoint.is_full_due:
            await self._write(self.checkpoint.full, self._kept())

    async def add_event(self, weights: Mapping[str, float], step: int) -> None:
        """Commit new mixture weights; for whoever holds ``commits``."""
        if self.checkpoint is not None:
            await self._write(self.checkpoint.event, step, dict(weights))
        self.record.add_event(weights, step)
        self.mixtures.append(self.record.events[-1])

    async def note_low(self) -> None:
        """Write which steps all ranks have acknowledged; for whoever holds ``commits``."""
        if self.checkpoint is not None:
            await self._write(self.checkpoint.marks, self.record.low)

    def _kept(self) -> Kept:
        return Kept.of(self.record, self.header["components"], self.mixtures)

    async def _write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write to the journal; what cannot be written is not committed, and ends the run.

        Storage that fails is tried again for a while. What is committed goes on to the trainers
        meanwhile.
        """
        try:
            await self._try(write, *arguments)
        except ServiceError as error:
            if not self.over:
                self.error = pack_error(error)
                self.close("its journal cannot be written")
            raise

    async def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write, again and again for as long as storage may fail."""
        now, limit_s = asyncio.get_running_loop().time, float(self.header["journal_s"])
        delay_s = RETRY_S
        while True:
            try:
                await asyncio.to_thread(write, *arguments)
                break
            except StorageError as error:
                if self.failing_since is None:
                    self.failing_since = now()
                    logger.warning("%s: %s", self.name, error)
                    self.record.note("journal fails", reason=str(error))
                left_s = self.failing_since + limit_s - now()
                if left_s <= 0 or self.over:
                    raise JournalError(
                        error.what,
                        got=error.got,
                        limit=f"storage that works again within {limit_s:g} s",
                        remedy="Check the space left and the way there, or raise "
                        "Limits(journal_s=).",
                    ) from error
            await self.changed.wait_until(lambda: self.over, min(delay_s, left_s))
            delay_s *= 2
        if self.failing_since is not None:
            self.failing_since = None
            logger.warning("%s: its journal can be written again", self.name)
            self.record.note("journal works again")

    async def open_generation(self, origin: Point) -> None:
        """Begin a new timeline."""
        async with self.commits:
            await self._open(origin)
        self.bump()

    async def reshard(
        self, step: int, topology: ClientPlaceTree, changes: Mapping[str, Any]
    ) -> None:
        """Commit another topology, from a step on; what cannot be written ends the run."""
        axis = changes["axis"]
        async with self.commits:
            self.header = {**self.header, **changes}
            self._end_generation()
            self.record.reshard(step, topology, axis if isinstance(axis, str) else tuple(axis))
            await self._begin_generation()
        self.bump()

    async def turn_pass(self) -> None:
        """Begin the pass that all ranks have come to, if that is another one than before."""
        if self.record.pass_number == self.record.passes.current:
            return
        async with self.commits:
            if self.record.pass_number == self.record.passes.current:
                return  # somebody else was quicker
            self.active = False
            await self._open(self.beginning)
        self.bump()

    async def _open(self, origin: Point) -> None:
        self._end_generation()
        self.record.open_generation(origin)
        await self._begin_generation()

    def _end_generation(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.acknowledged(self.record.low)

    async def _begin_generation(self) -> None:
        """Take up the mixtures that were ever set from here on, and begin the journal's chain."""
        record = self.record
        record.events = [event for event in self.mixtures if event.step >= record.origin.step]
        if self.checkpoint is not None:
            await self._write(self.checkpoint.begin, self._kept())


def new_run(name: str, header: Mapping[str, Any], client: str) -> Run:
    """Return the run that a header describes, at its origin, with its journal begun. Blocks.

    Raises ConfigError where the journal holds acknowledged steps that no state accounts for.
    """
    axis = header["axis"]
    record = RunRecord(
        name=name,
        topology=ClientPlaceTree.from_dict(header["topology"]),
        axis=axis if isinstance(axis, str) else tuple(axis),
        lanes=header["lanes"],
        origin=Point.from_json(header["origin"]),
    )
    run = Run(record, header, client, None, active=not header["restart"])
    if header["checkpoint"]:
        journal = Journal(header["checkpoint"])
        kept = last(journal.head())
        _check_accounted(journal.path, kept, header)
        run.mixtures = [] if kept is None else kept.mixture_events()
        record.events = [event for event in run.mixtures if event.step >= record.origin.step]
        record.generation = max(journal.generations(), default=0) + 1
        run.checkpoint = Checkpoint(journal)
        run.checkpoint.begin(run._kept())
    return run


def _check_accounted(path: str, kept: Kept | None, header: Mapping[str, Any]) -> None:
    # Those of an earlier generation count: a generation begins at its origin.
    done = 0 if kept is None else kept.low[0]
    if done and not header["resumed"]:
        raise ConfigError(
            f"the checkpoint path {path} holds a run",
            got=f"steps acknowledged up to {done}",
            remedy="Pass serve(resume=state) with the trainers' state, or use another path.",
        )
