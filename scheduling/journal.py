"""The committed record on storage: immutable, hash-chained objects on any fsspec path.

Object ``generation-G/S.kind`` holds one line of JSON (version, kind, hash of the object before it
and of this one) and the body, compressed. Object stores have neither append nor rename, so nothing
is ever changed: the head is the valid chain of the highest generation. A chain begins with a
``full`` object and holds others now and then; from each of them on it can be read and verified
alone, and each names the first object that is still kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args

import fsspec

from megadask.scheduling.errors import JournalError

logger = logging.getLogger(__name__)

#: Errors of a path or of rights to it, which do not pass by themselves.
LASTING = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)

VERSION = 2
Kind = Literal["full", "step", "event", "marks"]

_NAME = re.compile(r"(\d{9})\.(" + "|".join(get_args(Kind)) + ")")
#: As objects of version 1 were called.
_OLD_NAME = re.compile(r"\d{9}")

#: Objects that are read or removed at a time where storage is far.
MOST_CALLS = 16

#: Generation and sequence of an object.
Place = tuple[int, int]


class StorageError(JournalError):
    """Storage failed in a way that may pass: it is full, or far and does not answer."""


@dataclass(frozen=True)
class Entry:
    """One object of the journal.

    Attributes
    ----------
    kept
        Of a full object: the sequence of the first object that is kept of its generation.
    """

    generation: int
    sequence: int
    kind: Kind
    body: bytes
    kept: int = 0


class Journal:
    """Reads and writes one journal. All methods block.

    Parameters
    ----------
    path
        Folder, as any fsspec URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        self._fs, root = fsspec.core.url_to_fs(self.path)
        self._root = root.rstrip("/")
        self._is_local = isinstance(self._fs, fsspec.get_filesystem_class("file"))
        self._generation = 0
        self._sequence = 0
        self._hash = ""

    # Writing ------------------------------------------------------------------------------------

    def begin(self, generation: int, body: bytes) -> Place:
        """Start the chain of a generation. Raises JournalError if it has one already.

        After a StorageError it may be called again.
        """
        with self._told():
            is_again = generation == self._generation and not self._sequence
            is_taken = not is_again and generation in self.generations()
        if is_taken:
            raise JournalError(
                f"the journal at {self.path} has generation {generation} already",
                remedy="Another service may be using this checkpoint path; use one for each.",
            )
        self._generation, self._sequence, self._hash = generation, 0, ""
        return self.append("full", body)

    def append(self, kind: Kind, body: bytes, kept: int = 0) -> Place:
        """Write the next object of the chain; return its place.

        kept: of a full object, the first sequence that is not to be pruned. Raises JournalError
        where storage fails; then nothing is there, or a torn tail, which readers leave out. After a
        StorageError it may be called again.
        """
        packed = zlib.compress(body)
        header: dict[str, Any] = {"version": VERSION, "kind": kind, "previous": self._hash}
        if kind == "full":
            header["kept"] = kept
        header["hash"] = _own_hash(header, packed)
        data = _dumped(header) + b"\n" + packed
        folder = self._folder(self._generation)
        with self._told():
            self._fs.makedirs(folder, exist_ok=True)
            self._put(f"{folder}/{self._sequence:09d}.{kind}", data)
        place = (self._generation, self._sequence)
        self._hash = _hash(data)
        self._sequence += 1
        return place

    def prune(self, place: Place) -> None:
        """Remove what lies before an object: older generations, older objects of the present one.

        The full object that was written last has to name it. What cannot be removed stays, and
        does no harm.
        """
        generation, sequence = place
        try:
            for older in [number for number in self.generations() if number < generation]:
                folder = self._folder(older)
                self._remove(self._fs.ls(folder, detail=False))
                if self._fs.exists(folder):  # where there are folders
                    self._fs.rmdir(folder)
            if generation == self._generation:
                folder = self._folder(generation)
                names = [name for name in self._names(generation) if _sequence_of(name) < sequence]
                self._remove([f"{folder}/{name}" for name in names])
        except Exception as error:  # stores have classes of their own, as in `_told`
            logger.warning("old objects of the journal at %s stay: %s", self.path, error)

    # Reading ------------------------------------------------------------------------------------

    def generations(self) -> list[int]:
        """Return the generations that have a journal, in order."""
        self._fs.invalidate_cache()
        if not self._fs.exists(self._root):
            return []
        names = [
            name.rstrip("/").rsplit("/", 1)[-1] for name in self._fs.ls(self._root, detail=False)
        ]
        return sorted(int(name[11:]) for name in names if name.startswith("generation-"))

    def head(self) -> list[Entry]:
        """Return the end of the valid chain of the highest generation that has one.

        From its last full object on; nothing for a new journal. Raises JournalError where that is
        damaged, or written by another version.
        """
        for generation in reversed(self.generations()):
            names = self._names(generation)
            fulls = [n for n, name in enumerate(names) if name.endswith(".full")]
            # The last one may be the torn tail; then the chain from the one before it counts.
            for first in reversed(fulls):
                if found := self._chain(generation, names[first:]):
                    return found
            if names and not fulls:
                raise self._damaged(names[0])
        return []

    def read(self, generation: int) -> list[Entry]:
        """Return the valid chain of a generation, from the first object that is kept.

        A torn tail (the last object incomplete) is left out; damage before it raises JournalError.
        """
        names = self._names(generation)
        fulls = [name for name in names if name.endswith(".full")]
        for name in reversed(fulls):
            if last := self._chain(generation, [name]):
                return self._chain(generation, names, first=last[0].kept)
        if names and (len(names) > 1 or not fulls):
            raise self._damaged(names[0])
        return []

    def _chain(self, generation: int, names: list[str], first: int | None = None) -> list[Entry]:
        """Return the objects of these names that are not before ``first``, verified.

        first: a sequence; that of the first name when None.
        """
        first = _sequence_of(names[0]) if first is None else first
        names = [name for name in names if _sequence_of(name) >= first]
        entries: list[Entry] = []
        previous = None if first else ""  # what is before a later beginning need not be there
        contents = self._get(generation, names)
        for number, (name, data) in enumerate(zip(names, contents, strict=True)):
            header, packed = self._header(data), data[data.find(b"\n") + 1 :]
            follows = _sequence_of(name) == first + number
            if header is None and follows and number == len(names) - 1:
                break  # the torn tail
            if header is None or not follows or header["kind"] != name.partition(".")[2]:
                raise self._damaged(name)
            if previous is not None and header["previous"] != previous:
                raise self._damaged(name)
            body, kept = zlib.decompress(packed), header.get("kept", 0)
            entries.append(Entry(generation, _sequence_of(name), header["kind"], body, kept))
            previous = _hash(data)
        if entries and entries[0].kind != "full":
            raise self._damaged(names[0])
        return entries

    def _header(self, data: bytes) -> dict[str, Any] | None:
        """Return the header of an object, None if that is not whole. Refuses another version."""
        line, _, packed = data.partition(b"\n")
        try:
            header = json.loads(line)
        except ValueError:
            return None
        if not isinstance(header, dict) or not {"version", "kind", "previous"} <= header.keys():
            return None
        if header["version"] != VERSION:
            raise self._another_version(header["version"])
        return header if header.pop("hash", None) == _own_hash(header, packed) else None

    def _another_version(self, found: Any) -> JournalError:
        return JournalError(
            f"the journal at {self.path} has another version",
            got=found,
            limit=VERSION,
            remedy="Pass serve(resume=state) with the trainers' state, and a new checkpoint path.",
        )

    def _damaged(self, name: str) -> JournalError:
        return JournalError(
            f"the journal at {self.path} is damaged in its middle",
            got=name,
            remedy="Resume from a saved state into a new checkpoint path.",
        )

    # Objects ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Raise JournalError where storage fails, StorageError where that may pass."""
        try:
            yield
        except Exception as error:  # stores have classes of their own for what is not an OSError
            kind = JournalError if isinstance(error, LASTING) else StorageError
            raise kind(
                f"cannot write the journal at {self.path}",
                got=f"{type(error).__name__}: {error}",
                remedy="Check the path, its permissions and the space left.",
            ) from error

    def _folder(self, generation: int) -> str:
        return f"{self._root}/generation-{generation:06d}"

    def _names(self, generation: int) -> list[str]:
        """Return the names of a generation's objects, in order."""
        listed = self._fs.ls(self._folder(generation), detail=False)
        names = sorted(name.rsplit("/", 1)[-1] for name in listed)
        if any(_OLD_NAME.fullmatch(name) for name in names):
            raise self._another_version(1)
        return [name for name in names if _NAME.fullmatch(name)]

    def _get(self, generation: int, names: list[str]) -> list[bytes]:
        paths = [f"{self._folder(generation)}/{name}" for name in names]
        return self._each(self._fs.cat_file, paths)

    def _remove(self, paths: list[str]) -> None:
        self._each(self._fs.rm_file, paths)

    def _each(self, call: Callable[[str], Any], paths: list[str]) -> list[Any]:
        """Return the results of a call for every path; from afar, several at a time."""
        if self._is_local or len(paths) < 2:
            return [call(path) for path in paths]
        with ThreadPoolExecutor(MOST_CALLS, "megadask-journal") as pool:
            return list(pool.map(call, paths))

    def _put(self, name: str, data: bytes) -> None:
        """Write an object whole or not at all; other stores than files do so by themselves."""
        if not self._is_local:
            self._fs.pipe_file(name, data)
            return
        unfinished = f"{name}.tmp"
        try:
            with open(unfinished, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise


def _sequence_of(name: str) -> int:
    return int(name[:9])


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _dumped(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def _own_hash(header: dict[str, Any], packed: bytes) -> str:
    """Return the hash of an object: of its header, but for the hash itself, and of its body."""
    return _hash(_dumped(header) + packed)
