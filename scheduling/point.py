"""A point of a run from which it can be resumed: before a step, or inside one.

This is what a trainer's `state_dict()` holds. It is free of topology and the same on every rank.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import StateError
from megadask.planner.plan import Plan
from megadask.planner.state import MixtureEvent, events_in

#: Version 1 had no events.
VERSION = 2

#: Source, epoch, lane, position and verdict of a record.
PassedOver = tuple[str, int, int, int, int]
#: Step of a mixture event, and its weights by source.
Event = tuple[int, tuple[tuple[str, float], ...]]


@dataclass(frozen=True, kw_only=True)
class Point:
    """Before microbatch ``microbatch`` of step ``step``.

    Attributes
    ----------
    state
        JSON of the planner state before the step.
    consumed
        Inside a step: hexadecimal bitmap of the spans, in the order drawn, that the microbatches
        before this one delivered to all ranks together.
    draw_digest, assignment_digest
        Inside a step: what it consists of, and where it went.
    verdicts
        Inside a step: (source, epoch, lane, position, verdict) of the records that its plan passes
        over; they hold whatever a later reading says (rule 6).
    events
        Inside a step: the mixtures that were set when it was drawn. Some may have been set after
        the state before it was committed, which then lacks them.
    """

    step: int
    state: str
    microbatch: int = 0
    consumed: str = ""
    draw_digest: str = ""
    assignment_digest: str = ""
    verdicts: tuple[PassedOver, ...] = ()
    events: tuple[Event, ...] = ()

    @classmethod
    def inside(cls, plan: Plan, state: str, microbatch: int) -> Point:
        """Return the point before a microbatch of a plan; ``state`` is that before its step."""
        return cls.of(
            step=plan.step,
            state=state,
            microbatch=microbatch,
            microbatch_N=plan.microbatch_N,
            draw_digest=plan.draw_digest,
            assignment_digest=plan.assignment_digest,
            verdicts=verdicts_of(plan),
            events=events_in(plan.state),
        )

    @classmethod
    def of(
        cls,
        *,
        step: int,
        state: str,
        microbatch: int,
        microbatch_N: NDArray[np.int64],
        draw_digest: str,
        assignment_digest: str,
        verdicts: Iterable[Sequence[Any]],
        events: Iterable[Sequence[Any]],
    ) -> Point:
        """Return the point before a microbatch; microbatch_N: (N,) microbatch of each span.

        events: (step, weights by source) of each.
        """
        bits = np.packbits(microbatch_N < microbatch).tobytes().hex()
        return cls(
            step=step,
            state=state,
            microbatch=microbatch,
            consumed=bits,
            draw_digest=draw_digest,
            assignment_digest=assignment_digest,
            verdicts=tuple((s, e, k, p, v) for s, e, k, p, v in verdicts),
            events=tuple((step, tuple(weights.items())) for step, weights in events),
        )

    def consumed_N(self, num_spans: int) -> NDArray[np.bool_]:
        """Return (N,) whether each span of the step was delivered before this point."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(self.consumed), np.uint8))
        return bits[:num_spans].astype(bool)

    def mixture_events(self) -> tuple[MixtureEvent, ...]:
        """Return the mixtures that were set when its step was drawn, inside a step."""
        return tuple(MixtureEvent(step=step, weights=dict(pairs)) for step, pairs in self.events)

    @cached_property
    def digest(self) -> str:
        """A hash of everything in the point."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """Return the point as JSON."""
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    @cached_property
    def packed(self) -> bytes:
        """The point as it travels, of which thousands of ranks are told; see `unpack`."""
        return zlib.compress(self.to_json().encode(), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> Point:
        """Read `packed` back. Raises StateError as `from_json` does."""
        return cls.from_json(zlib.decompress(packed).decode())

    @classmethod
    def from_json(cls, text: str) -> Point:
        """Read a point back. Raises StateError for another version or a text that is no point."""
        try:
            data: Mapping[str, Any] = json.loads(text)
            version = data["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise StateError("this is not a MegaDask state", got=repr(text[:80])) from error
        if version not in (1, VERSION):
            raise StateError(
                "the state has another version",
                got=version,
                limit=VERSION,
                remedy="Resume with the MegaDask version that saved it.",
            )
        fields = {name: value for name, value in data.items() if name != "version"}
        try:
            fields["verdicts"] = tuple(tuple(verdict) for verdict in fields["verdicts"])
            fields["events"] = tuple(
                (step, tuple((name, weight) for name, weight in pairs))
                for step, pairs in fields.get("events", ())
            )
            return cls(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise StateError("the state is damaged", got=repr(text[:80])) from error


def verdicts_of(plan: Plan) -> tuple[PassedOver, ...]:
    """Return the records that a plan passes over, with their verdicts."""
    sources = [plan.sources[source] for source in plan.passed["source"].tolist()]
    names = ("epoch", "lane", "position", "verdict")
    return tuple(zip(sources, *(plan.passed[name].tolist() for name in names), strict=True))
