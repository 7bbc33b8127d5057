"""The state of every source behind a draw, and the records that were passed over for good.

Axes: S sources, N rows of `Known.table`, L lanes of all sources, one source after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megadask.planner.lines import Bools, Ints, Known
from megadask.planner.metadata import Metadata
from megadask.planner.pouring import Rest, parts
from megadask.planner.state import NEVER, Cursor, LaneCursor, SourceState

#: Columns whose values, in this order, give the canonical order within a source.
ORDER = ("epoch", "position", "lane", "start")


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """What a draw did to the sources.

    step
        Its number.
    taken_N
        (N,) rows drawn.
    waits_N
        (N,) rows that were too costly for it, if they were not drawn.
    epoch_S
        (S,) epoch that the source goes on with.
    ended_S
        (S,) whether nothing is left of a source with a weight.
    rest
        What is left of the last row drawn: it goes on in the next step.
    """

    step: int
    taken_N: Bools
    waits_N: Bools
    epoch_S: Ints
    ended_S: Bools
    rest: Rest | None = None


def go_behind(known: Known, taken: Taken) -> tuple[list[SourceState], Metadata]:
    """Return the states of the sources behind a draw, and the records passed over for good."""
    table, first_S1 = known.table, known.first_S1
    old_S4 = np.array([own.cursor for own in known.states], np.int64)
    cursor_S4 = _cursors(known, taken, old_S4)
    before_N = _is_before(table, cursor_S4[known.source_N])
    left_N = before_N & known.ok_N & ~taken.taken_N
    if taken.rest is not None:
        left_N[taken.rest.row] = True
    outstanding, first_outstanding_S1 = _outstanding(known, taken, left_N)
    nothing = outstanding.take(np.zeros(0))
    spans = list(pairwise(first_outstanding_S1.tolist()))
    lanes = _lanes_behind(known, cursor_S4)
    ended_S = taken.ended_S.tolist()
    states = []
    for source, own in enumerate(known.states):
        cursor = _cursor(cursor_S4[source])
        lengths = own.lengths
        if cursor[0] > own.cursor[0]:
            last_epoch = (cursor[0] - 1, NEVER, 0, 0)
            rows = np.arange(first_S1[source], first_S1[source + 1])
            lengths = tuple(k.position for k in _lanes_after(own, table.take(rows), last_epoch))
        first, stop = spans[source]
        states.append(
            replace(
                own,
                cursor=cursor,
                lanes=lanes[source],
                outstanding=outstanding.take(np.arange(first, stop)) if stop > first else nothing,
                lengths=lengths,
                ended=ended_S[source],
            )
        )
    return states, table.take(before_N & ~known.ok_N)


def is_before(table: Metadata, cursor: Cursor) -> NDArray[np.bool_]:
    """Return (N,) whether each span comes before ``cursor`` in canonical order."""
    return _is_before(table, np.array(cursor, np.int64)[None])


def _is_before(table: Metadata, cursor_N4: Ints) -> Bools:
    """Return (N,) whether each span comes before its own cursor, or before the only one."""
    before_N = np.zeros(table.num_rows, bool)
    equal_N = np.ones(table.num_rows, bool)
    for name, value_N in zip(ORDER, cursor_N4.T, strict=True):
        before_N |= equal_N & (table[name] < value_N)
        equal_N &= table[name] == value_N
    return before_N


def _cursors(known: Known, taken: Taken, old_S4: Ints) -> Ints:
    """Return (S, 4) the cursors of the sources behind a draw."""
    table = known.table
    row_n = np.flatnonzero(taken.taken_N)
    last_S = np.full(len(known.states), -1)
    last_S[known.source_N[row_n]] = row_n  # rows rise, and the last one stays
    after_S4 = old_S4.copy()
    drew = last_S >= 0
    row_s = last_S[drew]
    epoch_s, position_s, lane_s, _ = (table[name][row_s].astype(np.int64) for name in ORDER)
    # A record of which spans are left stays the next one of its lane.
    stop_s = table["stop"][row_s]
    partial_s = stop_s < table["length"][row_s]
    after_S4[drew] = np.stack(
        [epoch_s, position_s, lane_s + ~partial_s, np.where(partial_s, stop_s, 0)], axis=1
    )
    behind = _is_less(after_S4, old_S4)
    after_S4[behind] = old_S4[behind]
    ahead = taken.epoch_S > after_S4[:, 0]
    after_S4[ahead] = 0
    after_S4[ahead, 0] = taken.epoch_S[ahead]
    return after_S4


def _is_less(one_S4: Ints, other_S4: Ints) -> Bools:
    """Return (S,) which cursors come before others."""
    less = np.zeros(len(one_S4), bool)
    for column in reversed(range(4)):
        one, other = one_S4[:, column], other_S4[:, column]
        less = (one < other) | ((one == other) & less)
    return less


def _outstanding(known: Known, taken: Taken, left_N: Bools) -> tuple[Metadata, Ints]:
    """Return the spans passed over, and (S + 1,) where those of each source begin."""
    table = known.table.take(left_N)
    if taken.rest is not None:
        start_n = table["start"].copy()
        start_n[np.count_nonzero(left_N[: taken.rest.row])] = taken.rest.start
        table = parts(table, np.arange(len(start_n)), start_n, table["stop"])
    active_n = known.active_S[known.source_N[left_N]]
    waits_n = taken.waits_N[left_N]
    now_n = np.where(active_n, taken.step, NEVER)
    table = table.with_columns(
        since=np.minimum(table["since"], np.where(waits_n, NEVER, now_n)),
        held=np.minimum(table["held"], np.where(waits_n, now_n, NEVER)),
    )
    counts = np.bincount(known.source_N[left_N], minlength=len(known.states))
    return table, np.concatenate([[0], np.cumsum(counts)])


def _lanes_behind(known: Known, cursor_S4: Ints) -> list[tuple[LaneCursor, ...]]:
    """Return the next record of every lane of every source; see `_lanes_after`."""
    table, states = known.table, known.states
    count_S = np.array([len(own.lanes) for own in states])
    first_S = np.cumsum(count_S) - count_S
    cursor_N4 = cursor_S4[known.source_N]
    # Lanes of what was outstanding lie behind it already.
    passed_N = _is_record_before(table, cursor_N4) & ~known.outstanding_N
    row_n = np.flatnonzero(passed_N)
    last_L = np.full(int(count_S.sum()), -1)
    last_L[first_S[known.source_N[row_n]] + table["lane"][row_n]] = row_n
    touched = np.flatnonzero(last_L >= 0)
    row_l = last_L[touched]
    columns = (table[name][row_l].tolist() for name in ("position", "shard", "row", "verdict"))
    moved = dict(
        zip(
            touched.tolist(),
            (LaneCursor.after(*r) for r in zip(*columns, strict=True)),
            strict=True,
        )
    )
    lanes = []
    for own, first, epoch in zip(states, first_S.tolist(), cursor_S4[:, 0].tolist(), strict=True):
        old = own.lanes if epoch == own.cursor[0] else (LaneCursor(),) * len(own.lanes)
        lanes.append(tuple(moved.get(first + lane, at) for lane, at in enumerate(old)))
    return lanes


def _is_record_before(table: Metadata, cursor_N4: Ints) -> Bools:
    """Return (N,) whether each record lies before its cursor, in the cursor's epoch."""
    epoch_N, position_N, lane_N, _ = cursor_N4.T
    position = table["position"]
    earlier = (position < position_N) | ((position == position_N) & (table["lane"] < lane_N))
    return np.asarray((table["epoch"] == epoch_N) & earlier)


def _lanes_after(state: SourceState, table: Metadata, cursor: Cursor) -> tuple[LaneCursor, ...]:
    """Return the next record of every lane; one of which spans are left stays the next."""
    same_epoch = cursor[0] == state.cursor[0]
    lanes = list(state.lanes) if same_epoch else [LaneCursor()] * len(state.lanes)
    passed = _is_record_before(table, np.array(cursor, np.int64)[None])
    columns = (
        table[name][passed].tolist() for name in ("lane", "position", "shard", "row", "verdict")
    )
    for lane, *record in zip(*columns, strict=True):
        if record[0] >= lanes[lane].position:
            lanes[lane] = LaneCursor.after(*record)
    return tuple(lanes)


def _cursor(values: Ints) -> Cursor:
    epoch, position, lane, start = values.tolist()
    return (epoch, position, lane, start)
