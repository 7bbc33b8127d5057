"""User code that raises whatever it is told to, on the workers of a cluster only."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

import megadask as md


class Locked(Exception):
    """Does not pickle."""

    def __init__(self) -> None:
        super().__init__("it has a lock")
        self.lock = threading.Lock()


def from_a_lock() -> Exception:
    """Return an error that pickles, and was raised from one that does not."""
    error = ValueError("of a lock")
    error.__cause__ = Locked()
    return error


#: What is raised, by the words that must reach the trainers.
ERRORS: dict[str, Any] = {
    "ClosedError: mine": lambda: md.errors.ClosedError("mine"),
    "StaleError: mine": lambda: md.errors.StaleError("mine"),
    "DeadlineError: mine": lambda: md.errors.DeadlineError("mine"),
    "SystemExit: 2": lambda: SystemExit(2),
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
    "GeneratorExit": GeneratorExit,
    "it has a lock": Locked,
    "of a lock": from_a_lock,
    "two of them": lambda: ExceptionGroup("two of them", [ValueError(1), KeyError(2)]),
}


@dataclass(frozen=True)
class Raises:
    """A transform, a cost, or a collate that raises."""

    words: str

    def __call__(self, table: Any) -> Any:
        """Raise on a worker; elsewhere, return what a cost does."""
        if multiprocessing.parent_process() is not None:
            raise ERRORS[self.words]()
        return np.ones(table.num_rows)
