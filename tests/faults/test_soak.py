"""What `make soak` goes by: a schedule that a seed repeats, an account that notices."""

from __future__ import annotations

import importlib
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("benchmarks are not part of the wheel", allow_module_level=True)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An account of two ranks that were given two steps, of two microbatches each."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    made = importlib.import_module("soaking.account").Account()
    made.begin(0, 2)
    for step in range(2):
        for microbatch in range(2):
            for rank in range(2):
                made.note(rank, (step, microbatch), [span(step, microbatch, rank)])
    return made


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soaking.schedule")


def span(*place: int) -> tuple[str, int, int, int, int, int]:
    step, microbatch, rank = place
    return ("web", 0, 0, 4 * step + 2 * microbatch + rank, 0, 9)


def steps(count: int) -> dict[int, list[Any]]:
    return {
        step: [span(step, microbatch, rank) for microbatch in range(2) for rank in range(2)]
        for step in range(count)
    }


def test_a_seed_repeats_its_schedule(schedules: ModuleType) -> None:
    faults = list(islice(schedules.schedule(7), 64))
    assert faults == list(islice(schedules.schedule(7), 64))
    assert faults != list(islice(schedules.schedule(8), 64))
    assert {fault.kind for fault in faults[:16]} == set(get_args(schedules.Kind))


def test_a_whole_run_is_in_order(account: Any) -> None:
    assert account.compare(steps(2)) == []
    assert (account.lost, account.repeated, account.retaken) == (0, 0, 0)
    assert (account.num_steps, account.num_spans) == (2, 8)


def test_what_is_lost_is_noticed(account: Any) -> None:
    account.begin(2, 2)
    account.note(0, (2, 0), [span(2, 0, 0)])
    account.note(0, (2, 1), [span(2, 1, 0)])
    found = account.compare(steps(3))
    assert account.lost == 2
    assert any("ranks [0] alone" in line for line in found)
    assert any("2 spans are missing" in line for line in found)


def test_a_gap_is_noticed(account: Any) -> None:
    account.note(0, (2, 1), [])
    assert account.compare(steps(2))[0] == "rank 0 was given (2, 1) after (1, 1)"


def test_what_comes_twice_is_noticed(account: Any) -> None:
    account.begin(2, 1)
    account.note(0, (2, 0), [span(0, 0, 0)])
    found = account.compare({**steps(2), 2: [span(0, 0, 0)]})
    assert account.repeated == 1
    assert any("more than once" in line for line in found)


def test_a_successor_gets_the_same_again(account: Any) -> None:
    account.succeed(0)
    account.note(0, (1, 1), [span(1, 1, 0)])
    assert account.compare(steps(2)) == []
    assert account.retaken == 1
    account.succeed(0)
    account.note(0, (1, 1), [span(0, 0, 0)])
    assert account.compare(steps(2)) == ["rank 0 was given another (1, 1) the second time"]


def test_nobody_else_gets_anything_twice(account: Any) -> None:
    account._last.clear()
    account.note(1, (1, 1), [span(1, 1, 1)])
    assert account.compare(steps(2)) == ["rank 1 was given (1, 1) twice"]


def test_what_lies_behind_a_state_is_forgotten(account: Any) -> None:
    account.begin(1, 1)
    account.note(0, (1, 0), steps(2)[1])
    assert account.compare(steps(2)) == []
