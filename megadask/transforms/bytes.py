"""The bytes of a text as its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.transforms.transform import NeedsColumns, Record, Sample, column_value, token_sample


@dataclass(frozen=True)
class Bytes(NeedsColumns):
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
    def eos_id(self) -> int | None:
        """Id of the token that ends every document."""
        return 256 if self.eos else None

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """Return the tokens of a text, without the one that ends a document."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int16)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a record that it reads."""
        return (self.column,)

    def __call__(self, record: Record) -> Sample | None:
        """Return the tokens of a record; raises TransformError where it has no such text."""
        value = column_value(record, self.column, str | bytes)
        data = value.encode() if isinstance(value, str) else value
        tokens = np.empty(len(data) + self.eos, np.int16)
        tokens[: len(data)] = np.frombuffer(data, np.uint8)
        if self.eos:
            tokens[-1] = 256
        return token_sample(tokens)

    def decode(self, tokens: NDArray[Any]) -> str:
        """Return the text of some tokens; bytes that are none stand as U+FFFD."""
        return bytes(token for token in tokens.tolist() if token < 256).decode(errors="replace")

    def fingerprint(self) -> str:
        """Return a text that differs where results would."""
        return repr(self)
