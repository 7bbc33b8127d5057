"""What the journal keeps of a run: full now and then, a small delta each step, replayed alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from megadask.planner.deltas import applied, difference
from megadask.planner.errors import StateError
from megadask.planner.plan import Plan
from megadask.planner.state import MixtureEvent
from megadask.scheduling.errors import JournalError
from megadask.scheduling.history import chain
from megadask.scheduling.journal import Entry
from megadask.scheduling.marks import Watermark
from megadask.scheduling.point import Point
from megadask.scheduling.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The record of a run at a moment, as far as it outlives the cluster.

    Attributes
    ----------
    run
        Name of the run.
    components
        Digests of the pipeline, by name.
    generation
        The timeline.
    origin
        JSON of the point that it began at.
    step
        The next step to commit.
    state
        JSON of the planner state before it.
    events
        (step, weights) of all mixtures that were ever set.
    low
        What every rank has acknowledged.
    ahead
        Of ranks that have acknowledged more, when this was last written in full: rank to watermark.
    draw_digest, assignment_digest
        Of all steps of the generation so far.
    """

    run: str
    components: Mapping[str, str]
    generation: int
    origin: str
    step: int
    state: str
    events: tuple[tuple[int, Mapping[str, float]], ...]
    low: Watermark
    ahead: Mapping[str, Watermark]
    draw_digest: str
    assignment_digest: str

    @classmethod
    def of(
        cls, record: RunRecord, components: Mapping[str, str], events: Sequence[MixtureEvent]
    ) -> Kept:
        """Return what is kept of a record now; events: all that were ever set."""
        low = record.low
        point = record.planner_point
        return cls(
            run=record.name,
            components=dict(components),
            generation=record.generation,
            origin=record.origin.to_json(),
            step=point.step,
            state=point.state,
            events=tuple((event.step, dict(event.weights)) for event in events),
            low=low,
            ahead={str(rank): mark for rank, mark in record.watermarks.items() if mark > low},
            draw_digest=record.draw_digest,
            assignment_digest=record.assignment_digest,
        )

    def to_bytes(self) -> bytes:
        """Return it for a full object; `from_bytes` inverts it."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Kept:
        """Read a full object."""
        data = json.loads(body)
        data["events"] = tuple((step, weights) for step, weights in data["events"])
        data["ahead"] = {rank: tuple(mark) for rank, mark in data["ahead"].items()}
        return cls(**{**data, "low": tuple(data["low"])})

    def after(self, entry: Entry) -> Kept:
        """Return what is kept once an object was written, too.

        Raises StateError where it does not follow.
        """
        if entry.kind == "full":
            return Kept.from_bytes(entry.body)
        data = json.loads(entry.body)
        if entry.kind == "event":
            return replace(self, events=(*self.events, (data["step"], data["weights"])))
        if entry.kind == "marks":
            low = tuple(data["low"])
            ahead = {rank: mark for rank, mark in self.ahead.items() if mark > low}
            return replace(self, low=low, ahead=ahead)
        if data["step"] != self.step:
            raise StateError("a step does not follow", got=data["step"], limit=self.step)
        return replace(
            self,
            step=self.step + 1,
            state=applied(self.state, data["state"]),
            draw_digest=chain(self.draw_digest, data["draw"]),
            assignment_digest=chain(self.assignment_digest, data["assignment"]),
        )

    @property
    def point(self) -> Point:
        """Where the next step begins."""
        origin = Point.from_json(self.origin)
        return origin if self.step == origin.step else Point(step=self.step, state=self.state)

    def mixture_events(self) -> list[MixtureEvent]:
        """Return all mixtures that were ever set."""
        return [MixtureEvent(step=step, weights=weights) for step, weights in self.events]


def step_delta(before: str, plan: Plan) -> bytes:
    """Return what a step changes, for the journal; before: JSON of the planner state before it."""
    delta = {
        "step": plan.step,
        "draw": plan.draw_digest,
        "assignment": plan.assignment_digest,
        "state": difference(before, plan.state),
    }
    return json.dumps(delta, separators=(",", ":")).encode()


def replay(entries: Sequence[Entry]) -> Iterator[Kept]:
    """Yield what was kept after each object of a chain. Raises JournalError where one is amiss."""
    kept: Kept | None = None
    for entry in entries:
        try:
            kept = Kept.from_bytes(entry.body) if kept is None else kept.after(entry)
        except (StateError, ValueError, KeyError, TypeError) as error:
            raise JournalError(
                "the journal cannot be replayed",
                got=f"generation {entry.generation}, object {entry.sequence}: {error}",
                remedy="Resume from a saved state into a new checkpoint path.",
            ) from error
        yield kept


def last(entries: Sequence[Entry]) -> Kept | None:
    """Return what a chain ends with; None for an empty one."""
    found = None
    for kept in replay(entries):
        found = kept
    return found
