"""Run the ranks of a job in threads, each with a loader of its own, under a deadline."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import megadask as md
from megadask.service import Service

T = TypeVar("T")

#: Longest wait for a batch, and longest run of a job, unless a test says otherwise.
WAIT_S = 30.0
JOB_S = 60.0


class Ranks:
    """Threads of a job that were started; `results` waits for all of them."""

    def __init__(self, bodies: Sequence[Callable[[], Any]]) -> None:
        self._results: list[Any] = [None] * len(bodies)
        self._errors: list[BaseException | None] = [None] * len(bodies)
        self._threads = [
            threading.Thread(target=self._run, args=(n, body), name=f"rank-{n}", daemon=True)
            for n, body in enumerate(bodies)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, body: Callable[[], Any]) -> None:
        try:
            self._results[number] = body()
        except BaseException as error:
            self._errors[number] = error

    def join(self, seconds: float = JOB_S) -> None:
        """Wait for all ranks; fail with the stacks of those that hang."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [thread for thread in self._threads if thread.is_alive()]
        if hanging:
            frames = sys._current_frames()
            stacks = [
                f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident])[-6:])
                for thread in hanging
                if thread.ident in frames
            ]
            raise AssertionError(f"hang after {seconds:g} s\n" + "\n".join(stacks))

    def outcomes(self, seconds: float = JOB_S) -> list[Any]:
        """Return what each rank returned, or the error that it raised."""
        self.join(seconds)
        pairs = zip(self._results, self._errors, strict=True)
        return [result if error is None else error for result, error in pairs]

    def results(self, seconds: float = JOB_S) -> list[Any]:
        """Return what each rank returned; raise the first error."""
        self.join(seconds)
        for error in self._errors:
            if error is not None:
                raise error
        return self._results


def connect(service: Service, rank: int, **options: Any) -> md.Loader:
    """Connect one rank."""
    options = {"timeout": WAIT_S, **options}
    return md.connect(service.address, service.name, rank=rank, **options)


def world(service: Service, pipeline: str | None = None) -> int:
    """Return the number of ranks of a pipeline."""
    return service.pipelines[pipeline or "train"].topology.world_size


def start(
    service: Service,
    body: Callable[[md.Loader], T],
    *,
    ranks: Iterable[int] | None = None,
    **options: Any,
) -> Ranks:
    """Start ``body`` with the loader of every rank, which is closed after it."""

    def of(rank: int) -> Callable[[], T]:
        def run() -> T:
            with connect(service, rank, **options) as loader:
                return body(loader)

        return run

    chosen = range(world(service, options.get("pipeline"))) if ranks is None else ranks
    return Ranks([of(rank) for rank in chosen])


def run(
    service: Service,
    body: Callable[[md.Loader], T],
    *,
    ranks: Iterable[int] | None = None,
    seconds: float = JOB_S,
    **options: Any,
) -> list[T]:
    """Run ``body`` on every rank and return the results in the order of ranks."""
    return start(service, body, ranks=ranks, **options).results(seconds)
