"""Lengths of samples from a column, so that payload is read for planned samples alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from megadask.planner.errors import ConfigError
from megadask.scheduling.known import Entry
from megadask.scheduling.reading import BadRecord, ProjectableReader, Reader, Shard, columns_of
from megadask.scheduling.samples import scalar

#: A longer sample is a bad record: it would be cut in more spans than memory has room for.
LONGEST_SAMPLE = 2**30


@dataclass(frozen=True, kw_only=True)
class LengthReader:
    """Reads what is known of records: their lengths, and numbers that are metadata.

    Attributes
    ----------
    reader
        Of the records.
    tokens
        The column that holds the length of each sample, exactly as the transform makes it.
    loss_tokens
        The column that holds how many of its targets count; None where all of them do.
    scalars
        Columns that are metadata.
    whole
        What keeps samples from being cut; None where they may be.
    """

    reader: Reader
    tokens: str
    loss_tokens: str | None = None
    scalars: tuple[str, ...] = ()
    whole: str | None = None

    @classmethod
    def of(
        cls,
        reader: Reader,
        tokens: str,
        loss_tokens: str | None,
        scalars: Sequence[str],
        whole: str | None,
    ) -> LengthReader:
        """Return a reader of no more columns than these, where the format allows it."""
        columns = {tokens, *([loss_tokens] if loss_tokens else []), *scalars}
        if isinstance(reader, ProjectableReader):
            reader = reader.project(columns)
        return cls(
            reader=reader,
            tokens=tokens,
            loss_tokens=loss_tokens,
            scalars=tuple(scalars),
            whole=whole,
        )

    def shards(self) -> Sequence[Shard]:
        """Return the shards of the records."""
        return self.reader.shards()

    def read(self, shard: int, start: int = 0) -> Iterator[Any]:
        """Yield an entry for each record, or what is bad about it."""
        records: Any = self.reader.read(shard, start)
        if not hasattr(records, "close"):
            yield from map(self._entry, records)
            return
        with closing(records):
            yield from map(self._entry, records)

    def fingerprint(self) -> str:
        """Return that of the records."""
        return self.reader.fingerprint()

    def paths(self) -> Sequence[str]:
        """Return the files of the records."""
        return self.reader.paths()

    def _entry(self, record: Mapping[str, Any] | BadRecord) -> Entry | BadRecord:
        if isinstance(record, BadRecord):
            return record
        try:
            tokens = _count(record, self.tokens, LONGEST_SAMPLE)
            loss_tokens = None
            if self.loss_tokens is not None:
                loss_tokens = _count(record, self.loss_tokens, max(0, tokens - 1))
            scalars = {name: scalar(record, name) for name in self.scalars}
        except ConfigError as error:
            return BadRecord(str(error))
        return Entry(tokens=tokens, loss_tokens=loss_tokens, scalars=scalars, whole=self.whole)


def _count(record: Mapping[str, Any], column: str, most: int) -> int:
    """Return the number in a column; raises ConfigError for what cannot be one."""
    if column not in record:
        raise ConfigError(f"there is no column {column!r}", got=f"columns {columns_of(record)}")
    value = record[column]
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 0 <= value <= most:
        raise ConfigError(
            f"column {column!r}", got=repr(value)[:80], limit=f"an integer, 0 to {most}"
        )
    return int(value)
