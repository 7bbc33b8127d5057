"""Scenarios that users of other loaders report: other ranks, lost workers and slow ranks.

`test_exactly_once` has those on resuming, epochs, disjoint ranks and caps.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.conftest import make_cluster, wait_until
from tests.faults.helpers import WAIT_S, record_of
from tests.megadask.helpers.data import pipeline, records
from tests.megadask.helpers.ranks import Ranks, connect, run
from tests.megadask.helpers.seen import (
    drain,
    every_token,
    see,
    spans_by_step,
    take_steps,
    tokens_delivered,
)

pytestmark = pytest.mark.timeout(150)

#: Every record fills one pack, so that a step has as many ids as packs.
EVEN = 32


def made(steps: int = 20, **options: Any) -> md.Pipeline:
    """Return a pipeline of steps of 16 packs from two sources."""
    data = {"a": records([EVEN] * 8 * steps), "b": records([EVEN] * 8 * steps, first=1000)}
    return pipeline(data, **{"seq_len": EVEN, "global_batch": 16, "micro_batch": 2, **options})


@pytest.fixture
def killable() -> Iterator[LocalCluster]:
    """Three workers, one of which is going to be killed."""
    with make_cluster(processes=True, n_workers=3) as cluster:
        yield cluster


@pytest.mark.parametrize("dp", [2, 8])
def test_scenario_4_changed_dp(local_client: Client, name: str, dp: int) -> None:
    """Saved on 4 ranks after 3 steps; on others, every step has the ids that it would have had."""
    four = made(7, topology=md.ClientPlaceTree(dp=4))
    with md.serve(four, local_client, name=f"{name}-4") as service:
        begun = run(service, lambda loader: (take_steps(loader, 3), loader.state_dict()))
        rest = run(service, drain)  # the same ranks go on
    whole = spans_by_step([[*seen, *more] for (seen, _), more in zip(begun, rest, strict=True)])
    assert len(whole) == 7
    changed = made(7, topology=md.ClientPlaceTree(dp=dp))
    with md.serve(changed, local_client, name=name, resume=begun[0][1]) as service:
        resumed = run(service, drain)
        assert service.audit()["ok"]
    assert spans_by_step(resumed) == {step: ids for step, ids in whole.items() if step >= 3}


def test_scenario_4_on_a_running_service_of_other_ranks(local_client: Client, name: str) -> None:
    """The state of 4 ranks may also be loaded by the loaders of 2."""
    with md.serve(
        made(7, topology=md.ClientPlaceTree(dp=4)), local_client, name=f"{name}-4"
    ) as service:
        begun = run(service, lambda loader: (take_steps(loader, 3), loader.state_dict()))
    with md.serve(made(7), local_client, name=name) as service:

        def body(loader: md.Loader) -> Any:
            whole = drain(loader)
            loader.load_state_dict(begun[0][1])
            return whole, drain(loader)

        results = run(service, body)
    whole = spans_by_step([seen for seen, _ in results])
    rest = spans_by_step([seen for _, seen in results])
    assert rest == {step: ids for step, ids in whole.items() if step >= 3}


def test_scenario_11_a_lost_source(killable: LocalCluster, name: str) -> None:
    """The worker of source b is killed in step 5 of 20; the ids are those of a quiet run."""
    # The planner must not have read everything by then.
    limits = md.Limits(lead_steps=2)
    with Client(killable, set_as_default=False) as client:
        with md.serve(made(micro_batch=8), client, name=f"{name}-quiet") as service:
            quiet = run(service, drain)
        pids = client.run(os.getpid)
        with md.serve(made(micro_batch=8), client, name=name, limits=limits) as service:
            record = record_of(killable, name)
            own = {source: owner for (source, _), owner in record.loaders.items()}["b"]

            def body(loader: md.Loader) -> Any:
                seen = []
                for batch in loader:
                    if loader.rank == 0 and (batch["step"], batch["microbatch"]) == (5, 0):
                        os.kill(pids[own.address], signal.SIGKILL)
                    seen.append(see(batch))
                return seen

            ranks = run(service, body, seconds=2 * WAIT_S, timeout=WAIT_S)
            now = {source: owner for (source, _), owner in record.loaders.items()}["b"]
            audit = service.audit()
    assert now.incarnation != own.incarnation
    assert ranks == quiet
    assert audit["ok"]
    assert audit["total"]["samples"]["repeated"] == audit["total"]["samples"]["lost"] == 0


def test_scenario_11_a_slow_rank(local_client: Client, name: str) -> None:
    """Rank 0 pauses at step 8 while rank 1 drains; rank 0 still gets all 20, from small buffers."""
    size = 8 * 1024  # of a microbatch, at most
    limits = md.Limits(lead_steps=20, constructor_bytes=4 * size)
    held: list[int] = []
    with (
        md.serve(made(), local_client, name=name, limits=limits) as service,
        connect(service, 0) as slow,
        connect(service, 1) as fast,
    ):

        def look() -> bool:
            held.extend(one["held_bytes"] for one in service.stats()["constructors"])
            return not ahead._threads[0].is_alive()

        begun = Ranks([partial(take_steps, slow, 8)]).results()[0]
        ahead = Ranks([partial(drain, fast)])
        assert wait_until(look, WAIT_S)
        drained = ahead.results()[0]
        rest = Ranks([partial(drain, slow)])
        ahead = rest
        assert wait_until(look, WAIT_S)
        ranks = [[*begun, *rest.results()[0]], drained]
        assert service.audit()["ok"]
    assert [len({batch.step for batch in seen}) for seen in ranks] == [20, 20]
    assert tokens_delivered(ranks) == every_token(
        [*records([EVEN] * 160), *records([EVEN] * 160, first=1000)]
    )
    assert 0 < max(held) <= limits.constructor_bytes + size
