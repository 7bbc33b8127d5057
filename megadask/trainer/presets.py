"""The form in which a loader hands out batches: names of a framework, other names, pinned memory.

Axes: Q packs of a microbatch, T tokens of a pack, D most documents of a pack.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megadask.planner.errors import ConfigError
from megadask.planner.fields import COUNT_KEYS, PLACE_KEYS
from megadask.scheduling.items import encoded_keys

logger = logging.getLogger(__name__)

#: A microbatch as tensors and facts; see docs/batches.md.
Batch = dict[str, Any]

Preset = Literal["hf"]

#: What a batch says about itself, beside its arrays.
FACTS = (*PLACE_KEYS, *COUNT_KEYS, "extras", "num_sequences")

#: The label that Hugging Face's losses pass over.
IGNORED = -100

#: What ``preset="hf"`` makes of each array; what is not listed keeps its name.
_HF_NAMES: dict[str, tuple[str, ...]] = {
    "tokens": ("input_ids", "use_cache"),
    "labels": ("labels", "shift_labels", "num_items_in_batch"),
    "loss_mask": (),
    "cu_seqlens": (),
    "cu_seqlens_padded": ("cu_seq_lens_q", "cu_seq_lens_k"),
    "max_seqlen": ("max_length_q", "max_length_k"),
    "lengths": (),
}

#: What the preset can use only together.
_HF_PAIRS = (("labels", "loss_mask"), ("cu_seqlens_padded", "max_seqlen"))


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a loader hands out its batches.

    Parameters
    ----------
    preset
        ``"hf"`` for the names and conventions of Hugging Face's transformers; None for those of
        docs/batches.md.
    names
        Other names for keys of the batch, by the names that they would have.
    pin_memory
        Whether tensors lie in page-locked memory. Without CUDA it is ignored, with a warning.
    """

    preset: Preset | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    pin_memory: bool = False

    def __post_init__(self) -> None:
        is_preset = isinstance(self.preset, str) and self.preset in get_args(Preset)
        if self.preset is not None and not is_preset:
            raise ConfigError(
                "connect(preset=)",
                got=repr(self.preset),
                limit=f"None or {get_args(Preset)}",
            )
        if not isinstance(self.names, Mapping) or not all(
            isinstance(word, str) and word for pair in self.names.items() for word in pair
        ):
            raise ConfigError(
                "connect(names=)",
                got=repr(self.names),
                limit='a dict of names, such as {"tokens": "input_ids"}',
            )
        object.__setattr__(self, "names", dict(self.names))
        if not isinstance(self.pin_memory, bool):
            raise ConfigError("connect(pin_memory=)", got=repr(self.pin_memory), limit="a bool")
        if self.pin_memory and not torch.cuda.is_available():
            logger.warning("connect(pin_memory=True) is ignored: this process has no CUDA device")
            object.__setattr__(self, "pin_memory", False)

    def check(self, arrays: Collection[str], *, is_sliced: bool) -> None:
        """Raise ConfigError unless `names` maps keys that there are, to keys that differ.

        arrays: what batches may hold; all that the preset makes something of together, or nothing.
        is_sliced: as in `to_hf`.
        """
        for pair in _HF_PAIRS if self.preset == "hf" else ():
            if len({*pair} & {*arrays}) == 1:
                raise ConfigError(
                    'connect(keys=) with preset="hf"',
                    got=sorted(arrays),
                    limit=f"both of {pair}, or none of them",
                )
        made = self._keys(dict.fromkeys(arrays), is_sliced=is_sliced)
        if twice := sorted({key for key in made if made.count(key) > 1} - set(self.names)):
            raise _two_of_one_name('connect(preset="hf")', twice)
        keys = list(dict.fromkeys([*made, *FACTS]))
        if unknown := sorted(set(self.names) - set(keys)):
            raise ConfigError("connect(names=)", got=unknown, limit=f"some of {sorted(keys)}")
        final = [self.names.get(key, key) for key in keys]
        if twice := sorted({name for name in final if final.count(name) > 1}):
            raise ConfigError(
                "connect(names=): two keys of a batch would have one name",
                got=twice,
                limit=f"a name of its own for each of {sorted(keys)}",
            )

    def apply(self, batch: Batch, *, is_sliced: bool) -> Batch:
        """Return a batch in this form. Its tensors may be those of ``batch``."""
        if self.preset == "hf":
            batch = to_hf(batch, is_sliced=is_sliced)
        if self.names:
            named = {self.names.get(key, key): value for key, value in batch.items()}
            if len(named) < len(batch):  # by what a collate returns, which nobody knew
                final = [self.names.get(key, key) for key in batch]
                twice = sorted({name for name in final if final.count(name) > 1})
                raise _two_of_one_name("connect(names=)", twice)
            batch = named
        if self.pin_memory:
            batch = {
                key: value.pin_memory() if isinstance(value, Tensor) else value
                for key, value in batch.items()
            }
        return batch

    def _keys(self, arrays: Iterable[str], *, is_sliced: bool) -> list[str]:
        if self.preset is None:
            return list(arrays)
        # Under context parallelism sequences stay as they are, and so do their names.
        kept = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen") if is_sliced else ()
        made = [k for name in arrays for k in ([name] if name in kept else _hf_names(name))]
        return [key for key in made if not (is_sliced and key == "labels")]


