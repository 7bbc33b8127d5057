"""The buffer of a Data Constructor: which payload it holds, builds next, and lets go.

It only decides; the constructor builds. A share is what one bucket gets of one microbatch. Shares
are built in the order of their microbatches as far as a limit of bytes allows. What the rank that
is furthest behind waits for is always admitted: then shares that all ranks of their bucket were
given are evicted first, and after them those that lie furthest ahead. What was evicted is built
again when a rank asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from megadask.scheduling.share import Share

#: Microbatches that are being built at a time, besides the one that is waited for.
MOST_BUILDS = 4

Slot = tuple[int, int]  # step, microbatch


@dataclass
class _Held:
    """What one bucket gets of one microbatch, and the ranks that have been given it."""

    share: Share
    had: set[int] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return self.share.num_bytes


class Shelf:
    """Shares within a limit of bytes, by microbatch and bucket.

    Parameters
    ----------
    limit_bytes
        What the shares may take together, besides the microbatch that is waited for.
    ranks_of
        The ranks of every bucket that the constructor serves.
    most_bytes
        Of a share, where shares differ in size; None where they are alike.
    on_leave
        Called with every share that is let go.
    """

    def __init__(
        self,
        limit_bytes: int,
        ranks_of: Mapping[int, frozenset[int]],
        most_bytes: int | None = None,
        on_leave: Callable[[Share], None] = lambda share: None,
    ) -> None:
        self._on_leave = on_leave
        self._shares: dict[tuple[Slot, int], _Held] = {}
        self.limit_bytes = limit_bytes
        self.num_evicted = 0
        self._ranks_of = ranks_of
        self._most_bytes = most_bytes
        self._waiting: Counter[tuple[Slot, int]] = Counter()
        self.clear()

    def clear(self) -> None:
        """Forget everything but who waits."""
        self._expected: set[Slot] = set()
        self._todo: dict[Slot, None] = {}  # microbatches to build, in their order
        self._low: dict[int, Slot] = {}  # what no rank of a bucket needs any more lies below
        for key in list(self._shares):
            self._let_go(key)
        self._reserved: dict[tuple[Slot, int], int] = {}  # bytes of what is being built
        self._evicted: set[tuple[Slot, int]] = set()
        # Of the largest share. Where shapes are static, the first one tells how large all are.
        self._share_bytes = self._most_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all shares, and of those that are being built."""
        held = sum(share.num_bytes for share in self._shares.values())
        return held + sum(self._reserved.values())

    @property
    def num_microbatches(self) -> int:
        """Microbatches of which there is a share."""
        return len({slot for slot, _ in self._shares})

    def get(self, slot: Slot, bucket: int) -> Share | None:
        """Return a share, None where it is not there."""
        held = self._shares.get((slot, bucket))
        return None if held is None else held.share

    def give(self, slot: Slot, bucket: int, rank: int) -> Share:
        """Return a share that is there, and note that a rank has it now."""
        held = self._shares[slot, bucket]
        held.had.add(rank)
        return held.share

    @contextmanager
    def waiting(self, slot: Slot, bucket: int) -> Iterator[None]:
        """Know that a rank waits for a share, which is not evicted meanwhile."""
        self._waiting[slot, bucket] += 1
        try:
            yield
        finally:
            self._waiting[slot, bucket] -= 1
            self._waiting += Counter()  # drops what nobody waits for

    def expect(self, slots: Iterable[Slot]) -> None:
        """Learn of planned microbatches; in their order, later than those known."""
        new = dict.fromkeys(slots)
        self._expected.update(new)
        self._todo.update(new)

    def free(self, low: Mapping[int, Slot]) -> None:
        """Let go of what is done with.

        low: the first microbatch that some rank of a bucket still needs, for those buckets that
        need anything.
        """
        self._low = dict(low)
        for slot, bucket in [key for key in self._shares if self._is_done(*key)]:
            self._let_go((slot, bucket))
        self._evicted = {key for key in self._evicted if not self._is_done(*key)}
        first = min(low.values(), default=None)
        for slot in [slot for slot in self._expected if first is None or slot < first]:
            self._expected.remove(slot)
            self._todo.pop(slot, None)

    def next_build(self) -> tuple[Slot, list[int]] | None:
        """Return the microbatch to build now, and for which buckets; None while there is none."""
        if self._share_bytes is None and self._reserved:
            return None  # the first one tells how large they are
        size, room = self._share_bytes or 0, self.limit_bytes - self.held_bytes
        due = min((key[0] for key in self._waiting if self._is_needed(*key)), default=None)
        if due is not None:
            missing = self._missing(due)
            if asked := [bucket for bucket in missing if (due, bucket) in self._waiting]:
                if size * len(missing) <= room:
                    return due, missing
                if allowed := self._allowed(asked):
                    return due, allowed
        is_empty = not self._shares and not self._reserved
        building = len({slot for slot, _ in self._reserved})
        if not is_empty and (room < size or building >= MOST_BUILDS):
            return None
        for slot in sorted({*self._todo, *(slot for slot, _ in self._waiting)}):
            if missing := self._missing(slot):
                fits = is_empty or size * len(missing) <= room
                return (slot, missing) if fits else None
        return None

    def reserve(self, slot: Slot, buckets: Iterable[int]) -> None:
        """Make room for shares that are going to be built, evicting others as far as it takes."""
        keys = [(slot, bucket) for bucket in buckets]
        self._reserved.update(dict.fromkeys(keys, self._share_bytes or 0))
        self._evicted.difference_update(keys)
        if not self._missing(slot):
            self._todo.pop(slot, None)
        self._make_room()

    def put(self, slot: Slot, built: Mapping[int, Share]) -> None:
        """Take the shares that were built, except those that nobody needs any more."""
        has_grown = False
        for bucket, share in built.items():
            has_grown |= share.num_bytes > self._reserved.pop((slot, bucket))
            self._share_bytes = max(share.num_bytes, self._share_bytes or 0)
            if self._is_done(slot, bucket):
                self._on_leave(share)
            else:
                self._shares[slot, bucket] = _Held(share)
        if has_grown:
            self._make_room(spared={(slot, bucket) for bucket in built})

    def _make_room(self, spared: Collection[tuple[Slot, int]] = ()) -> None:
        """Evict others than those spared, as far as the limit takes it."""
        excess = self.held_bytes - self.limit_bytes
        for key in self._in_the_way():
            if excess <= 0:
                break
            if key not in spared:
                excess -= self._let_go(key)
                self._evicted.add(key)
                self.num_evicted += 1

    def _let_go(self, key: tuple[Slot, int]) -> int:
        """Let a share go and return its bytes."""
        share = self._shares.pop(key).share
        self._on_leave(share)
        return share.num_bytes

    def _is_done(self, slot: Slot, bucket: int) -> bool:
        return bucket not in self._low or slot < self._low[bucket]

    def _is_needed(self, slot: Slot, bucket: int) -> bool:
        return slot in self._expected and not self._is_done(slot, bucket)

    def _missing(self, slot: Slot) -> list[int]:
        """Return the buckets that need a share of a microbatch, and have nobody at it."""
        keys = [(slot, bucket) for bucket in self._ranks_of]
        return [
            key[1]
            for key in keys
            if self._is_needed(*key)
            and key not in self._shares
            and key not in self._reserved
            and (key not in self._evicted or key in self._waiting)
        ]

    def _allowed(self, buckets: list[int]) -> list[int]:
        """Return the buckets of which a share is admitted though it may not fit.

        One at a time, so that what does not fit is at most one microbatch.
        """
        free = self.limit_bytes - sum(self._reserved.values())
        free -= sum(self._shares[key].num_bytes for key in self._shares.keys() & self._waiting)
        if (self._share_bytes or 0) * len(buckets) <= free:
            return buckets
        busy = {bucket for _, bucket in self._reserved}
        return [bucket for bucket in buckets if bucket not in busy]

    def _in_the_way(self) -> list[tuple[Slot, int]]:
        """Return what can be evicted: what was given to all its ranks, then the furthest ahead."""
        loose = {key: share for key, share in self._shares.items() if key not in self._waiting}
        given = {key for key, share in loose.items() if self._ranks_of[key[1]] <= share.had}
        return sorted(given) + sorted(loose.keys() - given, reverse=True)
