"""A driver in a process of its own: ``python -m tests.megadask.helpers.driver ADDRESS NAME``.

Serves on a cluster that is there, says so, and lives until its stdin closes.
"""

from __future__ import annotations

import sys

from distributed import Client

import megadask as md
from tests.megadask.helpers.restore import make


def main() -> None:
    address, name, *detached = sys.argv[1:]
    with Client(address, set_as_default=False) as client:
        try:
            md.serve(make(), client, name=name, detached=bool(detached))
        except Exception as error:
            print("error", type(error).__name__, str(error).replace("\n", " "), flush=True)
            return
        print("serving", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
