"""What stands in for planned samples that cannot be had: as many tokens, without loss (rule 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megadask.planner.errors import ConfigError
from megadask.scheduling.extras import encode_row
from megadask.scheduling.lanes import Read
from megadask.scheduling.samples import EXTRAS, Form, Sample, num_targets, whole_because
from megadask.scheduling.spec import SourceSpec


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a plan says of a sample.

    Attributes
    ----------
    length
        Tokens that are planned.
    loss_tokens
        Targets that count, None where only a part of the sample is asked for.
    checksum
        Of its payload, 0 where unknown.
    """

    length: int
    loss_tokens: int | None
    checksum: int


def filler(length: int, form: Form) -> Sample:
    """Return a sample of so many tokens of which nothing counts."""
    made: dict[str, Any] = {
        "tokens": np.zeros(length, np.int8),
        "loss_mask": np.zeros(length, np.float32),
    }
    if form.extras:
        made[EXTRAS] = encode_row(dict.fromkeys(form.extras))
    return made


def failure(spec: SourceSpec, read: Read, planned: Planned) -> str | None:
    """Return why a record is not what was planned, None where it is."""
    if read.sample is None:
        return read.reason or f"{read.where}: the transform dropped it"
    tokens = len(read.sample["tokens"])
    whole = whole_because(read.sample, spec.form)
    try:
        cuts = [(0, tokens)] if whole else spec.batching.cut(tokens)
    except ConfigError:
        cuts = []
    if not cuts or cuts[-1][1] != planned.length:
        return f"{read.where}: {tokens} tokens, planned with {planned.length}"
    if planned.loss_tokens is not None and not spec.counts_samples:
        targets = num_targets(read.sample, 0, planned.length, planned.length)
        if targets != planned.loss_tokens:
            return f"{read.where}: {targets} targets count, planned with {planned.loss_tokens}"
    return None
