"""What a transform is, and what is asked of every one.

A transform is any callable of a record. One whose signature has a parameter ``rng`` is given a
`numpy.random.Generator` of its own for every record, by that name. A sample is a dict; for language
models it holds ``tokens``, a 1-D integer array, and maybe ``loss_mask``, one bool a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import MegaDaskError
from megadask.scheduling.reading import columns_of

Record = Mapping[str, Any]
Sample = Mapping[str, Any]
#: ``transform(record)`` or ``transform(record, rng=generator)``.
Transform = Callable[..., Sample | None]
#: For each of some records its sample, None to drop it, or what it fails with.
Results = list[Sample | Exception | None]


class TransformError(MegaDaskError, ValueError):
    """A record cannot be made into a sample."""


@runtime_checkable
class TextEncoder(Protocol):
    """What turns a text into tokens: `Bytes`, `Tokenizer`, or any object like them."""

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a document, None where there is none."""
        ...

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """Return the tokens of a text, (l,) integers, without any token that ends it."""
        ...


class NeedsColumns:
    """A transform that fails where a record lacks one of its columns."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a record that it reads."""
        raise NotImplementedError

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """The columns without which it makes nothing of a record: all that it reads."""
        return self.columns


class InPlace(NeedsColumns):
    """A transform that changes one column of a record and passes the others on."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a record that it reads; it keeps the others."""
        return (self.column,)

    @property
    def keeps_columns(self) -> bool:
        """Whether what comes after it in a chain sees the other columns, too."""
        return True


def wants_rng(transform: Transform) -> bool:
    """Whether a transform asks for a generator: has a parameter ``rng``, to be passed by name.

    An attribute ``wants_rng`` of the transform, where there is one, decides instead.
    """
    declared = getattr(transform, "wants_rng", None)
    if declared is not None:
        return bool(declared)
    try:
        parameters = inspect.signature(transform).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return "rng" in parameters


def column_of(record: Record, column: str) -> Any:
    """Return what is in a column. Raises TransformError where there is no such column."""
    if column not in record:
        raise TransformError(
            f"the record has no column {column!r}",
            got=f"columns {columns_of(record)}",
            limit=column,
        )
    return record[column]


def text_of(record: Record, column: str) -> str:
    """Return the text in a column. Raises TransformError where there is none."""
    text: str = column_value(record, column, str)
    return text


def column_value(record: Record, column: str, kind: Any) -> Any:
    """Return the value of a column, which must be of a kind."""
    value = column_of(record, column)
    if not isinstance(value, kind):
        raise TransformError(
            f"column {column!r} is not a text",
            got="null" if value is None else type(value).__name__,
            remedy="Put a transform before this one that drops such records (return None).",
        )
    return value


def token_sample(tokens: NDArray[Any]) -> Sample | None:
    """Return a sample of tokens; None, which drops it, where there are none."""
    return {"tokens": tokens} if len(tokens) else None
