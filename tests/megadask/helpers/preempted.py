"""A trainer, or a driver, in a process of its own that SIGTERM ends as a job's scheduler would.

``python -m tests.megadask.helpers.preempted trainer ADDRESS SERVICE RANK FILE [MORE]`` reads until
the signal comes, and saves what it saw and its states in FILE. ``... driver ADDRESS SERVICE``
serves until then.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from distributed import Client

import megadask as md
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import see


class Terminated(BaseException):
    """SIGTERM came."""


def terminate(*_: int | FrameType | None) -> None:
    """End the process as ``with`` blocks see it; later signals change nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def trainer(address: str, service: str, rank: str, file: str) -> None:
    """Save the state in the handler, after it, and after the loader was closed."""
    states: list[Any] = []
    seen: list[Any] = []
    loader = md.connect(address, service, rank=int(rank), timeout=60)

    def handle(*_: int | FrameType | None) -> None:
        states.append(loader.state_dict())
        terminate()

    signal.signal(signal.SIGTERM, handle)
    try:
        for batch in loader:
            seen.append([see(batch).step, *map(list, see(batch).spans)])
            print(len(seen), flush=True)
            if len(seen) == 6:
                signal.pause()  # the signal comes while it computes, as it mostly does
    except Terminated:
        states.append(loader.state_dict())
    loader.close()
    states.append(loader.state_dict())
    Path(file).write_text(json.dumps({"seen": seen, "states": states}))


def driver(address: str, service: str) -> None:
    """Serve until the signal comes; `Service.__exit__` closes in order."""
    signal.signal(signal.SIGTERM, terminate)
    try:
        with (
            Client(address, set_as_default=False) as client,
            md.serve(make(), client, name=service),
        ):
            print("serving", flush=True)
            while True:
                signal.pause()
    except Terminated:
        print("ended", flush=True)


if __name__ == "__main__":
    {"trainer": trainer, "driver": driver}[sys.argv[1]](*sys.argv[2:])
