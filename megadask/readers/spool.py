"""Batches whose decoder holds much memory, by way of a file on the local disk."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from typing import IO

import pyarrow as pa

from megadask.readers.storage import ARROW_ERRORS

Batches = Generator[pa.RecordBatch, None, None]

logger = logging.getLogger(__name__)

#: What the decoder of one shard may hold; Parquet pages of large values take much more.
HELD_BYTES = 8 * 2**20
#: What is put on disk of one shard, at most.
SPOOLED_BYTES = 512 * 2**20


def spooled(batches: Batches, num_rows: int) -> Batches:
    """Yield batches, of which the decoder is closed early if it turns out to hold much.

    Then all of them are decoded at once into a file that has no name and goes with the process. An
    error of the decoder comes where it would without. Which way it goes depends on what memory was
    taken meanwhile; what comes out does not.

    num_rows: how many rows there are, about.
    """
    before_bytes = pa.total_allocated_bytes()
    first = next(batches, None)
    if first is None:
        return
    held_bytes = pa.total_allocated_bytes() - before_bytes
    total_bytes = first.nbytes * num_rows // max(1, first.num_rows)
    if held_bytes <= HELD_BYTES or total_bytes > SPOOLED_BYTES:
        yield first
        del first
        yield from batches
        return
    made = _file()
    if made is None:
        yield first
        yield from batches
        return
    with made as file:
        put = _put(file.fileno(), first, batches)
        del first
        file.seek(0)
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


def _put(number: int, batch: pa.RecordBatch, batches: Batches) -> _Put:
    """Write a batch and those after it to an open file, until they end or there is no room."""
    num_written = 0
    with open(number, "wb", closefd=False) as file, contextlib.suppress(OSError):
        writer = pa.ipc.new_stream(file, batch.schema)
        while batch is not None:
            try:
                writer.write_batch(batch)
                file.flush()
            except OSError as error:
                logger.warning("no room on disk for a shard, so memory holds it: %s", error)
                return _Put(num_written, batch)
            num_written += 1
            try:
                batch = next(batches, None)
            except ARROW_ERRORS as error:
                return _Put(num_written, error=error)
        batches.close()
    return _Put(num_written)


def _take(number: int, num_batches: int) -> Batches:
    with open(number, "rb", closefd=False) as file:
        reader = pa.ipc.open_stream(file) if num_batches else None
        for _ in range(num_batches):
            assert reader is not None
            yield reader.read_next_batch()
