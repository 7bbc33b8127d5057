"""The checked form of a sample, and what of it is payload.

A checked sample is a flat dict: ``tokens`` (l,) integers; maybe ``loss_mask`` (l,); ``sequences``,
the real lengths where it has several; fields aligned with its tokens, (..., l); ``extras``, its
Arrow bytes; lists of items; and scalars, which are metadata and no payload. It is kept, so its
arrays are no one else's: a transform may fill the same buffer again for its next record.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.fields import Field
from megadask.planner.sequences import SEQUENCES
from megadask.scheduling.conversion import converted, may_become
from megadask.scheduling.extras import encode_row
from megadask.scheduling.sample_items import items_of

Sample = Mapping[str, Any]
#: How a part of a sample is delivered: with its tokens, as extras, or item by item.
Kind = Literal["tokens", "aligned", "extras", "items"]

EXTRAS = "extras"

_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What the samples of a source may hold.

    Attributes
    ----------
    scalars
        Names of the numbers that become metadata columns.
    modalities
        Names of the lists of items. With ``image`` come ``image_grid``, (items, g) integers;
        ``image_rows``, (items,) integers, how many embeddings each becomes, as many as it is long
        where there are none; and ``image_index``, (l,) integers: the row of the sample's
        concatenated embeddings that stands in the place of a token, -1 elsewhere.
    extras
        Names of the columns that ride along, of the sample or else of its record.
    fields
        What may be aligned with the tokens.
    size
        What counts as the length of samples without tokens; None for samples with tokens.
    num_sequences
        Most sequences of a sample.
    pad_to_multiple
        What every sequence but the last is padded to.
    """

    scalars: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    size: str | None = None
    num_sequences: int = 1
    pad_to_multiple: int = 1

    @cached_property
    def ragged(self) -> tuple[str, ...]:
        """Names of the ragged metadata columns."""
        return (*self.modalities, *([SEQUENCES] if self.num_sequences > 1 else []))

    @cached_property
    def aligned(self) -> tuple[Field, ...]:
        """All that is aligned with the tokens, where items belong included."""
        indices = (Field(name=f"{name}_index", dtype="int64", fill=-1) for name in self.modalities)
        return (*self.fields, *indices)

    @cached_property
    def payload(self) -> Mapping[str, Kind]:
        """What of a checked sample is payload, in the order of its checksum, and of which kind."""
        kinds: dict[str, Kind] = {"tokens": "tokens", "loss_mask": "tokens", SEQUENCES: "tokens"}
        kinds |= {field.name: "aligned" for field in self.aligned}
        kinds[EXTRAS] = "extras"
        for name in self.modalities:
            kinds |= {name: "items", f"{name}_grid": "items", f"{name}_rows": "items"}
        return kinds


def check_sample(sample: Any, form: Form, record: Any = None) -> Sample:
    """Return the checked form of a sample; without tokens it is one to be dropped.

    record: what it was made of, which has the extras that the transform did not pass on. Raises
    ConfigError naming what is wrong with the sample.
    """
    if not isinstance(sample, Mapping):
        raise _no_sample(type(sample).__name__)
    if form.size is not None:
        checked = _sized(sample, form.size)
        checked |= _aligned(sample, form, len(checked["tokens"]))
    elif sample.get(SEQUENCES) is not None:
        checked = _together(sample, form)
    elif "tokens" in sample:
        checked = _sequence(sample, form, "a sample")
    else:
        raise _no_sample(sorted(sample))
    for name in form.modalities:
        checked |= items_of(sample, name, checked.get(f"{name}_index"))
    if form.extras:
        found = {**record, **sample} if isinstance(record, Mapping) else sample
        checked[EXTRAS] = encode_row({name: found.get(name) for name in form.extras})
    return {**{name: scalar(sample, name) for name in form.scalars}, **checked}


def payload_of(sample: Sample, form: Form) -> Sample:
    """Return what of a checked sample is delivered; the rest need not be kept."""
    return {name: sample[name] for name in form.payload if name in sample}


def weigh(payload: Sample) -> tuple[int, int]:
    """Return the bytes and the CRC-32 of a payload."""
    size_bytes, checksum = 0, 0
    for name, part in payload.items():
        is_plain = name in ("tokens", "loss_mask")
        for array in part if isinstance(part, list) else [part]:
            if not is_plain:  # what lies where counts too
                checksum = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), checksum)
            size_bytes += array.nbytes
            checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return size_bytes, checksum


def num_targets(sample: Sample, start: int, stop: int, length: int) -> int:
    """Return how many inputs of [start, stop) have a target that counts (rule 18)."""
    mask = sample.get("loss_mask")
    if mask is None:
        return min(stop, length - 1) - start
    return int(np.count_nonzero(mask[start + 1 : min(stop + 1, length)]))


def whole_because(sample: Sample, form: Form) -> str | None:
    """Return what keeps a checked sample from being cut, None where it may be."""
    if form.size is not None:
        return f"a sample without tokens, of size {form.size!r}"
    if SEQUENCES in sample:
        return f"a sample of {len(sample[SEQUENCES])} sequences"
    for name in form.modalities:
        if sample.get(name):
            return f"a sample with items {name!r}"
    return None


def scalar(sample: Sample, name: str) -> float:
    """Return a scalar of a sample, NaN where it has none. Raises ConfigError for anything else."""
    value = sample.get(name)
    try:
        return np.nan if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a sample's scalar {name!r}", got=repr(value)) from error


