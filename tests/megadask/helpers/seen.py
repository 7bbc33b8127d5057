"""What a rank saw, in a form that tests can compare; every batch is checked on the way."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

import megadask as md
from tests.megadask.helpers.data import STRIDE

#: (source, epoch, lane, position, start, stop)
Span = tuple[str, int, int, int, int, int]


@dataclass(frozen=True)
class Seen:
    """One batch as a rank got it."""

    step: int
    microbatch: int
    is_last: bool
    spans: tuple[Span, ...]
    documents: tuple[tuple[int, int, int], ...]  # (record, start, stop) read from the tokens
    num_loss_tokens: int
    num_loss_tokens_step: int
    digest: str


def spans_of(batch: Mapping[str, Any]) -> tuple[Span, ...]:
    bounds = batch["spans"].tolist()
    return tuple((*ident, *span) for ident, span in zip(batch["sample_ids"], bounds, strict=True))


def digest(batch: Mapping[str, Any]) -> str:
    """Return a hash of every tensor of a batch, its name, type and shape."""
    made = hashlib.blake2b(digest_size=16)
    for name in sorted(batch):
        value = batch[name]
        if isinstance(value, torch.Tensor):
            array = value.numpy()
            made.update(f"{name} {array.dtype} {array.shape}".encode())
            made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


def see(batch: Mapping[str, Any]) -> Seen:
    """Check a whole batch (no slice of one) of the data of `helpers.data` against itself."""
    documents = tuple(_documents(batch))
    spans = spans_of(batch)
    assert [d[1:] for d in documents] == [s[4:] for s in spans], "spans are not in pack order"
    counted = int((batch["loss_mask"] > 0).sum())
    assert batch["num_loss_tokens"] == counted
    return Seen(
        step=batch["step"],
        microbatch=batch["microbatch"],
        is_last=batch["is_last"],
        spans=spans,
        documents=documents,
        num_loss_tokens=batch["num_loss_tokens"],
        num_loss_tokens_step=batch["num_loss_tokens_step"],
        digest=digest(batch),
    )


def _documents(batch: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield what the tokens say, having checked targets, positions and pads."""
    for pack in range(len(batch["tokens"])):
        row = {
            name: batch[name][pack].numpy()
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
        real = batch["cu_seqlens"][pack].tolist()
        padded = batch["cu_seqlens_padded"][pack].tolist()
        rest = np.ones(len(row["tokens"]), bool)
        for number, first in enumerate(padded[:-1]):
            length = real[number + 1] - real[number]
            if not length:
                continue
            part = slice(first, first + length)
            tokens = row["tokens"][part]
            start, record = int(tokens[0]) % STRIDE, int(tokens[0]) // STRIDE
            assert (tokens == tokens[0] + np.arange(length)).all(), "tokens of a document are mixed"
            assert (row["position_ids"][part] == np.arange(length)).all()
            has_target = row["loss_mask"][part] > 0
            assert (row["labels"][part][has_target] == tokens[has_target] + 1).all()
            rest[part] = False
            yield record, start, start + length
        assert not row["loss_mask"][rest].any(), "a pad counts in the loss"


def drain(loader: md.Loader) -> list[Seen]:
    """Return everything from where the loader stands to the end."""
    return [see(batch) for batch in loader]


def take(loader: md.Loader, count: int) -> list[Seen]:
    """Return the next batches; all of them must come."""
    seen = [see(batch) for batch in islice(loader, count)]
    assert len(seen) == count
    return seen


def take_steps(loader: md.Loader, count: int) -> list[Seen]:
    """Return the batches of the next whole steps, or fewer at the end."""
    return [see(batch) for step in islice(loader.steps(), count) for batch in step]


def spans_by_step(ranks: Iterable[Iterable[Seen]]) -> dict[int, list[Span]]:
    """Return the spans of every step over all given ranks, sorted."""
    steps: dict[int, list[Span]] = defaultdict(list)
    for seen in ranks:
        for batch in seen:
            steps[batch.step].extend(batch.spans)
    return {step: sorted(spans) for step, spans in sorted(steps.items())}


def merge(*parts: Mapping[int, list[Span]]) -> dict[int, list[Span]]:
    """Return the spans by step of several parts of a run."""
    steps: dict[int, list[Span]] = defaultdict(list)
    for part in parts:
        for step, spans in part.items():
            steps[step].extend(spans)
    return {step: sorted(spans) for step, spans in sorted(steps.items())}


def tokens_delivered(ranks: Iterable[Iterable[Seen]]) -> Counter[tuple[int, int]]:
    """Return how often every (record, token) was delivered, by the payload alone."""
    counts: Counter[tuple[int, int]] = Counter()
    for seen in ranks:
        for batch in seen:
            for record, start, stop in batch.documents:
                counts.update((record, token) for token in range(start, stop))
    return counts


def every_token(rows: Iterable[Mapping[str, int]], times: int = 1) -> Counter[tuple[int, int]]:
    """Return what `tokens_delivered` is where every record was delivered so many times."""
    return Counter(
        {(row["id"], token): times for row in rows for token in range(int(row["length"]))}
    )


def shape(seen: Iterable[Seen]) -> list[tuple[int, int, bool]]:
    """Return the (step, microbatch, is_last) of every batch: what all ranks must have alike."""
    return [(batch.step, batch.microbatch, batch.is_last) for batch in seen]
