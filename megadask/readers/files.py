"""What readers of files share: the shard list, which travels in the pickle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.readers.paths import DataFile, Paths, absolute, expand
from megadask.scheduling.reading import BadRecord, Shard, TruncatedShard, fingerprint_shards

#: Files whose footers are read at the same time when shards are listed.
LISTING_THREADS = 8


@dataclass(frozen=True)
class Part:
    """A shard, and where it lies.

    Attributes
    ----------
    url
        Its file.
    shard
        What callers see of it.
    index
        Which part of the file it is (row group, record batch); -1 for the whole file.
    """

    url: str
    shard: Shard
    index: int = -1

    def truncated(self, row: int, error: BaseException | str) -> TruncatedShard:
        """Return the error that ends the shard at a row."""
        detail = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error
        return TruncatedShard(
            f"{self.shard.name} cannot be read from row {row} on: {detail}",
            remedy="Restore the file, or take it out of the source.",
        )


class FileReader(ABC):
    """Base of readers of files. It says how, a subclass says what one file holds.

    A reader compares, prints and pickles by its arguments, and carries the shard list once made.
    """

    def __init__(self, paths: Paths, **options: Any) -> None:
        self._patterns = absolute(paths)
        self._options = options
        self._parts: tuple[Part, ...] | None = None

    @abstractmethod
    def _list(self, file: DataFile) -> list[Part]:
        """Return the shards of one file, in order."""

    @abstractmethod
    def _read(self, part: Part, start: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        """Yield the rows of a shard from ``start`` on."""

    def shards(self) -> Sequence[Shard]:
        """Return the shards in the order of their files' names; lists the files the first time."""
        return [part.shard for part in self._listing()]

    def read(
        self, shard: int, start: int = 0
    ) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        """Yield rows ``start``, ``start + 1``, ... of a shard; see `Reader.read`."""
        parts = self._listing()
        if not 0 <= shard < len(parts) or start < 0:
            raise IndexError(f"no row {start} of shard {shard}: there are {len(parts)} shards")
        return self._read(parts[shard], start)

    def fingerprint(self) -> str:
        """Return a hash of the names, row counts and sizes of the shards."""
        return fingerprint_shards(self.shards())

    def paths(self) -> Sequence[str]:
        """Return the files, as absolute paths or URLs."""
        return sorted({part.url for part in self._listing()})

    def _files(self) -> list[DataFile]:
        """Return what `_list` is asked about."""
        return expand(self._patterns)

    def _listing(self) -> tuple[Part, ...]:
        if self._parts is None:
            files = self._files()
            with ThreadPoolExecutor(min(LISTING_THREADS, len(files))) as pool:
                parts = tuple(part for found in pool.map(self._list, files) for part in found)
            if all(map(_is_empty, parts)):
                raise ConfigError(f"{self!r} has no records", got=f"{len(files)} empty files")
            self._parts = parts
        return self._parts

    def __repr__(self) -> str:
        paths = self._patterns[0] if len(self._patterns) == 1 else list(self._patterns)
        options = "".join(f", {name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({paths!r}{options})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return (self._patterns, self._options) == (other._patterns, other._options)

    def __hash__(self) -> int:
        return hash((type(self), self._patterns))


def _is_empty(part: Part) -> bool:
    """Whether a shard has no rows for certain; whoever counts them may find one in no bytes."""
    rows = part.shard.rows
    return rows == 0 or (rows is None and part.shard.size_bytes == 0)


def check_columns(owner: str, columns: Sequence[str] | None) -> list[str] | None:
    """Return the columns as a list; raises ConfigError for a single name."""
    if isinstance(columns, str):
        raise ConfigError(f"{owner}(columns=)", got=repr(columns), limit="a list of names")
    return None if columns is None else list(columns)


def check_has_columns(url: str, columns: Sequence[str] | None, names: Sequence[str]) -> None:
    """Raise ConfigError where a file lacks a column that was asked for."""
    missing = [name for name in columns or () if name not in names]
    if missing:
        raise ConfigError(f"{url} lacks columns", got=missing, limit=f"some of {list(names)}")


def check_positive(owner: str, **values: object) -> None:
    """Raise ConfigError where an option is not an integer of at least 1."""
    for name, value in values.items():
        check_integer(f"{owner}({name}=)", value, 1)
