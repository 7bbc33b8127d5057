"""The ``megadask`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import megadask as md
from megadask.cli import index, look, simulate, verify_resume

#: As `megadask.planner.balance.Method`, which takes a second to import.
_METHODS = ("assignment", "greedy", "karmarkar_karp", "none")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code of the process."""
    parser, commands = parsers()
    options = parser.parse_args(argv)
    try:
        runs = {
            "demo": _demo,
            "index": index.run,
            "look": look.run,
            "simulate": simulate.run,
            "verify-resume": verify_resume.run,
        }
        run = runs[options.command]
        return run(options, commands[options.command])
    except (md.errors.MegaDaskError, OSError) as error:
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


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and those of its commands by name."""
    parser = _Parser(prog="megadask", description="Multisource data loading for training, on Dask.")
    parser.add_argument("--version", action="version", version=f"megadask {md.__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small model on a local cluster, end to end",
        description=(
            "Build a corpus from what is installed with this Python, serve it from a local Dask "
            "cluster, and train a small transformer on it in data-parallel processes: first with "
            "samples as they arrive, then the same samples balanced over the ranks. Ends with a "
            "table; the exit status is 0 only if every planned sample was delivered once."
        ),
        formatter_class=_Help,
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
    simulation = commands.add_parser(
        "simulate",
        help="what balancing would gain on lengths of your own",
        description=(
            "Plan steps from the lengths of your documents, without a cluster and without "
            "training anything, and say how long they would take: in arrival order, balanced, and "
            "at best. The exit status is 2 for bad options and 1 for bad data."
        ),
        formatter_class=_Help,
    )
    simulate.add_options(simulation, _METHODS)
    indexing = commands.add_parser(
        "index",
        help="read sources once, so that steps are planned without their payload",
        description=(
            "Read sources through their transforms and write down what planning needs to know of "
            "every record: an index, for Source(index=). The exit status is 2 for bad options and "
            "1 for bad data."
        ),
        formatter_class=_Help,
    )
    index.add_options(indexing)
    looking = commands.add_parser(
        "look",
        help="what is in data: lengths, samples, records that cannot be read",
        description=(
            "Read some records of files, or of the sources of a pipeline, as a run would, without "
            "a cluster, and print how many tokens they have, what was skipped and why, and a few "
            "samples. The exit status is 1 where nothing could be read, and 2 for bad options."
        ),
        formatter_class=_Help,
    )
    look.add_options(looking)
    verifying = commands.add_parser(
        "verify-resume",
        help="whether a pipeline of yours resumes exactly",
        description=(
            "Run a pipeline on local clusters: undisturbed, and again stopped at several places "
            "and taken up on a new cluster, with other numbers of loaders, constructors and ranks. "
            "The exit status is 0 if the same samples came in every step, 1 if not, 2 for bad "
            "options."
        ),
        formatter_class=_Help,
    )
    verify_resume.add_options(verifying)
    return parser, {
        "demo": demo,
        "index": indexing,
        "look": looking,
        "simulate": simulation,
        "verify-resume": verifying,
    }
