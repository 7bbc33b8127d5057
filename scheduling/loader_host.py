"""The worker plugin that hosts Source Loaders on a Dask worker.

Each loader has one thread of its own, so that a slow source delays no other, and one incarnation:
calls meant for an earlier life are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.core import Status
from distributed.protocol.serialize import ToPickle

from megadask.planner.metadata import Metadata
from megadask.planner.state import LaneCursor
from megadask.scheduling.errors import StaleError, told, travelling
from megadask.scheduling.quiet import keep_quiet
from megadask.scheduling.source_loader import SourceLoader
from megadask.scheduling.wire import ARRIVAL, LOADER_HOST, within

#: Deadline for a worker to tell the Supervisor that it came.
ARRIVE_S = 30.0
#: Arenas of the C library for all threads of a worker; loaders take turns at the GIL anyway.
NUM_ARENAS = 4
_M_ARENA_MAX = -8  # malloc.h of glibc


class Busy:
    """Counts the time spent inside of it, by one thread."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Time spent inside so far, in seconds; any thread may ask."""
        since = self._since
        return self._before_s + (0.0 if since is None else time.monotonic() - since)

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._before_s, self._since = self.seconds, None


@dataclass
class _Hosted:
    """A loader, its thread, and how long that was busy."""

    loader: SourceLoader
    thread: ThreadPoolExecutor
    busy: Busy = field(default_factory=Busy)


class LoaderHost(WorkerPlugin):
    """Hosts the loaders of all services on one worker."""

    name = "megadask-loader-host"
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        """Answer calls to the loaders of this worker, and tell the Supervisor that it does."""
        _share_memory()
        keep_quiet()
        self._hosted: dict[str, _Hosted] = {}
        self._worker = worker
        worker.handlers[LOADER_HOST] = self.handle
        # Dask tells its scheduler of a new worker before the worker has its plugins.
        arrival = getattr(worker.scheduler, ARRIVAL)(worker=worker.address)
        await within(ARRIVE_S, arrival, "the supervisor to hear of this worker")

    def teardown(self, worker: Worker) -> None:
        """Close every loader.

        The handler stays, and refuses: Dask answers calls that nobody handles with None.
        """
        self._release(list(self._hosted))

    async def handle(
        self,
        call: str,
        incarnation: str = "",
        packed: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """Carry out one call: open, release, retain, or one to a loader.

        packed: arguments that hold arrays, as `Partners.call` sends them; it is answered alike.
        """
        if call == "open":
            return await self._open(incarnation, **arguments)
        if call == "release":
            return self._release(**arguments)
        if call == "retain":
            return self._retain(**arguments)
        hosted = self._hosted.get(incarnation)
        if hosted is None:
            raise StaleError(
                "this worker has no such loader",
                got=f"incarnation {incarnation}",
                remedy="It was replaced or released; ask the supervisor for the owner.",
            )
        if call == "status":  # answered at once, however busy the loader is
            return {**_status(hosted.loader), "busy_s": hosted.busy.seconds}
        work = partial(_carried_out, _CALLS[call], hosted, packed or arguments)
        answer = await asyncio.get_running_loop().run_in_executor(hosted.thread, work)
        return answer if packed is None else {"packed": ToPickle(answer)}

    async def _open(
        self,
        incarnation: str,
        blob: bytes,
        limit_bytes: int,
        lanes: Collection[int],
        standby: bool,
    ) -> str | None:
        """Open a loader; return what is wrong with its source, if anything.

        An exception would reach the scheduler as text alone, without its class.
        """
        running = self._worker.status in (Status.running, Status.paused)
        if incarnation in self._hosted or not running:
            return None
        thread = ThreadPoolExecutor(1, thread_name_prefix="megadask-loader")
        loop = asyncio.get_running_loop()
        try:
            spec = await loop.run_in_executor(thread, pickle.loads, blob)
        except Exception as error:  # unpickling runs imports, which may raise anything
            thread.shutdown(wait=False)
            return told(error)
        loader = SourceLoader(spec, limit_bytes, standby=standby, lanes=lanes)
        self._hosted[incarnation] = _Hosted(loader, thread)
        return None

    def _retain(self, incarnations: Collection[str]) -> None:
        """Let all loaders go but those that the Supervisor knows of."""
        self._release(set(self._hosted).difference(incarnations))

    def _release(self, incarnations: Iterable[str]) -> None:
        """Let loaders go, as far as they are there."""
        for hosted in [self._hosted.pop(one) for one in incarnations if one in self._hosted]:
            with contextlib.suppress(RuntimeError):  # the interpreter may be shutting down
                hosted.thread.submit(hosted.loader.close)
            hosted.thread.shutdown(wait=False)


def _share_memory() -> None:
    """Let Arrow take memory from the system, as all of the process does, and all from few arenas.

    Allocators keep some memory for every thread that has read, and each loader is one: Arrow's own
    did so in megabytes, and that of glibc has up to eight arenas for every core. Arrow asks the
    environment once, when it is loaded; who has chosen there keeps it.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(AttributeError, OSError, TypeError):  # another libc than glibc
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, NUM_ARENAS)


def _carried_out(method: Callable[..., Any], hosted: _Hosted, arguments: Mapping[str, Any]) -> Any:
    """Return what a call returns; raise what it raises in a form that travels.

    An error of somebody's transform may be of any class, also of those by which callers know that a
    loader was lost: they would ask again and again, and never tell what it was.
    """
    try:
        with hosted.busy:
            return method(hosted.loader, **arguments)
    except BaseException as error:
        sent = travelling(error)
        if sent is error:
            raise
    raise sent  # not from what it tells of, which may not travel


def _describe(
    loader: SourceLoader, epoch: int, cursors: Mapping[str, list[int]], until: int
) -> dict[str, Any]:
    """Return the metadata of the next records; keys of messages are strings.

    read: what `Usual.note` wants to know.
    """
    at = {
        int(lane): LaneCursor(position=position, shard=shard, row=row)
        for lane, (position, shard, row) in cursors.items()
    }
    described = loader.describe(epoch, at, until)
    return {
        "table": described.table.pack(),
        "cursors": {
            str(lane): [cursor.position, cursor.shard, cursor.row]
            for lane, cursor in described.cursors.items()
        },
        "ended": sorted(described.ended),
        "read": {"num_records": described.num_records, "is_short": described.is_short},
    }


def _serve(loader: SourceLoader, wanted: dict[str, Any]) -> dict[str, Any]:
    return loader.serve(Metadata.unpack(wanted))


def _serve_items(loader: SourceLoader, wanted: dict[str, Any], modality: str) -> dict[str, Any]:
    return loader.serve_items(Metadata.unpack(wanted), modality)


def _keep(loader: SourceLoader, lanes: Collection[int]) -> None:
    loader.keep(lanes)


def _promote(loader: SourceLoader) -> None:
    loader.cache.standby = False


def _status(loader: SourceLoader) -> dict[str, Any]:
    return {
        "source": loader.spec.name,
        "cached_bytes": loader.cache.bytes,
        "cached_samples": len(loader.cache),
        "rereads": loader.num_rereads,
        "skip_reasons": list(loader.skip_reasons),
        "fillers": len(loader.filled),
        "open_lanes": loader.num_open_lanes,
    }


_CALLS: dict[str, Callable[..., dict[str, Any] | None]] = {
    "describe": _describe,
    "keep": _keep,
    "promote": _promote,
    "serve": _serve,
    "serve_items": _serve_items,
}
