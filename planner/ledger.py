"""The audit: committed plans times watermarks, in samples, spans and tokens.

The ledger keeps which records of every lane were delivered, as runs of positions, and forgets
epochs that were delivered in full; so its size does not grow with the run. It counts what was
proven delivered, never what somebody says was.

Axes: N rows of a table, S sources, U units, C counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata
from megadask.planner.runs import Runs
from megadask.planner.state import PlannerState, SourceState

UNITS = ("samples", "spans", "tokens")
#: What the audit tells of every source, in the order in which it prints.
COUNTS = ("planned", "delivered", "repeated", "lost", "skipped", "filtered", "unread")

_RecordKey = tuple[int, int, int]  # epoch, lane, position
#: Columns that are looked at.
_SPAN = ("epoch", "lane", "position", "start", "stop", "length")
_USED = ("source", *_SPAN, "tokens")


class Ledger:
    """What one generation planned and delivered, from the state it began with."""

    def __init__(self, state: PlannerState) -> None:
        self._sources = state.sources  # where the last plan leads
        self._names = tuple(state.sources)
        self._delivered = {name: _Delivered(source) for name, source in state.sources.items()}
        self._count_SUC = np.zeros((len(self._names), len(UNITS), len(COUNTS)), np.int64)
        self._filled: dict[str, set[_RecordKey]] = {name: set() for name in self._names}

    def plan(
        self,
        table: Metadata,
        passed: Metadata,
        fresh_N: NDArray[np.bool_],
        sources: Mapping[str, SourceState],
    ) -> None:
        """Enter a committed plan.

        Parameters
        ----------
        table
            (N rows) its spans.
        passed
            Records that it passes over.
        fresh_N
            (N,) which spans this generation is to deliver; the others were delivered before it.
        sources
            Their states after the plan; looked at where an epoch has ended, and for the report.
        """
        self._sources = sources
        self._count("planned", table.take(fresh_N))
        self._enter(table.take(~fresh_N))
        filtered_N = passed["verdict"] == Verdict.FILTERED
        for verdict, mine_N in (("filtered", filtered_N), ("skipped", ~filtered_N)):
            for name, part in self._by_source(passed.take(mine_N)):
                records = dict.fromkeys(_ids(part))
                place = (self._names.index(name), UNITS.index("samples"), COUNTS.index(verdict))
                self._count_SUC[place] += len(records)
                for record in records:
                    self._delivered[name].pass_over(record)

    def deliver(self, table: Metadata, rows: NDArray[np.int64]) -> None:
        """Enter spans that every rank concerned has acknowledged."""
        delivered = Metadata({name: table[name][rows] for name in _USED})
        self._count("delivered", delivered)
        again_N = self._enter(delivered)
        if again_N.any():
            self._count("repeated", delivered.with_columns(tokens=again_N).take(again_N > 0))

    def fill(self, table: Metadata) -> None:
        """Enter planned spans that a filler stands in for: their samples count as skipped, too."""
        for name, part in self._by_source(table):
            self._filled[name].update(_ids(part))

    def report(
        self, pending: Sequence[Metadata], unread: Mapping[str, int | None] | None = None
    ) -> dict[str, Any]:
        """Return the audit.

        Parameters
        ----------
        pending
            Committed spans that are not yet delivered.
        unread
            Source name to the samples that were left when the data ended; None where unknown.
        """
        waiting: dict[str, set[_RecordKey]] = {name: set() for name in self._names}
        for table in pending:
            for name, part in self._by_source(table):
                waiting[name].update(_ids(part))
        sources = {}
        for name, count_UC in zip(self._names, self._count_SUC.tolist(), strict=True):
            counts = {
                unit: dict(zip(COUNTS, count_C, strict=True))
                for unit, count_C in zip(UNITS, count_UC, strict=True)
            }
            lost = self._delivered[name].lost(self._sources[name], waiting[name])
            counts["samples"]["lost"] = lost
            counts["samples"]["skipped"] += len(self._filled[name])
            left = (unread or {}).get(name, 0)
            counts["samples"]["unread"] = -1 if left is None else left
            sources[name] = counts
        total = {
            unit: {count: sum(max(0, s[unit][count]) for s in sources.values()) for count in COUNTS}
            for unit in UNITS
        }
        clean = total["samples"]["lost"] == 0 and total["spans"]["repeated"] == 0
        return {"sources": sources, "total": total, "ok": clean}

    def _enter(self, table: Metadata) -> NDArray[np.int64]:
        """Enter delivered spans; return (N,) how many tokens of each had been delivered before.

        Samples that are whole and follow one another are entered together.
        """
        order_N = np.lexsort([table[name] for name in ("position", "lane", "epoch", "source")])
        columns = {name: table[name][order_N] for name in _USED}
        follows = np.diff(columns["position"]) == 1
        for name in ("epoch", "lane", "source"):
            follows &= np.diff(columns[name]) == 0
        whole_N = columns["stop"] - columns["start"] == columns["length"]
        follows &= whole_N[1:] & whole_N[:-1]
        begin_n = np.flatnonzero(np.concatenate([[True], ~follows])[: len(order_N)])
        count_n = np.diff(begin_n, append=len(order_N))
        again_N = np.zeros(len(order_N), np.int64)
        latest: dict[str, int] = {}  # epoch of each source
        keys = [columns[key][begin_n].tolist() for key in ("source", "epoch", "lane", "position")]
        keys += [begin_n.tolist(), count_n.tolist(), whole_N[begin_n].tolist()]
        for source, epoch, lane, position, begin, count, whole in zip(*keys, strict=True):
            name = self._names[source]
            latest[name] = epoch
            if whole and self._delivered[name].add_whole(epoch, lane, position, count):
                continue
            for row in range(begin, begin + count):
                span = [int(columns[key][row]) for key in _SPAN]
                again_N[order_N[row]] = self._delivered[name].add(*span)
        for name, epoch in latest.items():
            if epoch > self._delivered[name].first_epoch:
                self._delivered[name].forget(self._sources[name])
        return again_N

    def _by_source(self, table: Metadata) -> Iterable[tuple[str, Metadata]]:
        """Return the rows of each source that there are, in their order."""
        for source in np.unique(table["source"]).tolist():
            yield self._names[source], table.take(table["source"] == source)

    def _count(self, count: str, table: Metadata) -> None:
        """Count the rows of a table."""
        samples_S, spans_S, tokens_S = self._count_SUC[:, :, COUNTS.index(count)].T
        np.add.at(samples_S, table["source"], table["start"] == 0)
        np.add.at(spans_S, table["source"], 1)
        np.add.at(tokens_S, table["source"], table["tokens"])


class _Lane:
    """Records of one lane in one epoch.

    done: positions delivered in full, or passed over for good; partial: position to the tokens
    delivered of a sample that is not yet done.
    """

    def __init__(self) -> None:
        self.done = Runs()
        self.partial: dict[int, Runs] = {}


class _Delivered:
    """What was delivered of one source."""

    def __init__(self, state: SourceState) -> None:
        epoch, position, lane, start = state.cursor
        self.first_epoch = epoch  # everything before it was delivered
        self._lanes: dict[tuple[int, int], _Lane] = {}
        for number, cursor in enumerate(state.lanes):
            self._lane(epoch, number).done.add(0, cursor.position)
        if start:
            self._lane(epoch, lane).partial.setdefault(position, Runs()).add(0, start)
        for epoch, lane, position, *span in _spans(state.outstanding):
            self._take_back(self._lane(epoch, lane), position, *span)

    def add(self, epoch: int, lane: int, position: int, start: int, stop: int, length: int) -> int:
        """Enter a span; return how many of its tokens had been delivered before."""
        if epoch < self.first_epoch:
            return stop - start
        own = self._lane(epoch, lane)
        if position in own.done:
            return stop - start
        if stop - start == length:
            own.done.add(position, position + 1)
            return 0
        runs = own.partial.setdefault(position, Runs())
        again = runs.add(start, stop)
        if len(runs) == length:
            del own.partial[position]
            own.done.add(position, position + 1)
        return again

    def add_whole(self, epoch: int, lane: int, position: int, count: int) -> bool:
        """Enter so many samples from a position on; False, and nothing, if some had been."""
        if epoch < self.first_epoch:
            return False
        done = self._lane(epoch, lane).done
        if done.overlaps(position, position + count):
            return False
        done.add(position, position + count)
        return True

    def pass_over(self, record: _RecordKey) -> None:
        """Enter a record that is not to be delivered."""
        epoch, lane, position = record
        self._lane(epoch, lane).done.add(position, position + 1)

    def lost(self, state: SourceState, waiting: set[_RecordKey]) -> int:
        """Count records before the cursor that are neither delivered, waiting, nor passed over."""
        held = waiting | set(_ids(state.outstanding))
        return sum(
            (old, number, missing) not in held
            for old in range(self.first_epoch, state.cursor[0] + 1)
            for number, end in enumerate(_ends(state, old))
            for missing in self._lane(old, number).done.missing_below(end)
        )

    def forget(self, state: SourceState) -> None:
        """Forget epochs that were delivered in full."""
        while self.first_epoch < state.cursor[0]:
            lanes = [(self.first_epoch, number) for number in range(len(state.lanes))]
            ends = _ends(state, self.first_epoch)
            if not all(self._lane(*k).done.covers(n) for k, n in zip(lanes, ends, strict=True)):
                return
            for key in lanes:
                del self._lanes[key]
            self.first_epoch += 1

    def _lane(self, epoch: int, lane: int) -> _Lane:
        return self._lanes.setdefault((epoch, lane), _Lane())

    def _take_back(self, own: _Lane, position: int, start: int, stop: int, length: int) -> None:
        """Undo the delivery of a span."""
        if position in own.done:
            own.done.remove(position, position + 1)
            own.partial.setdefault(position, Runs()).add(0, length)
        own.partial[position].remove(start, stop)


def unread_records(
    state: SourceState, lane_rows: Sequence[int] | None, epochs: int | None
) -> int | None:
    """Return how many records of a source are left; None where only reading would tell.

    lane_rows: records of each lane in one epoch, None where the reader does not know.
    """
    if lane_rows is None or epochs is None:
        return None
    if state.cursor[0] >= epochs:
        return 0
    later = (epochs - state.cursor[0] - 1) * sum(lane_rows)
    left = sum(rows - lane.position for rows, lane in zip(lane_rows, state.lanes, strict=True))
    return later + left + len(set(_ids(state.outstanding)))


def _ends(state: SourceState, epoch: int) -> Sequence[int]:
    """Return how many records of each lane lie before the cursor; every epoch has the same."""
    if epoch == state.cursor[0]:
        return [lane.position for lane in state.lanes]
    return state.lengths


def _ids(table: Metadata) -> list[_RecordKey]:
    """Return (epoch, lane, position) of every row."""
    columns = (table[name].tolist() for name in ("epoch", "lane", "position"))
    return list(zip(*columns, strict=True))


def _spans(table: Metadata) -> list[tuple[int, int, int, int, int, int]]:
    """Return (epoch, lane, position, start, stop, length) of every row."""
    return list(zip(*(table[name].tolist() for name in _SPAN), strict=True))
