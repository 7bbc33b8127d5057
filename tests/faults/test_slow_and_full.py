"""Disks that answer late, and disks that are full."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import megadask as md
from megadask.scheduling.journal import Journal
from tests.conftest import wait_until
from tests.faults.helpers import WAIT_S
from tests.megadask.helpers import faulty
from tests.megadask.helpers.data import pipeline, records
from tests.megadask.helpers.ranks import Ranks, connect, run, start
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import Seen, drain, every_token, take, tokens_delivered

pytestmark = pytest.mark.timeout(150)


def test_a_disk_that_answers_late_holds_nobody_else_up(
    client: Client, name: str, tmp_path: Path, whole: list[list[Seen]]
) -> None:
    """One source is not read for a while: its worker is not given up, other services go on."""
    gate = tmp_path / "gate"
    rows: list[Any] = [{**row, "gate": str(gate)} for row in records([20] * 30)]
    corpus = {"slow": rows, "b": DATA["b"]}
    slow = pipeline(corpus, sources={"transform": faulty.wait_for_file})
    limits = md.Limits(silent_s=5.0)
    with (
        md.serve(slow, client, name=f"{name}-slow", limits=limits) as late,
        md.serve(make(), client, name=name, limits=limits) as service,
    ):
        waiting = start(late, drain, timeout=WAIT_S)
        assert run(service, drain, timeout=WAIT_S) == whole
        assert all(thread.is_alive() for thread in waiting._threads)
        assert late.stats()["next_step"] == 0
        gate.touch()
        got = waiting.results(WAIT_S)
        assert not late.stats()["events"]
        assert late.audit()["ok"]
    assert tokens_delivered(got) == every_token([*rows, *DATA["b"]])


def test_a_full_disk_ends_the_run_and_no_state_is_lost(
    local_client: Client,
    name: str,
    tmp_path: Path,
    whole: list[list[Seen]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every trainer hears that the journal cannot be written, and can go on elsewhere."""
    path = str(tmp_path / "run")
    limits = md.Limits(lead_steps=1, journal_s=1.0)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with md.serve(make(), local_client, name=name, checkpoint=path, limits=limits) as service:
        loaders = [connect(service, rank, timeout=WAIT_S) for rank in range(2)]
        first = Ranks([partial(take, loader, 5) for loader in loaders]).results()
        monkeypatch.setattr(Journal, "_put", fail)
        rest: list[list[Seen]] = [[], []]

        def go_on(rank: int) -> None:
            for _ in range(1000):
                rest[rank] += take(loaders[rank], 1)

        for error in Ranks([partial(go_on, rank) for rank in range(2)]).outcomes(2 * WAIT_S):
            assert isinstance(error, md.errors.JournalError), repr(error)
            assert "No space left" in str(error)
            assert path in str(error)
        states = [loader.state_dict() for loader in loaders]
        for loader in loaders:
            loader.close()
        assert wait_until(lambda: service.stats()["closed"], WAIT_S)
    seen = [[*a, *b] for a, b in zip(first, rest, strict=True)]
    monkeypatch.undo()
    # They run apart, and one may be ahead; a job would save where all of them are.
    least = min(range(2), key=lambda rank: len(seen[rank]))
    count = len(seen[least])
    again = str(tmp_path / "again")
    with md.serve(
        make(), local_client, name=name, checkpoint=again, resume=states[least]
    ) as service:
        behind = run(service, drain)
        assert service.audit()["ok"]
    for rank in range(2):
        assert [*seen[rank][:count], *behind[rank]] == whole[rank]
