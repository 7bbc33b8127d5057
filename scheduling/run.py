"""One running pipeline as the Supervisor holds it: record, journal, and who waits for news."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megadask.planner.errors import ConfigError
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.errors import ClosedError, ServiceError, pack_error
from megadask.scheduling.journal import Entry, Journal, Kind, acknowledged_step, events_of
from megadask.scheduling.point import Point
from megadask.scheduling.record import RunRecord
from megadask.scheduling.wire import Signal


@dataclass
class Run:
    """A record and what it takes to act on it.

    Attributes
    ----------
    header
        What `megadask.serve` sent: plain values, and pickles that are never opened here.
    client
        The Dask client that started it.
    active
        Whether the planner may plan; a pipeline that restarts rests between its passes.
    version
        Grows with every change that somebody may wait for.
    commits
        Held while something is committed: journal first, then the record.
    custody
        Held while roles are created or ended.
    closed
        Why it was closed.
    error
        Packed error of a role that cannot go on.
    heard
        Incarnation of a constructor to the last version that it has taken up.
    """

    record: RunRecord
    header: Mapping[str, Any]
    client: str
    journal: Journal | None
    active: bool
    changed: Signal = field(default_factory=Signal)
    version: int = 0
    commits: asyncio.Lock = field(default_factory=asyncio.Lock)
    custody: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: str | None = None
    error: bytes | None = None
    heard: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the record."""
        return self.record.name

    @property
    def over(self) -> bool:
        """Whether it is closed."""
        return self.closed is not None

    def bump(self) -> None:
        """Tell everybody who waits that something changed."""
        self.version += 1
        self.changed.set()

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

    async def write(self, kind: Kind, body: bytes) -> None:
        """Write to the journal; what cannot be written is not committed, and ends the run."""
        if self.journal is None:
            return
        try:
            await asyncio.to_thread(self.journal.append, kind, body)
        except ServiceError as error:
            self.error = pack_error(error)
            self.close("its journal cannot be written")
            raise

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
            self.record.reshard(step, topology, axis if isinstance(axis, str) else tuple(axis))
            try:
                await self._begin_journal()
            except ServiceError as error:
                self.error = pack_error(error)
                self.close("its journal cannot be written")
                raise
        self.bump()

    async def turn_pass(self) -> None:
        """Begin the pass that all ranks have come to, if that is another one than before."""
        if self.record.pass_number == self.record.passes.current:
            return
        async with self.commits:
            if self.record.pass_number == self.record.passes.current:
                return  # somebody else was quicker
            self.active = False
            await self._open(Point.from_json(self.header["origin"]))
        self.bump()

    async def _open(self, origin: Point) -> None:
        self.record.open_generation(origin)
        await self._begin_journal()

    async def _begin_journal(self) -> None:
        """Begin the chain of the record's generation."""
        if self.journal is not None:
            generation, body = self.record.generation, opening(self.header, self.record)
            await asyncio.to_thread(self.journal.begin, generation, body)


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
    journal = None
    if header["checkpoint"]:
        journal = Journal(header["checkpoint"])
        entries = journal.head()
        _check_accounted(journal.path, entries, header)
        record.events = [event for event in events_of(entries) if event.step >= record.origin.step]
        record.generation = max(journal.generations(), default=0) + 1
        journal.begin(record.generation, opening(header, record))
    return Run(record, header, client, journal, active=not header["restart"])


def opening(header: Mapping[str, Any], record: RunRecord) -> bytes:
    """Return the first entry of a generation's journal."""
    return json.dumps(
        {
            "run": record.name,
            "components": header["components"],
            "origin": record.origin.to_json(),
            "events": [[event.step, dict(event.weights)] for event in record.events],
        }
    ).encode()


def _check_accounted(path: str, entries: list[Entry], header: Mapping[str, Any]) -> None:
    done = acknowledged_step(entries)
    if done and not header["resumed"]:
        raise ConfigError(
            f"the checkpoint path {path} holds a run",
            got=f"steps acknowledged up to {done}",
            remedy="Pass serve(resume=state) with the trainers' state, or use another path.",
        )
