"""Read the records of one lane in order, from any place, with verdicts.

Lane k of a source with L lanes holds its shards k, k + L, k + 2L, ... in their order. Positions
count the records of the lane in one epoch. All functions here block; a loader runs them in its
executor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megadask.planner.ids import Verdict
from megadask.planner.state import LaneCursor
from megadask.scheduling.batched import Outcome, transformed_ahead
from megadask.scheduling.errors import SourceError
from megadask.scheduling.reading import BadRecord, TruncatedShard
from megadask.scheduling.samples import Sample, check_sample
from megadask.scheduling.spec import SourceSpec

logger = logging.getLogger(__name__)

#: An OSError is tried again this often, after so many seconds each, before it is fatal.
RETRY_DELAYS_S = (0.1, 0.5, 2.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Read:
    """One record of a lane, as the transform left it.

    sample
        None unless the verdict is OK.
    reason
        Why the record was skipped, or what ends the shard.
    """

    position: int
    shard: int
    row: int
    verdict: Verdict
    sample: Sample | None = None
    reason: str | None = None


def shards_of(lane: int, num_lanes: int, num_shards: int) -> range:
    """Return the indices of a lane's shards in the reader's list."""
    return range(lane, num_shards, num_lanes)


def lane_shards(spec: SourceSpec, lane: int) -> range:
    """Return the indices of the lane's shards in the reader's list."""
    return shards_of(lane, spec.lanes, len(spec.reader.shards()))


def read_lane(spec: SourceSpec, epoch: int, lane: int, start: LaneCursor) -> Iterator[Read]:
    """Yield the records of a lane from ``start`` to the end of the epoch.

    Raises the record's own error under ``on_error="raise"``, and SourceError when the source cannot
    be read at all or too many records in a row are bad.
    """
    shards = lane_shards(spec, lane)
    position, first_row, failures = start.position, start.row, 0
    for shard in range(start.shard, len(shards)):
        for row, record in transformed_ahead(spec, _rows(spec, shards[shard], first_row)):
            read = _judge(
                spec, epoch, lane, LaneCursor(position=position, shard=shard, row=row), record
            )
            failures = 0 if read.reason is None else failures + 1
            if failures >= spec.max_consecutive_errors:
                raise SourceError(
                    f"source {spec.name!r}: too many bad records in a row",
                    got=f"{failures}, the last one: {read.reason}",
                    limit=f"fewer than max_consecutive_errors={spec.max_consecutive_errors}",
                    remedy="Repair the data or the transform, or raise the limit.",
                )
            yield read
            position += 1
        first_row = 0


def read_rows(spec: SourceSpec, epoch: int, lane: int, wanted: list[LaneCursor]) -> Iterator[Read]:
    """Yield the given records of one shard of a lane, which must be in order of rows."""
    shard = lane_shards(spec, lane)[wanted[0].shard]
    todo = {cursor.row: cursor for cursor in wanted}
    for row, record in _rows(spec, shard, wanted[0].row):
        cursor = todo.pop(row, None)
        if cursor is not None:
            yield _judge(spec, epoch, lane, cursor, record)
        if not todo:
            return


def _rows(spec: SourceSpec, shard: int, start: int) -> Iterator[tuple[int, Any]]:
    """Yield (row, record) of a shard; errors of the medium are tried again, then fatal."""
    delays = iter(RETRY_DELAYS_S)
    row = start
    while True:
        records: Iterator[Any] | None = None
        try:
            records = spec.reader.read(shard, row)
            for record in records:
                yield row, record
                row += 1
                delays = iter(RETRY_DELAYS_S)
        except TruncatedShard as error:
            yield row, error
        except OSError as error:
            delay = next(delays, None)
            if delay is None:
                raise SourceError(
                    f"source {spec.name!r}: {_where(spec, shard, row)} cannot be read",
                    got=f"{type(error).__name__}: {error}",
                    remedy="Check the path and the permissions on every worker.",
                ) from error
            logger.warning("%s: %s; trying again", _where(spec, shard, row), error)
            time.sleep(delay)
            continue
        finally:
            close = getattr(records, "close", None)
            if close is not None:
                close()
        return


def _judge(spec: SourceSpec, epoch: int, lane: int, at: LaneCursor, record: Any) -> Read:
    """Transform a record and say what came of it."""
    where = _where(spec, lane_shards(spec, lane)[at.shard], at.row)
    read = partial(Read, position=at.position, shard=at.shard, row=at.row)
    if isinstance(record, BadRecord | TruncatedShard):
        reason = record.reason if isinstance(record, BadRecord) else str(record)
        if spec.on_error == "raise":
            raise SourceError(
                f"source {spec.name!r}: bad record in {where}",
                got=reason,
                remedy='Repair it, or let Source(on_error="skip") pass it over.',
            )
        verdict = Verdict.SKIPPED if isinstance(record, BadRecord) else Verdict.TOMBSTONE
        return read(verdict=verdict, reason=f"{where}: {reason}")
    try:
        sample = _transform(spec, epoch, lane, at.position, record)
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        # These would end this generator, or the worker, instead of reaching the trainers.
        raise SourceError(
            f"source {spec.name!r}: the transform must not raise this, at {where}",
            got=repr(error),
            remedy="Return None to drop a record, or raise an ordinary error.",
        ) from error
    except Exception as error:  # a transform is the user's code and may raise anything
        if spec.on_error == "raise":
            error.add_note(f"MegaDask: source {spec.name!r}, {where}, epoch {epoch}")
            raise
        reason = f"{where}: {type(error).__name__}: {error}"
        return read(verdict=Verdict.SKIPPED, reason=reason)
    if sample is None or not len(sample["tokens"]):
        return read(verdict=Verdict.FILTERED)
    return read(verdict=Verdict.OK, sample=sample)


def _transform(
    spec: SourceSpec, epoch: int, lane: int, position: int, record: Any
) -> Sample | None:
    sample = record
    if isinstance(record, Outcome):
        sample = record.get()
    elif spec.transform is not None:
        generator = {"rng": spec.generator(epoch, lane, position)} if spec.wants_rng else {}
        sample = spec.transform(record, **generator)
    return None if sample is None else check_sample(sample, spec.form)


def _where(spec: SourceSpec, shard: int, row: int) -> str:
    return f"shard {spec.reader.shards()[shard].name}, row {row}"
