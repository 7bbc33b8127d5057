"""Fields of a batch that are aligned with its tokens, beside the tokens themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megadask.planner.errors import ConfigError

#: What a batch says of where it stands: known when it is built.
PLACE_KEYS = ("sample_ids", "spans", "step", "microbatch")
#: What a batch says of its step and of its rank.
COUNT_KEYS = ("is_last", "num_loss_tokens", "num_loss_tokens_step", "cp_layout")
#: Names that a reply with a batch uses on its way.
WIRE_KEYS = ("ids", "header", "error")
#: Keys that a batch has in any case, or may have: no field may be called so.
RESERVED = frozenset(
    (
        *PLACE_KEYS,
        *COUNT_KEYS,
        *WIRE_KEYS,
        "tokens",
        "labels",
        "loss_mask",
        "position_ids",
        "attention_mask",
        "cu_seqlens",
        "cu_seqlens_padded",
        "max_seqlen",
        "lengths",
        "num_sequences",
        "sequences",
        "extras",
    )
)

#: Kinds of numbers that arrays of a batch may be of: bool, signed and unsigned integers, floats.
_KINDS = "biuf"
#: The widest of them, in bytes: tensors hold no long doubles.
_WIDEST = 8


@dataclass(frozen=True, kw_only=True)
class Field:
    """One number, or an array of a fixed shape, a token.

    Attributes
    ----------
    name
        Its key in samples and in batches.
    dtype
        Of its numbers, by numpy's name.
    shape
        Axes before that of the tokens: a sample of l tokens has (*shape, l), a batch
        (*shape, Q, T).
    fill
        Where a sample has none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    fill: int = 0


def is_deliverable(dtype: np.dtype[Any]) -> bool:
    """Whether a tensor can hold numbers of this type."""
    if dtype.kind == "c":
        return dtype.itemsize <= 2 * _WIDEST
    return dtype.kind in _KINDS and dtype.itemsize <= _WIDEST


def position_field(axes: int) -> Field:
    """Return the field of positions that samples bring themselves; -1 where they are counted."""
    shape = () if axes == 1 else (axes,)
    return Field(name="position_ids", dtype="int64", shape=shape, fill=-1)


def aligned_fields(owner: str, aligned: Mapping[str, str]) -> tuple[Field, ...]:
    """Return declared fields, in the order of their names.

    aligned: name to a dtype as numpy writes it, with the axes before the tokens if there are any:
    ``"float32"``, ``"(8,)float16"``. owner: what declares it, for messages. Raises ConfigError.
    """
    if not isinstance(aligned, Mapping):
        raise ConfigError(
            f"{owner}(aligned=)",
            got=repr(aligned),
            limit='a dict such as {"advantages": "float32"}',
        )
    fields = []
    for name, declared in sorted(aligned.items(), key=lambda item: str(item[0])):
        if not isinstance(name, str) or not name or name in RESERVED or ":" in name:
            raise ConfigError(
                f"{owner}(aligned=): a name",
                got=repr(name),
                limit="a text without ':' that is no key of every batch",
            )
        try:
            dtype = np.dtype(declared)
        except TypeError as error:
            raise _no_dtype(owner, name, declared) from error
        base = dtype.base
        if base.kind not in _KINDS or not is_deliverable(base) or 0 in dtype.shape:
            raise _no_dtype(owner, name, declared)
        fields.append(Field(name=name, dtype=dtype.base.name, shape=dtype.shape))
    return tuple(fields)


def _no_dtype(owner: str, name: str, declared: object) -> ConfigError:
    return ConfigError(
        f"{owner}(aligned=): the type of {name!r}",
        got=repr(declared),
        limit='numbers or bools of up to 8 bytes, such as "float32", "int64" or "(8,)float16"',
    )
