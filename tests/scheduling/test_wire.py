"""Works that are carried out side by side."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from megadask.scheduling.wire import side_by_side


@pytest.mark.parametrize("most", [1, 3, 20])
def test_works_are_done_side_by_side_and_told_in_their_order(most: int) -> None:
    running, largest = 0, 0

    async def work(number: int) -> int:
        nonlocal running, largest
        running += 1
        largest = max(largest, running)
        for _ in range(10 - number):  # later ones end sooner
            await asyncio.sleep(0)
        running -= 1
        assert len(done) >= number + 1 - most, "what has ended is not yet there"
        return number**2

    done: dict[int, int] = {}
    works = {number: partial(work, number) for number in range(10)}
    asyncio.run(side_by_side(works, most, done))
    assert list(done.items()) == [(number, number**2) for number in range(10)]
    assert largest == min(most, 10)


def test_after_a_failure_none_is_begun_and_none_is_left_half_done() -> None:
    begun, ended = [], []

    async def work(number: int) -> int:
        begun.append(number)
        await asyncio.sleep(0)
        if number == 1:
            raise OSError("lost")
        await asyncio.sleep(0)
        ended.append(number)
        return number

    done: dict[int, int] = {}
    works = {number: partial(work, number) for number in range(10)}
    with pytest.raises(OSError, match="lost"):
        asyncio.run(side_by_side(works, 3, done))
    assert set(ended) == set(done) == set(begun) - {1}
    assert len(begun) < len(works)


def test_of_several_failures_the_first_in_order_is_raised() -> None:
    async def work(number: int) -> int:
        for _ in range(10 - number):  # later ones fail sooner
            await asyncio.sleep(0)
        raise OSError(f"work {number}")

    works = {number: partial(work, number) for number in range(3)}
    with pytest.raises(OSError, match="work 0"):
        asyncio.run(side_by_side(works, 3, {}))
