"""The order of a shuffled source: shards within a lane, then rows within blocks of a shard.

It depends on the seed, the name of the source, the epoch and the shard list alone, never on what
the records hold: so it is the same whether lengths come from a column, an index or the records.
Axes: B rows of a block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.scheduling.reading import Shard, TruncatedShard, close_rows

#: Rows of a block with ``shuffle=True``.
BLOCK_ROWS = 1000
#: A block has fewer rows where they would take more than this in storage, as the shard list says.
STORED_BYTES = 8 * 2**20
#: What is held of a block, at most, but for one record. A block that takes more is read again.
HELD_BYTES = 32 * 2**20

# Domains of generators, beside those of random transforms, which have none.
_SHARDS, _BLOCKS = 1, 2

#: A row as it is read: its number in the order of reading, its number in the shard, the record.
Row = tuple[int, int, Any]


def shard_order(key: Sequence[int], shards: Sequence[int]) -> list[int]:
    """Return the shards of a lane in the order in which one epoch reads them.

    key: seed, source, epoch and lane.
    """
    ranks = _raw(key, _SHARDS, len(shards))
    return [shards[i] for i in np.argsort(ranks, kind="stable").tolist()]


def rows_of_block(shard: Shard, most: int) -> int:
    """Return the rows of a block: ``most``, or as many as `STORED_BYTES` hold on average."""
    if not shard.rows or not shard.size_bytes:
        return most
    return max(1, min(most, STORED_BYTES * shard.rows // shard.size_bytes))


@dataclass(frozen=True)
class BlockOrder:
    """The order of the rows of one shard in one epoch.

    Attributes
    ----------
    key
        Seed, source, epoch and shard.
    rows
        B, rows of every block but the last, which may have fewer.
    """

    key: tuple[int, ...]
    rows: int

    def ranks(self, block: int) -> NDArray[np.uint64]:
        """Return (B,) what the rows of a block are sorted by.

        The first n of them sort a block that ends after n rows, so that a block which is cut short
        keeps the order of the rows that are left.
        """
        return _raw((*self.key, block), _BLOCKS, self.rows)

    def numbers(self, block: int, num_rows: int) -> list[int]:
        """Return the place in the order of each of the first ``num_rows`` rows of a block."""
        order = np.argsort(self.ranks(block)[:num_rows], kind="stable")
        places = np.empty(num_rows, np.int64)
        places[order] = np.arange(num_rows)
        return [int(place) for place in places]


def shuffled(
    rows_from: Callable[[int], Iterator[tuple[int, Any]]],
    order: BlockOrder,
    start: int,
    expected: Callable[[int, int], int] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a shard in the order of an epoch, from number ``start`` on.

    Reads from the beginning of the block that ``start`` lies in. Holds one block, or `HELD_BYTES`
    of it and then reads the block again for the rest. What ends a shard (TruncatedShard) comes
    behind the rows that can be read.

    rows_from: opens the shard at a row, and yields rows with their numbers. expected: tells, from
    the first row of a block that is cut short and the rows of a block, how many it was numbered by;
    None where by those that can be read.
    """
    block, passed = divmod(start, order.rows)
    rows = rows_from(block * order.rows)
    try:
        while True:
            first = block * order.rows
            part = _Part.of(rows, order.ranks(block), order.rows, first)
            served, num_rows, end = 0, part.num_rows, part.end
            numbers = None
            if end is not None and expected is not None:
                numbers = order.numbers(block, expected(first, order.rows))
            while True:
                for row, record in part.in_order():
                    number = served if numbers is None else numbers[row - first]
                    if number >= passed:
                        yield first + number, row, record
                    served += 1
                if part.dropped is None:
                    break
                again = rows_from(first)
                try:
                    part = _Part.of(again, order.ranks(block), num_rows, first, behind=part.last)
                finally:
                    close_rows(again)
            if end is not None:
                yield first + (len(numbers) if numbers else served), first + served, end
            if num_rows < order.rows:
                return
            block, passed = block + 1, 0
    finally:
        close_rows(rows)


class _Part:
    """The rows of a block that come next in its order, as many as memory has room for."""

    def __init__(self) -> None:
        self.num_rows = 0  # of the block
        self.end: TruncatedShard | None = None
        self.dropped: tuple[int, int] | None = None  # the first in order that found no room
        self.last = (-1, -1)
        self._held: list[tuple[int, int, int, Any, int]] = []  # a heap, last in order first
        self._bytes = 0

    @classmethod
    def of(
        cls,
        rows: Iterator[tuple[int, Any]],
        ranks: NDArray[np.uint64],
        most: int,
        first: int,
        behind: tuple[int, int] = (-1, -1),
    ) -> _Part:
        """Read up to ``most`` rows and hold those whose rank comes after ``behind``."""
        part = cls()
        by_rank = ranks.tolist()
        while part.num_rows < most:
            row, record = next(rows, (-1, None))
            if row < 0:
                break
            if isinstance(record, TruncatedShard):
                part.end = record
                break
            offset = row - first
            part.num_rows += 1
            place = (by_rank[offset], offset)
            if place > behind and (part.dropped is None or place < part.dropped):
                part._hold(place, row, record)
        return part

    def in_order(self) -> Iterator[tuple[int, Any]]:
        """Yield what is held, and let go of it."""
        for rank, offset, row, record, _ in sorted(
            ((-entry[0], -entry[1], *entry[2:]) for entry in self._held), key=lambda e: e[:2]
        ):
            self.last = (rank, offset)
            yield row, record
        self._held.clear()

    def _hold(self, place: tuple[int, int], row: int, record: Any) -> None:
        size_bytes = size_of(record)
        heapq.heappush(self._held, (-place[0], -place[1], row, record, size_bytes))
        self._bytes += size_bytes
        while self._bytes > HELD_BYTES and len(self._held) > 1:
            rank, offset, _, _, freed = heapq.heappop(self._held)
            self._bytes -= freed
            self.dropped = (-rank, -offset)


def size_of(value: Any) -> int:
    """Return about how many bytes a record holds."""
    match value:
        case bytes() | str():
            return len(value) + 50
        case np.ndarray():
            return value.nbytes + 100
        case dict():
            return 200 + sum(size_of(item) for item in value.values())
        case list() | tuple():
            return 50 + sum(size_of(item) for item in value)
        case _:
            return 30


def _raw(key: Sequence[int], domain: int, count: int) -> NDArray[np.uint64]:
    # What a Generator makes of them may change between versions of NumPy; raw numbers do not.
    seed = np.random.SeedSequence(list(key), spawn_key=(domain,))
    return np.asarray(np.random.Philox(seed).random_raw(count))
