"""What the journal keeps of a run: full now and then, a small delta each step, replayed alike."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megadask.planner.deltas import Replayed, difference
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


class Replay:
    """What was kept after each object of a chain, one object after the other.

    Parameters
    ----------
    entry
        The first one, which is full.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        with _told(entry):
            self._begin(entry)

    @property
    def step(self) -> int:
        """The next step to commit."""
        return self._kept.step

    def take(self, entry: Entry) -> None:
        """Go on behind an object. Raises JournalError where it does not follow."""
        self._entry = entry
        with _told(entry):
            if entry.kind == "full":
                self._begin(entry)
                return
            data = json.loads(entry.body)
            if entry.kind == "event":
                self._change(events=(*self._kept.events, (data["step"], data["weights"])))
            elif entry.kind == "marks":
                low = tuple(data["low"])
                ahead = {rank: mark for rank, mark in self._kept.ahead.items() if mark > low}
                self._change(low=low, ahead=ahead)
            else:
                self._step(data)

    def kept(self) -> Kept:
        """Return what is kept now. Raises JournalError where the steps did not lead here."""
        with _told(self._entry):
            return replace(self._kept, state=self._state.to_json())

    def _begin(self, entry: Entry) -> None:
        self._kept = Kept.from_bytes(entry.body)
        self._state = Replayed(self._kept.state)

    def _change(self, **changes: Any) -> None:
        self._kept = replace(self._kept, **changes)

    def _step(self, data: Mapping[str, Any]) -> None:
        if data["step"] != self.step:
            raise StateError("a step does not follow", got=data["step"], limit=self.step)
        self._state.apply(data["state"])
        self._change(
            step=self.step + 1,
            draw_digest=chain(self._kept.draw_digest, data["draw"]),
            assignment_digest=chain(self._kept.assignment_digest, data["assignment"]),
        )


@contextlib.contextmanager
def _told(entry: Entry) -> Iterator[None]:
    """Raise JournalError for an object that is amiss."""
    try:
        yield
    except (StateError, ValueError, KeyError, TypeError) as error:
        raise JournalError(
            "the journal cannot be replayed",
            got=f"generation {entry.generation}, object {entry.sequence}: {error}",
            remedy="Resume from a saved state into a new checkpoint path.",
        ) from error


def replay(entries: Sequence[Entry]) -> Iterator[Replay]:
    """Yield one replay after each object of a chain. Raises JournalError where one is amiss."""
    replayed: Replay | None = None
    for entry in entries:
        if replayed is None:
            replayed = Replay(entry)
        else:
            replayed.take(entry)
        yield replayed


def last(entries: Sequence[Entry]) -> Kept | None:
    """Return what a chain ends with; None for an empty one."""
    first = max((n for n, entry in enumerate(entries) if entry.kind == "full"), default=0)
    reached = None
    for replayed in replay(entries[first:]):
        reached = replayed
    return None if reached is None else reached.kept()


def before(entries: Sequence[Entry], step: int) -> Kept | None:
    """Return what was kept before a step; None where a chain does not reach it."""
    fulls = [n for n, one in enumerate(entries) if one.kind == "full" and _step_of(one) <= step]
    for replayed in replay(entries[max(fulls, default=0) :]):
        if replayed.step == step:
            return replayed.kept()
    return None


def acknowledged(entries: Sequence[Entry]) -> Watermark:
    """Return what every rank has acknowledged at the end of a chain, which is not empty."""
    entry = next(one for one in reversed(entries) if one.kind in ("full", "marks"))
    with _told(entry):
        step, microbatch = json.loads(entry.body)["low"]
        return step, microbatch


def reach(entries: Sequence[Entry]) -> tuple[int, int]:
    """Return the first and the last step that a chain, which is not empty, tells the state of."""
    num_steps = sum(entry.kind == "step" for entry in entries)
    first = _step_of(entries[0])
    return first, first + num_steps


def _step_of(full: Entry) -> int:
    with _told(full):
        return Kept.from_bytes(full.body).step
