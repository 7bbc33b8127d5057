"""The slots of shared memory in which a constructor has what the trainers of its host read.

`slots` decides which slot is used when; here the memory is made, written and closed. A share that
finds no slot stays where it is, and travels in messages. Safe for use by several threads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterable
from typing import Any

from megadask.scheduling.marks import Watermark
from megadask.scheduling.segment import Segment, host_identity
from megadask.scheduling.share import Share
from megadask.scheduling.slots import Report, Slots

logger = logging.getLogger(__name__)

#: Slots of a bucket that there may be whatever they take: one in use, one being read, one ahead.
LEAST_SLOTS = 3
#: A slot takes two file descriptors; of those of the process they take a quarter at most.
FDS_OF_SLOT = 2
MOST_SLOTS = 1024


class Ring:
    """Shared memory for the shares of one constructor.

    Parameters
    ----------
    limit_bytes
        Of all slots; 0 for no shared memory.
    num_buckets
        That the constructor serves.
    """

    def __init__(self, limit_bytes: int, num_buckets: int) -> None:
        self._host = host_identity() if limit_bytes else None
        most = max(LEAST_SLOTS, min(MOST_SLOTS, _most_fds() // 4 // FDS_OF_SLOT))
        least = min(most, LEAST_SLOTS * num_buckets)
        self._slots = Slots(limit_bytes, num_least=least, num_most=most)
        self._segments: dict[int, Segment] = {}  # by slot
        self._segment_of: dict[int, Segment] = {}  # by content, of those on the shelf
        self._lock = threading.Lock()
        self._is_closed = False

    def reaches(self, host: str | None) -> bool:
        """Whether a trainer that names this host can read the slots."""
        return host is not None and host == self._host

    def place(self, share: Share) -> bool:
        """Move a share into a slot; returns False where there is none for it."""
        if self._host is None:
            return False
        with self._lock:
            taken = self._slots.take(share.laid_out_bytes)
            if taken is None:
                return False
            self._close(taken.closed)
        if taken.is_new:
            try:
                segment = Segment(taken.num_bytes)
            except OSError as error:
                logger.warning("no more shared memory is to be had: %s", error)
                with self._lock:
                    self._slots.fail(taken)
                self._host = None
                return False
        else:
            segment = self._segments[taken.slot]
        share.move(segment.bytes, taken.content)
        with self._lock:
            if self._is_closed:
                segment.close()
            else:
                self._segments[taken.slot] = segment
                self._segment_of[taken.content] = segment
        return True

    def give(
        self,
        share: Share,
        rank: int,
        names: tuple[str, ...],
        reader: str,
        generation: int,
        at: Watermark,
    ) -> dict[str, Any]:
        """Return how a reader finds the arrays of a share, which it may use from now on."""
        assert share.content is not None
        with self._lock:
            self._slots.grant(share.content, reader, generation, at)
        segment = self._segment_of[share.content]
        return {
            "process": os.getpid(),
            "number": segment.number,
            "name": segment.name,
            "inode": segment.inode,
            "content": share.content,
            "arrays": share.where(rank, names),
        }

    def drop(self, share: Share) -> None:
        """Note that a share left the shelf."""
        if share.content is not None:
            with self._lock:
                self._segment_of.pop(share.content, None)
                self._close(self._slots.leave(share.content))

    def hear(self, reader: str, report: Report) -> None:
        """Take a reader's word of what it uses."""
        with self._lock:
            self._close(self._slots.hear(reader, report))

    def keep(self, readers: Collection[str]) -> None:
        """Let go of what all other readers had; without readers of everything that is unused."""
        with self._lock:
            self._close(self._slots.keep(readers))
            if not readers:
                self._close(self._slots.drop_free())

    def close(self) -> None:
        """Let go of all slots; who has them mapped keeps them."""
        with self._lock:
            self._host, self._is_closed = None, True
            self._close(list(self._segments))

    def status(self) -> dict[str, Any]:
        """Return how much shared memory there is, and what of it trainers have for themselves."""
        with self._lock:
            return {
                "shared_slots": len(self._slots),
                "shared_bytes": self._slots.num_bytes,
                "leased_bytes": self._slots.leased_bytes,
            }

    def _close(self, slots: Iterable[int]) -> None:
        for slot in slots:
            segment = self._segments.pop(slot, None)
            if segment is not None:
                segment.close()


def _most_fds() -> int:
    try:
        import resource
    except ImportError:  # not a Unix
        return 256
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_SLOTS * 4 * FDS_OF_SLOT if soft == resource.RLIM_INFINITY else soft
