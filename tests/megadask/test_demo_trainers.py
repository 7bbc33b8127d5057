"""Trainer processes are listened to, the first failure is told, and none is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megadask.demo.trainers import TrainerError, Trainers
from megadask.scheduling.errors import DeadlineError

#: What rank 0 and rank 1 run in place of a trainer.
PRELUDE = """
import json, os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
def tell(event, **fields):
    print(json.dumps({"event": event, "rank": rank, **fields}), flush=True)
"""


def trainers(tmp_path: Path, code: str, *, silence_s: float = 30.0) -> Trainers:
    program = (sys.executable, "-c", PRELUDE + code)
    return Trainers(2, [], tmp_path, silence_s=silence_s, program=program)


def all_ended(group: Trainers) -> bool:
    return all(trainer.process.poll() is not None for trainer in group._trainers)


def test_what_they_say_is_heard_until_they_end(tmp_path: Path) -> None:
    code = "print('a library prints'); print('[1]'); tell('step', step=3)"
    with trainers(tmp_path, code) as group:
        events = list(group.events())
    assert sorted(event["rank"] for event in events) == [0, 1]
    assert {event["step"] for event in events} == {3}
    assert all_ended(group)


def test_the_failure_that_came_first_is_told(tmp_path: Path) -> None:
    # Rank 0 speaks and ends first, of what rank 1 did before.
    code = f"""
flag = pathlib.Path({str(tmp_path / "flag")!r})
print("output of rank", rank, file=sys.stderr)
if rank == 0:
    tell("error", time_s=2.0, what="reset by peer")
    flag.touch()
else:
    while not flag.exists(): time.sleep(0.01)
    tell("error", time_s=1.0, what="ValueError: the cause")
sys.exit(1)
"""
    with trainers(tmp_path, code) as group, pytest.raises(TrainerError) as caught:
        list(group.events())
    assert "rank 1 failed; got exit status 1: ValueError: the cause" in str(caught.value)
    assert caught.value.output == "output of rank 1\n"
    assert all_ended(group)


def test_who_was_killed_did_not_fail_because_of_another_one(tmp_path: Path) -> None:
    code = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
tell("error", time_s=1.0, what="reset by peer")
sys.exit(1)
"""
    with trainers(tmp_path, code) as group, pytest.raises(TrainerError) as caught:
        list(group.events())
    assert "rank 1 failed; got SIGKILL" in str(caught.value)


def test_silence_is_an_error_and_nobody_is_left_even_if_deaf(tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("ready")
time.sleep(600)
"""
    heard = []
    with (
        trainers(tmp_path, code, silence_s=3.0) as group,
        pytest.raises(DeadlineError, match=r"silence of ranks \[0, 1\]"),
    ):
        heard.extend(group.events())
    assert all_ended(group)


def test_their_standard_input_ends_with_us(tmp_path: Path) -> None:
    code = "tell('ready')\nassert os.read(0, 1) == b''\ntell('eof')"
    with trainers(tmp_path, code) as group:
        events = group.events()
        assert [next(events)["event"] for _ in range(2)] == ["ready", "ready"]
        for trainer in group._trainers:
            assert trainer.process.stdin is not None
            trainer.process.stdin.close()
        assert [event["event"] for event in events] == ["eof", "eof"]
