"""Laws of the mixture: exact shares at any moment, whatever the sizes, through changes too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megadask.planner.mixture import Turns, settle
from megadask.planner.weights import TOTAL_SHARE, quantise
from tests.strategies import laws, weights

Ints = NDArray[np.int64]


def turns(deficit_S: Ints, share_S: Ints, count: int) -> Iterator[tuple[int, Ints]]:
    """Yield (source, deficits behind it) of so many turns by samples."""
    own = Turns(deficit_S, share_S)
    run = own.run()
    source = next(run)
    for _ in range(count):
        following = run.send((1, 1))
        yield source, own.deficits()
        source = following


def pick(deficit_S: Ints, share_S: Ints, size_S: Ints | None) -> int:
    """Return whose turn it is, by looking at all sources: what the rules say, word by word."""
    active = np.flatnonzero(share_S > 0)
    if len(active) < 2:
        return int(active[0]) if len(active) else -1
    share, deficit = share_S[active], deficit_S[active]
    if size_S is None:
        slack = TOTAL_SHARE // (2 * len(active) - 2)
        due = deficit + share >= slack
        deadline = (TOTAL_SHARE - slack - deficit - share) // share
    else:
        due = deficit >= 0
        deadline = (TOTAL_SHARE * size_S[active] - deficit) // share
    return int(active[due][np.argmin(deadline[due])])


def charge(deficit_S: Ints, share_S: Ints, source: int, size: int) -> Ints:
    """Return the deficits after a source received a sample of a size."""
    deficit_S = deficit_S + share_S * size
    deficit_S[source] -= TOTAL_SHARE * size
    return deficit_S


def random_shares(rng: np.random.Generator, num_sources: int) -> Ints:
    """Return shares between nearly equal and very unequal."""
    spread = rng.choice([0.05, 1.0, 20.0])
    return quantise((rng.dirichlet(np.full(num_sources, spread)) + 1e-9).tolist())


@laws
@given(st.lists(weights, min_size=1, max_size=12), st.integers(1, 400))
def test_every_source_is_within_one_sample_of_its_share_at_any_time(
    weight_S: list[float], count: int
) -> None:
    share_S = quantise(weight_S)
    received_S = np.zeros(len(share_S), np.int64)
    for turn, (source, _) in enumerate(turns(np.zeros_like(share_S), share_S, count), start=1):
        received_S[source] += 1
        # Without a division: |share * turn / TOTAL - received| < 1.
        assert (np.abs(share_S * turn - received_S * TOTAL_SHARE) < TOTAL_SHARE).all()


@pytest.mark.parametrize("num_sources", [2, 30, 300, 1000])
def test_a_thousand_sources_are_within_one_sample(num_sources: int) -> None:
    rng = np.random.default_rng(num_sources)
    for _ in range(3):
        share_S = random_shares(rng, num_sources)
        start_S = np.zeros_like(share_S)
        assert all(np.abs(d).max() < TOTAL_SHARE for _, d in turns(start_S, share_S, 800))


@laws
@given(st.integers(1, 30), st.sampled_from(["any", "extreme"]), st.integers(0, 2**32))
def test_by_size_every_source_is_within_the_largest_sample(
    num_sources: int, sizes: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    largest = 4096
    share_S = random_shares(rng, num_sources)
    deficit_S = np.zeros(num_sources, np.int64)

    def next_size() -> int:
        return int(rng.integers(1, largest + 1) if sizes == "any" else rng.choice([1, largest]))

    size_S = np.array([next_size() for _ in range(num_sources)])
    own = Turns(deficit_S, share_S, size_S.tolist())
    run = own.run()
    source = next(run)
    for _ in range(300):
        size, size_S[source] = int(size_S[source]), next_size()
        source = run.send((size, int(size_S[source])))
        assert np.abs(own.deficits()).max() < TOTAL_SHARE * largest


@laws
@given(st.integers(2, 12), st.integers(1, 20), st.integers(0, 2**32))
def test_deficits_stay_small_when_weights_change_and_sources_come_and_go(
    num_sources: int, period: int, seed: int
) -> None:
    """What a change leaves over does not add up, however often weights change."""
    rng = np.random.default_rng(seed)
    deficit_S = np.zeros(num_sources, np.int64)
    for _ in range(200 // period):
        takes_part_S = rng.random(num_sources) < 0.6
        takes_part_S[rng.integers(num_sources)] = True
        share_S = np.where(takes_part_S, random_shares(rng, num_sources), 0)
        deficit_S, share_S = settle(deficit_S, share_S)
        for source, left_S in turns(deficit_S, share_S, period):
            assert share_S[source] > 0
            assert np.abs(left_S).max() < 4 * TOTAL_SHARE
            deficit_S = left_S


@laws
@given(st.lists(st.integers(0, TOTAL_SHARE), min_size=1, max_size=20), st.data())
def test_settled_deficits_and_shares_add_up(shares: list[int], data: st.DataObject) -> None:
    size = len(shares)
    numbers = st.lists(st.integers(-(2**50), 2**50), min_size=size, max_size=size)
    share_S = np.array(shares, np.int64)
    deficit_S = np.array(data.draw(numbers), np.int64)
    settled_S, live_S = settle(deficit_S, share_S)
    assert settled_S.sum() == 0
    assert not settled_S[share_S == 0].any()
    assert ((live_S > 0) == (share_S > 0)).all()
    assert live_S.sum() == (TOTAL_SHARE if any(shares) else 0)
    again_S, same_S = settle(settled_S, live_S)
    np.testing.assert_array_equal(again_S, settled_S)
    np.testing.assert_array_equal(same_S, live_S)


def test_the_end_of_a_large_source_leaves_the_small_ones_in_turn() -> None:
    """A deficit keeps its unit: half a sample of 98 % is not 25 samples of what is left."""
    share_S = quantise([0.98, 0.01, 0.01])
    deficit_S = np.zeros(3, np.int64)
    *_, (_, deficit_S) = turns(deficit_S, share_S, 60)
    deficit_S, share_S = settle(deficit_S, np.where([False, True, True], share_S, 0))
    sources = [source for source, _ in turns(deficit_S, share_S, 40)]
    longest = max(len(list(run)) for run in np.split(sources, np.flatnonzero(np.diff(sources)) + 1))
    assert sorted(set(sources)) == [1, 2]
    assert longest <= 2


def test_small_sources_get_their_turn_under_weights_that_change_every_step() -> None:
    """A ramp of 64 samples a step must not forget what it owes to a source of one in a thousand."""
    deficit_S = np.zeros(2, np.int64)
    expected, received = 0.0, 0
    for step in range(200):
        share_S = quantise([0.999 + step * 1e-6, 0.001])
        deficit_S, share_S = settle(deficit_S, share_S)
        for source, left_S in turns(deficit_S, share_S, 64):
            received += source
            deficit_S = left_S
        expected += 64 * float(share_S[1]) / TOTAL_SHARE
        assert abs(expected - received) < 1.01


@settings(max_examples=20)
@given(st.integers(1, 8))
def test_nothing_is_drawn_where_nothing_has_a_share(num_sources: int) -> None:
    nothing_S = np.zeros(num_sources, np.int64)
    assert list(Turns(*settle(nothing_S, nothing_S)).run()) == []


# Two heaps give what looking at all sources gives ----------------------------------------------


def assert_same_turns(
    rng: np.random.Generator, num_sources: int, by_size: bool, period: int, count: int
) -> None:
    """Weights change, and sources come and go, after every period of turns."""
    deficit_S = np.zeros(num_sources, np.int64)
    size_S = rng.integers(1, 5000, num_sources)
    for _ in range(count // period):
        takes_part_S = rng.random(num_sources) < rng.choice([0.1, 0.7, 1.0])
        takes_part_S[rng.integers(num_sources)] = True
        share_S = np.where(takes_part_S, random_shares(rng, num_sources), 0)
        deficit_S, share_S = settle(deficit_S, share_S)
        own = Turns(deficit_S, share_S, size_S.tolist() if by_size else None)
        run = own.run()
        following = next(run)
        for _ in range(period):
            source = pick(deficit_S, share_S, size_S if by_size else None)
            assert source == following
            size = int(size_S[source]) if by_size else 1
            deficit_S = charge(deficit_S, share_S, source, size)
            size_S[source] = rng.choice([1, 4999, rng.integers(1, 5000)])
            following = run.send((size, int(size_S[source]) if by_size else 1))
        np.testing.assert_array_equal(own.deficits(), deficit_S)


@laws
@given(st.integers(1, 30), st.booleans(), st.sampled_from([1, 7, 60]), st.integers(0, 2**32))
def test_turns_are_those_of_the_plain_rule(
    num_sources: int, by_size: bool, period: int, seed: int
) -> None:
    assert_same_turns(np.random.default_rng(seed), num_sources, by_size, period, 240)


@pytest.mark.parametrize("by_size", [False, True])
def test_turns_of_a_thousand_sources_are_those_of_the_plain_rule(by_size: bool) -> None:
    assert_same_turns(np.random.default_rng(5), 1000, by_size, 600, 1800)


@laws
@given(st.integers(1, 8), st.integers(0, 2**32))
def test_equal_weights_take_turns_by_index(num_sources: int, seed: int) -> None:
    share_S = quantise([1.0] * num_sources)
    order = [source for source, _ in turns(np.zeros_like(share_S), share_S, 3 * num_sources)]
    assert sorted(order[:num_sources]) == list(range(num_sources))
    assert order[:num_sources] == order[num_sources : 2 * num_sources]
