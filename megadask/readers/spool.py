"""Batches whose decoder holds much memory, by way of a file on the local disk."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import IO, Self

import pyarrow as pa

Batches = Generator[pa.RecordBatch, None, None]

logger = logging.getLogger(__name__)

#: What the decoder of one shard may hold; Parquet pages of large values take much more.
HELD_BYTES = 8 * 2**20
#: What is put on disk of one shard, at most.
SPOOLED_BYTES = 512 * 2**20
#: Shards of these sizes go by way of the disk as soon as their reader has others open, too: their
#: decoders may hold all of them, and as many of them as a source has lanes are open for long.
SMALL_BYTES = (128 * 2**10, 4 * 2**20)
#: No decoder holds more than so many times what it decodes to.
_MOST_HELD = 4


class OpenShards:
    """The shards that one reader has open; a copy of the reader elsewhere begins with none."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may end a shard at any place
        self._shards: list[Spooled] = []

    def __reduce__(self) -> tuple[type[OpenShards], tuple[()]]:
        return OpenShards, ()

    def add(self, shard: Spooled) -> None:
        """Count a shard in."""
        with self._lock:
            self._shards.append(shard)

    def remove(self, shard: Spooled) -> None:
        """Count a shard out."""
        with self._lock:
            self._shards.remove(shard)

    def settle(self) -> None:
        """Let small shards go by way of the disk if there are several."""
        with self._lock:
            shards = [*self._shards] if len(self._shards) > 1 else []
        for shard in shards:
            shard.settle()


class Spooled:
    """Yields batches, of which the decoder is closed early if it holds much.

    Then what is left of them is decoded at once into a file that has no name and goes with the
    process. An error of the decoder comes where it would without. Which way it goes depends on what
    memory was taken meanwhile, and on what else is open; what comes out does not.

    Used as a context; the end of it closes the batches and the file.

    Parameters
    ----------
    batches
        What the decoder yields.
    num_rows
        How many rows there are, about.
    others
        The shards of the same reader.
    """

    def __init__(self, batches: Batches, num_rows: int, others: OpenShards) -> None:
        self._batches = batches
        self._num_rows = num_rows
        self._others = others
        self._file: IO[bytes] | None = None
        self._is_judged = self._is_small = False
        # Another thread that opens a shard of the same reader may close the decoder of this one.
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        self._others.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._others.remove(self)
        with self._lock:
            self._is_small = False
            self._batches.close()
            if self._file is not None:
                self._file.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        with self._lock:
            if self._is_judged:
                return next(self._batches)
            self._is_judged = True
            first = self._judged()
        self._others.settle()
        return first

    def settle(self) -> None:
        """Let go of the decoder of a small shard, unless it is at work just now."""
        if self._is_small and self._lock.acquire(blocking=False):
            try:
                if self._is_small:
                    self._move()
            finally:
                self._lock.release()

    def _judged(self) -> pa.RecordBatch:
        """Return the first batch, and go by way of the disk if the decoder holds much by then."""
        before_bytes = pa.total_allocated_bytes()
        first = next(self._batches)
        held_bytes = pa.total_allocated_bytes() - before_bytes
        total_bytes = first.nbytes * self._num_rows // max(1, first.num_rows)
        self._is_small = SMALL_BYTES[0] <= total_bytes <= SMALL_BYTES[1]
        # Other threads decode meanwhile: a small shard is not to blame for what they take.
        held_bytes = min(held_bytes, _MOST_HELD * total_bytes)
        if held_bytes > HELD_BYTES and total_bytes <= SPOOLED_BYTES:
            self._move()
        return first

    def _move(self) -> None:
        self._is_small = False
        self._file = _file()
        if self._file is not None:
            put = _put(self._file.fileno(), self._batches)
            self._file.seek(0)
            self._batches = _rest(self._file, put, self._batches)


def _rest(file: IO[bytes], put: _Put, batches: Batches) -> Batches:
    """Yield what was put into a file, and what found no room there."""
    yield from _take(file.fileno(), put.num_written)
    if put.unwritten is not None:
        yield put.unwritten
        yield from batches
    if put.error is not None:
        raise put.error


@dataclass(frozen=True, eq=False)
class _Put:
    """What came of writing batches."""

    num_written: int
    unwritten: pa.RecordBatch | None = None  # the one that there was no room for
    error: BaseException | None = None  # that the decoder ended with


def _file() -> IO[bytes] | None:
    try:
        return tempfile.TemporaryFile(prefix="megadask-")
    except OSError as error:
        logger.warning("no file on disk for a shard, so memory holds it: %s", error)
        return None


def _put(number: int, batches: Batches) -> _Put:
    """Write batches to an open file, until they end or there is no room."""
    put = _Put(0)
    # What found no room is tried again, and fails again, when the file is closed.
    with contextlib.suppress(OSError), open(number, "wb", closefd=False) as file:
        put = _written(file, batches)
    return put


def _written(file: IO[bytes], batches: Batches) -> _Put:
    writer = None
    num_written = 0
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # of any kind: it belongs to the rows behind, not to this call
            return _Put(num_written, error=error)
        if batch is None:
            return _Put(num_written)
        try:
            writer = writer or pa.ipc.new_stream(file, batch.schema)
            writer.write_batch(batch)
            file.flush()
        except OSError as error:
            logger.warning("no room on disk for a shard, so memory holds it: %s", error)
            return _Put(num_written, batch)
        num_written += 1


def _take(number: int, num_batches: int) -> Batches:
    with open(number, "rb", closefd=False) as file:
        reader = pa.ipc.open_stream(file) if num_batches else None
        for _ in range(num_batches):
            assert reader is not None
            yield reader.read_next_batch()
