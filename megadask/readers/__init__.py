"""Readers of common formats; anything that follows `megadask.scheduling.reading.Reader` will do.

parquet.py       Parquet, row groups are shards
arrow.py         Arrow IPC, record batches (file format) or files (stream format) are shards
huggingface.py   data sets that Hugging Face datasets saved to disk
jsonl.py         JSON lines, plain or compressed, files are shards
text.py          plain text, a record is a line, a block of lines or a file
csv.py           comma-separated values
tar.py           tar files of samples in parts (WebDataset)
image_folder.py  images in a folder for each class
mds.py           Mosaic Data Shards
sequence.py      records that are in memory already

files.py         what the readers of files share: the shard list, pickling, fingerprints
columns.py       what readers share that can leave out columns
footers.py       parsed footers of Parquet files, once a process
spool.py         batches by way of the local disk, where their decoder holds much
lines.py         what the readers of text share: lines of bounded length
records.py       from Arrow batches to records
ipc_footer.py    where the record batches of an Arrow file lie
tar_members.py   the members of a tar file, front to back
mds_columns.py   how MDS stores values
index_file.py    JSON files that say what a data set consists of
forward.py       exact counts of bytes front to back, plain or compressed
compression.py   decompressing up to where a stream breaks
paths.py         from paths, globs and brace lists to files
storage.py       opening files, and telling failing storage from broken data
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megadask.readers.arrow import ArrowIpc
    from megadask.readers.csv import Csv
    from megadask.readers.huggingface import HuggingFace
    from megadask.readers.image_folder import ImageFolder
    from megadask.readers.jsonl import Jsonl
    from megadask.readers.mds import Mds
    from megadask.readers.parquet import Parquet
    from megadask.readers.sequence import InMemory
    from megadask.readers.tar import Tar
    from megadask.readers.text import Text

__all__ = [
    "ArrowIpc",
    "Csv",
    "HuggingFace",
    "ImageFolder",
    "InMemory",
    "Jsonl",
    "Mds",
    "Parquet",
    "Tar",
    "Text",
]

_HOMES = {
    "ArrowIpc": "arrow",
    "Csv": "csv",
    "HuggingFace": "huggingface",
    "ImageFolder": "image_folder",
    "InMemory": "sequence",
    "Jsonl": "jsonl",
    "Mds": "mds",
    "Parquet": "parquet",
    "Tar": "tar",
    "Text": "text",
}

if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
