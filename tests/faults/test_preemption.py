"""SIGTERM: the trainers' states outlive it, services end in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import megadask as md
from tests.conftest import wait_until
from tests.faults.helpers import WAIT_S, assert_nothing_is_left_on
from tests.megadask.helpers.ranks import Ranks, connect, run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, merge, spans_by_step, take

pytestmark = pytest.mark.timeout(150)

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process of `helpers.preempted`; all are killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.megadask.helpers.preempted", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], line: str) -> None:
    """Wait for a line that a process prints."""
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
    raise AssertionError(f"the process ended without {line!r}")


def test_a_trainer_that_is_preempted_has_its_state(
    local_client: Client, name: str, start: Start, tmp_path: Path, whole: list[list[Seen]]
) -> None:
    """In the signal's handler, behind it, and after close; and what it saw is what it says."""
    files = [tmp_path / f"{rank}.json" for rank in range(2)]
    with md.serve(make(), local_client, name=name) as service:
        trainers = [
            start("trainer", service.address, name, rank, file) for rank, file in enumerate(files)
        ]
        for trainer in trainers:
            read_until(trainer, "6")
        for trainer in trainers:
            trainer.send_signal(signal.SIGTERM)
        assert [trainer.wait(WAIT_S) for trainer in trainers] == [0, 0]
        assert service.audit()["ok"]
        assert service.stats()["trainers"] == {}
    saved = [json.loads(file.read_text()) for file in files]
    states = [state for one in saved for state in one["states"]]
    assert len(states) == 6
    assert all(state == states[0] for state in states)
    seen: dict[int, list[Any]] = {}
    for one in saved:
        for step, *spans in one["seen"]:
            seen.setdefault(step, []).extend(map(tuple, spans))
    with md.serve(make(), local_client, name=name, resume=states[0]) as service:
        rest = run(service, drain)
    assert merge(seen, spans_by_step(rest)) == spans_by_step(whole)


def test_a_driver_that_is_preempted_closes_its_service(
    local_client: Client, name: str, start: Start, whole: list[list[Seen]]
) -> None:
    """The trainers get a named error, and their states still hold."""
    driver = start("driver", local_client.scheduler.address, name)
    read_until(driver, "serving")
    address = local_client.scheduler.address
    loaders = [md.connect(address, name, rank=rank, timeout=WAIT_S) for rank in range(2)]
    first = Ranks([partial(take, loader, 5) for loader in loaders]).results()
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(WAIT_S) == 0
    read_until(driver, "ended")
    outcomes = Ranks([partial(drain, loader) for loader in loaders]).outcomes()
    for error in outcomes:
        assert isinstance(error, md.errors.ClosedError)
        assert "the driver closed it" in str(error)
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    assert states[0] == states[1]
    last = first[0][-1]
    assert (states[0]["step"], states[0]["microbatch"]) == (last.step, last.microbatch + 1)
    assert_nothing_is_left_on(local_client)
    with md.serve(make(), local_client, name=name, resume=states[0]) as service:
        rest = run(service, drain)
    assert [[*a, *b] for a, b in zip(first, rest, strict=True)] == whole


def test_what_was_acknowledged_and_not_saved_comes_again(
    local_client: Client, name: str, tmp_path: Path, whole: list[list[Seen]]
) -> None:
    """A crash between acknowledgements and the model's checkpoint: the model's state wins."""
    checkpoint = str(tmp_path / "run")
    with md.serve(make(), local_client, name=name, checkpoint=checkpoint) as service:
        loaders = [connect(service, rank) for rank in range(2)]
        Ranks([partial(take, loader, 4) for loader in loaders]).results()
        saved = json.dumps(loaders[0].state_dict())  # with the model
        Ranks([partial(take, loader, 9) for loader in loaders]).results()
        for loader in loaders:
            loader.close()  # acknowledges: 13 batches, of which the model knows four

        def low() -> tuple[int, ...]:
            return min(map(tuple, service.stats()["watermarks"].values()))

        assert wait_until(lambda: low() > (2, 0))
    state = json.loads(saved)
    for again in range(2):  # and the job may crash again before it has saved anything new
        with md.serve(
            make(), local_client, name=name, checkpoint=checkpoint, resume=state
        ) as service:
            count = 7 if again == 0 else len(whole[0]) - 4
            ranks = run(service, lambda loader, count=count: take(loader, count))
            assert service.audit()["ok"]
        assert ranks == [seen[4 : 4 + count] for seen in whole]
