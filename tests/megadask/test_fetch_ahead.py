"""What the planner has sources read before a step needs it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

import megadask as md
from tests.fakes import MemoryReader

WINDOW, LEAD, PER_STEP, ALL = 4, 1, 2, 100
#: Steps 0 to LEAD are planned before anybody takes one. Beyond them lie the window, what the next
#: step takes, and what two more do.
READ = (1 + LEAD) * PER_STEP + WINDOW + 3 * PER_STEP

seen: list[int] = []
is_ahead = threading.Event()


def transform(record: dict[str, int]) -> dict[str, Any]:
    """Note what is read, in the process of the test."""
    seen.append(record["n"])
    if len(seen) == READ:
        is_ahead.set()
    return {"tokens": np.full(4, record["n"])}


def test_it_reads_ahead_while_it_may_not_plan(
    local_cluster: LocalCluster, local_client: Client, name: str
) -> None:
    pipeline = md.Pipeline(
        sources=[md.Source("numbers", MemoryReader([[{"n": n} for n in range(ALL)]]), transform)],
        batching=md.Packed(seq_len=4, global_batch=PER_STEP),
        topology=md.ClientPlaceTree(),
        window=WINDOW,
        epochs=1,
    )
    limits = md.Limits(lead_steps=LEAD)
    with md.serve(pipeline, local_client, name=name, limits=limits) as service:
        assert is_ahead.wait(60), f"{len(seen)} of {READ} were read"
        with md.connect(service.address, name) as loader:
            given = [n for batch in loader for n in batch["tokens"][:, 0].tolist()]
    assert sorted(given) == sorted(seen) == list(range(ALL))  # each once
