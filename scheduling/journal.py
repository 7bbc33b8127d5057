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

from megadask.planner.state import MixtureEvent
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
        """Start the chain of a generation. Raises JournalError if it has one already."""
        if generation in self.generations():
            raise JournalError(
                f"the journal at {self.path} has generation {generation} already",
                remedy="Another service may be using this checkpoint path; use one for each.",
            )
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
        self._fs.invalidate_cache()
        if not self._fs.exists(self._root):
            return []
        names = [
            name.rstrip("/").rsplit("/", 1)[-1] for name in self._fs.ls(self._root, detail=False)
        ]
        return sorted(int(name[11:]) for name in names if name.startswith("generation-"))

    def head(self) -> list[Entry]:
        """Return the valid chain of the highest generation that has one; none for a new journal."""
        chains = (self.read(generation) for generation in reversed(self.generations()))
        return next((chain for chain in chains if chain), [])

    def read(self, generation: int) -> list[Entry]:
        """Return the valid chain of a generation.

        A torn tail (the last object incomplete) is left out; damage before it raises JournalError.
        """
        folder = self._name(generation, 0).rsplit("/", 1)[0]
        names = sorted(name for name in self._fs.ls(folder, detail=False) if name[-9:].isdigit())
        entries: list[Entry] = []
        previous = ""
        for sequence, name in enumerate(names):
            data = self._fs.cat_file(name)
            header = _header(data)
            body = data[data.find(b"\n") + 1 :]
            whole = header is not None and header["body"] == hashlib.sha256(body).hexdigest()
            follows = name.endswith(f"/{sequence:09d}")
            if not whole and follows and sequence == len(names) - 1:
                break
            if header is None or not whole or not follows or header["previous"] != previous:
                raise JournalError(
                    f"the journal at {self.path} is damaged in its middle",
                    got=name.rsplit("/", 1)[-1],
                    remedy="Resume from a saved state into a new checkpoint path.",
                )
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
    """Return the step before which every rank had acknowledged everything; 0 when none had.

    That of an earlier generation counts: a generation begins at its origin.
    """
    steps = [0]
    for entry in entries:
        if entry.kind == "open":
            steps.append(json.loads(json.loads(entry.body)["origin"])["step"])
        elif entry.kind == "marks":
            steps.append(json.loads(entry.body)["low"][0])
    return max(steps)


def events_of(entries: list[Entry]) -> list[MixtureEvent]:
    """Return the events that a chain holds, those that it began with too."""
    events: list[MixtureEvent] = []
    for entry in entries:
        if entry.kind == "open":
            found = json.loads(entry.body)["events"]
        elif entry.kind == "event":
            event = json.loads(entry.body)
            found = [[event["step"], event["weights"]]]
        else:
            continue
        events.extend(MixtureEvent(step=step, weights=weights) for step, weights in found)
    return events


def _header(data: bytes) -> dict[str, Any] | None:
    try:
        header = json.loads(data[: data.find(b"\n")])
    except ValueError:
        return None
    keys = {"version", "kind", "previous", "body"}
    return header if isinstance(header, dict) and keys <= header.keys() else None
