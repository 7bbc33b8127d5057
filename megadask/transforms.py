"""Transforms: from a record of a reader to a sample, or to None, which drops the record.

A transform is any callable of a record. One whose signature has a parameter ``rng`` is given a
`numpy.random.Generator` of its own for every record, by that name. A sample is a dict; for language
models it holds ``tokens``, a 1-D integer array, and maybe ``loss_mask``, one bool a token.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megadask.columns import chain_columns
from megadask.planner.errors import ConfigError, MegaDaskError
from megadask.tokenizer_files import load, load_json, token_id

if TYPE_CHECKING:
    import tokenizers

    from megadask.audio import LogMel as LogMel
    from megadask.batched import Batched as Batched
    from megadask.images import DecodeImage as DecodeImage
    from megadask.instruct import CHATML as CHATML
    from megadask.instruct import Chat as Chat
    from megadask.instruct import Group as Group
    from megadask.instruct import Preference as Preference
    from megadask.instruct import PromptResponse as PromptResponse
    from megadask.instruct import Turn as Turn
    from megadask.placeholders import Placeholders as Placeholders
    from megadask.video import Frames as Frames

Record = Mapping[str, Any]
Sample = Mapping[str, Any]
#: ``transform(record)`` or ``transform(record, rng=generator)``.
Transform = Callable[..., Sample | None]


class TransformError(MegaDaskError, ValueError):
    """A record cannot be made into a sample."""


@runtime_checkable
class Fingerprinted(Protocol):
    """A transform that says itself what its results depend on."""

    def fingerprint(self) -> str:
        """Return a text that differs where results would."""
        ...


@dataclass(frozen=True)
class Bytes:
    """Take the UTF-8 bytes of a text as its tokens.

    Parameters
    ----------
    column
        The column that holds the text, a str or bytes.
    eos
        Whether token 256 ends every document. Without it, empty texts are dropped.
    """

    column: str = "text"
    eos: bool = True

    @property
    def vocab_size(self) -> int:
        """Number of tokens: 256 bytes, and the end of a document."""
        return 257

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a record that it reads."""
        return (self.column,)

    def __call__(self, record: Record) -> Sample | None:
        """Return the tokens of a record; raises TransformError where it has no such text."""
        value = _value(record, self.column, str | bytes)
        data = value.encode() if isinstance(value, str) else value
        tokens = np.empty(len(data) + self.eos, np.int16)
        tokens[: len(data)] = np.frombuffer(data, np.uint8)
        if self.eos:
            tokens[-1] = 256
        return _sample(tokens)

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends every document."""
        return 256 if self.eos else None

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """Return the tokens of a text, without the one that ends a document."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int16)

    def fingerprint(self) -> str:
        """Return a text that differs where results would."""
        return repr(self)


class Tokenizer:
    """Tokenize a text with a Hugging Face ``tokenizers.Tokenizer``.

    Its padding and truncation are switched off: batching pads, and ``Packed(overflow=)`` cuts. It
    pickles as its JSON and is built where it is first used.

    Parameters
    ----------
    tokenizer
        A ``tokenizers.Tokenizer``, a fast tokenizer of ``transformers``, the path of a
        ``tokenizer.json``, or the path of a folder that holds one.
    column
        The column that holds the text.
    eos
        Token to end every document with, by name or id; none when None.
    add_special_tokens
        Whether the tokenizer adds its own, such as a beginning of text.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer | str | os.PathLike[str],
        column: str = "text",
        *,
        eos: str | int | None = None,
        add_special_tokens: bool = False,
    ) -> None:
        built = load(tokenizer)
        self._json: str = built.to_str()
        self._column = column
        self._add_special_tokens = add_special_tokens
        ids = built.get_vocab(with_added_tokens=True).values()
        self._vocab_size = max(ids, default=-1) + 1
        self._eos = token_id(built, eos, self._vocab_size)
        self._built: tokenizers.Tokenizer | None = built

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""
        return self._vocab_size

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a record that it reads."""
        return (self._column,)

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends every document."""
        return self._eos

    def __call__(self, record: Record) -> Sample | None:
        """Return the tokens of a record; raises TransformError where it has no such text."""
        text = text_of(record, self._column)
        added = self._add_special_tokens
        return self._ended(self._backend.encode(text, add_special_tokens=added).ids)

    def batch(self, records: Sequence[Record]) -> list[Sample | Exception | None]:
        """Return what each of some records becomes, or fails with: faster than one by one."""
        results: list[Any] = []
        for record in records:
            try:
                results.append(text_of(record, self._column))
            except TransformError as error:
                results.append(error)
        good = [n for n, found in enumerate(results) if isinstance(found, str)]
        encoded = self._backend.encode_batch_fast(
            [results[n] for n in good], add_special_tokens=self._add_special_tokens
        )
        for n, found in zip(good, encoded, strict=True):
            results[n] = self._ended(found.ids)
        return results

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """Return the tokens of a text, without any that the tokenizer or `eos` would add."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, self._dtype)

    def fingerprint(self) -> str:
        """Return a text that differs where results would: it has a hash of the tokenizer's JSON."""
        digest = hashlib.sha256(self._json.encode()).hexdigest()[:32]
        return (
            f"Tokenizer({digest}, column={self._column!r}, eos={self._eos}, "
            f"add_special_tokens={self._add_special_tokens})"
        )

    def __repr__(self) -> str:
        return self.fingerprint()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        return self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}

    @property
    def _backend(self) -> tokenizers.Tokenizer:
        if self._built is None:
            self._built = load_json(self._json)
        return self._built

    def _ended(self, ids: list[int]) -> Sample | None:
        ending = [] if self._eos is None else [self._eos]
        return _sample(np.asarray([*ids, *ending], self._dtype))

    @property
    def _dtype(self) -> type[np.integer[Any]]:
        return np.int16 if self._vocab_size <= 2**15 else np.int32


