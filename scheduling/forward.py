"""Reading the payload of planned records: forward through each lane, each row about once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megadask.planner.state import LaneCursor
from megadask.scheduling.batched import transformed_ahead
from megadask.scheduling.lanes import Read, judge, lane_shards, ordered_rows, where_is
from megadask.scheduling.reading import TruncatedShard, close_rows
from megadask.scheduling.shuffle import Row, size_of
from megadask.scheduling.spec import SourceSpec

#: A row that lies further ahead is opened anew: readers pass over rows quicker than they read them.
FAR_ROWS = 1000
#: Shards of a lane that are open at a time: where one ends, microbatches take turns in two.
MOST_OPEN = 2


@dataclass(eq=False)
class _Open:
    """A shard that is being read, and the number of the row that comes next."""

    epoch: int
    shard: int
    next_row: int
    rows: Iterator[Row]


class Forward:
    """Keeps its place in each lane, and the records passed on the way within a limit of bytes.

    Planned records are asked for in about the order of their lanes, but not quite: one microbatch
    takes every other, the next one those between.

    Attributes
    ----------
    num_read
        Rows read so far.
    """

    def __init__(self, spec: SourceSpec, limit_bytes: int) -> None:
        self._spec = spec
        self._limit_bytes = limit_bytes
        self._open: dict[int, list[_Open]] = {}
        self._passed: OrderedDict[tuple[int, int, int, int], tuple[int, Any, int]] = OrderedDict()
        self._bytes = 0
        self.num_read = 0

    def read(self, epoch: int, lane: int, wanted: list[LaneCursor]) -> Iterator[Read]:
        """Yield the given records of one shard of a lane, which must be in order of rows.

        One that cannot be reached any more has the verdict TOMBSTONE, or raises its error under
        ``on_error="raise"``.
        """
        ordinal = wanted[0].shard
        shard = lane_shards(self._spec, lane, epoch)[ordinal]
        name = self._spec.reader.shards()[shard].name

        def rows() -> Iterator[Row]:
            for at in wanted:
                found = self._take((epoch, lane, ordinal, at.row))
                yield at.row, *(found or self._advance(epoch, lane, ordinal, shard, at.row))

        ahead = transformed_ahead(self._spec, rows())
        for at, (_, place, record) in zip(wanted, ahead, strict=True):
            yield judge(self._spec, epoch, lane, at, record, where_is(name, place))

    def retain(self, keep: Callable[[int], bool]) -> None:
        """Close the files of all lanes but some, and forget their records."""
        for lane in [lane for lane in self._open if not keep(lane)]:
            self._close(lane, 0)
        for key in [key for key in self._passed if not keep(key[1])]:
            self._take(key)

    def close(self) -> None:
        """Close all files and forget all records."""
        self.retain(lambda lane: False)

    def _advance(
        self, epoch: int, lane: int, ordinal: int, shard: int, row: int
    ) -> tuple[int, Any]:
        """Return the place and the record of a row, keeping the rows before it."""
        opened = self._opened(epoch, lane, ordinal, shard, row)
        try:
            for number, place, record in opened.rows:
                self.num_read += 1
                opened.next_row = number + 1
                if isinstance(record, TruncatedShard):
                    break
                if number == row:
                    if opened.next_row == self._spec.reader.shards()[shard].rows:
                        self._drop(lane, opened)
                    return place, record
                self._keep((epoch, lane, ordinal, number), place, record)
                if number > row:
                    return row, TruncatedShard("what was planned cannot be read any more")
            else:
                record = TruncatedShard(f"the shard ends before row {row}")
        except BaseException:
            self._drop(lane, opened)  # a generator that has raised would look like one at its end
            raise
        self._drop(lane, opened)
        return row, record

    def _opened(self, epoch: int, lane: int, ordinal: int, shard: int, row: int) -> _Open:
        """Return a shard that is open before a row, and not far from it."""
        for opened in self._open.get(lane, ()):
            if (opened.epoch, opened.shard) == (epoch, ordinal):
                if opened.next_row <= row < opened.next_row + FAR_ROWS:
                    return opened
                self._drop(lane, opened)
                first = row
                break
        else:
            first = 0 if row < FAR_ROWS else row  # those before it will be asked for, too
        self._close(lane, MOST_OPEN - 1)
        rows = iter(ordered_rows(self._spec, self._spec.reader, epoch, shard, first))
        opened = _Open(epoch, ordinal, first, rows)
        self._open.setdefault(lane, []).append(opened)
        return opened

    def _keep(self, key: tuple[int, int, int, int], place: int, record: Any) -> None:
        size_bytes = size_of(record)
        self._passed[key] = (place, record, size_bytes)
        self._bytes += size_bytes
        while self._bytes > self._limit_bytes:
            _, (_, _, freed) = self._passed.popitem(last=False)
            self._bytes -= freed

    def _take(self, key: tuple[int, int, int, int]) -> tuple[int, Any] | None:
        found = self._passed.pop(key, None)
        if found is None:
            return None
        self._bytes -= found[2]
        return found[:2]

    def _close(self, lane: int, most: int) -> None:
        """Close shards of a lane, the oldest first, until there are so many left."""
        opened = self._open.get(lane, [])
        while len(opened) > most:
            self._drop(lane, opened[0])

    def _drop(self, lane: int, opened: _Open) -> None:
        self._open[lane].remove(opened)
        close_rows(opened.rows)
