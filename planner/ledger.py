"""The audit: committed plans times watermarks, in samples, spans and tokens.

The ledger keeps which records of every lane were delivered, as runs of positions, so its size does
not grow with the run. It counts what was proven delivered, never what somebody says was.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata
from megadask.planner.state import PlannerState, SourceState

UNITS = ("samples", "spans", "tokens")
#: What the audit tells of every source, in the order in which it prints.
COUNTS = ("planned", "delivered", "repeated", "lost", "skipped", "filtered", "unread")

_LaneKey = tuple[int, int]  # epoch, lane
_RecordKey = tuple[int, int, int]  # epoch, lane, position


class Runs:
    """A set of integers kept as sorted, disjoint runs [start, stop)."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> int:
        """Add [start, stop); return how many of it were there before."""
        if start >= stop:
            return 0
        low = bisect.bisect_left(self._stops, start)
        high = bisect.bisect_right(self._starts, stop)
        before = sum(
            max(0, min(stop, e) - max(start, s))
            for s, e in zip(self._starts[low:high], self._stops[low:high], strict=True)
        )
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]
        return before

    def remove(self, value: int) -> None:
        """Take one integer out."""
        at = bisect.bisect_right(self._starts, value) - 1
        if at < 0 or value >= self._stops[at]:
            return
        start, stop = self._starts[at], self._stops[at]
        parts = [(s, e) for s, e in ((start, value), (value + 1, stop)) if s < e]
        self._starts[at : at + 1] = [s for s, _ in parts]
        self._stops[at : at + 1] = [e for _, e in parts]

    def missing_below(self, end: int) -> list[int]:
        """Return the integers in [0, end) that are not in the set."""
        gaps: list[int] = []
        at = 0
        for start, stop in zip([*self._starts, end], [*self._stops, end], strict=True):
            gaps.extend(range(at, min(start, end)))
            at = max(at, stop)
        return gaps

    @property
    def end(self) -> int:
        """One past the largest integer, 0 when empty."""
        return self._stops[-1] if self._stops else 0

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __contains__(self, value: int) -> bool:
        at = bisect.bisect_right(self._starts, value) - 1
        return at >= 0 and value < self._stops[at]


@dataclass
class _Lane:
    done: Runs = field(default_factory=Runs)  # positions delivered in full, or passed over for good
    partial: dict[int, Runs] = field(default_factory=dict)  # position to tokens delivered


@dataclass
class _Source:
    lanes: dict[_LaneKey, _Lane] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(
        default_factory=lambda: {unit: dict.fromkeys(COUNTS, 0) for unit in UNITS}
    )


