"""A cluster whose workers may die, and an undisturbed run to compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.conftest import make_cluster
from tests.faults.helpers import WAIT_S
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three workers, so that one holds loaders alone; nannies start a new one for each killed."""
    with make_cluster(processes=True, n_workers=3) as made:
        yield made


@pytest.fixture
def pids(client: Client) -> dict[str, int]:
    """The process of every worker by its address; all are there again after an earlier test."""
    client.wait_for_workers(3, timeout=WAIT_S)
    return client.run(os.getpid)


@pytest.fixture(scope="module")
def whole(local_client: Client) -> list[list[Seen]]:
    """What both ranks of `make` see where nothing happens."""
    with md.serve(make(), local_client, name="whole") as service:
        return run(service, drain)
