"""Which slot of shared memory holds what, and when it may be used again. Only decides.

A slot holds one content at a time, under a number that is never used again: what the ranks of one
bucket get of one microbatch. Readers are granted contents, and say with each of their messages
which ones they still use. A slot is used again once its content has left the shelf, and every
reader that was granted it has either acknowledged its microbatch and uses it no longer, or was
taken to another generation. Nobody knows what a reader that is gone still uses: what it was granted
is closed, and its memory ends with its last user.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megadask.scheduling.marks import Watermark


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a reader says with a message. Messages may arrive in any order.

    Attributes
    ----------
    generation
        That it reads in; it has dropped what it has not opened of earlier ones.
    mark
        What it has acknowledged: everything before.
    held
        Contents that it uses.
    """

    generation: int
    mark: Watermark
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A slot to write to.

    Attributes
    ----------
    slot, content
        Their numbers.
    num_bytes
        Size of the slot.
    is_new
        Whether the slot has to be made.
    closed
        Slots to close first, to make room.
    """

    slot: int
    content: int
    num_bytes: int
    is_new: bool
    closed: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Grant:
    generation: int
    at: Watermark


class Slots:
    """Slots within a limit of bytes.

    Parameters
    ----------
    limit_bytes
        Of all slots together.
    num_least
        As many there may be whatever they take, so that no batch is too large.
    num_most
        More than that there never are.
    """

    def __init__(self, limit_bytes: int, *, num_least: int, num_most: int) -> None:
        self._limit_bytes = limit_bytes
        self._num_least = num_least
        self._num_most = num_most
        self._bytes: dict[int, int] = {}  # of each slot
        self._free: list[int] = []  # the one that was used last is at the end
        self._slot_of: dict[int, int] = {}  # content to its slot
        self._shelved: set[int] = set()  # contents
        self._grants: dict[str, dict[int, _Grant]] = {}  # by reader and content
        self._spoilt: set[int] = set()  # contents that a reader that is gone may use
        self._last = 0

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(self._bytes.values())

    @property
    def leased_bytes(self) -> int:
        """Bytes of slots that readers have, or may have, though they are on the shelf no more."""
        return sum(self._bytes[s] for c, s in self._slot_of.items() if c not in self._shelved)

    def take(self, num_bytes: int) -> Taken | None:
        """Return a slot for a content that goes on the shelf; None where there is no room."""
        fitting = [s for s in self._free if num_bytes <= self._bytes[s] <= 2 * rounded(num_bytes)]
        if fitting:  # the smallest; of several the one that was used last
            slot = min(reversed(fitting), key=lambda s: self._bytes[s])
            self._free.remove(slot)
            return self._put(slot, is_new=False)
        size, closed = rounded(num_bytes), self._room_for(rounded(num_bytes))
        if closed is None:
            return None
        self.close(closed)
        slot = self._next()
        self._bytes[slot] = size
        return self._put(slot, is_new=True, closed=closed)

    def fail(self, taken: Taken) -> None:
        """Forget a slot that could not be made."""
        self._shelved.discard(taken.content)
        del self._slot_of[taken.content], self._bytes[taken.slot]

    def leave(self, content: int) -> list[int]:
        """Note that a content left the shelf. Returns slots to close."""
        self._shelved.discard(content)
        return self._settle([content])

    def grant(self, content: int, reader: str, generation: int, at: Watermark) -> None:
        """Note that a reader is told of a content, that of microbatch ``at``."""
        self._grants.setdefault(reader, {})[content] = _Grant(generation, at)

    def hear(self, reader: str, report: Report) -> list[int]:
        """Take a reader's word of what it uses. Returns slots to close."""
        grants = self._grants.get(reader, {})
        done = [
            content
            for content, grant in grants.items()
            if content not in report.held
            and (grant.at < report.mark or grant.generation < report.generation)
        ]
        for content in done:
            del grants[content]
        return self._settle(done)

    def keep(self, readers: Collection[str]) -> list[int]:
        """Forget all readers but these. Returns slots to close."""
        left: list[int] = []
        for reader in [reader for reader in self._grants if reader not in readers]:
            left += self._grants.pop(reader)
        self._spoilt.update(left)
        return self._settle(left)

    def drop_free(self) -> list[int]:
        """Return the slots that hold nothing, to be closed."""
        free = tuple(self._free)
        self.close(free)
        return list(free)

    def close(self, slots: Iterable[int]) -> None:
        """Forget free slots."""
        for slot in slots:
            self._free.remove(slot)
            del self._bytes[slot]

    def _put(self, slot: int, *, is_new: bool, closed: tuple[int, ...] = ()) -> Taken:
        content = self._next()
        self._slot_of[content] = slot
        self._shelved.add(content)
        size = self._bytes[slot]
        return Taken(slot=slot, content=content, num_bytes=size, is_new=is_new, closed=closed)

    def _room_for(self, size: int) -> tuple[int, ...] | None:
        """Return the free slots to close for a new one, those longest unused; None if no use."""
        closed: list[int] = []
        left, count = self.num_bytes, len(self._bytes)
        for slot in [*self._free, None]:
            is_small = left + size <= self._limit_bytes or count < self._num_least
            if is_small and count < self._num_most:
                return tuple(closed)
            if slot is not None:
                closed.append(slot)
                left, count = left - self._bytes[slot], count - 1
        return None

    def _settle(self, contents: Iterable[int]) -> list[int]:
        """Free the slots of contents that nobody uses; return those to close instead."""
        closed = []
        for content in contents:
            used = any(content in grants for grants in self._grants.values())
            if content in self._shelved or used or content not in self._slot_of:
                continue
            slot = self._slot_of.pop(content)
            if content in self._spoilt:
                self._spoilt.discard(content)
                del self._bytes[slot]
                closed.append(slot)
            else:
                self._free.append(slot)
        return closed

    def _next(self) -> int:
        self._last += 1
        return self._last


def rounded(num_bytes: int) -> int:
    """Return the size of a slot for so many bytes: at most a sixteenth more, and whole pages.

    Sizes are few, so that contents of almost one size take turns in the same slots.
    """
    unit = max(4096, 1 << max(0, num_bytes.bit_length() - 5))
    return max(unit, -(-num_bytes // unit) * unit)
