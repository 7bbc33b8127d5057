"""An undisturbed run, to compare with."""

from __future__ import annotations

import pytest
from distributed import Client

import megadask as md
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.seen import Seen, drain


@pytest.fixture(scope="module")
def whole(local_client: Client) -> list[list[Seen]]:
    """What both ranks of `make` see where nothing happens."""
    with md.serve(make(), local_client, name="whole") as service:
        return run(service, drain)
