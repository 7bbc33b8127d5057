"""Lengths of documents that lie in files: a column of numbers, or the size of each text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.checks import is_integer
from megadask.planner.errors import ConfigError
from megadask.planner.tables import MOST_TOKENS
from megadask.readers.arrow import ArrowIpc
from megadask.readers.files import FileReader
from megadask.readers.jsonl import Jsonl
from megadask.readers.parquet import Parquet
from megadask.readers.paths import absolute, expand
from megadask.scheduling.reading import BadRecord, Shard

#: Suffix of a file, less that of its compression, to the reader of such files, given columns.
_READERS: dict[str, Callable[[Sequence[str], Sequence[str] | None], FileReader]] = {
    ".parquet": Parquet,
    ".pq": Parquet,
    ".jsonl": lambda paths, columns: Jsonl(paths),
    ".ndjson": lambda paths, columns: Jsonl(paths),
    ".arrow": lambda paths, columns: ArrowIpc(paths),
    ".arrows": lambda paths, columns: ArrowIpc(paths),
    ".feather": lambda paths, columns: ArrowIpc(paths),
    ".ipc": lambda paths, columns: ArrowIpc(paths),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class FileLengths:
    """What was found in the files of one source.

    Attributes
    ----------
    lengths_N
        (N,) int64 >= 1, in the order of the files.
    num_skipped
        Records that are empty, null or broken.
    num_records
        Records of the source, read or not; None where only reading them would tell.
    """

    lengths_N: NDArray[np.int64]
    num_skipped: int
    num_records: int | None

    @property
    def num_read(self) -> int:
        """Records that were read."""
        return len(self.lengths_N) + self.num_skipped

    @property
    def num_documents(self) -> float | None:
        """Documents of the source, if those that were not read are like those that were."""
        if self.num_records is None:
            return None
        return len(self.lengths_N) * self.num_records / self.num_read


def read_lengths(paths: Sequence[str], column: str, *, is_text: bool, most: int) -> FileLengths:
    """Read the lengths of the documents of a source.

    Parameters
    ----------
    paths
        Paths, globs or URLs of files of one kind: Parquet, JSON lines or Arrow IPC.
    column
        Integers, or lists of tokens; or texts.
    is_text
        Whether the column holds texts: a token is a byte of UTF-8.
    most
        Records to read, about: an even part of every shard, from its start.

    Raises
    ------
    ConfigError
        A path is missing, a glob is empty, files are of several kinds or of none that is known, a
        column is missing, a value has no length, or no document has one.
    """
    reader = reader_of(paths, [column])
    shards = reader.shards()
    per_shard = max(1, -(-most // len(shards)))
    measure = _bytes if is_text else _length
    lengths: list[int] = []
    num_skipped, complete = 0, True
    for index, shard in enumerate(shards):
        with closing(reader.read(index)) as records:
            for row, record in enumerate(records):
                if row == per_shard:
                    complete = False
                    break
                length = None
                if not isinstance(record, BadRecord):
                    length = measure(_value(record, column, shard, row), column, shard, row)
                if length and length > MOST_TOKENS:
                    what = f"{shard.name}, row {row}: length in column {column!r}"
                    raise ConfigError(what, got=length, limit=f"at most {MOST_TOKENS}")
                if length:
                    lengths.append(length)
                else:
                    num_skipped += 1
    if not lengths:
        raise ConfigError(
            f"column {column!r} has no length in {', '.join(paths)}",
            got=f"{num_skipped} records that are empty, null or broken",
        )
    rows = [shard.rows for shard in shards if shard.rows is not None]
    num_records = len(lengths) + num_skipped if complete else None
    if len(rows) == len(shards):
        num_records = sum(rows)
    return FileLengths(
        lengths_N=np.array(lengths, np.int64), num_skipped=num_skipped, num_records=num_records
    )


def reader_of(paths: Sequence[str], columns: Sequence[str] | None) -> FileReader:
    """Return a reader of files of one kind, of some columns where that saves reading.

    Raises ConfigError for a path that is missing, and for files of several kinds or of none that is
    known.
    """
    kinds: dict[str, list[str]] = {}
    for file in expand(absolute(paths)):
        plain = re.sub(r"\.(gz|zst)$", "", file.name.lower())
        kinds.setdefault(re.sub(r"^.*(?=\.)", "", plain), []).append(file.url)
    makers = {_READERS.get(suffix) for suffix in kinds}
    if len(makers) > 1 or None in makers:
        raise ConfigError(
            f"kind of the files {', '.join(paths)}",
            got=sorted(kinds),
            limit=f"one of {sorted(_READERS)}, all of one kind",
        )
    (make,) = (maker for maker in makers if maker)
    return make(sorted(url for urls in kinds.values() for url in urls), columns)


def _value(record: Mapping[str, Any], column: str, shard: Shard, row: int) -> Any:
    if column not in record:
        raise ConfigError(
            f"{shard.name}, row {row} lacks a column",
            got=repr(column),
            limit=f"one of {sorted(record)}",
        )
    return record[column]


def _length(value: Any, column: str, shard: Shard, row: int) -> int | None:
    if isinstance(value, list | np.ndarray):
        return len(value)
    if value is None:
        return None
    if is_integer(value, 0):
        return value
    raise ConfigError(
        f"column {column!r} of {shard.name}, row {row}",
        got=repr(value)[:80],
        limit="an integer >= 0, or a list of tokens",
        remedy="For the texts themselves: --text-column." if isinstance(value, str) else None,
    )


def _bytes(value: Any, column: str, shard: Shard, row: int) -> int | None:
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if value is None:
        return None
    if isinstance(value, bytes):
        return len(value)
    raise ConfigError(
        f"column {column!r} of {shard.name}, row {row}",
        got=repr(value)[:80],
        limit="a text",
        remedy="For numbers or lists of tokens: --length-column.",
    )
