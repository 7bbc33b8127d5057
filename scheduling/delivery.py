"""The form in which a Data Constructor answers a trainer: one flat dict of arrays.

Dask sends a flat dict of numpy arrays without a copy, if its first value is an array; so everything
that is not an array travels as JSON in the array ``header``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.plan import Plan
from megadask.scheduling.portions import read_text

Reply = dict[str, NDArray[Any]]

#: Under which name the first microbatch of a step has what is known of the step, as JSON.
PLAN = "plan"

_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One microbatch as it arrived.

    is_private: whether its arrays are memory of this process alone; else they may be those of a
    constructor in this process. made: what a trainer made of ids and arrays when they came.
    """

    step: int
    microbatch: int
    is_last: bool
    num_loss_tokens: int
    num_loss_tokens_step: int
    cp_layout: str
    ids: NDArray[np.int64]
    arrays: dict[str, NDArray[Any]]
    is_private: bool
    made: Any = None


@dataclass(frozen=True, eq=False)
class StepFacts:
    """What is known of a step before its first microbatch is used; counts all microbatches."""

    index: int
    num_microbatches: int
    num_loss_tokens: int
    imbalance: float
    text: bytes

    @cached_property
    def header(self) -> dict[str, Any]:
        """What `Point.of` needs of the step, and the state behind it; read when it is asked for."""
        return read_text(self.text)


def reply(status: str, payload: Mapping[str, NDArray[Any]] | None = None, **header: Any) -> Reply:
    """Return an answer.

    status: ``"batch"``, ``"step_over"`` (the step has no such microbatch), ``"end"``, ``"wait"``
    (not ready within the time allowed), ``"generation"`` (the run went back to a state),
    ``"moved"`` (this constructor is none any more; the supervisor knows more) or ``"closed"``.
    """
    text = _encode({"status": status, **header})
    return {"header": np.frombuffer(text.encode(), np.uint8), **(payload or {})}


def closed(reason: str, error: bytes | None) -> Reply:
    """Return the answer that the run is over; error: packed, what it failed with."""
    payload = {"error": np.frombuffer(error, np.uint8)} if error else {}
    return reply("closed", payload, reason=reason)


def packed_error(payload: Reply) -> bytes | None:
    """Return what a run failed with, of the answer that it is over."""
    return payload["error"].tobytes() if "error" in payload else None


def read_reply(answer: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Any], Reply]:
    """Split an answer into its header and its arrays."""
    header = json.loads(answer["header"].tobytes())
    return header, {name: array for name, array in answer.items() if name != "header"}


def span_ids(plan: Plan, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (6, n) int64: source, epoch, lane, position, start, stop of the given rows."""
    names = ("source", "epoch", "lane", "position", "start", "stop")
    return np.stack([plan.table[name][rows].astype(np.int64) for name in names])
