"""A trainer in a process: ``python -m tests.megadask.helpers.trainer ADDRESS NAME RANK``.

Prints one line for every batch, and the name of the error that ended it, if any. With a fourth
argument it waits for a line on stdin before every batch but the first.
"""

from __future__ import annotations

import sys

import megadask as md


def main() -> None:
    address, name, rank, *gated = sys.argv[1:]
    try:
        with md.connect(address, name, rank=int(rank), timeout=30) as loader:
            print("connected", flush=True)
            for batch in loader:
                print("batch", batch["step"], batch["microbatch"], flush=True)
                if gated and not sys.stdin.readline():
                    break
        print("end", flush=True)
    except Exception as error:
        print("error", type(error).__name__, str(error).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
