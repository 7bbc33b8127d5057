"""Read the records of one lane in order, from any place, with verdicts.

Lane k of a source with L lanes holds its shards k, k + L, k + 2L, ... in every epoch, in their
order or, where the source is shuffled, in one of the epoch. Positions count the records of the lane
in one epoch. All functions here block; a loader runs them in its
executor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megadask.planner.ids import Verdict
from megadask.planner.state import LaneCursor
from megadask.scheduling.batched import Outcome, batch_shares, transformed_ahead
from megadask.scheduling.errors import SourceError, noted, told
from megadask.scheduling.known import Entry
from megadask.scheduling.policy import skips
from megadask.scheduling.reading import BadRecord, Reader, TruncatedShard, close_rows
from megadask.scheduling.samples import Sample, check_sample
from megadask.scheduling.shuffle import BlockOrder, Row, rows_of_block, shard_order, shuffled
from megadask.scheduling.spec import SourceSpec

logger = logging.getLogger(__name__)

#: An OSError is tried again this often, after so many seconds each, before it is fatal.
RETRY_DELAYS_S = (0.1, 0.5, 2.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Read:
    """One record of a lane, as the transform left it.

    shard, row
        Ordinals in the order of reading: of the shard in the lane, of the row in the shard.
    where
        Shard and row in the source, for people.
    sample
        None unless the verdict is OK; or where only the entry was read.
    entry
        What was known of the record without its payload.
    reason
        Why the record was skipped, or what ends the shard.
    """

    position: int
    shard: int
    row: int
    where: str
    verdict: Verdict
    sample: Sample | None = None
    entry: Entry | None = None
    reason: str | None = None


def shards_of(lane: int, num_lanes: int, num_shards: int) -> range:
    """Return the indices of a lane's shards in the reader's list."""
    return range(lane, num_shards, num_lanes)


def lane_shards(spec: SourceSpec, lane: int, epoch: int = 0) -> Sequence[int]:
    """Return the indices of the lane's shards in the reader's list, as an epoch reads them.

    They are the same in every epoch; so are the records of the lane, and how many there are.
    """
    shards = shards_of(lane, spec.lanes, len(spec.reader.shards()))
    if not spec.shuffle:
        return shards
    return shard_order((spec.seed, *spec.name.encode(), epoch, lane), shards)


def read_lane(spec: SourceSpec, epoch: int, lane: int, start: LaneCursor) -> Iterator[Read]:
    """Yield the records of a lane from ``start`` to the end of the epoch.

    Raises the record's own error under ``on_error="raise"``, and SourceError when the source cannot
    be read at all or too many records in a row are bad.
    """
    return _read(spec, spec.reader, epoch, lane, start)


def describe_lane(spec: SourceSpec, epoch: int, lane: int, start: LaneCursor) -> Iterator[Read]:
    """Yield the same as `read_lane`, with entries for samples where those are known."""
    return _read(spec, spec.known or spec.reader, epoch, lane, start)


def _read(
    spec: SourceSpec, reader: Reader, epoch: int, lane: int, start: LaneCursor
) -> Iterator[Read]:
    shards = lane_shards(spec, lane, epoch)
    position, first_row, failures = start.position, start.row, 0
    for shard in range(start.shard, len(shards)):
        name = spec.reader.shards()[shards[shard]].name
        rows = ordered_rows(spec, reader, epoch, shards[shard], first_row)
        for row, place, record in transformed_ahead(spec, rows, batch_shares(spec, lane)):
            at = LaneCursor(position=position, shard=shard, row=row)
            read = judge(spec, epoch, lane, at, record, where_is(name, place))
            failures = check_failures(spec, failures, read.reason)
            yield read
            position += 1
        first_row = 0


def check_failures(spec: SourceSpec, failures: int, reason: str | None) -> int:
    """Return how many records in a row have failed by now; raises SourceError for too many.

    reason: why the last one failed, if it did; failures: those before it.
    """
    failures = 0 if reason is None else failures + 1
    if failures >= spec.max_consecutive_errors:
        raise SourceError(
            f"source {spec.name!r}: too many bad records in a row",
            got=f"{failures}, the last one: {reason}",
            limit=f"fewer than max_consecutive_errors={spec.max_consecutive_errors}",
            remedy="Repair the data or the transform, or raise the limit.",
        )
    return failures


def read_rows(spec: SourceSpec, epoch: int, lane: int, wanted: list[LaneCursor]) -> Iterator[Read]:
    """Yield the given records of one shard of a lane, which must be in order of rows."""
    shard = lane_shards(spec, lane, epoch)[wanted[0].shard]
    name = spec.reader.shards()[shard].name
    todo = {cursor.row: cursor for cursor in wanted}
    for row, place, record in ordered_rows(spec, spec.reader, epoch, shard, wanted[0].row):
        cursor = todo.pop(row, None)
        if cursor is not None:
            yield judge(spec, epoch, lane, cursor, record, where_is(name, place))
        if not todo:
            return


def block_order(spec: SourceSpec, epoch: int, shard: int) -> BlockOrder:
    """Return the order of the rows of a shuffled shard, given its index in the reader's list."""
    rows = rows_of_block(spec.reader.shards()[shard], spec.shuffle)
    return BlockOrder((spec.seed, *spec.name.encode(), epoch, shard), rows)


