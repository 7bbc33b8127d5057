"""Keeps standbys warm: what a loader was asked, its shadows are asked too, and compared."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.metadata import Metadata
from megadask.scheduling.errors import DeadlineError, told
from megadask.scheduling.owners import LOST, LoaderAddress, Partners

logger = logging.getLogger(__name__)

#: Requests that a slow shadow may be behind; older ones are dropped, and what they would have read
#: is read when it is needed.
MOST_BEHIND = 64

_KEYS = ("lane", "position", "start")
_SAME = ("stop", "verdict", "length", "loss_tokens", "bytes", "checksum")


@dataclass(frozen=True, eq=False)
class _Read:
    """What a loader was asked, and what it answered."""

    arguments: Mapping[str, Any]
    table: Metadata


class Mirror:
    """Lets the shadows of all sources follow their primaries, behind the Planner's back.

    Parameters
    ----------
    partners
        Who the shadows are.
    incarnation
        Of the planner, for what it tells the supervisor.
    """

    def __init__(self, partners: Partners, incarnation: str) -> None:
        self._partners = partners
        self._incarnation = incarnation
        self._queues: dict[str, deque[_Read]] = {}  # by incarnation of the shadow
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(
        self, source: str, lanes: Mapping[int, Any], arguments: Mapping[str, Any], table: Metadata
    ) -> None:
        """Pass on what the owner of some lanes was asked to describe; returns at once."""
        for shadow in self._partners.shadows(source):
            if shadow.lanes and next(iter(lanes)) in shadow.lanes:
                queue = self._queues.setdefault(shadow.incarnation, deque(maxlen=MOST_BEHIND))
                queue.append(_Read(arguments, table))
                if shadow.incarnation not in self._tasks:
                    task = asyncio.create_task(self._read(source, shadow, queue))
                    self._tasks[shadow.incarnation] = task
                    task.add_done_callback(partial(self._forget, shadow.incarnation))

    async def close(self) -> None:
        """Stop following."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _forget(self, incarnation: str, task: asyncio.Task[None]) -> None:
        del self._tasks[incarnation]

    async def _read(self, source: str, shadow: LoaderAddress, queue: deque[_Read]) -> None:
        """Ask one shadow until it has caught up; one that is lost the supervisor sees itself."""
        try:
            while queue:
                read = queue.popleft()
                reply = await self._partners.call(
                    shadow, source, shadow.lanes[0], "describe", read.arguments
                )
                what = difference(read.table, Metadata.unpack(reply["table"]))
                if what is not None:
                    await self._drop(source, shadow, what)
                    return
        except (*LOST, DeadlineError) as error:
            logger.info("a shadow of source %r on %s: %s", source, shadow.address, error)
        except Exception as error:  # its reader or transform may raise anything
            if not self._partners.is_over(error):
                await self._drop(source, shadow, told(error))

    async def _drop(self, source: str, shadow: LoaderAddress, what: str) -> None:
        with contextlib.suppress(*LOST, DeadlineError):
            await self._partners.supervisor(
                "shadow_differs",
                incarnation=self._incarnation,
                shadow=shadow.incarnation,
                what=f"source {source!r}: {what}",
            )


def difference(primary: Metadata, shadow: Metadata) -> str | None:
    """Return where two readings of the same records differ, None where they agree.

    Records that only one of them has come to count for nothing.
    """
    if not primary.num_rows or not shadow.num_rows:
        return None
    one, other = _keyed(primary), _keyed(shadow)
    common, one_n, other_n = np.intersect1d(
        one[:, : len(_KEYS)].copy().view(_ROW).ravel(),
        other[:, : len(_KEYS)].copy().view(_ROW).ravel(),
        return_indices=True,
    )
    del common
    unlike_n = (one[one_n] != other[other_n]).any(axis=1)
    if not unlike_n.any():
        return None
    first = int(np.flatnonzero(unlike_n)[0])
    lane, position = one[one_n[first], :2].tolist()
    return f"lane {lane}, position {position} reads {_named(other[other_n[first]])}, not " + (
        _named(one[one_n[first]])
    )


_ROW = np.dtype([(name, np.int64) for name in _KEYS])


def _keyed(table: Metadata) -> NDArray[np.int64]:
    """(N, keys and values) of a table."""
    return np.stack([table[name].astype(np.int64) for name in (*_KEYS, *_SAME)], axis=1)


def _named(values: NDArray[np.int64]) -> str:
    return ", ".join(
        f"{name} {value}" for name, value in zip((*_KEYS, *_SAME), values.tolist(), strict=True)
    )
