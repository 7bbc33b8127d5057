"""Uses what it has opened in a fork: ``python -m tests.megadask.helpers.forked WHAT ADDRESS NAME``.

WHAT is ``loader`` or ``service``. For each use the fork prints how many seconds it took, and the
error or ``nothing``; then the parent goes on, and prints what it got.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from distributed import Client

import megadask as md
from tests.megadask.helpers.restore import make

Uses = dict[str, Callable[[], Any]]


def use(uses: Uses) -> None:
    for what, call in uses.items():
        begin = time.monotonic()
        try:
            call()
            outcome = "nothing"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        print("fork", what, f"{time.monotonic() - begin:.1f}", outcome, flush=True)


def uses_of_loader(loader: md.Loader, validation: md.Loader) -> Uses:
    batches = iter(loader)
    next(batches)
    step = iter(next(loader.steps()))
    begun = iter(validation)
    next(begun)
    return {
        "iter": lambda: next(iter(loader)),
        "iter_begun": lambda: next(batches),
        "steps": lambda: next(loader.steps()),
        "step_begun": lambda: next(step),
        "iterators": lambda: loader.iterators(2),
        "load_state_dict": lambda: loader.load_state_dict(loader.state_dict()),
        "pass": lambda: next(iter(validation)),
        "pass_begun": lambda: next(begun),
        "close": loader.close,
        "close_again": loader.close,
        "exit": lambda: validation.__exit__(None, None, None),
        "close_client": lambda: loader._client.close(),
    }


def uses_of_service(service: md.Service) -> Uses:
    return {
        "audit": service.audit,
        "stats": service.stats,
        "spread": service.spread,
        "scale": lambda: service.scale({"a": 1}),
        "set_mixture": lambda: service.set_mixture({"a": 1}),
        "reshard": lambda: service.reshard(md.ClientPlaceTree()),
        "retire": lambda: service.retire("0"),
        "close": service.close,
        "close_again": service.close,
        "exit": lambda: service.__exit__(None, None, None),
    }


def in_fork(uses: Uses, end: Callable[[int], Any]) -> None:
    """Use these in a fork, and wait for its end."""
    pid = os.fork()
    if pid == 0:
        use(uses)
        end(0)
    _, status = os.waitpid(pid, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)


def as_trainer(address: str, name: str) -> None:
    with (
        md.connect(address, name, rank=0, timeout=30) as loader,
        md.connect(address, name, pipeline="val", rank=0, timeout=30) as validation,
    ):
        in_fork(uses_of_loader(loader, validation), sys.exit)  # as programs end
        print("parent", sum(1 for _ in loader), len(list(validation)), flush=True)


def as_driver(address: str, name: str) -> None:
    with (
        Client(address, set_as_default=False) as client,
        md.serve(make(dp=1), client, name=name) as service,
    ):
        in_fork(uses_of_service(service), os._exit)  # Dask's own client would wait
        with md.connect(address, name, rank=0, timeout=30) as loader:
            print("parent", sum(1 for _ in loader), service.audit()["ok"], flush=True)


if __name__ == "__main__":
    {"loader": as_trainer, "service": as_driver}[sys.argv[1]](*sys.argv[2:])
