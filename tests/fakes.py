"""Sources in memory, and the Planner's loop over them without Dask: same decisions, no IO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megadask.planner.ahead import Ahead
from megadask.planner.batching import Batching
from megadask.planner.draw import Draw, DrawRules, Starved, draw
from megadask.planner.ids import Verdict
from megadask.planner.lines import Rows
from megadask.planner.metadata import SPAN_COLUMNS, Metadata
from megadask.planner.onward import again, joined, next_shares, shares_of
from megadask.planner.place import place
from megadask.planner.plan import Plan
from megadask.planner.schedule import Schedule, StepSchedule
from megadask.planner.state import LaneCursor, PlannerState, SourceState
from megadask.planner.strategy import Strategy
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.reading import BadRecord, Shard, fingerprint_shards

SpanKey = tuple[int, int, int, int, int, int]  # source, epoch, lane, position, start, stop


class Record(NamedTuple):
    """What a loader would say of one record."""

    tokens: int
    verdict: Verdict = Verdict.OK


def ok(*tokens: int) -> list[Record]:
    """Return readable records of these lengths."""
    return [Record(count) for count in tokens]


@dataclass(frozen=True, eq=False)
class MemorySource:
    """A source of which every epoch holds the same records: lane after lane.

    A tombstone ends a shard, so that the record behind it begins the next one.
    """

    name: str
    index: int
    lanes: Sequence[Sequence[Record]]
    batching: Batching

    @property
    def num_records(self) -> int:
        return sum(map(len, self.lanes))

    @cached_property
    def places(self) -> list[list[LaneCursor]]:
        """Where each record of each lane lies, and behind the last one."""
        places = []
        for records in self.lanes:
            cursors = [LaneCursor()]
            for record in records:
                at = cursors[-1]
                cursors.append(LaneCursor.after(at.position, at.shard, at.row, record.verdict))
            places.append(cursors)
        return places

    @cached_property
    def rows(self) -> Metadata:
        """The spans of one epoch in canonical order."""
        rows = []
        for lane, records in enumerate(self.lanes):
            for at, record in zip(self.places[lane], records, strict=False):
                key = (self.index, 0, lane, at.position, at.shard, at.row)
                cuts = self.batching.cut(record.tokens) if record.verdict is Verdict.OK else []
                if not cuts:
                    verdict = max(record.verdict, Verdict.FILTERED)
                    rows.append((*key, 0, 0, verdict, 0, 0, 0, 0, 0))
                length = cuts[-1][1] if cuts else 0
                checksum = hash((self.index, lane, at.position)) & 0xFFFFFFFF
                for start, stop in cuts:
                    counts = (stop - start, length, min(stop, length - 1) - start)
                    rows.append(
                        (*key, start, stop, Verdict.OK, *counts, 2 * record.tokens, checksum)
                    )
        table = span_table(rows)
        keys = (table["start"], table["lane"], table["position"])
        return table.take(np.lexsort(keys))

    def epoch(self, number: int) -> Metadata:
        """Return the spans of an epoch in canonical order."""
        return self.rows.with_columns(epoch=np.full(self.rows.num_rows, number, np.int64))


class MemoryFeed:
    """Does for the driver what `SourceFeed` does for the Planner: fetches by lane cursors."""

    def __init__(self, source: MemorySource, state: SourceState, epochs: int | None) -> None:
        self._source = source
        self._epochs = epochs
        self._ahead = Ahead(state)
        self._epoch = state.cursor[0]
        self._frontier = state.cursor[1]
        self._first = self._check(state.lanes)

    @property
    def rows(self) -> Rows:
        return self._ahead.rows(self._epoch)

    def fetch(self, num_records: int) -> None:
        """Fetch so many more records of each lane, and tell where the epoch ends."""
        if self._epochs is not None and self._epoch >= self._epochs:
            return
        table = self._source.epoch(self._epoch)
        until = self._frontier + num_records
        position = table["position"]
        first_N = np.array(self._first, np.int64)[table["lane"]]
        self._ahead.add(
            table.take((position >= np.maximum(first_N, self._frontier)) & (position < until))
        )
        self._frontier = until
        if until > max(map(len, self._source.lanes)):
            self._epoch += 1
            self._frontier = 0
            self._first = [0] * len(self._source.lanes)

    def trim(self, state: SourceState) -> None:
        self._check(state.lanes)
        self._ahead.trim(state)

    def _check(self, cursors: Sequence[LaneCursor]) -> list[int]:
        """Return the next position of each lane; a cursor must say where its record lies."""
        for places, cursor in zip(self._source.places, cursors, strict=True):
            assert cursor == places[cursor.position]
        return [cursor.position for cursor in cursors]


class Driver:
    """Draws and places step after step, fetching ``chunk()`` records a lane at a time.

    Now and then, when that is a multiple of 3, it fetches ahead of need.
    """

    def __init__(
        self,
        sources: Sequence[MemorySource],
        rules: DrawRules,
        weights: Mapping[str, float] | StepSchedule | None = None,
        *,
        chunk: Callable[[], int] = lambda: 7,
        state: PlannerState | None = None,
        num_buckets: int = 1,
        strategy: Strategy | None = None,
    ) -> None:
        self.sources = sources
        self.rules = rules
        self.state = state or initial_state(sources)
        if weights is None or isinstance(weights, Mapping):
            weights = Schedule.constant(weights or {source.name: 1.0 for source in sources})
        self._schedule = weights
        self._chunk = chunk
        self._num_buckets = num_buckets
        self._strategy = strategy or Strategy()
        self._feeds: dict[str, MemoryFeed] = {}
        self.mixture: dict[str, float] = {}

    def known(self, name: str) -> int:
        """Return how many rows of a source are in memory."""
        return self._feeds[name].rows.table.num_rows

    def draw(self) -> Draw:
        """Draw the next step and go on behind it."""
        names = [source.name for source in self.sources]
        at, share_S = shares_of(self.state, self._schedule, self.rules)
        drawn = self._draw(self.state, share_S)
        while (later := next_shares(drawn, self._schedule, self.rules, at)) is not None:
            at, share_S = later
            more = self._draw(again(self.state, drawn, share_S), share_S)
            drawn = joined(drawn, more, share_S)
        self.state = drawn.state
        for name, feed in self._feeds.items():
            feed.trim(self.state.sources[name])
        total = int(share_S.sum())
        self.mixture = {n: int(s) / total for n, s in zip(names, share_S, strict=True) if s}
        return drawn

    def _draw(self, state: PlannerState, share_S: NDArray[np.int64]) -> Draw:
        active = [s for s, share in zip(self.sources, share_S, strict=True) if share]
        for source in active:
            if source.name not in self._feeds:
                epochs = None if self.rules.stop == "repeat" else self.rules.epochs
                own = state.sources[source.name]
                self._feeds[source.name] = MemoryFeed(source, own, epochs)
            feed = self._feeds[source.name]
            if self._chunk() % 3 == 0 and feed.rows.table.num_rows < 2 * source.num_records:
                feed.fetch(self._chunk())  # more than is needed, also of the next epoch
        while True:
            rows = {source.name: self._feeds[source.name].rows for source in active}
            drawn = draw(state, rows, share_S, self.rules)
            if not isinstance(drawn, Starved):
                return drawn
            assert drawn.source in drawn.wanted
            self._feeds[drawn.source].fetch(self._chunk())

    def plan(self) -> Plan:
        """Draw and place the next step."""
        return self.place(self.draw())

    def place(self, drawn: Draw) -> Plan:
        topology = ClientPlaceTree(dp=self._num_buckets)
        return place(drawn, self._strategy, self.rules.batching, topology, self.mixture)

    def draws(self, most: int = 1000) -> Iterator[Draw]:
        """Yield the steps up to the end of the data, at most so many."""
        for _ in range(most):
            drawn = self.draw()
            if not drawn.table.num_rows:
                return
            yield drawn

    def plans(self, most: int = 1000) -> Iterator[Plan]:
        """Yield the plans up to the one that says that the data has ended, at most so many."""
        for _ in range(most):
            plan = self.plan()
            yield plan
            if plan.end:
                return


@dataclass
class MemoryReader:
    """A reader of records in memory that fails on demand.

    faults: (shard, row) to the errors that reading this row raises, one after the other; the row
    itself follows when there are none left.
    """

    content: Sequence[Sequence[Any]]
    faults: dict[tuple[int, int], list[Exception]]
    num_opened: int = 0
    num_open: int = 0

    def __init__(
        self,
        content: Sequence[Sequence[Any]],
        faults: Mapping[tuple[int, int], list[Exception]] | None = None,
    ) -> None:
        self.content = content
        self.faults = dict(faults or {})

    def shards(self) -> list[Shard]:
        return [Shard(f"memory#{n}", rows=len(rows)) for n, rows in enumerate(self.content)]

    def read(self, shard: int, start: int = 0) -> Iterator[Any]:
        self.num_opened += 1
        self.num_open += 1
        try:
            for row in range(start, len(self.content[shard])):
                faults = self.faults.get((shard, row))
                if faults:
                    raise faults.pop(0)
                record = self.content[shard][row]
                yield record if isinstance(record, BadRecord) else dict(record)
        finally:
            self.num_open -= 1

    def fingerprint(self) -> str:
        return fingerprint_shards(self.shards())

    def paths(self) -> list[str]:
        return []


def initial_state(sources: Sequence[MemorySource]) -> PlannerState:
    return PlannerState.initial({source.name: len(source.lanes) for source in sources})


def restored(state: PlannerState) -> PlannerState:
    """Return a state as it comes back from JSON."""
    return PlannerState.from_json(state.to_json())


def span_table(rows: Sequence[Sequence[int]]) -> Metadata:
    """Return a span table from rows in the order of SPAN_COLUMNS."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(SPAN_COLUMNS)
    return Metadata(
        {
            name: np.array(column, dtype)
            for (name, dtype), column in zip(SPAN_COLUMNS.items(), columns, strict=True)
        }
    )


def spans(table: Metadata) -> list[SpanKey]:
    """Return the spans of a table as plain tuples, in its order."""
    names = ("source", "epoch", "lane", "position", "start", "stop")
    return list(zip(*(table[name].tolist() for name in names), strict=True))


def readable(source: MemorySource, epochs: int) -> list[SpanKey]:
    """Return all spans that a source has to give, in canonical order."""
    return [
        span
        for epoch in range(epochs)
        for span in spans(source.epoch(epoch).take(source.rows["verdict"] == Verdict.OK))
    ]


def without(plan: Plan, rows: NDArray[np.int64]) -> Plan:
    """Return a plan that has lost some rows."""
    kept = np.setdiff1d(np.arange(plan.table.num_rows), rows)
    columns = {
        f"{n}_N": getattr(plan, f"{n}_N")[kept] for n in ("bucket", "microbatch", "pack", "offset")
    }
    return replace(plan, table=plan.table.take(kept), **columns)
