"""How a source says what is known of its records, and the reader of that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from megadask.planner.errors import ConfigError
from megadask.scheduling.reading import Reader
from megadask.transforms import wants_rng

if TYPE_CHECKING:
    from megadask.scheduling.spec import SourceSpec
    from megadask.source import Source


def check_known(source: Source) -> None:
    """Raise ConfigError where a source says what is known of its records in ways that clash."""
    for what in ("length_column", "loss_column"):
        value = getattr(source, what)
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(
                f"Source({source.name!r}, {what}=)", got=repr(value), limit="a name, or None"
            )
    if source.index is not None and not isinstance(source.index, str | os.PathLike):
        raise ConfigError(
            f"Source({source.name!r}, index=)", got=repr(source.index), limit="a path or URL"
        )
    if source.loss_column is not None and source.length_column is None:
        raise ConfigError(
            f"Source({source.name!r}, loss_column=)", got="no length_column", limit="both"
        )
    if source.length_column is not None and source.index is not None:
        raise ConfigError(
            f"Source({source.name!r})", got="length_column and index", limit="one of them"
        )
    if source.length_column is not None and source.modalities:
        raise ConfigError(
            f"Source({source.name!r}, length_column=)",
            got=f"modalities {list(source.modalities)}",
            remedy="The lengths of items are in no column: use an index.",
        )
    if source.index is not None and source.transform is not None and wants_rng(source.transform):
        raise ConfigError(
            f"Source({source.name!r}, index=)",
            got="a random transform",
            remedy="What it makes differs by epoch: leave the index away.",
        )


#: Set while pipelines are declared in order to be indexed: their indexes may not be there yet.
_ignored: ContextVar[bool] = ContextVar("ignored", default=False)


@contextmanager
def ignored_indexes() -> Iterator[None]:
    """Take pipelines that are declared here as if they had no indexes."""
    token = _ignored.set(True)
    try:
        yield
    finally:
        _ignored.reset(token)


def known_reader(source: Source, spec: SourceSpec) -> Reader | None:
    """Return the reader of what is known of the records of a source, None where that is nothing.

    Raises ConfigError for an index of other data, or of another transform.
    """
    if source.index is not None:
        if _ignored.get():
            return None
        from megadask.indexing.sidecar import open_index

        return open_index(os.fspath(source.index), spec, source.transform_text)
    if source.length_column is None:
        return None
    if spec.form.num_sequences > 1:
        raise ConfigError(
            f"Source({source.name!r}, length_column=)",
            got=f"Packed(sequences={spec.form.num_sequences})",
            remedy="The lengths of sequences are in no column: use an index.",
        )
    from megadask.indexing.length_column import LengthReader

    return LengthReader.of(
        source.reader,
        source.length_column,
        source.loss_column,
        spec.scalars,
        None if source.size is None else f"a sample without tokens, of size {source.size!r}",
    )
