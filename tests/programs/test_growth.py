"""Nothing grows with the steps of a run: neither what is counted nor what is kept in memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

import megadask as md
from megadask.demo.cluster import local_cluster
from tests.megadask.helpers.data import corpus, pipeline
from tests.megadask.helpers.footprint import Held, held_here
from tests.megadask.helpers.processes import module

pytestmark = pytest.mark.timeout(3600)

#: When everything is weighed. At the first time buffers and Dask's own logs are full.
FIRST, LAST = 3_000, 10_000
#: Less than an object every two steps, and than a kB a step: allocators do not come out even.
MOST_OBJECTS = (LAST - FIRST) // 2
MOST_BYTES = (LAST - FIRST) * 1000
WAIT_S = 1500.0

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two workers without Dask's profiler, which keeps what it saw in the last hour."""
    with local_cluster(2, tmp_path_factory.mktemp("cluster")) as made:
        yield made


def test_ten_thousand_steps_leave_nothing_behind(client: Client, tmp_path: Path, name: str) -> None:
    data = corpus({"a": 300, "b": 200, "c": 100}, longest=60)
    with ExitStack() as stack:
        service = stack.enter_context(
            md.serve(
                pipeline(data, seq_len=64, global_batch=2, epochs=None),
                client,
                name=name,
                checkpoint=str(tmp_path / "journal"),
            )
        )
        arguments = (service.address, name)
        trainers = [
            stack.enter_context(module("footprint", *arguments, str(rank))) for rank in range(2)
        ]
        for trainer in trainers:
            trainer.wait_for("connected", seconds=WAIT_S)

        def weigh(steps: int) -> dict[str, Held]:
            for trainer in trainers:
                trainer.say(str(steps))
            lines = [trainer.wait_for("held", seconds=WAIT_S) for trainer in trainers]
            found = {
                f"rank {rank}": Held(**json.loads(line.removeprefix("held ")))
                for rank, line in enumerate(lines)
            }
            return found | client.run(held_here) | {"scheduler": held_here()}

        first, last = weigh(FIRST), weigh(LAST - FIRST)
        for who, held in last.items():
            before = first[who]
            more = held.num_objects - before.num_objects
            grown = held.pss_bytes - before.pss_bytes
            told = f"{who}: {more:+,} objects, {grown / 1e6:+.1f} MB, {held.more_than(before)}"
            logger.info(told)
            assert more < MOST_OBJECTS, told
            assert grown < MOST_BYTES, told
        assert service.audit()["ok"]
