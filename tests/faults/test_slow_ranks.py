"""A slow rank, and small buffers: others go ahead as far as declared, and nothing fills up."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import pytest
from distributed import Client

import megadask as md
from megadask.scheduling import trainer_link
from tests.megadask.helpers.ranks import Ranks, connect, run
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import Seen, drain, every_token, see, take, tokens_delivered

pytestmark = pytest.mark.timeout(150)

ROWS = [row for rows in DATA.values() for row in rows]


def batch_bytes(loader: md.Loader) -> int:
    batch = next(iter(loader))
    return sum(value.nbytes for value in batch.values() if hasattr(value, "nbytes"))


@pytest.mark.parametrize("room", [0, 2, 5], ids=lambda room: f"{room}-microbatches")
def test_a_slow_rank_loses_nothing_and_fills_no_buffer(
    client: Client, name: str, whole: list[list[Seen]], room: int
) -> None:
    """Rank 0 pauses, rank 1 goes on as far as it may; what is held stays within the limit."""
    with md.serve(make(), client, name=f"{name}-size") as service:
        one = sum(run(service, batch_bytes))  # one microbatch of both ranks
    limits = md.Limits(constructor_bytes=room * one)
    held: list[int] = []
    with md.serve(make(), client, name=name, limits=limits) as service:
        slow = connect(service, 0)
        fast: list[Seen] = []

        def go_on() -> None:
            with connect(service, 1, timeout=4.0, prefetch=8) as loader:
                fast.extend(map(see, islice(loader, 1)))
                fast.extend(map(see, loader))

        begun = take(slow, 2)
        ahead = Ranks([go_on])
        while ahead._threads[0].is_alive():
            held += [part["held_bytes"] for part in service.stats()["constructors"]]
            ahead._threads[0].join(0.05)
        (error,) = ahead.outcomes()
        assert isinstance(error, md.errors.DeadlineError)
        assert fast == whole[1][: len(fast)]
        assert len(fast) >= 2
        both = Ranks([partial(drain, slow), partial(drain_again, service, 1)])
        slow_rest, fast_rest = both.results()
        assert [*begun, *slow_rest] == whole[0]
        assert fast_rest == whole[1][whole[1].index(fast_rest[0]) :]
        assert whole[1].index(fast_rest[0]) <= len(fast)
        assert service.audit()["ok"]
        slow.close()
    assert max(held) <= limits.constructor_bytes + one


def drain_again(service: md.Service, rank: int) -> list[Seen]:
    with connect(service, rank) as loader:
        return drain(loader)


def test_a_blocked_rank_says_whom_it_waits_for(client: Client, name: str) -> None:
    with (
        md.serve(make(), client, name=name) as service,
        connect(service, 0) as slow,
        connect(service, 1, timeout=3.0) as fast,
    ):
        take(slow, 2)
        with pytest.raises(md.errors.DeadlineError) as caught:
            drain(fast)
    assert "rank 1" in str(caught.value)
    assert "rank 0" in str(caught.value)
    assert "lead_steps=4" in str(caught.value)


@pytest.mark.parametrize("prefetch", [1, 8])
def test_a_small_buffer_never_stalls(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    """No batch may come only because a call that is held somewhere reaches its end."""
    monkeypatch.setattr(trainer_link, "HOLD_S", 60.0)
    limits = md.Limits(constructor_bytes=0, lead_steps=1)
    with md.serve(make(), client, name=name, limits=limits) as service:
        # With timeout=40 a constructor holds calls for 20 s.
        ranks = run(service, drain, prefetch=prefetch, timeout=40.0, seconds=15.0)
    assert tokens_delivered(ranks) == every_token(ROWS, times=2)


def test_iterators_run_ahead_of_a_small_buffer(
    client: Client, name: str, whole: list[list[Seen]]
) -> None:
    """A virtual pipeline: one cursor is five microbatches ahead, then the other one 29.

    Nothing is acknowledged meanwhile that only one of them has passed.
    """

    def body(loader: md.Loader) -> Any:
        first, second = loader.iterators(2)
        ahead = [see(batch) for batch in islice(first, 5)]
        behind = [see(batch) for batch in second]
        return [*ahead, *map(see, first)], behind

    limits = md.Limits(constructor_bytes=0, lead_steps=30)
    with md.serve(make(), client, name=name, limits=limits) as service:
        for rank, cursors in enumerate(run(service, body, timeout=15.0)):
            assert cursors == (whole[rank], whole[rank])
        assert service.audit()["ok"]
