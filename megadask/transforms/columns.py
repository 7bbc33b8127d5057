"""Which columns of its records a source needs, as far as its transform says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megadask.scheduling.reading import ProjectableReader, Reader


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
        own = _own_columns(transform)
        if own is None:
            return None
        needed |= own
        if not getattr(transform, "keeps_columns", False):
            return needed
    return None


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


def _own_columns(transform: Any) -> frozenset[str] | None:
    columns = getattr(transform, "columns", None)
    if callable(columns):
        columns = columns()
    if isinstance(columns, str):
        return frozenset([columns])
    if columns is None or not all(isinstance(column, str) for column in columns):
        return None
    return frozenset(columns)
