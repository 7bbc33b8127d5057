"""Where a run stands before a step: small, versioned JSON, free of topology.

The state names the next record of every lane and what was passed over; with the data, the seed and
the schedules it fixes everything that follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from megadask.planner.errors import StateError
from megadask.planner.ids import Verdict
from megadask.planner.metadata import SPAN_COLUMNS, Metadata, Ragged, empty_spans

VERSION = 2

#: ``since`` or ``held`` of a span that never was.
NEVER = int(np.iinfo(np.int64).max)

#: Columns of outstanding spans: the steps that first passed them over.
WAITS = ("since", "held")

#: A canonical place in a source: (epoch, position, lane, start); compares in canonical order.
Cursor = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class LaneCursor:
    """The next record of a lane in the current epoch, and where it lies."""

    position: int = 0  # records of the lane before it
    shard: int = 0  # ordinal of its shard within the lane
    row: int = 0  # row within that shard; may be one past its end

    @classmethod
    def after(cls, position: int, shard: int, row: int, verdict: int) -> LaneCursor:
        """Return the cursor behind a record; nothing of its shard is behind a tombstone."""
        if verdict == Verdict.TOMBSTONE:
            return cls(position=position + 1, shard=shard + 1, row=0)
        return cls(position=position + 1, shard=shard, row=row + 1)


@lru_cache(maxsize=1)
def _none_outstanding() -> Metadata:
    """Return the table of a source that owes nothing, the same one for all sources."""
    return with_waits(empty_spans(), 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceState:
    """How far one source has been drawn.

    Attributes
    ----------
    cursor
        Every span before it, in canonical order, was drawn, passed over or not readable.
    lanes
        The next record of each lane in the cursor's epoch.
    outstanding
        Spans before the cursor that were passed over, in canonical order. Column ``since`` has the
        step that first had no room for it, ``held`` the one for which it first was too costly.
    lengths
        Records of each lane in the last epoch that was completed; empty before there is one.
    ended
        Whether nothing is left to draw.
    """

    cursor: Cursor = (0, 0, 0, 0)
    lanes: tuple[LaneCursor, ...]
    outstanding: Metadata = field(default_factory=_none_outstanding)
    lengths: tuple[int, ...] = ()
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class MixtureEvent:
    """Weights set while running: they hold from ``step`` on, until the next such event."""

    step: int
    weights: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannerState:
    """Everything the draw of ``step`` and of all later steps depends on, besides the pipeline.

    Attributes
    ----------
    step
        The next step to draw.
    sources
        Name to state, in the pipeline's order.
    deficits
        Name to what the mixture owes the source, in units of `weights.TOTAL_SHARE` times a sample
        or a token.
    events
        Mixture events in order of step: the one in force, and those to come.
    """

    step: int = 0
    sources: Mapping[str, SourceState]
    deficits: Mapping[str, int]
    events: tuple[MixtureEvent, ...] = ()

    @classmethod
    def initial(cls, lanes: Mapping[str, int]) -> PlannerState:
        """Return the state before step 0, from the number of lanes of every source."""
        return cls(
            sources={name: SourceState(lanes=(LaneCursor(),) * n) for name, n in lanes.items()},
            deficits=dict.fromkeys(lanes, 0),
        )

    def with_event(self, event: MixtureEvent) -> PlannerState:
        """Return the state with one more mixture event; those that can hold no more are dropped."""
        events = {old.step: old for old in (*self.events, event)}
        begun = [step for step in events if step <= self.step]
        kept = [step for step in events if step > self.step or step == max(begun)]
        return replace(self, events=tuple(events[step] for step in sorted(kept)))

    def weights_at(self, step: int) -> Mapping[str, float] | None:
        """Return the weights that an event set for ``step``, or None where the schedule holds."""
        in_force = [event.weights for event in self.events if event.step <= step]
        return in_force[-1] if in_force else None

    def to_json(self) -> str:
        """Return the state as JSON; `from_json` inverts it."""
        return json.dumps(
            {
                "version": VERSION,
                "step": self.step,
                "deficits": dict(self.deficits),
                "events": [[event.step, dict(event.weights)] for event in self.events],
                "sources": {name: _source_to_dict(state) for name, state in self.sources.items()},
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> PlannerState:
        """Read a state back. Raises StateError for another version or a text that is no state."""
        try:
            data = json.loads(text)
            version = data["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise StateError("this is not a planner state", got=repr(text[:80])) from error
        if version != VERSION:
            raise StateError(
                "the planner state has another version",
                got=version,
                limit=VERSION,
                remedy="Resume with the MegaDask version that wrote it.",
            )
        try:
            return cls(
                step=data["step"],
                sources={name: _source_from_dict(state) for name, state in data["sources"].items()},
                deficits=data["deficits"],
                events=tuple(MixtureEvent(step=s, weights=w) for s, w in data["events"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError("the planner state is damaged", got=repr(text[:80])) from error


def events_in(state: str) -> list[tuple[int, dict[str, float]]]:
    """Return (step, weights) of the mixture events in the JSON of a state.

    Nothing else of it is read: it may be large, and is asked for every step.
    """
    mark = '"events":'
    # Whatever is before it are numbers by source, also where a source is called so.
    events, _ = json.JSONDecoder().raw_decode(state, state.index(f"{mark}[") + len(mark))
    return [(step, weights) for step, weights in events]


class SourcesIn(Mapping[str, SourceState]):
    """The sources in the JSON of a state, each read when it is asked for.

    Parameters
    ----------
    state
        JSON as `PlannerState` writes it.
    """

    def __init__(self, state: str) -> None:
        self._state = state

    @cached_property
    def _data(self) -> Mapping[str, Any]:
        data: Mapping[str, Any] = json.loads(self._state)["sources"]
        return data

    def __getitem__(self, name: str) -> SourceState:
        return _source_from_dict(self._data[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


def check_lanes(state: PlannerState, lanes: Mapping[str, int]) -> PlannerState:
    """Fit a saved state to a pipeline's sources.

    A source that the state does not know starts from its beginning. Raises StateError when the
    state knows a source that the pipeline lacks, or another number of lanes.
    """
    missing = [name for name in state.sources if name not in lanes]
    if missing:
        raise StateError(
            "the state has sources that the pipeline lacks",
            got=sorted(missing),
            limit=f"some of {sorted(lanes)}",
            remedy="Keep the source in the pipeline, with weight 0 to stop drawing from it.",
        )
    for name, source in state.sources.items():
        if len(source.lanes) != lanes[name]:
            raise StateError(
                f"source {name!r} has another number of lanes than the state",
                got=lanes[name],
                limit=len(source.lanes),
                remedy="Lanes belong to the pipeline; keep Source(lanes=) and the shards.",
            )
    known = {**PlannerState.initial(lanes).sources, **state.sources}
    return replace(
        state,
        sources={name: _with_index(known[name], index) for index, name in enumerate(lanes)},
        deficits={name: state.deficits.get(name, 0) for name in lanes},
    )


def _with_index(state: SourceState, index: int) -> SourceState:
    """Return a source's state where the source has another place in the pipeline."""
    table = state.outstanding
    index_n = np.full(table.num_rows, index, table["source"].dtype)
    return replace(state, outstanding=table.with_columns(source=index_n))


