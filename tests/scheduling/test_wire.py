"""Works that are carried out side by side, and waiting for a change."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from megadask.scheduling.wire import Signal, side_by_side


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


#: Longer than any of these tests takes.
LONG_S = 60.0


async def turns(number: int = 3) -> None:
    """Let everything run that can."""
    for _ in range(number):
        await asyncio.sleep(0)


def test_who_waits_is_woken_by_what_it_waits_for_and_by_nothing_else() -> None:
    there: list[int] = []
    woken: list[int] = []

    async def wait(signal: Signal, number: int) -> None:
        assert await signal.wait_until(lambda: number in there, LONG_S)
        woken.append(number)

    async def run() -> None:
        signal = Signal()
        tasks = [asyncio.create_task(wait(signal, number)) for number in range(3)]
        await turns()
        signal.set()
        await turns()
        assert not woken
        there.append(2)  # before anybody says so
        await turns()
        assert not woken
        signal.set()
        await turns()
        assert woken == [2]
        signal.set()
        there.extend([0, 1])  # after it was said, by the same: a look comes later
        await asyncio.gather(*tasks)
        assert woken == [2, 0, 1]

    asyncio.run(run())


def test_what_one_who_is_woken_takes_away_another_goes_on_waiting_for() -> None:
    pool = ["one"]
    got: list[str] = []

    async def take(signal: Signal) -> None:
        while not (await signal.wait_until(lambda: len(pool) > len(got), LONG_S)):
            pass
        got.append(pool[len(got)])

    async def run() -> None:
        signal = Signal()
        got.append("nothing yet")  # so that there is nothing at first
        tasks = [asyncio.create_task(take(signal)) for _ in range(2)]
        await turns()
        pool.append("two")
        signal.set()
        await turns(6)
        assert sum(task.done() for task in tasks) == 1
        pool.append("three")
        signal.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert got == ["nothing yet", "two", "three"]


def test_many_changes_at_a_time_are_looked_at_once() -> None:
    async def run() -> int:
        signal, looks = Signal(), 0

        def ready() -> bool:
            nonlocal looks
            looks += 1
            return False

        task = asyncio.create_task(signal.wait_until(ready, LONG_S))
        await turns()
        for _ in range(100):
            signal.set()
        await turns()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        signal.set()  # nobody waits any more
        await turns()
        return looks

    assert asyncio.run(run()) == 2


def test_what_a_check_raises_is_raised_where_it_is_waited_for() -> None:
    fails: list[int] = []

    def ready() -> None:
        if fails:
            raise OSError("lost")

    async def run() -> None:
        signal = Signal()
        task = asyncio.create_task(signal.wait_until(ready, LONG_S))
        await turns()
        fails.append(1)
        signal.set()
        with pytest.raises(OSError, match="lost"):
            await task

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.01])
def test_at_the_deadline_the_last_value_is_returned(seconds: float) -> None:
    value = asyncio.run(Signal().wait_until(lambda: 0, seconds))
    assert value == 0


def test_a_cancellation_that_comes_with_the_change_is_not_lost() -> None:
    there: list[int] = []

    async def run() -> None:
        signal = Signal()
        task = asyncio.create_task(signal.wait_until(lambda: there, LONG_S))
        await turns()
        there.append(1)
        signal.set()
        await turns(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
