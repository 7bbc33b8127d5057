"""A fork of a trainer or driver is told at once that what its parent opened is not its own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from distributed import Client

import megadask as md
from tests.megadask.helpers.processes import Process, module
from tests.megadask.helpers.restore import make

pytestmark = pytest.mark.timeout(150)

#: What a fork may do: nothing happens.
ALLOWED = {"close", "close_again", "exit", "close_client"}


def uses_in_fork(process: Process) -> dict[str, tuple[float, str]]:
    """Return how long each use took, and what came of it."""
    seen = {}
    while not (line := process.wait_for("fork", "ended")).startswith("ended"):
        _, what, seconds, outcome = line.split(maxsplit=3)
        seen[what] = (float(seconds), outcome)
    assert line == "ended 0"
    return seen


def check(seen: dict[str, tuple[float, str]], belongs: str, remedy: str) -> None:
    assert ALLOWED & set(seen)
    for what, (seconds, outcome) in seen.items():
        assert seconds < 5, (what, seconds)
        if what in ALLOWED:
            assert outcome == "nothing", what
        else:
            assert re.search(rf"ServiceError: {belongs} belongs to another process", outcome), what
            assert re.search(r"got process \d+, a fork; expected process \d+", outcome), what
            assert remedy in outcome, what


def test_a_loader_in_a_fork(client: Client, name: str) -> None:
    pipelines = {"train": make(dp=1), "val": replace(make(dp=1), restart=True)}
    with md.serve(pipelines, client, name=name) as service:
        with module("forked", "loader", service.address, name) as process:
            seen = uses_in_fork(process)
            _, trained, validated = process.wait_for("parent").split()
        check(seen, "this loader of rank 0", "megadask.connect() in this process")
        assert {"iter", "iter_begun", "step_begun", "iterators", "pass_begun"} <= set(seen)
        audit = service.audit()
        assert audit["ok"]
        assert audit["total"]["samples"]["unread"] == 0
    assert int(trained) == int(validated) - 1  # the parent had one batch of training before


def test_a_service_in_a_fork(client: Client, name: str) -> None:
    with module("forked", "service", client.scheduler.address, name) as process:
        seen = uses_in_fork(process)
        line = process.wait_for("parent")
    check(seen, f"service '{name}'", "in the process that served it")
    assert re.fullmatch(r"parent [1-9]\d* True", line)
