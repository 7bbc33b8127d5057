"""Tokens of Hugging Face's tokenizers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megadask.transforms.tokenizer_files import load, load_json, token_id
from megadask.transforms.transform import (
    NeedsColumns,
    Record,
    Results,
    Sample,
    TransformError,
    text_of,
    token_sample,
)

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(NeedsColumns):
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

    def batch(self, records: Sequence[Record]) -> Results:
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

    def decode(self, tokens: NDArray[Any]) -> str:
        """Return the text of some tokens, special ones too."""
        text: str = self._backend.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    @property
    def _backend(self) -> tokenizers.Tokenizer:
        if self._built is None:
            self._built = load_json(self._json)
        return self._built

    def _ended(self, ids: list[int]) -> Sample | None:
        ending = [] if self._eos is None else [self._eos]
        return token_sample(np.asarray([*ids, *ending], self._dtype))

    @property
    def _dtype(self) -> type[np.integer[Any]]:
        return np.int16 if self._vocab_size <= 2**15 else np.int32