def _sequence(sample: Sample, form: Form, what: str) -> dict[str, Any]:
    """Return the tokens of a sample, or of one of its sequences, and all that is aligned."""
    tokens = np.array(sample["tokens"])
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise ConfigError(
            f"{what}'s 'tokens'",
            got=f"{tokens.dtype} of shape {tokens.shape}",
            limit="1-D integers",
        )
    if tokens.dtype == np.uint64 and tokens.size and tokens.max() > _INT64.max:
        raise ConfigError(
            f"{what}'s 'tokens'", got=tokens.max(), limit="integers of 64 bits, signed"
        )
    checked: dict[str, Any] = {"tokens": tokens}
    if sample.get("loss_mask") is not None:
        with np.errstate(over="ignore"):  # what is infinite then is an error below
            mask = np.array(sample["loss_mask"], np.float32)
        if mask.shape != tokens.shape:
            raise ConfigError(f"{what}'s 'loss_mask'", got=mask.shape, limit=tokens.shape)
        if not np.isfinite(mask).all():
            at = int(np.flatnonzero(~np.isfinite(mask))[0])
            raise ConfigError(f"{what}'s 'loss_mask'", got=f"{mask[at]} at {at}", limit="finite")
        checked["loss_mask"] = mask
    return {**checked, **_aligned(sample, form, len(tokens))}


def _aligned(sample: Sample, form: Form, length: int) -> dict[str, NDArray[Any]]:
    """Return the fields that a sample of so many tokens has."""
    found = {}
    for field in form.aligned:
        value = sample.get(field.name)
        if value is None:
            continue
        array = np.array(value)
        if field.name == "position_ids" and array.shape == (length,):
            array = np.broadcast_to(array, (*field.shape, length))
        if array.shape != (*field.shape, length) or not may_become(array, field.dtype):
            raise ConfigError(
                f"a sample's field {field.name!r}",
                got=f"{array.dtype} of shape {array.shape}",
                limit=f"{field.dtype} of shape {(*field.shape, length)}",
                remedy="position_axes= of the batching says how many axes positions have."
                if field.name == "position_ids"
                else None,
            )
        if field.name == "position_ids" and array.size and array.min() < 0:
            raise ConfigError("a sample's 'position_ids'", got=array.min(), limit=">= 0")
        found[field.name] = converted(array, field)
    return found


def _sized(sample: Sample, name: str) -> dict[str, Any]:
    """Return what stands for the tokens of a sample that has none: as many zeros, without loss."""
    value: Any = sample.get(name)
    try:
        if isinstance(value, np.ndarray) and not value.ndim:
            value = value[()]
        size = len(value) if isinstance(value, Sized) else index(value)
    except TypeError:
        size = -1
    if size < 0:
        raise ConfigError(
            f"a sample's size, Source(size={name!r})",
            got=f"columns {sorted(sample)}" if value is None else repr(value)[:80],
            limit="a number >= 0, or an array or a list, which counts by its length",
        )
    return {"tokens": np.zeros(size, np.int8), "loss_mask": np.zeros(size, bool)}


def _together(sample: Sample, form: Form) -> dict[str, Any]:
    """Return the sequences of a sample laid out one after the other, padded but for the last."""
    sequences = sample[SEQUENCES]
    if not isinstance(sequences, list | tuple) or not all(
        isinstance(one, Mapping) and "tokens" in one for one in sequences
    ):
        raise ConfigError(
            "a sample's 'sequences'",
            got=type(sequences).__name__,
            limit="a list of dicts with 'tokens'",
        )
    twice = {"tokens", "loss_mask", *(field.name for field in form.aligned)} & set(sample)
    if twice:
        raise ConfigError(
            "a sample with 'sequences' has these beside them",
            got=sorted(twice),
            remedy="They belong into each of its sequences.",
        )
    if len(sequences) > form.num_sequences:
        raise ConfigError(
            "a sample has too many sequences",
            got=len(sequences),
            limit=f"at most {form.num_sequences}",
            remedy="Packed(sequences=) says how many a sample may have.",
        )
    parts = [
        _sequence(one, form, f"sequence {number} of a sample")
        for number, one in enumerate(sequences)
    ]
    if not parts:
        return {"tokens": np.empty(0, np.int64)}
    lengths = np.array([len(part["tokens"]) for part in parts], np.int64)
    if len(parts) == 1:
        return parts[0]
    if not lengths.all():
        raise ConfigError(
            f"sequence {int(lengths.argmin())} of a sample", got="no tokens", limit="at least one"
        )
    return {**_laid_out(parts, lengths, form), SEQUENCES: lengths}


def _laid_out(
    parts: list[dict[str, Any]], lengths: NDArray[np.int64], form: Form
) -> dict[str, NDArray[Any]]:
    padded = -(-lengths // form.pad_to_multiple) * form.pad_to_multiple
    firsts = np.cumsum(padded) - padded
    total = int(firsts[-1] + lengths[-1])
    places = [slice(a, a + n) for a, n in zip(firsts.tolist(), lengths.tolist(), strict=True)]
    dtype = np.result_type(*(part["tokens"] for part in parts))
    tokens, mask = np.zeros(total, dtype), np.zeros(total, np.float32)
    for place, part in zip(places, parts, strict=True):
        tokens[place] = part["tokens"]
        mask[place] = part.get("loss_mask", 1)
        mask[place.start] = 0  # nothing predicts the first token of a sequence
    whole: dict[str, NDArray[Any]] = {"tokens": tokens, "loss_mask": mask}
    for field in form.aligned:
        if any(field.name in part for part in parts):
            array = whole[field.name] = np.full((*field.shape, total), field.fill, field.dtype)
            for place, part in zip(places, parts, strict=True):
                array[..., place] = part.get(field.name, field.fill)
    return whole


def _no_sample(got: object) -> ConfigError:
    return ConfigError(
        "a transform must return a dict with 'tokens', or None",
        got=got,
        remedy='For text, use transform=md.transforms.Bytes("column") or a tokenizer; for samples '
        "without tokens, Source(size=).",
    )