def known_keys(
    keys: Collection[str] | None, names: Collection[str], place: Mapping[str, Any]
) -> list[str]:
    """Return the arrays that a loader can expect. Raises ConfigError for those there are not.

    What a ``collate`` of the pipeline gives is not known before there is a batch.
    """
    unknown = sorted(set(keys or ()) - set(place["keys"]))
    if unknown and not place["collates"]:
        raise ConfigError("connect(keys=)", got=unknown, limit=f"a list of some of {place['keys']}")
    return [*(keys or place["keys"]), *(names if place["collates"] else ())]


def _two_of_one_name(what: str, names: list[str]) -> ConfigError:
    return ConfigError(
        f"{what}: two keys of a batch would have one name",
        got=names,
        remedy="Give the one of aligned=, or of collate=, another name.",
    )


def _hf_names(name: str) -> tuple[str, ...]:
    return _HF_NAMES.get(name, (name,))


def model_inputs(batch: Mapping[str, Any]) -> Batch:
    """Return what goes into the model of a batch: all but the facts, ``model(**inputs)``.

    Facts are what a batch says about itself, such as ``step`` and ``sample_ids``. A fact to which
    ``connect(names=)`` gave another name goes along.
    """
    return {key: value for key, value in batch.items() if key not in FACTS}


