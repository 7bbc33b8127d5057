"""The demo's table says what was measured, and does not hide what went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megadask.demo.report import (
    AUDIT_COUNTS,
    Ended,
    Phase,
    RankReport,
    StepRecord,
    problems,
    render,
    rows,
    summarize,
    verdict,
)
from megadask.planner.errors import StateError

SAMPLES = {"planned": 1200, "delivered": 1190, "repeated": 0, "lost": 0, "skipped": 2}


def make_record(step: int, rank: int, *, slow: float = 1.0, shift: float = 0.0) -> StepRecord:
    """Rank 1 computes ``slow`` times as long as rank 0, and rank 0 waits for it."""
    return StepRecord(
        step=step,
        loss=5.0 - step + shift,
        tokens=1000 + rank,
        loss_tokens=990,
        num_microbatches=1,
        planned_imbalance=1.25,
        wait_s=0.1,
        compute_s=9.0,
        compute_cpu_s=slow if rank else 1.0,
        step_s=100.0 if step == 0 else slow + 0.2,
    )


def make_phase(
    name: str,
    *,
    slow: float = 1.0,
    shift: float = 0.0,
    num_steps: tuple[int, int] = (4, 4),
    samples: Mapping[str, int] = SAMPLES,
    ok: bool = True,
    drawn: str = "digest",
    ended: Ended = "steps",
) -> Phase:
    ranks = tuple(
        RankReport(
            rank=rank,
            world_size=2,
            ended=ended,
            steps=tuple(
                make_record(step, rank, slow=slow, shift=shift) for step in range(num_steps[rank])
            ),
            loader={"wait_s": 0.4},
        )
        for rank in range(2)
    )
    memory = {"tcp://a": 150_000_000, "tcp://b": 250_000_000, "tcp://idle": 1}
    return Phase(
        name=name,
        ranks=ranks,
        audit={"total": {"samples": samples}, "ok": ok},
        stats={
            "loaders": ({"worker": "tcp://a"}, {"worker": "tcp://b"}, {"worker": "tcp://a"}),
            "workers": {address: {"memory_bytes": size} for address, size in memory.items()},
            "packing": {"efficiency": 0.9876},
            "steps": [{"step": step, "draw_digest": f"{drawn} {step}"} for step in range(6)],
        },
    )


def test_a_report_survives_json() -> None:
    for report in make_phase("a").ranks:
        assert RankReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(("key", "value"), [("version", 2), ("version", None), ("ended", "so")])
def test_a_report_of_another_kind_is_refused(key: str, value: Any) -> None:
    fields = json.loads(make_phase("a").ranks[0].to_json()) | {key: value}
    with pytest.raises(StateError, match="report"):
        RankReport.from_json(json.dumps(fields))


def test_a_summary_leaves_out_the_first_step_and_waiting_for_others() -> None:
    summary = summarize(make_phase("a", slow=3.0))
    assert summary.num_steps == 4
    assert (summary.loss_start, summary.loss_end) == (5.0, 2.0)
    assert summary.step_s == pytest.approx(3.2)
    assert summary.tokens_per_s == pytest.approx(2001 / 3.2)
    assert summary.planned_imbalance == 1.25
    assert summary.measured_imbalance == pytest.approx(3.0 / 2.0)
    assert summary.wait_share == pytest.approx(0.1 / 3.2)
    assert (summary.loader_bytes, summary.num_workers) == (400_000_000, 2)
    assert summary.audit == SAMPLES
    assert summary.num_pending == 10


def test_steps_that_only_some_ranks_made_do_not_count() -> None:
    phase = make_phase("a", num_steps=(4, 3))
    assert summarize(phase).num_steps == 3
    assert any("unequal" in problem for problem in problems([phase]))
    with pytest.raises(StateError, match="'a'"):
        summarize(make_phase("a", num_steps=(4, 0)))


def test_one_step_is_better_than_none() -> None:
    assert summarize(make_phase("a", num_steps=(1, 1))).step_s == 100.0


def test_the_table_has_a_column_a_phase() -> None:
    table = rows([make_phase("arrival order", slow=3.0), make_phase("assignment")])
    assert all(len(line) == 3 for line in table)
    assert table[0] == ("", "arrival order", "assignment")
    figures = {line[0]: line[1:] for line in table}
    assert figures["imbalance measured, max/mean"] == ("1.500", "1.000")
    assert figures["loader memory"] == ("400 MB", "400 MB")
    assert figures["packing, real/all tokens"] == ("0.988", "0.988")
    assert figures["samples planned"] == ("1,200", "1,200")
    assert {f"samples {name}" for name in AUDIT_COUNTS} <= figures.keys()
    lines = render(table).splitlines()
    assert lines[0].split() == ["arrival", "order", "assignment"]
    assert len(lines) == len(table) + 1
    assert len({len(line) for line in lines}) == 1


def test_the_verdict_compares() -> None:
    words = verdict(make_phase("assignment"), make_phase("arrival order", slow=3.0))
    assert words.startswith("assignment: the slowest rank computes 1.00 x the mean")
    assert "against 1.50 x in arrival order" in words
    assert "that alone would make them 1.50 x as fast" in words
    assert "By the clock they are 2.67 x as fast" in words
    assert "the same 4 steps" in words


def test_the_clock_says_the_same_in_the_table_and_below_it() -> None:
    """Also where a few steps took much longer than the others."""
    old, new = make_phase("arrival order", slow=3.0), make_phase("assignment")
    slow = replace(old.ranks[0].steps[2], step_s=40.0)
    steps = (*old.ranks[0].steps[:2], slow, *old.ranks[0].steps[3:])
    old = replace(old, ranks=(replace(old.ranks[0], steps=steps), old.ranks[1]))
    ratio = summarize(old).step_s / summarize(new).step_s
    assert f"By the clock they are {ratio:.2f} x as fast" in verdict(new, old)


def test_a_demo_that_held_its_promises_has_no_problems() -> None:
    assert problems([make_phase("a"), make_phase("b", slow=3.0, shift=1e-4)]) == []


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (make_phase("b", samples=SAMPLES | {"lost": 3}), "b: 3 samples lost"),
        (make_phase("b", samples=SAMPLES | {"repeated": 1}), "b: 1 samples repeated"),
        (make_phase("b", ok=False), "audit"),
        (make_phase("b", ended="signal"), "rank 0 was stopped"),
        (make_phase("b", drawn="other"), "step 3 of a and b was drawn differently"),
        (make_phase("b", shift=0.5), "differ by 0.5"),
        (make_phase("b", shift=float("nan")), "differ by nan"),
        (make_phase("b", shift=float("inf")), "b: a loss is not finite"),
    ],
)
def test_what_went_wrong_is_named(phase: Phase, words: str) -> None:
    assert any(words in problem for problem in problems([make_phase("a"), phase]))
