"""Transform several records at once where the transform can, with the results of one by one.

A transform may have a method ``batch``: from a list of records to a list with, for each, its
sample, None, or the Exception that it fails with. Each result must be that of its record alone, so
that it does not matter which records come together (rule 4); where a whole batch fails, its records
are transformed one by one instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeVar

from megadask.planner.checks import check_integer, is_integer
from megadask.planner.errors import ConfigError
from megadask.scheduling.known import Entry
from megadask.scheduling.reading import BadRecord, TruncatedShard
from megadask.scheduling.spec import SourceSpec

#: Most records of a batch, where the transform does not say.
BATCH_RECORDS = 64
#: Bytes of texts after which a batch is full, likewise: a tokenizer takes some 30 ms for them, and
#: whoever waits for the first record waits for the whole batch.
BATCH_BYTES = 64 * 2**10
#: Most records of the first batch of a shard.
FIRST_RECORDS = 4
#: How much larger than the one before each batch is, until they are whole.
GROWTH = 2.0
#: Multiples of it, without their whole part, lie evenly in 0 to 1, however many there are.
_GOLDEN = (5**0.5 - 1) / 2
#: Reading ahead stops after so long: a slow medium must not look like a lost loader.
AHEAD_S = 1.0

#: What stands in the place of a record.
_NO_RECORDS = (BadRecord, TruncatedShard, Entry)

Row = TypeVar("Row", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Outcome:
    """What a batch made of one record, in its place."""

    record: Any
    value: Any

    def get(self) -> Any:
        """Return the sample or None; raise what the record failed with."""
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


def check_batches(source: str, transform: Any) -> None:
    """Raise ConfigError where a transform says of its batches what cannot be."""
    if callable(getattr(transform, "batch", None)):
        for name, default in (("batch_records", BATCH_RECORDS), ("batch_bytes", BATCH_BYTES)):
            value = getattr(transform, name, default)
            check_integer(f"Source({source!r}, transform=): its {name}", value, 1)


def batch_shares(spec: SourceSpec, lane: int) -> Iterator[float]:
    """Yield how much of a whole batch of a shard of a lane to transform at a time, in (0, 1].

    Little at first, then twice as much each time: the first samples are waited for, and shards of
    several lanes often begin together. The first batch has another size in each lane, and so each
    one ends at another place: lanes are read in turn, and else all of them would need another batch
    in the same step, which would wait for hundreds of records not its own.
    """
    first = min(FIRST_RECORDS / _most(spec), 1 / 4)
    share = first * GROWTH ** -(lane * _GOLDEN % 1)
    while share < 1:
        yield share
        share *= GROWTH
    yield from repeat(1.0)


def transformed_ahead(
    spec: SourceSpec, rows: Iterator[Row], shares: Iterator[float] | None = None
) -> Iterator[Row]:
    """Yield rows, (..., record), with an `Outcome` in the place of the record where there is one.

    Reads a batch ahead. What reading fails with is raised in its turn, behind the rows before it.
    shares: how much of a whole batch each one is, in records and in bytes; None for all of it.
    """
    batch = getattr(spec.transform, "batch", None)
    if spec.wants_rng or not callable(batch):
        yield from rows
        return
    shares = shares or repeat(1.0)
    whole, whole_bytes = _most(spec), _at_least_1(spec, "batch_bytes", BATCH_BYTES)
    is_over, over = False, 0.0  # over: what the batch before took beyond its share
    while not is_over:
        held: list[Row] = []
        failure: Exception | None = None
        share, taken, num_bytes = next(shares), 0.0, 0
        deadline = time.monotonic() + AHEAD_S
        while not held or taken < share - over:
            try:
                row = next(rows)
            except StopIteration:
                is_over = True
                break
            except Exception as error:  # kept for its turn
                is_over, failure = True, error
                break
            held.append(row)
            num_bytes += _num_bytes(row[-1])
            taken = max(len(held) / whole, num_bytes / whole_bytes)
            if time.monotonic() >= deadline:
                break
        over = min(max(0.0, over + taken - share), share)
        yield from _with_outcomes(spec, batch, held)
        if failure is not None:
            raise failure


def _most(spec: SourceSpec) -> int:
    return _at_least_1(spec, "batch_records", BATCH_RECORDS)


def _at_least_1(spec: SourceSpec, name: str, default: int) -> int:
    """Return what a transform says of its batches; whatever that is, a batch has a record."""
    value = getattr(spec.transform, name, default)
    return value if is_integer(value, 1) else 1


def _with_outcomes(
    spec: SourceSpec, batch: Callable[[list[Any]], Any], held: list[Row]
) -> Iterator[Row]:
    good = [n for n, row in enumerate(held) if not isinstance(row[-1], _NO_RECORDS)]
    try:
        results = batch([held[n][-1] for n in good]) if good else []
    except BaseException:  # the user's code may raise anything
        yield from held  # whichever is to blame is found when it is transformed alone
        return
    if not isinstance(results, list) or len(results) != len(good):
        raise ConfigError(
            f"source {spec.name!r}: batch() of the transform",
            got=f"a list of {len(results)}"
            if isinstance(results, list)
            else f"a {type(results).__name__}, which is no list",
            limit=f"a list of {len(good)}, one for each record",
        )
    outcomes = dict(zip(good, results, strict=True))
    for number, row in enumerate(held):
        if number in outcomes:
            outcome = Outcome(row[-1], outcomes[number])
            yield (*row[:-1], outcome)  # type: ignore[misc]
        else:
            yield row


def _num_bytes(record: Any) -> int:
    values = record.values() if isinstance(record, Mapping) else ()
    return sum(len(value) for value in values if isinstance(value, str | bytes))
