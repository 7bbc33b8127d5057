"""Data whose tokens say where they come from, and pipelines over it.

Record ``id`` of ``length`` tokens becomes the tokens ``id * STRIDE + 0, 1, 2, ...``, so every token
of a corpus is another number, and a batch proves by its payload alone what was delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import megadask as md

STRIDE = 10_000

Record = dict[str, int]
#: Source name to its records.
Corpus = Mapping[str, Sequence[Record]]


def unfold(record: Mapping[str, Any]) -> dict[str, Any]:
    first = int(record["id"]) * STRIDE
    return {"tokens": np.arange(first, first + int(record["length"]))}


def unfold_small(record: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of a small vocabulary, below 512, for models."""
    return {"tokens": np.arange(record["length"]) * (record["id"] + 1) % 512}


def unfold_masked(record: Mapping[str, Any]) -> dict[str, Any]:
    """Every third token is not to be predicted."""
    tokens = unfold(record)["tokens"]
    return {"tokens": tokens, "loss_mask": tokens % 3 > 0}


def records(lengths: Iterable[int], first: int = 0) -> list[Record]:
    return [{"id": first + i, "length": int(length)} for i, length in enumerate(lengths)]


def corpus(counts: Mapping[str, int], *, longest: int, seed: int = 0) -> dict[str, list[Record]]:
    """Return records of uneven lengths; ids are unique over all sources."""
    rng = np.random.default_rng(seed)
    made, first = {}, 0
    for name, count in counts.items():
        lengths = np.minimum(rng.lognormal(3.0, 1.0, count).astype(int) + 1, longest)
        made[name] = records(lengths, first)
        first += count
    return made


def source(name: str, rows: Sequence[Record], **options: Any) -> md.Source:
    """Return a source of records in memory, in several shards and lanes."""
    shards = min(options.pop("shards", 5), max(1, len(rows)))
    options = {"transform": unfold, "lanes": 3, **options}
    return md.Source(name, md.readers.InMemory(rows, shards=shards), **options)


def pipeline(
    data: Corpus,
    *,
    seq_len: int = 128,
    global_batch: int = 8,
    micro_batch: int = 1,
    packed: Mapping[str, Any] | None = None,
    batching: md.Packed | md.Padded | md.Fixed | None = None,
    sources: Mapping[str, Any] | None = None,
    **options: Any,
) -> md.Pipeline:
    """Return a pipeline over a corpus; by default one epoch for two data-parallel ranks."""
    if batching is None:
        batching = md.Packed(
            seq_len=seq_len, global_batch=global_batch, micro_batch=micro_batch, **(packed or {})
        )
    options = {"epochs": 1, "topology": md.ClientPlaceTree(dp=2), **options}
    made = [source(name, rows, **(sources or {})) for name, rows in data.items()]
    return md.Pipeline(sources=made, batching=batching, **options)


def record_at(rows: Sequence[Record], lane: int, position: int, lanes: int, shards: int) -> Record:
    """Return the record that a sample id names, from the definition of lanes."""
    bounds = [len(rows) * i // shards for i in range(shards + 1)]
    mine = [
        row
        for shard in range(lane, shards, lanes)
        for row in rows[bounds[shard] : bounds[shard + 1]]
    ]
    return mine[position]


def write_parquet(folder: Path, rows: Sequence[Record], files: int = 3) -> str:
    """Write records to Parquet files; return the glob that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        part = list(rows)[len(rows) * number // files : len(rows) * (number + 1) // files]
        pq.write_table(pa.Table.from_pylist(part), folder / f"{number}.parquet", row_group_size=7)
    return str(folder / "*.parquet")


def write_jsonl(folder: Path, rows: Sequence[Record], files: int = 3) -> str:
    """Write records to JSON lines; return the glob that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        part = list(rows)[len(rows) * number // files : len(rows) * (number + 1) // files]
        text = "".join(f'{{"id": {row["id"]}, "length": {row["length"]}}}\n' for row in part)
        (folder / f"{number}.jsonl").write_text(text)
    return str(folder / "*.jsonl")
