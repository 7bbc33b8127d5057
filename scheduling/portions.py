"""What of a committed plan a constructor is told: the spans of its buckets, and facts of the step.

A plan grows with the number of ranks, and so does the number of constructors: all of it for each of
them would grow with their product.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.columnar import Cutter
from megadask.planner.plan import Plan
from megadask.planner.state import events_in
from megadask.scheduling.point import verdicts_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Portion:
    """A part of a plan.

    Attributes
    ----------
    plan
        Of its spans, with neither loads nor a state.
    row_N
        (N,) their rows in the whole plan.
    facts
        What trainers must know of the step to run it; `StepFacts` with the text.
    text
        What they must know to save its state anywhere in it, for `read_text`.
    """

    plan: Plan
    row_N: NDArray[np.int64]
    facts: Mapping[str, Any]
    text: NDArray[np.uint8]

    @classmethod
    def read(cls, message: Mapping[str, bytes], sources: Sequence[str]) -> Portion:
        """Read what `Portions.of` has made; sources: their names, which every plan has alike."""
        read = Plan.from_cut if "cut" in message else Plan.from_arrow
        return cls(
            plan=replace(read(message.get("cut") or message["plan"]), sources=tuple(sources)),
            row_N=np.frombuffer(message["rows"], np.int64),
            facts=json.loads(message["facts"]),
            text=np.frombuffer(message["text"], np.uint8),
        )


class Portions:
    """A committed plan, and its parts as they travel."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def of(self, buckets: Sequence[int]) -> dict[str, bytes]:
        """Return the part that the constructor of some buckets is told.

        Where items are encoded by other ranks than those that use them, it has all spans.
        """
        said = {"facts": self._facts, "text": self._text}
        if self.plan.routing:
            row_N = np.arange(self.plan.table.num_rows)
            return {"plan": self._bare.to_arrow(), "rows": row_N.tobytes(), **said}
        order_N, first_B = self._by_bucket
        runs = [order_N[first_B[bucket] : first_B[bucket + 1]] for bucket in buckets]
        row_N = np.sort(np.concatenate(runs))
        return {"cut": self._cutter.cut(row_N), "rows": row_N.tobytes(), **said}

    @cached_property
    def _bare(self) -> Plan:
        """The plan without what no constructor needs."""
        plan = self.plan
        return replace(
            plan,
            sources=(),
            loads_BMP=np.zeros((0, *plan.loads_BMP.shape[1:]), np.int64),
            passed=plan.passed.take(np.empty(0, np.int64)),
            mixture={},
            speeds=None,
            state="",
        )

    @cached_property
    def _cutter(self) -> Cutter:
        return self._bare.cutter()

    @cached_property
    def _by_bucket(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(N,) rows by bucket, and (B + 1,) where those of each bucket begin."""
        bucket_N = self.plan.bucket_N
        order_N = np.argsort(bucket_N, kind="stable")
        return order_N, np.searchsorted(bucket_N[order_N], np.arange(self.plan.num_buckets + 1))

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
        """What grows with the sources, and is told all constructors: packed, much less of it."""
        plan = self.plan
        several = plan.num_microbatches > 1
        text = _json(
            state_after=plan.state,
            num_microbatches=plan.num_microbatches,
            microbatches=_to_text(plan.microbatch_N, plan.num_microbatches) if several else "",
            draw_digest=plan.draw_digest,
            assignment_digest=plan.assignment_digest,
            verdicts=verdicts_of(plan),
            events=events_in(plan.state),
        )
        return zlib.compress(text, 1)


def read_text(text: bytes) -> dict[str, Any]:
    """Return what `Portion.text` holds."""
    read: dict[str, Any] = json.loads(zlib.decompress(text))
    return read


def microbatches_of(text: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return (N,) the microbatch of every span of a step that has several."""
    data = zlib.decompress(base64.b85decode(text["microbatches"]))
    return np.frombuffer(data, _narrow(text["num_microbatches"])).astype(np.int64)


def _json(**values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def _to_text(microbatch_N: NDArray[np.int64], num_microbatches: int) -> str:
    data = microbatch_N.astype(_narrow(num_microbatches)).tobytes()
    return base64.b85encode(zlib.compress(data, 1)).decode()


def _narrow(num_microbatches: int) -> np.dtype[Any]:
    """Return the smallest type that holds every microbatch, and -1."""
    return np.min_scalar_type(-num_microbatches)
