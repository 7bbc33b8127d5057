"""`megadask verify-resume`: good pipelines pass, and what cannot be resumed is caught and named."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megadask as md
from megadask import cli
from megadask.resuming.report import (
    Reading,
    ResumeCase,
    ResumeReport,
    Taken,
    differing_sources,
    join,
)
from tests.megadask.helpers import verified

pytestmark = pytest.mark.timeout(150)

ROOT = Path(__file__).resolve().parents[2]


def test_a_good_pipeline_by_its_command() -> None:
    """In a process of its own, as users run it."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megadask", "verify-resume", f"{verified.__name__}:good"),
            *("--steps", "4", "--dp", "4"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == (
        "resumes exactly: 6 runs beside an undisturbed one of 6 steps (2 behind the last stop)"
    )
    stops = [line.partition("  ")[0] for line in lines[2:8]]
    assert stops == [s for s in ("inside a step", "between steps", "after the last") for _ in "12"]
    assert sum("dp=4" in line for line in lines) == 3
    # Tensors are compared where the topology is the same: all of them.
    assert sum("digests" in line for line in lines) == 3
    assert all(line.endswith("same") for line in lines[2:8])


def test_a_pipeline_that_ends_and_one_that_draws_from_rng() -> None:
    for made in (verified.short(), verified.random_with_rng()):
        report = md.verify_resume(made, steps=20 if made.epochs else 3, dp=[])
        assert report.ok, str(report)
        assert report.ended == (made.epochs is not None)
        assert len(report.cases) == 3
        assert all(case.num_digests for case in report.cases)


@pytest.mark.parametrize("what", ["random_contents", "random_lengths"])
def test_a_transform_that_is_random_by_itself(what: str) -> None:
    report = md.verify_resume(getattr(verified, what)(), steps=2, dp=[])
    assert not report.ok
    assert list(report.unsteady) == ["odd"]
    text = str(report)
    assert "source 'odd' does not read the same twice" in text
    assert "does NOT resume exactly" in text


def test_the_exit_status_is_1_where_something_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ResumeCase(
        stop="between steps", mark=(3, 0), topology="dp=2", loaders=1, constructors=1, problem="bad"
    )
    report = ResumeReport(num_steps=4, ended=False, cases=[case])
    asked: dict[str, Any] = {}

    def verify(pipeline: md.Pipeline, **options: Any) -> ResumeReport:
        asked.update(options)
        return report

    monkeypatch.setattr(md, "verify_resume", verify)
    path = f"{verified.__name__}:good"
    assert cli.main(["verify-resume", path, "--at", "3", "--dp", "2,4,8"]) == 1
    assert asked["dp"] == [2, 4, 8]
    assert "problem: bad" in capsys.readouterr().out
    report = replace(report, cases=[replace(case, problem="")])
    assert cli.main(["verify-resume", path]) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["tests:nothing_there"], 1, "nothing to import"),
        ([f"{verified.__name__}:DATA"], 1, "nothing to verify"),
        ([f"{verified.__name__}:good", "--at", "9"], 2, "--steps 8"),
        ([f"{verified.__name__}:good", "--dp", "2,x"], 2, "integer"),
        ([f"{verified.__name__}:good", "--dp", "3"], 1, "global_batch"),
    ],
)
def test_bad_options(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = cli.main(["verify-resume", *arguments])
    except SystemExit as stopped:
        found = int(stopped.code or 0)
    assert found == status
    assert says in capsys.readouterr().err


def test_a_pipeline_that_begins_anew_is_refused() -> None:
    made = replace(verified.short(), restart=True)
    with pytest.raises(md.errors.ConfigError, match="restart"):
        md.verify_resume(made)


# What is compared ---------------------------------------------------------------------------------


def taken(step: int, spans: list[tuple[Any, int, int]], contents: list[str], **more: Any) -> Taken:
    facts = {"bucket": 0, "microbatch": 0, "is_last": True, "digest": ""} | more
    return Taken(step=step, spans=tuple(spans), contents=tuple(contents), **facts)


ONE, TWO = ("a", 0, 0, 0), ("a", 0, 0, 1)


def test_ranks_of_one_bucket_count_once_and_parts_add_up() -> None:
    shared = taken(0, [(ONE, 0, 4)], ["x"])
    other = taken(0, [(TWO, 0, 4)], ["y"], bucket=1)
    empty = taken(0, [], [])
    reading = Reading(((shared,), (empty,), (other,)))
    assert reading.steps() == {0: [(ONE, 0, 4), (TWO, 0, 4)]}
    halves = [Reading(((shared,),)).steps(), Reading(((other,),)).steps()]
    assert join(halves) == reading.steps()
    assert join([*halves, halves[0]]) != reading.steps(), "what comes twice must not be hidden"


def test_a_sample_that_differs_names_its_source() -> None:
    whole = Reading(((taken(0, [(ONE, 0, 4), (TWO, 0, 4)], ["x", "y"]),),))
    assert differing_sources(whole, whole) == {}
    part = Reading(((taken(0, [(TWO, 0, 4)], ["y"]),),))
    assert differing_sources(whole, part) == {}
    for odd in (taken(0, [(TWO, 0, 4)], ["z"]), taken(0, [(TWO, 0, 3)], ["y"])):
        assert "position 1" in differing_sources(whole, Reading(((odd,),)))["a"]


def test_a_span_is_hashed_by_its_tokens_wherever_it_lies() -> None:
    def batch(first: int) -> dict[str, Any]:
        tokens = np.zeros((1, 8), np.int64)
        tokens[0, first : first + 3] = [5, 6, 7]
        ends = [0, first, first + 3] if first else [0, 3, 3]
        idents = [md.SampleId("pad", 0, 0, 0)] * bool(first) + [md.SampleId("a", 0, 0, 0)]
        return {
            "tokens": torch.from_numpy(tokens),
            "cu_seqlens": torch.tensor([ends]),
            "cu_seqlens_padded": torch.tensor([ends]),
            "sample_ids": idents,
            "spans": torch.tensor([[0, 3]] * len(idents)),
            "step": 0,
            "microbatch": 0,
            "is_last": True,
        }

    one, two = (Taken.of(batch(first), 0) for first in (0, 2))
    assert one.contents[-1] == two.contents[-1]
    assert one.digest != two.digest