def with_waits(table: Metadata, since: int) -> Metadata:
    """Return a span table whose spans wait for room since a step; none was too costly."""
    since_N, held_N = (np.full(table.num_rows, value, np.int64) for value in (since, NEVER))
    return table.with_columns(since=since_N, held=held_N)


def without_waits(table: Metadata) -> Metadata:
    """Return a table without what tells how long its spans have waited."""
    kept = {name: column for name, column in table.columns.items() if name not in WAITS}
    return Metadata(kept, table.ragged)


def table_to_json(table: Metadata) -> dict[str, Any]:
    """Return a table as plain lists and numbers; `table_from_json` inverts it."""
    data: dict[str, Any] = {name: column.tolist() for name, column in table.columns.items()}
    for name, ragged in table.ragged.items():
        data[f"items:{name}"] = [ragged.lengths_I.tolist(), ragged.offsets.tolist()]
    return data


def table_from_json(data: Mapping[str, Any]) -> Metadata:
    """Invert `table_to_json`; columns that are not those of a span table become floats."""
    dtypes = {**SPAN_COLUMNS, **dict.fromkeys(WAITS, "int64")}
    columns = {
        name: np.asarray(values, dtypes.get(name, "float64"))
        for name, values in data.items()
        if not name.startswith("items:")
    }
    items = {
        name.removeprefix("items:"): Ragged(
            np.asarray(values[0], np.int64), np.asarray(values[1], np.int64)
        )
        for name, values in data.items()
        if name.startswith("items:")
    }
    return Metadata(columns, items)


def narrow(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns of which those that hold one value say it once; `widen` inverts it."""
    narrowed = dict(data)
    for name, values in data.items():
        # The position tells how many rows there are.
        if name != "position" and ":" not in name and values.count(values[0]) == len(values):
            narrowed[name] = values[0]
    return narrowed


def widen(data: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `narrow`."""
    num_rows = len(data["position"])
    return {
        name: values if isinstance(values, list) else [values] * num_rows
        for name, values in data.items()
    }


def _source_to_dict(state: SourceState) -> dict[str, Any]:
    data: dict[str, Any] = {
        "cursor": list(state.cursor),
        "lanes": [[lane.position, lane.shard, lane.row] for lane in state.lanes],
    }
    if state.outstanding.num_rows:
        data["outstanding"] = narrow(table_to_json(state.outstanding))
    if state.lengths:
        data["lengths"] = list(state.lengths)
    if state.ended:
        data["ended"] = True
    return data


def _source_from_dict(data: Mapping[str, Any]) -> SourceState:
    lanes: Sequence[Sequence[int]] = data["lanes"]
    outstanding = data.get("outstanding")
    epoch, position, lane, start = data["cursor"]
    state = SourceState(
        cursor=(epoch, position, lane, start),
        lanes=tuple(LaneCursor(position=p, shard=s, row=r) for p, s, r in lanes),
        lengths=tuple(data.get("lengths", ())),
        ended=data.get("ended", False),
    )
    return (
        state
        if outstanding is None
        else replace(state, outstanding=table_from_json(widen(outstanding)))
    )