class Ledger:
    """What one generation planned and delivered, from the state it began with."""

    def __init__(self, state: PlannerState) -> None:
        self._names = tuple(state.sources)
        self._sources = {name: _Source() for name in self._names}
        for name, source in state.sources.items():
            self._begin(self._sources[name], source)

    def plan(self, table: Metadata, passed: Metadata, fresh_N: NDArray[np.bool_]) -> None:
        """Enter a committed plan; fresh_N says which spans this generation is to deliver."""
        for name, part in self._by_source(table.take(fresh_N)):
            self._count(name, "planned", part)
        for row in np.flatnonzero(~fresh_N).tolist():
            self._deliver_row(self._sources[self._names[int(table["source"][row])]], table, row)
        for name, part in self._by_source(passed):
            num_filtered = int((part["verdict"] == Verdict.FILTERED).sum())
            counts = self._sources[name].counts["samples"]
            counts["filtered"] += num_filtered
            counts["skipped"] += part.num_rows - num_filtered
            for epoch, lane, position in _ids(part):
                self._lane(name, epoch, lane).done.add(position, position + 1)

    def deliver(self, table: Metadata, rows: NDArray[np.int64]) -> None:
        """Enter spans that every rank concerned has acknowledged."""
        part = table.take(rows)
        for name, mine in self._by_source(part):
            self._count(name, "delivered", mine)
        for row in range(part.num_rows):
            name = self._names[int(part["source"][row])]
            again = self._deliver_row(self._sources[name], part, row)
            if again:
                counts = self._sources[name].counts
                counts["spans"]["repeated"] += 1
                counts["tokens"]["repeated"] += again
                counts["samples"]["repeated"] += int(part["start"][row] == 0)

    def report(
        self,
        state: PlannerState,
        pending: Sequence[Metadata],
        unread: Mapping[str, int | None] | None = None,
    ) -> dict[str, Any]:
        """Return the audit.

        Parameters
        ----------
        state
            The state after the last committed plan.
        pending
            Committed spans that are not yet delivered.
        unread
            Source name to the samples that were left when the data ended; None where unknown.
        """
        waiting: dict[str, set[tuple[int, int, int]]] = {name: set() for name in self._names}
        for table in pending:
            for name, part in self._by_source(table):
                waiting[name].update(_ids(part))
        sources = {}
        for name in self._names:
            counts = {unit: dict(values) for unit, values in self._sources[name].counts.items()}
            lost = self._lost(name, state.sources[name], waiting[name])
            counts["samples"]["lost"] = lost
            left = (unread or {}).get(name, 0)
            counts["samples"]["unread"] = -1 if left is None else left
            sources[name] = counts
        total = {
            unit: {count: sum(max(0, s[unit][count]) for s in sources.values()) for count in COUNTS}
            for unit in UNITS
        }
        clean = total["samples"]["lost"] == 0 and total["spans"]["repeated"] == 0
        return {"sources": sources, "total": total, "ok": clean}

    def _begin(self, source: _Source, state: SourceState) -> None:
        epoch, position, lane, start = state.cursor
        table = state.outstanding
        outstanding: dict[_RecordKey, list[int]] = {key: [] for key in _ids(table)}
        for key, first in zip(_ids(table), table["start"].tolist(), strict=True):
            outstanding[key].append(first)
        for number, cursor in enumerate(state.lanes):
            source.lanes[epoch, number] = own = _Lane()
            own.done.add(0, cursor.position)
        for (hole_epoch, hole_lane, hole), firsts in outstanding.items():
            own = source.lanes.setdefault((hole_epoch, hole_lane), _Lane())
            own.done.remove(hole)
            if min(firsts) > 0:
                own.partial.setdefault(hole, Runs()).add(0, min(firsts))
        if start:
            source.lanes[epoch, lane].partial.setdefault(position, Runs()).add(0, start)

    def _lane(self, name: str, epoch: int, lane: int) -> _Lane:
        return self._sources[name].lanes.setdefault((epoch, lane), _Lane())

    def _by_source(self, table: Metadata) -> Iterable[tuple[str, Metadata]]:
        for source in np.unique(table["source"]).tolist():
            yield self._names[source], table.take(table["source"] == source)

    def _count(self, name: str, count: str, part: Metadata) -> None:
        counts = self._sources[name].counts
        counts["samples"][count] += int((part["start"] == 0).sum())
        counts["spans"][count] += part.num_rows
        counts["tokens"][count] += int(part["tokens"].sum())

    def _deliver_row(self, source: _Source, table: Metadata, row: int) -> int:
        """Mark a span as delivered; return how many of its tokens had been before."""
        epoch, lane, position, start, stop, length = (
            int(table[name][row])
            for name in ("epoch", "lane", "position", "start", "stop", "length")
        )
        own = source.lanes.setdefault((epoch, lane), _Lane())
        if position in own.done:
            return stop - start
        if start == 0 and stop == length:
            own.done.add(position, position + 1)
            return 0
        runs = own.partial.setdefault(position, Runs())
        again = runs.add(start, stop)
        if len(runs) == length:
            del own.partial[position]
            own.done.add(position, position + 1)
        return again

    def _lost(self, name: str, state: SourceState, waiting: set[_RecordKey]) -> int:
        """Count records before the cursor that are neither delivered, waiting, nor passed over."""
        held = waiting | set(_ids(state.outstanding))
        epoch, position, lane, start = state.cursor
        if start:
            held.add((epoch, lane, position))
        lost = 0
        for (lane_epoch, number), own in self._sources[name].lanes.items():
            if lane_epoch == epoch:
                end = state.lanes[number].position
            elif lane_epoch == epoch - 1 and state.lengths:
                end = state.lengths[number]
            else:
                end = own.done.end
            missing = own.done.missing_below(end)
            lost += sum((lane_epoch, number, position) not in held for position in missing)
        return lost


def unread_records(
    state: SourceState, lane_rows: Sequence[int] | None, epochs: int | None
) -> int | None:
    """Return how many records of a source are left; None where only reading would tell.

    lane_rows: records of each lane in one epoch, None where the reader does not know.
    """
    if lane_rows is None or epochs is None:
        return None
    later = max(0, epochs - state.cursor[0] - 1) * sum(lane_rows)
    if state.cursor[0] >= epochs:
        return 0
    left = sum(rows - lane.position for rows, lane in zip(lane_rows, state.lanes, strict=True))
    return later + left + len(set(_ids(state.outstanding)))


def _ids(table: Metadata) -> list[_RecordKey]:
    """Return (epoch, lane, position) of every row."""
    columns = (table[name].tolist() for name in ("epoch", "lane", "position"))
    return list(zip(*columns, strict=True))
