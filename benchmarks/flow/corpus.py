"""Web documents in Parquet files, which MegaDask and a DataLoader both read for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lengths import mix
from throughput import corpora

import megadask as md

RANKS = 2
#: Files, and row groups of each: as many shards as lanes, and a multiple of any loader's processes.
FILES, ROW_GROUPS = 4, 8


@dataclass(frozen=True, kw_only=True)
class Web:
    """Documents on disk, and how they become samples.

    Attributes
    ----------
    paths
        The Parquet files.
    transform
        Makes a sample of a record.
    tokens
        Tokens of all documents.
    documents
        Number of all documents.
    """

    kind: str
    paths: tuple[str, ...]
    transform: Callable[[Any], Any]
    tokens: int
    documents: int

    def reader(self) -> md.readers.Parquet:
        """Return a reader of the text alone."""
        return md.readers.Parquet(list(self.paths), columns=["text"])

    def pipeline(self, seq_len: int, global_batch: int, micro_batch: int) -> md.Pipeline:
        """Return what a user declares who trains on them, packed, on all ranks."""
        return md.Pipeline(
            sources=[md.Source("web", self.reader(), transform=self.transform)],
            topology=md.ClientPlaceTree(dp=RANKS),
            batching=md.Packed(seq_len, global_batch=global_batch, micro_batch=micro_batch),
        )

    def __str__(self) -> str:
        return f"{self.kind}: {self.documents:,} documents of {self.tokens:,} tokens"


def write(kind: str, folder: Path, tokens: int, context: int) -> Web:
    """Write documents of about so many tokens in all, none longer than the context.

    kind: "bytes" or "bpe", for tokens of a tokenizer that is trained on a part of the texts.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    mean = float(mix("web", np.random.default_rng(1), 20_000, context)["tokens"].mean())
    table = mix("web", rng, max(FILES * ROW_GROUPS, round(tokens / mean)), context)
    writer = corpora.writer_of(kind, rng, context)
    rows, length_N = writer.rows("web", table)
    texts = pa.table({"text": [row["text"] for row in rows]})
    each = -(-len(rows) // FILES)
    paths = []
    for number in range(FILES):
        paths.append(str(folder / f"{number}.parquet"))
        part = texts.slice(number * each, each)
        pq.write_table(part, paths[-1], row_group_size=-(-part.num_rows // ROW_GROUPS))
    return Web(
        kind=kind,
        paths=tuple(paths),
        transform=writer.transform,
        tokens=int(length_N.sum()),
        documents=len(rows),
    )
