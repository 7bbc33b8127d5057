"""A stage that begins long after the sources of the stage before have ended."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Client

import megadask as md
from tests.megadask.helpers.data import corpus, pipeline
from tests.megadask.helpers.faulty import drop_every_third
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import (
    drain,
    every_token,
    spans_by_step,
    take_steps,
    tokens_delivered,
)

pytestmark = pytest.mark.timeout(60)

DATA = corpus({"a": 40, "b": 40}, longest=100, seed=3)


def late(graph: md.DGraph) -> None:
    graph.mix(md.Schedule.stages({0: {"a": 1}, 10_000: {"b": 1}}))


def made(**options: Any) -> md.Pipeline:
    return pipeline(DATA, strategy=late, **options)


def test_the_run_goes_on_with_the_next_stage(local_client: Client, name: str) -> None:
    with md.serve(made(), local_client, name=name) as service:
        ranks = run(service, drain)
        audit = service.audit()
        mixtures = [step["mixture"] for step in service.stats()["steps"]]
    assert tokens_delivered(ranks) == every_token([*DATA["a"], *DATA["b"]])
    assert audit["ok"]
    assert audit["total"]["samples"]["unread"] == 0
    assert mixtures[0] == {"a": 1.0}
    assert mixtures[-1] == {"b": 1.0}
    assert len(mixtures) < 100


def test_a_state_behind_the_end_of_the_stage_is_resumed(local_client: Client, name: str) -> None:
    sources = {"transform": drop_every_third}
    with md.serve(made(sources=sources), local_client, name=name) as service:
        whole = spans_by_step(run(service, drain))
    last_of_a = max(step for step, spans in whole.items() if spans[0][0] == "a")
    with md.serve(made(sources=sources), local_client, name=name) as service:
        parts = run(
            service, lambda loader: (take_steps(loader, last_of_a + 1), loader.state_dict())
        )
    with md.serve(made(sources=sources), local_client, name=name, resume=parts[0][1]) as service:
        rest = spans_by_step(run(service, drain))
        assert service.audit()["ok"]
    assert {**spans_by_step([seen for seen, _ in parts]), **rest} == whole
    assert rest
