"""Laws of who gets which lanes and which roles: even, complete, and little moves."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.scheduling.errors import ServiceError
from megadask.scheduling.splitting import level, resplit, spread
from tests.strategies import laws

WORKERS = ["a", "b", "c", "d"]


@given(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=6))
@laws
def test_lanes_are_split_evenly_and_few_of_them_move(num_lanes: int, counts: list[int]) -> None:
    """From any split that others before it left behind."""
    first, *others = [min(count, num_lanes) for count in counts]
    parts = [tuple(range(n, num_lanes, first)) for n in range(first)]
    for count in others:
        split = resplit(parts, count)
        now = [lanes for _, lanes in split]
        assert sorted(lane for lanes in now for lane in lanes) == list(range(num_lanes))
        assert max(map(len, now)) - min(map(len, now)) <= 1
        kept = [old for old, _ in split if old is not None]
        assert len(set(kept)) == len(kept) == min(len(parts), count)
        assert set(kept) <= set(parts)
        moved = sum(len(set(lanes).difference(old or ())) for old, lanes in split)
        # No split that is as even could leave more lanes where they are.
        sizes = sorted(map(len, now), reverse=True)
        own = sorted(map(len, parts), reverse=True)
        assert moved == num_lanes - sum(map(min, zip(sizes, own, strict=False)))
        parts = now


def test_as_many_loaders_as_before_change_nothing() -> None:
    parts = [(0, 2, 4), (1, 3)]
    assert resplit(parts, 2) == [(part, part) for part in parts]


def test_of_loaders_with_as_many_lanes_the_first_stay() -> None:
    assert resplit([(2, 3), (0, 1)], 1) == [((2, 3), (0, 1, 2, 3))]


@given(
    st.lists(st.integers(0, 9), max_size=9),
    st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 9)),
)
@laws
def test_roles_go_to_workers_that_bear_little(weights: list[int], used: dict[str, int]) -> None:
    load = Counter(used)
    for weight, worker in sorted(
        zip(weights, spread(weights, WORKERS, used), strict=True), key=lambda pair: -pair[0]
    ):
        assert load[worker] == min(load[one] for one in WORKERS)
        load[worker] += weight


def test_there_is_no_place_without_workers() -> None:
    with pytest.raises(ServiceError, match="no running worker"):
        spread([1], [], {})


@given(st.lists(st.sampled_from(WORKERS), max_size=20), st.integers(1, 4))
@laws
def test_roles_are_levelled_and_few_of_them_move(places: list[str], num_workers: int) -> None:
    workers = WORKERS[-num_workers:]
    now = level(places, workers, range(len(places)))
    moved = [role for role, worker in enumerate(places) if now[role] != worker]
    assert all(places[role] in workers for role in moved), "others see to those that leave"
    load = sorted(now.count(worker) for worker in workers)
    assert load[-1] - load[0] <= 1
    before = sorted(places.count(worker) for worker in workers)
    assert len(moved) == sum(max(0, b - n) for b, n in zip(before, load, strict=True))


@given(st.data())
@laws
def test_what_has_to_be_apart_stays_apart(data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.permutations(WORKERS).map(lambda p: p[:2]), max_size=8))
    places = [worker for pair in pairs for worker in pair]
    apart = [number // 2 for number in range(len(places))]
    now = level(places, WORKERS, apart)
    assert all(one != other for one, other in list(pairwise(now))[::2])
    before, load = Counter(places), Counter(now)
    assert max(load.values(), default=0) <= max(before.values(), default=0)
