"""Laws of the comparison of a deferred stream with the undeferred one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from megadask.planner.drift import drift, ks_statistic
from megadask.planner.errors import ConfigError
from megadask.planner.metadata import Metadata
from tests.fakes import span_table
from tests.strategies import World, chunks, few_laws, laws, worlds

lengths = st.lists(st.integers(1, 20), min_size=1, max_size=40)


def step(*spans: tuple[int, int, int]) -> Metadata:
    """Return a step of spans (source, position, tokens)."""
    return span_table([(s, 0, 0, p, 0, p, 0, n, 0, n, n, n - 1, 2 * n, 0) for s, p, n in spans])


@laws
@given(lengths, lengths)
def test_the_statistic_is_that_of_scipy(one: list[int], other: list[int]) -> None:
    with np.errstate(all="ignore"):  # of the p-value, which samples this small have not
        expected = ks_2samp(one, other, method="asymp").statistic
    assert ks_statistic(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-12)


def test_an_empty_step_differs_from_any_other_as_much_as_can_be() -> None:
    nothing, something = np.zeros(0, np.int64), np.array([3])
    assert ks_statistic(nothing, nothing) == 0
    assert ks_statistic(nothing, something) == ks_statistic(something, nothing) == 1


@few_laws
@given(worlds(), chunks)
def test_a_stream_does_not_drift_from_itself(world: World, chunk: object) -> None:
    tables = [drawn.table for drawn in world.driver(chunk=chunk).draws()]
    found = drift(tables, tables)
    for values in (found.sample_mixture_T, found.token_mixture_T, found.length_T):
        assert values.tolist() == [0.0] * len(tables)
    assert (found.length, found.mean_delay, found.max_delay) == (0.0, 0.0, 0)
    assert (found.delayed, found.waiting) == (0.0, 0)


def test_what_comes_later_is_counted_in_steps() -> None:
    plain = [step((0, 0, 8), (0, 1, 1)), step((0, 2, 1), (1, 0, 1)), step((0, 3, 1), (1, 1, 4))]
    deferred = [step((0, 1, 1), (0, 2, 1)), step((0, 3, 1), (1, 0, 1)), step((0, 0, 8), (0, 4, 1))]
    found = drift(deferred, plain)
    assert (found.mean_delay, found.max_delay) == (2.0, 2)
    assert found.delayed == 1 / 5
    assert found.waiting == 1
    assert found.sample_mixture_T.tolist() == [0.0, 0.0, 0.5]
    assert found.token_mixture_T.tolist() == [0.0, 0.0, 0.8]
    assert found.length_T.tolist() == [0.5, 0.0, 0.5]
    assert found.length == pytest.approx(1 / 6)


@pytest.mark.parametrize("counts", [(0, 0), (1, 2)])
def test_streams_of_other_numbers_of_steps_are_refused(counts: tuple[int, int]) -> None:
    tables = [step((0, 0, 1))] * 2
    with pytest.raises(ConfigError, match=r"drift.*equal numbers"):
        drift(tables[: counts[0]], tables[: counts[1]])
