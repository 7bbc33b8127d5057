"""Validation passes: whatever a rank does with one, its next pass meets that of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from distributed import Client

import megadask as md
from tests.megadask.helpers.data import pipeline, records
from tests.megadask.helpers.ranks import Ranks, connect, run
from tests.megadask.helpers.seen import Seen, drain, see, take

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def service(local_client: Client, name: str) -> Iterator[md.Service]:
    """Thirty steps of one batch a rank: more than anybody may go ahead of the others."""
    made = pipeline({"v": records([32] * 60)}, restart=True, global_batch=2, seq_len=32)
    with md.serve(made, local_client, name=name) as served:
        yield served


@pytest.fixture
def whole(service: md.Service) -> list[list[Seen]]:
    ranks = run(service, drain)
    assert len(ranks[0]) == 30
    return ranks


def test_ranks_break_off_where_they_like(service: md.Service, whole: list[list[Seen]]) -> None:
    """Nothing holds the ranks together but the passes."""
    counts = [[1, None, 3, 0, None, 2, None], [None, 2, 0, None, 1, None, None]]

    def body(loader: md.Loader) -> list[list[Seen]]:
        return [[see(b) for b in islice(loader, count)] for count in counts[loader.rank]]

    for rank, passes in enumerate(run(service, body)):
        # A count of 0 does not even begin, and is no pass.
        assert passes == [whole[rank][:count] for count in counts[rank]]


def test_a_rank_does_not_get_into_the_pass_before(
    service: md.Service, whole: list[list[Seen]]
) -> None:
    """It breaks off before it has acknowledged anything, when the other is in the middle."""
    inside, gone = threading.Event(), threading.Event()

    def slow(loader: md.Loader) -> Any:
        seen = []
        for number, batch in enumerate(loader):
            seen.append(see(batch))
            if number == 1:
                inside.set()
                assert gone.wait(30)
        return seen, drain(loader)

    def quick(loader: md.Loader) -> Any:
        assert inside.wait(30)
        first = [see(batch) for batch in islice(loader, 1)]
        gone.set()
        return first, drain(loader)

    with connect(service, 0) as one, connect(service, 1) as other:
        slow_seen, quick_seen = Ranks([lambda: slow(one), lambda: quick(other)]).results()
    assert slow_seen == (whole[0], whole[0])
    assert quick_seen == (whole[1][:1], whole[1])


def test_a_pass_that_another_one_replaces(service: md.Service, whole: list[list[Seen]]) -> None:
    """The iterator of the old one is collected late, and must not end the new one."""

    def body(loader: md.Loader) -> Any:
        old = iter(loader)
        next(old)
        new = iter(loader)
        begun = see(next(new))
        del old
        return [begun, *map(see, new)]

    assert run(service, body) == whole


def test_a_rank_that_leaves_lets_the_others_go_on(
    service: md.Service, whole: list[list[Seen]]
) -> None:
    """It counts as having broken off, and is in step again when it comes back."""
    with connect(service, 0) as stays:
        left = connect(service, 1)
        begun = iter(stays)
        first = see(next(begun))
        assert take(left, 2) == whole[1][:2]
        leaves = iter(left)
        # Its second pass: open when the other one is done with its first.
        rest = Ranks([lambda: [see(b) for b in begun]]).results()[0]
        assert [first, *rest] == whole[0]
        assert see(next(leaves)) == whole[1][0]
        left.close()
        assert Ranks([lambda: drain(stays)]).results()[0] == whole[0]
        with connect(service, 1) as back:
            both = Ranks([lambda: drain(stays), lambda: drain(back)]).results()
        assert both == whole


def test_a_rank_that_waits_for_a_pass_is_told_for_whom(service: md.Service) -> None:
    with connect(service, 0, timeout=1.0) as loader, connect(service, 1) as other:
        begun = iter(other)
        next(begun)
        take(loader, 1)
        with pytest.raises(md.errors.DeadlineError, match=r"ranks \[1\] to end"):
            next(iter(loader))
        begun.close()
        # The pass that it never got into is still its next one.
        both = Ranks([lambda: take(loader, 2), lambda: take(other, 2)]).results()
        assert [one[0].step for one in both] == [0, 0]
