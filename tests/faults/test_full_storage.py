"""Storage of the journal that is full for a while, as ranks see it."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import megadask as md
from megadask.scheduling.journal import Journal
from tests.conftest import wait_until
from tests.faults.helpers import WAIT_S
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain, see

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, there is no space left."""
    is_full = threading.Event()
    put = Journal._put

    def refuse(self: Journal, name: str, data: bytes) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device", name)
        put(self, name, data)

    monkeypatch.setattr(Journal, "_put", refuse)
    return is_full


def events(service: md.Service) -> list[str]:
    return [one["event"] for one in service.stats()["events"]]


def test_what_is_committed_is_delivered_meanwhile(
    local_client: Client,
    name: str,
    whole: list[list[Seen]],
    full: threading.Event,
    tmp_path: Path,
) -> None:
    """And states can be saved, also those that were read while nothing could be written."""
    checkpoint = str(tmp_path / "run")
    states: list[dict[str, Any]] = []
    with md.serve(make(), local_client, name=name, checkpoint=checkpoint) as service:

        def body(loader: md.Loader) -> list[Seen]:
            batches = iter(loader)
            seen = [see(next(batches)) for _ in range(3)]
            if loader.rank == 0:
                assert wait_until(lambda: service.stats()["next_step"] > seen[-1].step + 1, WAIT_S)
                full.set()
                seen += [see(next(batches))]
                states.append(json.loads(json.dumps(loader.state_dict())))
                assert wait_until(lambda: "journal fails" in events(service), WAIT_S)
                assert service.stats()["closed"] is None
                full.clear()
            return [*seen, *map(see, batches)]

        assert run(service, body, seconds=2 * WAIT_S) == whole
        assert events(service) == ["journal fails", "journal works again"]
        assert service.audit()["ok"]
    with md.serve(make(), local_client, name=name, checkpoint=checkpoint, resume=states[0]) as one:
        assert run(one, drain) == [rank[4:] for rank in whole]


def test_the_error_names_the_storage_when_it_stays_full(
    local_client: Client, name: str, full: threading.Event, tmp_path: Path
) -> None:
    limits = md.Limits(journal_s=0.5)
    states: list[dict[str, Any]] = []
    with md.serve(
        make(), local_client, name=name, limits=limits, checkpoint=str(tmp_path / "run")
    ) as service:

        def body(loader: md.Loader) -> None:
            for number, _ in enumerate(loader):
                if number == 2:
                    full.set()
                    states.append(loader.state_dict())

        with pytest.raises(md.errors.JournalError, match=r"No space left.*within 0.5 s"):
            run(service, body, seconds=2 * WAIT_S)
    full.clear()
    with md.serve(make(), local_client, name=name, resume=states[0]) as service:
        assert all(run(service, drain))