class Chain:
    """Apply transforms one after another; the first None drops the record.

    All but the last return what the next one takes as its record.
    """

    def __init__(self, *transforms: Transform) -> None:
        if not transforms:
            raise ConfigError("Chain()", got="no transforms", limit="at least one")
        self._steps = tuple((transform, wants_rng(transform)) for transform in transforms)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms, in the order of their use."""
        return tuple(transform for transform, _ in self._steps)

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns of a record that they read together, None where one of them may read all."""
        return chain_columns(self.transforms)

    @property
    def wants_rng(self) -> bool:
        """Whether one of them asks for a generator; they share it."""
        return any(wants for _, wants in self._steps)

    @property
    def batch(self) -> Callable[[Sequence[Record]], list[Sample | Exception | None]] | None:
        """What transforms several records at once, None unless all of them can."""
        from megadask.batched import batch_through

        steps: list[Any] = [getattr(transform, "batch", None) for transform in self.transforms]
        if self.wants_rng or not all(map(callable, steps)):
            return None
        return functools.partial(batch_through, steps)

    def __call__(self, record: Record, rng: np.random.Generator | None = None) -> Sample | None:
        """Return what the last transform makes of a record, or None where one dropped it."""
        value: Mapping[str, Any] | None = record
        for transform, wants in self._steps:
            if value is None:
                return None
            value = transform(value, rng=rng) if wants else transform(value)
        return value

    def fingerprint(self) -> str:
        """Return a text that differs where results would."""
        return f"Chain({', '.join(transform_fingerprint(t) for t in self.transforms)})"

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.transforms))})"

    def __eq__(self, other: object) -> bool:
        return self.transforms == other.transforms if isinstance(other, Chain) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.transforms)


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


def transform_fingerprint(transform: Any) -> str:
    """Return a text that differs where the results of a transform would, as far as can be seen.

    That is its own ``fingerprint()``; else a dataclass's fields, a function's source, or at least
    the name of its class. Values that a function closes over are not seen.
    """
    if isinstance(transform, Fingerprinted):
        return transform.fingerprint()
    if isinstance(transform, functools.partial):
        bound = [_repr(value) for value in transform.args]
        bound += [f"{name}={_repr(value)}" for name, value in sorted(transform.keywords.items())]
        return f"partial({', '.join([transform_fingerprint(transform.func), *bound])})"
    if dataclasses.is_dataclass(transform):
        return f"{type(transform).__module__}.{_repr(transform)}"
    named: Any = transform if hasattr(transform, "__qualname__") else type(transform)
    name = f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"
    try:
        source = inspect.getsource(named)
    except (OSError, TypeError):
        return name
    return f"{name}@{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def _repr(value: object) -> str:
    """Return the repr without addresses, which are others in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def text_of(record: Record, column: str) -> str:
    """Return the text in a column. Raises TransformError where there is none."""
    text: str = _value(record, column, str)
    return text


def _value(record: Record, column: str, kind: Any) -> Any:
    """Return the value of a column, which must be of a kind."""
    if column not in record:
        raise TransformError(
            f"the record has no column {column!r}", got=f"columns {sorted(record)}", limit=column
        )
    value = record[column]
    if not isinstance(value, kind):
        raise TransformError(
            f"column {column!r} is not a text",
            got="null" if value is None else type(value).__name__,
            remedy="Put a transform before this one that drops such records (return None).",
        )
    return value


def _sample(tokens: NDArray[Any]) -> Sample | None:
    return {"tokens": tokens} if len(tokens) else None


#: Where the names live that need more than this module.
_HOMES = {
    "Batched": "megadask.batched",
    "CHATML": "megadask.instruct",
    "Chat": "megadask.instruct",
    "DecodeImage": "megadask.images",
    "Frames": "megadask.video",
    "Group": "megadask.instruct",
    "LogMel": "megadask.audio",
    "Placeholders": "megadask.placeholders",
    "Preference": "megadask.instruct",
    "PromptResponse": "megadask.instruct",
    "Turn": "megadask.instruct",
}

if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
