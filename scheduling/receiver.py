"""The trainer's end of shared memory: maps what the constructor tells of, and says what is in use.

What it maps is private to the process: tensors may be changed in place, and nobody else sees it.
They keep their memory for as long as they are there, whatever becomes of the constructor.

Batches are mapped as they come, in the thread of the client, and unmapped by a courier: the
trainer, which works meanwhile, finds them ready and is rid of them at once.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from mmap import mmap
from typing import Any

import numpy as np

from megadask.scheduling.courier import Courier
from megadask.scheduling.delivery import PLAN, Reply, read_reply
from megadask.scheduling.segment import GoneError, host_identity, map_segment
from megadask.scheduling.share import IDS, Arrays, arrays_in, parts_of

#: What a constructor answered: header and arrays.
Answer = tuple[dict[str, Any], Reply]

logger = logging.getLogger(__name__)

#: So often in a row a batch may be gone before it is mapped: more often it is not to be seen.
MOST_GONE = 3


class Receiver:
    """Opens batches that lie in shared memory, for one loader.

    Parameters
    ----------
    rank
        For what it logs.
    courier
        Unmaps what is used up.
    """

    def __init__(self, rank: int, courier: Courier) -> None:
        self._courier = courier
        self._rank = rank
        #: Makes of the arrays of a microbatch what the trainer will want of them, as they come and
        #: not when it waits for them. Is given whether they are memory of this process alone.
        self.make: Callable[[Arrays, bool], object] | None = None
        self._host = host_identity()
        self._held: Counter[int] = Counter()  # one that is sent again may be there twice
        # Batches come in another thread than they are used in, and tensors may end in any, also in
        # the middle of anything that this one does.
        self._came: deque[int] = deque()
        self._let_go: deque[int] = deque()
        self._num_missed = 0  # in a row
        self.num_shared = 0
        self.why_not = "" if self._host else "this system has no memfd or /proc"

    def use(self) -> list[Any]:
        """Return what to tell the constructor: on which host this is, and what is in use."""
        let_go = len(self._let_go)  # all of these have come before
        while self._came:
            self._held[self._came.popleft()] += 1
        for _ in range(let_go):
            self._held[self._let_go.popleft()] -= 1
        self._held = +self._held  # those that are there
        return [self._host, list(self._held)]

    def stats(self) -> dict[str, Any]:
        """Return how many batches were mapped, and why no others, if any reason is known."""
        return {"shared_batches": self.num_shared, "why_not_shared": self.why_not}

    def take(self, answer: Reply) -> Answer:
        """Return an answer's header and arrays, those in shared memory too.

        Where these cannot be had they are missing, and the header's ``missed`` says why. Its
        ``made`` is what `make` made of them; missing where that failed, as it will again.
        """
        header, arrays = read_reply(answer)
        if "shared" in header and self._host is not None:
            try:
                arrays.update(self._mapped(header["shared"]))
                self._num_missed = 0
            except OSError as error:
                header["missed"] = error
        if self.make is not None and IDS in arrays:
            with suppress(Exception):
                own = {name: array for name, array in arrays.items() if name != PLAN}
                header["made"] = self.make(own, "shared" in header)
        return header, arrays

    def miss(self, error: OSError | None) -> None:
        """Take note that a batch that is wanted now is missing; it has to be asked for again.

        Several may be gone at once, with their constructor: only the one that is wanted counts.
        """
        if error is None or self._host is None:  # it was asked for when others could be mapped
            return
        self._num_missed += 1
        if isinstance(error, GoneError) and self._num_missed < MOST_GONE:
            return
        self._host = None
        self.why_not = f"{type(error).__name__}: {error}"
        logger.warning(
            "rank %d cannot map the batches of its constructor, though it is on the same host; "
            "they come over the network from now on: %s",
            self._rank,
            self.why_not,
        )

    def _mapped(self, told: Mapping[str, Any]) -> Arrays:
        """Return the arrays that `Ring.give` told of. Raises OSError."""
        where, content = told["arrays"], int(told["content"])
        parts = parts_of(where)
        size = max((end for _, end in parts), default=0)
        of = (told["process"], told["number"], told["name"], told["inode"])
        mapped = map_segment(*of, size, parts)
        self._came.append(content)
        memory = np.frombuffer(mapped, np.uint8)  # lives as long as any array in it
        ended = weakref.finalize(memory, _end, self._let_go, content, self._courier, mapped)
        ended.atexit = False
        return arrays_in(memory, where)


def _end(let_go: deque[int], content: int, courier: Courier, mapped: mmap) -> None:
    """Take note that nobody has a batch any more; to unmap its memory takes up to milliseconds."""
    let_go.append(content)
    courier.send(partial(_unmap, mapped))


def _unmap(mapped: mmap) -> None:
    with suppress(BufferError):  # what ends is not quite gone: then it goes with that
        mapped.close()