def to_hf(batch: Mapping[str, Any], *, is_sliced: bool) -> Batch:
    """Return a batch as transformers' causal language models take it.

    Packed: the Q packs become one row, (1, Q x T), and there is no ``attention_mask``: with one,
    flash attention would not look at positions and attend across documents.

    ``input_ids``, ``position_ids``
        int64.
    ``use_cache``
        False: with a key-value cache, which models make by default, eager and sdpa attention would
        not look at positions either, and attend across documents.
    ``labels``
        int64, not shifted: the token itself, -100 on the first of each document, on pads, and
        wherever predicting that token does not count. What the last token of a piece of a split
        document predicts lies outside of the piece, so these labels lack it. Not given if
        `is_sliced`: what comes before a slice's token lies with another rank.
    ``shift_labels``
        int64, shifted, -100 where nothing counts: complete. transformers' losses prefer it.
    ``num_items_in_batch``
        int64 without axes, ``num_loss_tokens_step``, at least 1: the loss becomes the sum over this
        microbatch, divided by the targets of the whole step.
    ``cu_seq_lens_q``, ``cu_seq_lens_k``
        (Q x (D + 1) + 1,) int32, where documents start, from 0 to Q x T, values repeated; the tail
        of a pack is one more sequence. Not given if `is_sliced`: rows stay (Q, T / cp) then, and
        ``cu_seqlens``, ``cu_seqlens_padded`` and ``max_seqlen`` those of the whole pack.
    ``max_length_q``, ``max_length_k``
        int, T.

    A batch that has an ``attention_mask`` (padded rows) stays (Q, T), gets the mask as int64, and
    no ``cu_seq_lens``. Facts, and arrays that are not listed, stay; of these, those of shape
    (..., Q, T) become (..., 1, Q x T) as well. What needs an array that is not there is left out.

    Parameters
    ----------
    batch
        With the keys of docs/batches.md; not modified.
    is_sliced
        Whether it is a slice for context parallelism.

    Raises
    ------
    ConfigError
        A loss weight is neither 0 nor 1, which labels cannot express; or a key of somebody's own
        has the name of one that is made here.
    """
    made = {key: value for key, value in batch.items() if key not in _HF_NAMES}
    ours: Batch = {}
    if "tokens" in batch:
        ours |= {"input_ids": batch["tokens"], "use_cache": False}
    if "labels" in batch and "loss_mask" in batch:
        ours |= _labels(batch, is_sliced=is_sliced)
    elif "labels" in batch:  # somebody's own, of whatever task
        ours["labels"] = batch["labels"]
    varlen = {} if is_sliced or "attention_mask" in batch else _varlen(batch)
    if twice := sorted({*ours, *varlen} & set(made)):
        raise _two_of_one_name('connect(preset="hf")', twice)
    made |= ours
    if "attention_mask" in batch:
        made["attention_mask"] = batch["attention_mask"].long()
    elif is_sliced:
        kept = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
        made |= {key: batch[key] for key in kept if key in batch}
    else:
        shape = _pack_shape(batch)
        apart = {*FACTS, *encoded_keys(made)}
        made = {k: v if k in apart else _one_row(v, shape) for k, v in made.items()}
    return made | varlen


def _labels(batch: Mapping[str, Any], *, is_sliced: bool) -> Batch:
    weights, targets = batch["loss_mask"], batch["labels"]
    counts = weights != 0
    if (weights[counts] != 1).any():
        raise ConfigError(
            'connect(preset="hf"): loss weights',
            got=sorted(set(weights[counts].tolist()))[:5],
            limit="0 or 1, as labels can only be left out",
            remedy="Connect without the preset and weight the loss by loss_mask.",
        )
    shifted = targets.masked_fill(~counts, IGNORED)
    made = {
        "shift_labels": shifted,
        "num_items_in_batch": torch.tensor(max(1, batch["num_loss_tokens_step"])),
    }
    if not is_sliced:
        labels = torch.full_like(shifted, IGNORED)
        labels[:, 1:] = shifted[:, :-1]
        if "cu_seqlens_padded" in batch:
            outside = batch["cu_seqlens_padded"].long()
            if "cu_seqlens" in batch:  # the pads behind each document as well
                ends = outside[:, :-1] + batch["cu_seqlens"].diff(dim=1)
                outside = torch.cat([outside, ends], dim=1)
            pack, number = torch.nonzero(outside < labels.shape[1], as_tuple=True)
            labels[pack, outside[pack, number]] = IGNORED
        made["labels"] = labels
    return made


def _varlen(batch: Mapping[str, Any]) -> Batch:
    made: Batch = {}
    if "max_seqlen" in batch:
        made |= dict.fromkeys(("max_length_q", "max_length_k"), batch["max_seqlen"])
        if "cu_seqlens_padded" in batch:
            starts, seq_len = batch["cu_seqlens_padded"], batch["max_seqlen"]
            first = torch.arange(len(starts), dtype=starts.dtype)[:, None] * seq_len
            end = starts.new_tensor([len(starts) * seq_len])
            bounds = torch.cat([(starts + first).flatten(), end])
            made |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone()}
    return made


def _pack_shape(batch: Mapping[str, Any]) -> tuple[int, int] | None:
    for key in ("tokens", "labels", "position_ids", "loss_mask"):
        if key in batch:
            return batch[key].shape[-2], batch[key].shape[-1]
    return None


def _one_row(value: Any, shape: tuple[int, int] | None) -> Any:
    """Return an array (..., Q, T) as (..., 1, Q x T), anything else as it is."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-2:] != shape:
        return value
    return value.reshape(*value.shape[:-2], 1, -1)
