"""What of a committed plan a constructor is told: the spans of its buckets, and facts of the step.

A plan grows with the number of ranks, and so does the number of constructors: all of it for each of
them would grow with their product.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.plan import Plan
from megadask.planner.state import events_in
from megadask.scheduling.point import verdicts_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Portion:
    """A part of a plan.

    Attributes
    ----------
    plan
        Of its spans; see `Plan.portion`.
    row_N
        (N,) their rows in the whole plan.
    facts
        What trainers must know of the step to run it; `StepFacts` with the text.
    text
        JSON of what they must know to save its state anywhere in it.
    """

    plan: Plan
    row_N: NDArray[np.int64]
    facts: Mapping[str, Any]
    text: NDArray[np.uint8]

    @classmethod
    def read(cls, message: Mapping[str, bytes]) -> Portion:
        """Read what `Portions.of` has made."""
        return cls(
            plan=Plan.from_arrow(message["plan"]),
            row_N=np.frombuffer(message["rows"], np.int64),
            facts=json.loads(message["facts"]),
            text=np.frombuffer(message["text"], np.uint8),
        )


class Portions:
    """A committed plan, and its parts as they travel."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def of(self, buckets: Sequence[int]) -> dict[str, bytes]:
        """Return the part that the constructor of some buckets is told."""
        part, row_N = self.plan.portion(buckets)
        said = {"facts": self._facts, "text": self._text}
        return {"plan": part.to_arrow(), "rows": row_N.tobytes(), **said}

    @cached_property
    def _facts(self) -> bytes:
        plan = self.plan
        return _json(
            index=plan.step,
            num_microbatches=plan.num_microbatches,
            num_loss_tokens=plan.num_loss_tokens,
            imbalance=plan.imbalance,
        )

    @cached_property
    def _text(self) -> bytes:
        plan = self.plan
        return _json(
            state_after=plan.state,
            microbatches=_to_text(plan.microbatch_N) if plan.num_microbatches > 1 else "",
            draw_digest=plan.draw_digest,
            assignment_digest=plan.assignment_digest,
            verdicts=verdicts_of(plan),
            events=events_in(plan.state),
        )


def microbatches_of(text: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return (N,) the microbatch of every span of a step that has several."""
    data = zlib.decompress(base64.b85decode(text["microbatches"]))
    return np.frombuffer(data, np.int32).astype(np.int64)


def _json(**values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def _to_text(microbatch_N: NDArray[np.int64]) -> str:
    return base64.b85encode(zlib.compress(microbatch_N.astype(np.int32).tobytes(), 1)).decode()