def ordered_rows(
    spec: SourceSpec, reader: Reader, epoch: int, shard: int, start: int
) -> Iterator[Row]:
    """Yield the rows of a shard as an epoch reads them, from number ``start`` on.

    reader: that of the source, or `SourceSpec.known`. Where payload ends before what is known of it
    does, the rows that are left keep their numbers.
    """
    rows_from = partial(shard_rows, spec, reader, shard)
    if not spec.shuffle:
        return ((row, row, record) for row, record in rows_from(start))
    expected = None
    if spec.known is not None and reader is not spec.known:
        expected = partial(known_rows, spec, shard)
    return shuffled(rows_from, block_order(spec, epoch, shard), start, expected)


def known_rows(spec: SourceSpec, shard: int, start: int, most: int) -> int:
    """Return how many of ``most`` rows from ``start`` on `SourceSpec.known` tells of."""
    assert spec.known is not None
    count = 0
    for _, record in shard_rows(spec, spec.known, shard, start):
        if isinstance(record, TruncatedShard):
            break
        count += 1
        if count == most:
            break
    return count


def shard_rows(
    spec: SourceSpec, reader: Reader, shard: int, start: int
) -> Iterator[tuple[int, Any]]:
    """Yield (row, record) of a shard; errors of the medium are tried again, then fatal."""
    delays = iter(RETRY_DELAYS_S)
    row = start
    while True:
        records: Iterator[Any] | None = None
        try:
            records = reader.read(shard, row)
            for record in records:
                yield row, record
                row += 1
                delays = iter(RETRY_DELAYS_S)
        except TruncatedShard as error:
            yield row, error
        except OSError as error:
            place = where_is(reader.shards()[shard].name, row)
            delay = next(delays, None)
            if delay is None:
                raise SourceError(
                    f"source {spec.name!r}: {place} cannot be read",
                    got=told(error),
                    remedy="Check the path and the permissions on every worker.",
                ) from error
            logger.warning("%s: %s; trying again", place, error)
            time.sleep(delay)
            continue
        finally:
            close_rows(records)
        return


def judge(spec: SourceSpec, epoch: int, lane: int, at: LaneCursor, record: Any, where: str) -> Read:
    """Transform a record and say what came of it."""
    read = partial(Read, position=at.position, shard=at.shard, row=at.row, where=where)
    if isinstance(record, BadRecord | TruncatedShard):
        reason = record.reason if isinstance(record, BadRecord) else str(record)
        bad = SourceError(
            f"source {spec.name!r}: bad record in {where}",
            got=reason,
            remedy='Repair it, or let Source(on_error="skip") pass it over.',
        )
        if not skips(spec.on_error, bad, f"source {spec.name!r}, {where}"):
            raise bad
        verdict = Verdict.SKIPPED if isinstance(record, BadRecord) else Verdict.TOMBSTONE
        return read(verdict=verdict, reason=f"{where}: {reason}")
    if isinstance(record, Entry):
        return read(verdict=Verdict.OK if record.tokens else Verdict.FILTERED, entry=record)
    try:
        sample = _transform(spec, epoch, lane, at.position, record)
    except BaseException as error:  # a transform is the user's code and may raise anything
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            # These would end this generator, or the worker, instead of reaching the trainers.
            raise SourceError(
                f"source {spec.name!r}: the transform must not raise this, at {where}",
                got=told(error),
                remedy="Return None to drop a record, or raise an ordinary error.",
            ) from error
        if not skips(spec.on_error, error, f"source {spec.name!r}, {where}"):
            raised = noted(error, f"MegaDask: source {spec.name!r}, {where}, epoch {epoch}")
            if raised is error:
                raise
            raise raised from error
        return read(verdict=Verdict.SKIPPED, reason=f"{where}: {told(error)}")
    if sample is None or not len(sample["tokens"]):
        return read(verdict=Verdict.FILTERED)
    return read(verdict=Verdict.OK, sample=sample)


def _transform(
    spec: SourceSpec, epoch: int, lane: int, position: int, record: Any
) -> Sample | None:
    sample = record
    if isinstance(record, Outcome):
        sample, record = record.get(), record.record
    elif spec.transform is not None:
        generator = {"rng": spec.generator(epoch, lane, position)} if spec.wants_rng else {}
        sample = spec.transform(record, **generator)
    return None if sample is None else check_sample(sample, spec.form, record)


def where_is(shard: str, row: int) -> str:
    """Return the place of a record, for people."""
    return f"shard {shard}, row {row}"
