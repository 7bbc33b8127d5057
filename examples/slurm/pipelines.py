"""What the trainers of this example read: a training and a validation pipeline."""

from __future__ import annotations

import megadask as md

WORDS = {"web": "the quick brown fox jumps over the lazy dog ", "code": "def f(x): return x + 1\n"}


def records(name: str, count: int) -> list[dict[str, str]]:
    """Return documents of uneven lengths. Yours would be files: ``md.readers.Parquet("...")``."""
    return [{"text": WORDS[name] * (1 + (7 * i * i) % 40)} for i in range(count)]


def pipelines(dp: int) -> dict[str, md.Pipeline]:
    """Return the pipelines by name, for so many data-parallel ranks."""
    text = md.transforms.Bytes("text")
    batching = md.Packed(seq_len=1024, global_batch=2 * dp)
    topology = md.ClientPlaceTree(dp=dp)
    train = [
        md.Source(name, md.readers.InMemory(records(name, 400)), transform=text) for name in WORDS
    ]
    held_out = md.Source("held-out", md.readers.InMemory(records("web", 24)), transform=text)
    return {
        "train": md.Pipeline(sources=train, topology=topology, batching=batching, seed=0),
        # It begins anew with every pass, and holds nothing in between.
        "val": md.Pipeline(
            sources=[held_out], topology=topology, batching=batching, epochs=1, restart=True
        ),
    }
