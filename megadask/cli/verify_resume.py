"""``megadask verify-resume``: whether a pipeline resumes exactly."""

from __future__ import annotations

import argparse
import os
import sys

import megadask as md


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add(
        "pipeline",
        metavar="MODULE:NAME",
        help="a pipeline, or a function that returns one; or the path of a YAML file",
    )
    add("--steps", type=_count, default=8, help="steps before the last stop")
    add("--at", type=_count, help="the step to stop in and before; half of the steps")
    add(
        "--dp",
        type=_counts,
        metavar="N[,N...]",
        help="data-parallel sizes to resume on, besides the pipeline's own; half and twice that",
    )
    add("--processes", action="store_true", help="workers are processes of their own; slower")
    add("--timeout", type=float, default=60.0, help="longest wait for a batch, in seconds")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Verify and print the report; return the exit code."""
    import logging

    from rich.console import Console

    if options.at is not None and options.at > options.steps:
        parser.error(f"--at: got {options.at}, expected at most --steps {options.steps}")
    logger = logging.getLogger("megadask")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # errors are findings here
    try:
        report = md.verify_resume(
            _pipeline(options.pipeline),
            steps=options.steps,
            at=options.at,
            dp=options.dp,
            processes=options.processes,
            timeout=options.timeout,
        )
    finally:
        logger.setLevel(level)
    Console(highlight=False, markup=False, soft_wrap=True).print(str(report))
    return 0 if report.ok else 1


def _pipeline(name: str) -> md.Pipeline:
    from megadask.cli.sources import imported

    if name.endswith((".yaml", ".yml")):
        return md.Pipeline.from_yaml(name)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = imported(name)
    if callable(found) and not isinstance(found, type | md.Pipeline):
        found = found()
    if not isinstance(found, md.Pipeline):
        raise md.errors.ConfigError(
            f"{name} is nothing to verify",
            got=type(found).__name__,
            limit="a Pipeline, or a function that returns one",
        )
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected an integer >= 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]
