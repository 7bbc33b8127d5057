"""A trainer's client of Dask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed import Client
from distributed.security import Security

from megadask.planner.errors import ConfigError
from megadask.scheduling.errors import DeadlineError
from megadask.scheduling.process import Process


def open_client(address: str, *, timeout_s: float, security: Security | None) -> Client:
    """Return a client of the scheduler at an address, or of one whose scheduler file is there.

    Raises
    ------
    ConfigError
        It is neither an address nor a file.
    DeadlineError
        The scheduler does not answer.
    """
    target = {"address": address}
    if Path(address).is_file():
        target = {"scheduler_file": address}
    elif "://" not in address and ":" not in address:
        raise ConfigError(
            "connect(address)",
            got=repr(address),
            limit="an address such as tcp://host:port, or the path of a scheduler file",
        )
    try:
        return _Client(
            **target,
            timeout=timeout_s,
            direct_to_workers=True,
            set_as_default=False,
            security=security,
            name="megadask-trainer",
        )
    except (OSError, TimeoutError) as error:
        raise DeadlineError(
            "the Dask scheduler does not answer",
            got=f"{address}: {type(error).__name__}: {error}",
            limit=f"a connection within {timeout_s:g} s",
            remedy="Check the address, and that the scheduler is running.",
        ) from error


class _Client(Client):
    """Dask's own leaves a thread behind where the scheduler does not answer.

    And in a fork of its process, where it closes as it ends, it waits for a thread that is not
    there.
    """

    def __init__(self, **options: Any) -> None:
        self._process = Process()
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def start(self, **options: Any) -> None:
        try:
            super().start(**options)  # type: ignore[no-untyped-call]
        except BaseException:
            self._loop_runner.stop()
            raise

    def close(self, *arguments: Any) -> Any:
        if self._process.is_this:
            return super().close(*arguments)  # type: ignore[no-untyped-call]
        return None
