"""The form of a loader's ``state_dict()``: a small dict of strings that any checkpoint can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megadask.planner.errors import StateError
from megadask.scheduling.point import Point

VERSION = 1


def to_saved(components: Mapping[str, str], point: Point) -> dict[str, Any]:
    """Return the state of a loader: what pipeline it belongs to, and where in it."""
    return {
        "version": VERSION,
        "step": point.step,
        "microbatch": point.microbatch,
        "point": point.to_json(),
        "pipeline": json.dumps(components, separators=(",", ":")),
    }


def differences(was: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the components in which two pipelines differ, each with both sides."""
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return {
        name: f"{name}: {was.get(name, 'missing')} in the state, "
        f"{now.get(name, 'missing')} in the pipeline"
        for name in names
    }


def another_pipeline(found: Mapping[str, str], remedy: str) -> StateError:
    """Return the error for a state that belongs to another pipeline."""
    got = "; ".join(found.values())
    return StateError("the state was saved by another pipeline", got=got, remedy=remedy)


def read_saved(state: Mapping[str, Any]) -> tuple[dict[str, str], Point]:
    """Invert `to_saved`. Raises StateError for another version or a dict that is no state."""
    if not isinstance(state, Mapping) or not {"version", "point", "pipeline"} <= set(state):
        got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(
            "this is not the state of a MegaDask loader",
            got=got,
            remedy="Pass what loader.state_dict() returned.",
        )
    if state["version"] != VERSION:
        raise StateError(
            "the state has another version",
            got=state["version"],
            limit=VERSION,
            remedy="Resume with the MegaDask version that saved it.",
        )
    return json.loads(state["pipeline"]), Point.from_json(state["point"])
