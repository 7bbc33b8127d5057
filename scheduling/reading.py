"""What loaders and readers agree on: shards, records, and how reading fails. No IO here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from megadask.planner.errors import MegaDaskError


@dataclass(frozen=True)
class Shard:
    """The unit of reading: a file, a row group, a tar.

    Attributes
    ----------
    name
        Unique within the reader and free of machine paths, such as ``"data/x.parquet#rg3"``.
    rows
        Records in it, None where only reading it would tell.
    size_bytes
        Bytes it takes in storage, about where it is a part of a file; None where unknown.
    """

    name: str
    rows: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class BadRecord:
    """Stands in for one record that cannot be decoded; the records after it can be read.

    Attributes
    ----------
    reason
        What is wrong and where in the shard, for example ``"line 7: invalid UTF-8"``.
    """

    reason: str


class TruncatedShard(MegaDaskError):
    """Neither this row of the shard nor anything after it can be read, now or later."""


@runtime_checkable
class Reader(Protocol):
    """Reads the records of one source, shard by shard. It pickles, and holds no open file.

    The shard list is computed once and travels in the pickle, so that all workers agree on it.
    """

    def shards(self) -> Sequence[Shard]:
        """Return the shards in their fixed order; the first call may look at storage.

        Raises ConfigError where a path is missing, a glob is empty or a file is of another kind.
        """
        ...

    def read(self, shard: int, start: int = 0) -> Iterator[Mapping[str, Any] | BadRecord]:
        """Yield rows ``start``, ``start + 1``, ... of a shard; closing it closes the file.

        A row has the same number however the shard is read: records that cannot be decoded count.
        Raises TruncatedShard at the row from which on nothing can be read, and OSError where
        storage fails, which the caller may retry.
        """
        ...

    def fingerprint(self) -> str:
        """Return a hash of the shard list, the same wherever the data is mounted."""
        ...

    def paths(self) -> Sequence[str]:
        """Return the files read, as absolute paths or URLs; empty for data in memory."""
        ...


@runtime_checkable
class ProjectableReader(Reader, Protocol):
    """A reader that can leave out columns, and saves by it."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns that it was told to read, None for all."""
        ...

    def project(self, columns: Collection[str]) -> Reader:
        """Return a reader of the same shards and rows with only these columns of the records.

        A column that the data lack is not in the records.
        """
        ...


@runtime_checkable
class NamedReader(ProjectableReader, Protocol):
    """A reader that knows the columns of its records before it reads them."""

    def column_names(self) -> Sequence[str]:
        """Return the columns that the first file has, also those that are not read.

        Later files may have others. None at all where that file says nothing of them.
        """
        ...


class Partial(dict[str, Any]):
    """A record of a file that lacks columns that were asked for, which knows what it has."""

    file_columns: Sequence[str] = ()


def new_record(file_columns: Sequence[str] | None) -> dict[str, Any]:
    """Return an empty record; file_columns: of a file that lacks some that were asked for."""
    if file_columns is None:
        return {}
    record = Partial()
    record.file_columns = file_columns
    return record


def told_columns(wanted: Iterable[str] | None, names: Sequence[str]) -> Sequence[str] | None:
    """Return the columns of a file where it lacks some that are wanted, for `new_record`."""
    return None if wanted is None or set(wanted) <= set(names) else names


def columns_of(record: Mapping[str, Any]) -> list[str]:
    """Return the columns of a record or, where some that were asked for are missing, its file."""
    return sorted(getattr(record, "file_columns", record))


def fingerprint_shards(shards: Iterable[Shard]) -> str:
    """Return a hash of names, row counts and sizes: what `Reader.fingerprint` promises."""
    listing = [[shard.name, shard.rows, shard.size_bytes] for shard in shards]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:32]


def close_rows(rows: Any) -> None:
    """Close an iterator of rows, and so the file behind it, if it is one that can be closed."""
    close = getattr(rows, "close", None)
    if close is not None:
        close()
