"""Laws of how many loaders a source gets: bounded, steady, and as the mixture asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.scheduling.sizing import (
    HIGH,
    LOOKS_TO_GROW,
    LOOKS_TO_SHRINK,
    Demand,
    Sizing,
    size,
)
from tests.strategies import laws

loads = st.floats(0.0, 40.0)
counts = st.integers(1, 16)


@laws
@given(loads, counts, counts)
def test_sources_get_what_they_need_within_bounds(expected: float, now: int, most: int) -> None:
    given_now = size(expected, now, most)
    assert 1 <= given_now <= max(now, most)
    assert expected <= HIGH * given_now or given_now >= most
    if now > most:
        assert given_now <= now


@laws
@given(loads, counts, counts, st.floats(0.9, 1.1))
def test_what_was_given_is_enough_and_not_too_much(
    expected: float, now: int, most: int, change: float
) -> None:
    """So nothing goes up and down: not at the same load, and not at one a little different."""
    given_now = size(expected, now, most)
    if given_now != now:
        assert size(expected * change, given_now, most) == given_now


@laws
@given(st.lists(loads, min_size=2), counts, counts)
def test_more_work_never_means_fewer_loaders(load: list[float], now: int, most: int) -> None:
    sizes = [size(expected, now, most) for expected in sorted(load)]
    assert sizes == sorted(sizes)


def demand(busy: float, then: float = 0.5, now: float = 0.5) -> dict[str, Demand]:
    return {"a": Demand(busy=busy, share_then=then, share_now=now)}


@pytest.mark.parametrize(("busy", "looks"), [(5.0, LOOKS_TO_GROW), (0.1, LOOKS_TO_SHRINK)])
def test_one_look_is_not_enough(busy: float, looks: int) -> None:
    sizing, now, most = Sizing(), {"a": 3}, {"a": 8}
    decided = [sizing.decide(demand(busy), now, most) for _ in range(looks)]
    assert decided[:-1] == [{}] * (looks - 1)
    assert decided[-1] == {"a": size(busy, 3, 8)}
    assert decided[-1]["a"] != 3


def test_looks_that_differ_decide_nothing() -> None:
    sizing, now, most = Sizing(), {"a": 3}, {"a": 8}
    for _ in range(20):
        for busy in (5.0, 0.1):
            assert sizing.decide(demand(busy), now, most) == {}


def test_what_nothing_is_known_of_stays() -> None:
    sizing = Sizing()
    for _ in range(20):
        assert sizing.decide({}, {"a": 3}, {"a": 8}) == {}


def test_loaders_follow_the_mixture_before_they_are_busy() -> None:
    """The weight of a source is four times what it was when its loaders were seen."""
    assert demand(0.5, then=0.2, now=0.8)["a"].expected == pytest.approx(2.0)
    assert demand(0.5, then=0.8, now=0.2)["a"].expected == pytest.approx(0.125)
    assert demand(0.5, then=0.0, now=0.8)["a"].expected == 0.5
    assert demand(0.5, then=0.8, now=0.0)["a"].expected == 0.0
