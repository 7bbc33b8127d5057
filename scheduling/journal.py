"""The committed record on storage: immutable, hash-chained objects on any fsspec path.

Object ``generation-G/S`` holds one line of JSON (version, kind, the hash of the object before it,
the hash of the body) and the body. Object stores have neither append nor rename, so nothing is ever
changed: the head is the last object of the valid chain of the highest generation.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

import fsspec

from megadask.scheduling.errors import JournalError

VERSION = 1
Kind = Literal["open", "plan", "event", "marks"]


@dataclass(frozen=True)
class Entry:
    """One object of the journal."""

    generation: int
    sequence: int
    kind: Kind
    body: bytes


class Journal:
    """Reads and writes one journal. All methods block.

    Parameters
    ----------
    path
        Folder, as any fsspec URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self.path)
        self._generation = 0
        self._sequence = 0
        self._hash = ""

    def begin(self, generation: int, body: bytes) -> None:
        """Start the chain of a generation, above all that is there."""
        self._generation, self._sequence, self._hash = generation, 0, ""
        self.append("open", body)

    def append(self, kind: Kind, body: bytes) -> None:
        """Write the next object of the chain. Raises JournalError where storage fails."""
        header = {
            "version": VERSION,
            "kind": kind,
            "previous": self._hash,
            "body": hashlib.sha256(body).hexdigest(),
        }
        data = json.dumps(header).encode() + b"\n" + body
        name = self._name(self._generation, self._sequence)
        try:
            self._fs.makedirs(name.rsplit("/", 1)[0], exist_ok=True)
            with self._fs.open(name, "wb") as file:
                file.write(data)
        except OSError as error:
            raise JournalError(
                f"cannot write the journal at {self.path}",
                got=f"{type(error).__name__}: {error}",
                remedy="Check the path, its permissions and the space left.",
            ) from error
        self._hash = hashlib.sha256(data).hexdigest()
        self._sequence += 1

    def generations(self) -> list[int]:
        """Return the generations that have a journal, in order."""
        if not self._fs.exists(self._root):
            return []
        self._fs.invalidate_cache()
        names = [
            name.rstrip("/").rsplit("/", 1)[-1] for name in self._fs.ls(self._root, detail=False)
        ]
        return sorted(int(name[11:]) for name in names if name.startswith("generation-"))

    def read(self, generation: int) -> list[Entry]:
        """Return the valid chain of a generation.

        A torn tail (the last object incomplete) is left out; damage before it raises JournalError.
        """
        folder = self._name(generation, 0).rsplit("/", 1)[0]
        names = sorted(self._fs.ls(folder, detail=False))
        entries: list[Entry] = []
        previous = ""
        for sequence, name in enumerate(names):
            data = self._fs.cat_file(name)
            header = _header(data)
            body = data[data.find(b"\n") + 1 :]
            whole = (
                header is not None
                and name.endswith(f"/{sequence:09d}")
                and header["previous"] == previous
                and header["body"] == hashlib.sha256(body).hexdigest()
            )
            if not whole:
                if sequence == len(names) - 1:
                    break
                raise JournalError(
                    f"the journal at {self.path} is damaged in its middle",
                    got=name.rsplit("/", 1)[-1],
                    remedy="Resume from a saved state into a new checkpoint path.",
                )
            assert header is not None
            if header["version"] != VERSION:
                raise JournalError(
                    "the journal has another version", got=header["version"], limit=VERSION
                )
            entries.append(Entry(generation, sequence, header["kind"], body))
            previous = hashlib.sha256(data).hexdigest()
        return entries

    def _name(self, generation: int, sequence: int) -> str:
        return f"{self._root.rstrip('/')}/generation-{generation:06d}/{sequence:09d}"


def acknowledged_step(entries: list[Entry]) -> int:
    """Return the step before which every rank had acknowledged everything; 0 when none had."""
    marks = [json.loads(entry.body)["low"] for entry in entries if entry.kind == "marks"]
    return max((int(step) for step, _ in marks), default=0)


def _header(data: bytes) -> dict[str, Any] | None:
    try:
        header = json.loads(data[: data.find(b"\n")])
    except ValueError:
        return None
    return header if isinstance(header, dict) and "previous" in header else None
