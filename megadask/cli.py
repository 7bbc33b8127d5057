"""The ``megadask`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import megadask as md

#: As `megadask.planner.balance.Method`, which takes a second to import.
_METHODS = ("assignment", "greedy", "karmarkar_karp", "none")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code of the process."""
    parser, demo_parser = _parsers()
    options = parser.parse_args(argv)
    try:
        return _demo(options, demo_parser)
    except md.errors.MegaDaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while modules are imported
        return 130


def _demo(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from megadask.demo.run import Demo, run

    try:
        demo = Demo(
            steps=options.steps,
            dp=options.dp,
            seq_len=options.seq_len,
            balance=options.balance,
            workdir=options.workdir,
            keep=options.keep,
        )
        demo.check_workdir()
    except md.errors.ConfigError as error:
        parser.error(str(error))
    return run(demo)


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of the command line, and that of the demo's part of it."""
    parser = _Parser(prog="megadask", description="Multisource data loading for training, on Dask.")
    parser.add_argument("--version", action="version", version=f"megadask {md.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small model on a local cluster, end to end",
        description=(
            "Build a corpus from what is installed with this Python, serve it from a local Dask "
            "cluster, and train a small transformer on it in data-parallel processes: first with "
            "samples as they arrive, then the same samples balanced over the ranks. Ends with a "
            "table; the exit status is 0 only if every planned sample was delivered once."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--steps", type=int, default=20, help="steps of each of the two phases")
    demo.add_argument("--dp", type=int, default=2, help="data-parallel trainer processes")
    demo.add_argument("--seq-len", type=int, default=8192, help="tokens of a packed sequence")
    demo.add_argument(
        "--balance",
        choices=_METHODS,
        default="assignment",
        help="placement to compare with arrival order; none runs arrival order alone",
    )
    demo.add_argument(
        "--workdir",
        type=Path,
        default=Path("demo-data"),
        help="folder for the corpus, which is built once and stays there",
    )
    demo.add_argument(
        "--keep",
        action="store_true",
        help="keep the trainers' reports and logs in the workdir, too",
    )
    return parser, demo


if __name__ == "__main__":
    sys.exit(main())
