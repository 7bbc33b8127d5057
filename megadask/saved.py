"""The form of a loader's ``state_dict()``: a small dict of strings that any checkpoint can hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megadask.planner.errors import StateError
from megadask.scheduling.point import Point

VERSION = 2
#: Instead of what one side lacks.
MISSING = "missing"
#: Components whose parts bear the names of a pipeline's own parameters.
_OF_PIPELINE = ("batching", "reading")
#: Keys, and the text of each side.
Difference = tuple[tuple[str, ...], str, str]


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
    """Return the components in which two pipelines differ, each with what differs on both sides."""
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    found = {}
    for name in names:
        path = () if name in _OF_PIPELINE else (name,)
        lines = [
            f"{': '.join(keys)}: {left} in the state, {right} in the pipeline"
            for keys, left, right in differing(_parsed(was, name), _parsed(now, name), path)
        ]
        if lines:  # else the same in another order
            found[name] = "; ".join(lines)
    return found


def differing(was: Any, now: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yield what differs between two values of JSON: under which keys, and both sides as texts."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from differing(was.get(key, MISSING), now.get(key, MISSING), (*path, key))
    elif was != now:
        yield path, _shown(was, now), _shown(now, was)


def _parsed(components: Mapping[str, str], name: str) -> Any:
    text = components.get(name)
    if text is None:
        return MISSING
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shown(value: Any, other: Any) -> str:
    if isinstance(value, str):
        return value
    if other == MISSING and isinstance(value, dict):
        return "declared"
    return str(value) if value is None else json.dumps(value)


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
