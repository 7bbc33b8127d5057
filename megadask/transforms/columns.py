"""Which columns of its records a source needs, as far as its transform says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megadask.planner.errors import ConfigError
from megadask.scheduling.reading import NamedReader, ProjectableReader, Reader
from megadask.transforms.transform import InPlace


def declared_columns(transform: Any) -> frozenset[str] | None:
    """Return the columns that a transform reads; None where it does not say, or may read all.

    A transform says so by an attribute or a method ``columns``. One that passes other columns on,
    as ``keeps_columns = True`` says, is only known together with what comes after it in a chain.
    """
    return chain_columns([transform])


def chain_columns(transforms: Iterable[Any]) -> frozenset[str] | None:
    """Return the columns that transforms read which are applied one after another."""
    needed: frozenset[str] = frozenset()
    for transform in transforms:
        own = _names(transform, "columns")
        if own is None:
            return None
        needed |= own
        if not getattr(transform, "keeps_columns", False):
            return needed
    return None


def needed_columns(transform: Any) -> frozenset[str]:
    """Return the columns without which a transform makes nothing of any record.

    A transform says so by an attribute or a method ``needed_columns``; of one that does not, none
    are known: it may do without those that it reads.
    """
    return _names(transform, "needed_columns") or frozenset()


def chain_needs(transforms: Iterable[Any]) -> frozenset[str]:
    """Return the same of transforms that are applied one after another."""
    needed: frozenset[str] = frozenset()
    for transform in transforms:
        needed |= needed_columns(transform)
        if not isinstance(transform, InPlace):
            break  # who knows which columns it makes
    return needed


def check_columns(source: str, reader: Reader, needed: Iterable[str]) -> None:
    """Raise ConfigError where the data lack columns that a source needs, or they are not read.

    Of readers that do not know their columns, and of files behind the first, nothing is said.
    """
    needed = set(needed)
    if not needed or not isinstance(reader, NamedReader):
        return
    names, where = reader.column_names(), f"source {source!r}: {reader.shards()[0].name}"
    missing = sorted(needed.difference(names))
    if names and missing:
        raise ConfigError(
            f"{where} lacks columns",
            got=missing,
            limit=f"some of {sorted(names)}",
        )
    unread = sorted(needed.difference(needed if reader.columns is None else reader.columns))
    if unread:
        raise ConfigError(
            f"{where}: columns that are needed are not read",
            got=unread,
            limit=f"some of {sorted(reader.columns or ())}",
            remedy="Name them in columns=, too.",
        )


def lean(reader: Reader, transform: Any, others: Iterable[str]) -> Reader:
    """Return a reader of no more columns than the transform reads, and some others.

    It is the reader itself where that cannot leave out columns, was told which to read, or where
    the transform does not say what it reads.
    """
    columns = declared_columns(transform)
    if columns is None or not isinstance(reader, ProjectableReader) or reader.columns is not None:
        return reader
    return reader.project(columns | set(others))


def with_columns(reader: Reader, others: Iterable[str]) -> Reader:
    """Return a reader that reads some columns besides those that it was told to read."""
    if not isinstance(reader, ProjectableReader) or reader.columns is None:
        return reader
    missing = set(others) - set(reader.columns)
    return reader.project({*reader.columns, *missing}) if missing else reader


def _names(transform: Any, attribute: str) -> frozenset[str] | None:
    columns = getattr(transform, attribute, None)
    if callable(columns):
        columns = columns()
    if isinstance(columns, str):
        return frozenset([columns])
    if columns is None or not all(isinstance(column, str) for column in columns):
        return None
    return frozenset(columns)
