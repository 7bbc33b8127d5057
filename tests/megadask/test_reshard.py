"""Another topology in the middle of a run: the same steps, every sample once (rule 10)."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.conftest import wait_until
from tests.faults.helpers import record_of
from tests.megadask.helpers.ranks import connect, run, start
from tests.megadask.helpers.resharding import resharded
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import (
    Span,
    drain,
    every_token,
    merge,
    see,
    spans_by_step,
    tokens_delivered,
)

pytestmark = pytest.mark.timeout(150)
EVERY = every_token([row for rows in DATA.values() for row in rows], times=2)


@pytest.fixture(scope="module")
def undisturbed(local_client: Client) -> dict[int, list[Span]]:
    with md.serve(make(), local_client, name="undisturbed") as service:
        return spans_by_step(run(service, drain))


@pytest.mark.parametrize("dp", [4, 1])
def test_the_steps_stay_what_they_are(
    local_cluster: LocalCluster,
    local_client: Client,
    name: str,
    dp: int,
    undisturbed: dict[int, list[Span]],
) -> None:
    with md.serve(make(), local_client, name=name) as service:
        before, states, step = resharded(service, record_of(local_cluster, name), dp)
        after = run(service, drain)
        assert service.audit()["ok"]
    assert len(after) == dp
    assert all(state == states[0] for state in states)
    assert {batch.step for rank in before for batch in rank} == set(range(step))
    assert min(batch.step for rank in after for batch in rank) == step
    assert merge(spans_by_step(before), spans_by_step(after)) == undisturbed
    assert tokens_delivered([*before, *after]) == EVERY
    # The state in which the old topology ended resumes elsewhere, as any other.
    with md.serve(make(dp=2), local_client, name=name, resume=states[0]) as service:
        assert spans_by_step(run(service, drain)) == spans_by_step(after)


def test_a_rank_that_is_silent_changes_nothing(
    local_cluster: LocalCluster, local_client: Client, name: str, undisturbed: Any
) -> None:
    with md.serve(make(), local_client, name=name) as service:
        other = start(service, drain, ranks=[0])
        with connect(service, 1) as loader:
            first = see(next(iter(loader)))
            assert wait_until(lambda: record_of(local_cluster, name).watermarks[0] > (1, 0))
            with pytest.raises(md.errors.DeadlineError, match=r"goes on as before.*ranks \[1\]"):
                service.reshard(md.ClientPlaceTree(dp=4), timeout=0.5)
            assert record_of(local_cluster, name).generation == 1
            assert service.pipelines["train"].topology.dp == 2
            rest = drain(loader)
        assert spans_by_step([[first, *rest], *other.results()]) == undisturbed
        assert service.audit()["ok"]


def test_before_anything_was_read(local_client: Client, name: str, undisturbed: Any) -> None:
    with md.serve(make(), local_client, name=name) as service:
        assert service.reshard(md.ClientPlaceTree(dp=4)) == 0
        assert service.reshard(md.ClientPlaceTree(dp=1)) == 0
        assert spans_by_step(run(service, drain)) == undisturbed


def test_twice_in_a_run(
    local_cluster: LocalCluster, local_client: Client, name: str, undisturbed: Any
) -> None:
    with md.serve(make(), local_client, name=name) as service:
        parts = []
        for dp in (4, 2):
            parts += resharded(service, record_of(local_cluster, name), dp)[0]
        parts += run(service, drain)
    assert spans_by_step(parts) == undisturbed
    assert tokens_delivered(parts) == EVERY


def test_a_mixture_that_was_set_holds_on(
    local_cluster: LocalCluster, local_client: Client, name: str
) -> None:
    weights = {"a": 1.0, "c": 3.0}
    parts = []
    for dp in (2, 4):  # without a change, and with one
        with md.serve(make(), local_client, name=name) as service:
            service.set_mixture(weights, at_step=3)
            seen, _, _ = resharded(service, record_of(local_cluster, name), dp)
            parts.append(spans_by_step([*seen, *run(service, drain)]))
    assert parts[0] == parts[1]


def test_what_cannot_be_is_said_at_once(local_client: Client, name: str) -> None:
    with md.serve({"train": make(), "val": make(restart=True)}, local_client, name=name) as service:
        with pytest.raises(md.errors.ConfigError, match="global_batch"):
            service.reshard(md.ClientPlaceTree(dp=3))
        with pytest.raises(md.errors.ServiceError, match="begins anew with every pass"):
            service.reshard(md.ClientPlaceTree(dp=4), "val")
        with pytest.raises(md.errors.ConfigError, match="no such pipeline"):
            service.reshard(md.ClientPlaceTree(dp=4), "test")
        run(service, drain)
        with pytest.raises(md.errors.ServiceError, match="the data ends"):
            service.reshard(md.ClientPlaceTree(dp=4), timeout=5)


def test_a_loader_of_the_old_topology_stays_out(
    local_cluster: LocalCluster, local_client: Client, name: str
) -> None:
    """It is told so whenever it speaks, and disturbs nobody when it closes."""
    with md.serve(make(), local_client, name=name) as service:
        loader = connect(service, 0)
        assert service.reshard(md.ClientPlaceTree(dp=1)) == 0
        for _ in range(2):
            with pytest.raises(md.errors.ReshardedError):
                next(iter(loader))
        ranks = start(service, drain)
        loader.close()
        assert tokens_delivered(ranks.results()) == EVERY
