"""Readers of common formats; anything that follows `megadask.scheduling.reading.Reader` will do.

parquet.py   Parquet, row groups are shards
jsonl.py     JSON lines, plain or compressed, files are shards
arrow.py     Arrow IPC, record batches (file format) or files (stream format) are shards
sequence.py  records that are in memory already
files.py     what the readers of files share: the shard list, pickling, fingerprints
paths.py     from paths, globs and brace lists to files
storage.py   opening files, and telling failing storage from broken data
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megadask.readers.arrow import ArrowIpc
    from megadask.readers.jsonl import Jsonl
    from megadask.readers.parquet import Parquet
    from megadask.readers.sequence import InMemory

__all__ = ["ArrowIpc", "InMemory", "Jsonl", "Parquet"]

_HOMES = {"ArrowIpc": "arrow", "InMemory": "sequence", "Jsonl": "jsonl", "Parquet": "parquet"}

if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
