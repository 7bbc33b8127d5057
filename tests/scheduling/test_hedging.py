"""Laws of slow reads: when a shadow is asked too, and which answer counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megadask.scheduling.errors import DeadlineError, SourceError, StaleError
from megadask.scheduling.hedging import FACTOR, FEW, FIRST_S, LEAST_S, MOST, Usual, patience_s
from megadask.scheduling.owners import Answer, _first_answer
from tests.strategies import laws

seconds = st.lists(st.floats(0.0, 100.0), max_size=MOST)


@laws
@given(seconds)
def test_nothing_usual_is_slow(taken: list[float]) -> None:
    slower = [one for one in taken if one > patience_s(taken)]
    assert len(slower) <= len(taken) // 10
    assert patience_s(taken) >= LEAST_S
    if len(taken) < FEW:
        assert not slower
        assert patience_s(taken) >= FIRST_S


@laws
@given(seconds, st.floats(0.0, 100.0))
def test_slower_reads_never_make_impatient(taken: list[float], more: float) -> None:
    assert patience_s([one + more for one in taken]) >= patience_s(taken)


def test_one_slow_read_among_many_changes_nothing() -> None:
    usual = Usual()
    for _ in range(30):
        usual.note(0.5)
    before = usual.patience_s
    usual.note(1000.0)
    assert usual.patience_s == before == 2.5


def test_only_the_last_reads_count() -> None:
    usual = Usual()
    for taken in [100.0] * MOST + [0.5] * MOST:
        usual.note(taken)
    assert usual.patience_s == 2.5


def test_short_answers_make_nobody_patient() -> None:
    """A loader that is slow, not stuck, answers in time with little: that is not usual."""
    usual = Usual()
    usual.note(0.5, 500)
    before = usual.patience_s
    for _ in range(FEW):
        usual.note(8.0, 2, is_short=True)
    assert usual.patience_s == before


@laws
@given(st.floats(1e-6, 10.0), st.floats(0.01, 100.0))
def test_a_short_answer_shows_a_slow_loader_by_its_pace(pace_s: float, times: float) -> None:
    assume(abs(times - FACTOR) > 1e-6)
    assert not Usual().note(10 * times * pace_s, 10, is_short=True)  # nothing is known yet
    usual = Usual()
    for _ in range(FEW):
        assert not usual.note(100 * pace_s, 100)
    assert usual.note(10 * times * pace_s, 10, is_short=True) == (times > FACTOR)


def test_whoever_is_always_short_is_not_slow() -> None:
    """Records of a heavy source take as long as they do."""
    usual = Usual()
    for _ in range(2 * MOST):
        assert not usual.note(5.0, 100, is_short=True)


# Which answer counts ----------------------------------------------------------------------------

OURS = Answer("the loader's", by_shadow=False)
SHADOWS = Answer("the shadow's", by_shadow=True)

Way = Callable[[], Coroutine[Any, Any, Answer]]
Told = list[str]


def told(result: Answer | Exception, after: Awaitable[Any] | None = None) -> Way:
    """Return a way that ends as it is told, after something else."""

    async def way() -> Answer:
        if after is not None:
            await after
        if isinstance(result, Exception):
            raise result
        return result

    return way


def never() -> Awaitable[Any]:
    return asyncio.Event().wait()


def settle(make: Callable[[], tuple[list[Way], int, float]]) -> tuple[Answer, int]:
    async def run() -> tuple[Answer, int]:
        async with asyncio.timeout(30):
            return await _first_answer(*make())

    return asyncio.run(run())


def test_a_read_that_is_quick_asks_nobody_else() -> None:
    assert settle(lambda: ([told(OURS), told(SHADOWS)], 0, 30.0)) == (OURS, 1)


def test_a_read_that_hangs_is_answered_by_the_shadow() -> None:
    assert settle(lambda: ([told(OURS, never()), told(SHADOWS)], 0, 0.01)) == (SHADOWS, 2)


def test_a_read_that_comes_late_still_counts() -> None:
    def ways() -> tuple[list[Way], int, float]:
        asked = asyncio.Event()

        async def shadow() -> Answer:
            asked.set()
            await never()
            return SHADOWS

        return [told(OURS, asked.wait()), shadow], 0, 0.01

    assert settle(ways) == (OURS, 2)


@pytest.mark.parametrize("error", [SourceError("reads otherwise"), StaleError("gone"), OSError()])
def test_what_a_shadow_fails_with_is_nobodys_business(error: Exception) -> None:
    """Asked second, or first."""

    def second() -> tuple[list[Way], int, float]:
        failed = asyncio.Event()

        async def shadow() -> Answer:
            failed.set()
            raise error

        return [told(OURS, failed.wait()), shadow], 0, 0.01

    assert settle(second) == (OURS, 2)
    assert settle(lambda: ([told(error), told(OURS)], 1, 30.0)) == (OURS, 2)


def test_what_a_loader_fails_with_is_raised() -> None:
    with pytest.raises(SourceError, match="bad"):
        settle(lambda: ([told(SourceError("bad")), told(SHADOWS)], 0, 30.0))
    with pytest.raises(SourceError, match="bad"):
        settle(lambda: ([told(SHADOWS, never()), told(SourceError("bad"))], 1, 0.01))


def test_a_loader_at_its_deadline_leaves_the_word_to_its_shadow() -> None:
    def ways() -> tuple[list[Way], int, float]:
        over, asked = asyncio.Event(), asyncio.Event()

        async def ours() -> Answer:
            await asked.wait()
            over.set()
            raise DeadlineError("too slow")

        async def shadow() -> Answer:
            asked.set()
            await over.wait()
            return SHADOWS

        return [ours, shadow], 0, 0.01

    assert settle(ways) == (SHADOWS, 2)
    with pytest.raises(DeadlineError):
        settle(lambda: ([told(DeadlineError("slow")), told(OSError())], 0, 30.0))
