"""A driver in a process of its own: ``python -m tests.megadask.helpers.driver ADDRESS NAME``.

Serves on a cluster that is there, says so, and lives until its stdin closes. ``detached`` may
follow, or ``leased``: then it says often that it lives, and its lease is short.
"""

from __future__ import annotations

import sys

import dask
from distributed import Client

import megadask as md
from tests.megadask.helpers.restore import make


def main() -> None:
    address, name, *words = sys.argv[1:]
    limits = md.Limits()
    if "leased" in words:
        dask.config.set({"distributed.client.heartbeat": "200ms"})
        limits = md.Limits(lease_s=5.0)
    with Client(address, set_as_default=False) as client:
        try:
            md.serve(make(), client, name=name, limits=limits, detached="detached" in words)
        except Exception as error:
            print("error", type(error).__name__, str(error).replace("\n", " "), flush=True)
            return
        print("serving", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
