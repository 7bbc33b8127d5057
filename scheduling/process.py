"""Who is connected is a process; a fork of it has the memory, but neither threads nor a say."""

from __future__ import annotations

import os

from megadask.scheduling.errors import ServiceError


class Process:
    """The process that something was opened in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether it is the one that asks."""
        return os.getpid() == self._pid

    def check(self, what: str, remedy: str) -> None:
        """Raise ServiceError where something is used in another process than it was opened in."""
        if not self.is_this:
            raise ServiceError(
                f"{what} belongs to another process",
                got=f"process {os.getpid()}, a fork",
                limit=f"process {self._pid}, which opened it",
                remedy=remedy,
            )
