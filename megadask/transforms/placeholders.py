"""Tokens of a text with items in it: every marker becomes a run of placeholders.

Letters: L tokens of a sample, I its items of one modality.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.transforms.bytes import Bytes
from megadask.transforms.transform import (
    Record,
    Sample,
    TextEncoder,
    TransformError,
)


@dataclass(frozen=True)
class Placeholders:
    """Make tokens of a text whose markers stand for items; the last of a `Chain`.

    The n-th marker of a modality is the n-th item of the record: it becomes as many tokens as the
    item becomes embeddings, which a model then puts in their place. The record gets

    - ``tokens`` (L,), and ``loss_mask`` (L,): 0 where a placeholder would have to be predicted.
    - ``{modality}_index`` (L,) int64: which row of the item embeddings of the sample, laid one
      after another, a token is replaced by; -1 for a token that is none.
    - ``{modality}_rows`` (I,) int64: embeddings of each item.

    Parameters
    ----------
    modality
        The items: a list of arrays under this name in the record, as `DecodeImage`, `LogMel` and
        `Frames` leave them, one row a patch or frame.
    token
        Id of the placeholder.
    encoder
        Turns the text between markers into tokens, piece by piece: `Bytes` or `Tokenizer`.
    column
        The column that holds the text.
    marker
        What stands for an item in the text; ``<modality>`` when None.
    merge
        The encoder merges squares of ``merge x merge`` patches into one embedding; see
        `DecodeImage(merge=)`. Frames of audio that are halved in number: ``every=2``.
    every
        Rows of an item that become one embedding, the last of them rounded up; with `merge`, after
        it.
    also
        Other modalities in the same text, as `Placeholders` of their own, whose encoder and column
        do not count.
    """

    modality: str
    token: int
    encoder: TextEncoder = Bytes()  # noqa: RUF009  (frozen, and a default to be shared)
    _: KW_ONLY
    column: str = "text"
    marker: str | None = None
    merge: int = 1
    every: int = 1
    also: tuple[Placeholders, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("token", 0), ("merge", 1), ("every", 1)):
            check_integer(f"Placeholders({name}=)", getattr(self, name), least)
        if not isinstance(self.encoder, TextEncoder):
            raise ConfigError(
                "Placeholders(encoder=)",
                got=type(self.encoder).__name__,
                limit="md.transforms.Bytes, Tokenizer, or what has their encode and eos_id",
            )
        object.__setattr__(self, "also", tuple(self.also))
        for what in ("modality", "text"):
            names = [getattr(one, what) for one in self._all]
            if not all(names) or len(set(names)) < len(names):
                raise ConfigError(
                    f"Placeholders: {'marker' if what == 'text' else what}",
                    got=names,
                    limit="names that differ",
                )

    @property
    def text(self) -> str:
        """What stands for an item in the text."""
        return f"<{self.modality}>" if self.marker is None else self.marker

    def __call__(self, record: Record) -> Sample | None:
        """Return the record with tokens; raises TransformError where markers and items differ."""
        value = record.get(self.column)
        if not isinstance(value, str):
            raise TransformError(
                f"column {self.column!r} is not text",
                got="null" if value is None else type(value).__name__,
                limit="str",
            )
        rows = {one.modality: one.rows_of(record) for one in self._all}
        pieces = self._pattern.split(value)  # text, marker, text, ..., text
        self._check_counts(pieces[1::2], rows)
        parts: list[tuple[NDArray[Any], str | None]] = []
        left = {name: iter(rows_I.tolist()) for name, rows_I in rows.items()}
        for number, piece in enumerate(pieces):
            if number % 2:
                one = self._by_text[piece]
                count = next(left[one.modality])
                parts.append((np.full(count, one.token, np.int64), one.modality))
            elif piece:
                parts.append((self.encoder.encode(piece), None))
        if self.encoder.eos_id is not None:
            parts.append((np.array([self.encoder.eos_id], np.int64), None))
        if not parts:
            return None
        tokens = np.concatenate([part for part, _ in parts]).astype(np.int64)
        sample = {**record, "tokens": tokens, "loss_mask": np.ones(len(tokens), np.float32)}
        for name, rows_I in rows.items():
            is_mine = np.concatenate([np.full(len(part), at == name) for part, at in parts])
            index = np.full(len(tokens), -1, np.int64)
            index[is_mine] = np.arange(int(is_mine.sum()))
            sample["loss_mask"][is_mine] = 0
            sample |= {f"{name}_index": index, f"{name}_rows": rows_I}
        return sample

    def rows_of(self, record: Record) -> NDArray[np.int64]:
        """Return (I,) how many embeddings each item of the record becomes."""
        items = record.get(self.modality)
        items = [] if items is None else items
        if not isinstance(items, list | tuple) or not all(np.ndim(item) for item in items):
            raise TransformError(
                f"column {self.modality!r} holds no items",
                got=type(items).__name__,
                limit="a list of arrays with one row a patch or frame",
                remedy="Put DecodeImage, LogMel or Frames before Placeholders, in a Chain.",
            )
        lengths = np.array([len(item) for item in items], np.int64)
        if (lengths % self.merge**2).any():
            raise TransformError(
                f"an item of {self.modality!r} cannot be merged",
                got=f"{lengths[lengths % self.merge**2 > 0][0]} rows",
                limit=f"a multiple of merge x merge = {self.merge**2}",
                remedy=f"Give DecodeImage or Frames merge={self.merge} too.",
            )
        return -(-(lengths // self.merge**2) // self.every)

    def fingerprint(self) -> str:
        """Return a text that differs where results would."""
        own = [(one.modality, one.token, one.text, one.merge, one.every) for one in self._all]
        return f"Placeholders({own}, {self.column!r}, {fingerprint(self.encoder)})"

    @property
    def _all(self) -> tuple[Placeholders, ...]:
        return (self, *self.also)

    @cached_property
    def _by_text(self) -> Mapping[str, Placeholders]:
        return {one.text: one for one in self._all}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # The longest first: one marker may begin with another.
        texts = sorted(self._by_text, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, texts))})")

    def _check_counts(self, markers: list[str], rows: Mapping[str, NDArray[np.int64]]) -> None:
        for one in self._all:
            if markers.count(one.text) != len(rows[one.modality]):
                raise TransformError(
                    f"markers {one.text!r} and items of {one.modality!r} differ in number",
                    got=f"{markers.count(one.text)} markers in column {self.column!r}",
                    limit=f"{len(rows[one.modality])} items",
                )
