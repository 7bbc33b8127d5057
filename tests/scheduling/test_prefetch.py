"""How many microbatches are on their way: few at first, more only where that helps."""

from __future__ import annotations

import pytest

from megadask.scheduling.prefetch import MOST, MOST_BYTES, Prefetch


def note(made: Prefetch, *, waited: bool, was_built: bool, num_bytes: int = 1000) -> int:
    made.note(waited=waited, was_built=was_built, num_bytes=num_bytes)
    return made.count


def test_it_begins_with_one_and_goes_on_with_two() -> None:
    made = Prefetch()
    assert made.count == 1
    assert note(made, waited=True, was_built=False) == 2


@pytest.mark.parametrize(("waited", "was_built"), [(False, True), (True, False), (False, False)])
def test_it_stays_where_more_would_not_help(waited: bool, was_built: bool) -> None:
    made = Prefetch()
    assert [note(made, waited=waited, was_built=was_built) for _ in range(50)] == [2] * 50


def test_it_grows_while_the_way_is_what_is_waited_for() -> None:
    made = Prefetch()
    counts = [note(made, waited=True, was_built=True) for _ in range(MOST + 5)]
    assert counts[:4] == [2, 3, 4, 5]
    assert counts[-1] == MOST


def test_large_batches_are_fewer_and_two_in_any_case() -> None:
    made = Prefetch()
    for _ in range(MOST):
        note(made, waited=True, was_built=True, num_bytes=MOST_BYTES // 5)
    assert made.count == 5
    assert note(made, waited=True, was_built=True, num_bytes=2 * MOST_BYTES) == 2


def test_a_given_number_stays() -> None:
    made = Prefetch(7)
    assert [note(made, waited=True, was_built=True) for _ in range(9)] == [7] * 9


@pytest.mark.parametrize(("way", "compute"), [(3, 10), (10, 10), (35, 10)])
def test_a_trainer_slower_than_the_pipeline_waits_no_more(way: int, compute: int) -> None:
    """Times in ms: of the way from a request to its batch, and of the computation of one batch."""
    made, now, sent = Prefetch(), 0, {}
    waits = []
    for number in range(60):
        for ahead in range(number, number + made.count):
            sent.setdefault(ahead, now)
        arrives = sent[number] + way
        waits.append(max(0, arrives - now))
        now = max(now, arrives)
        note(made, waited=waits[-1] > 0, was_built=True)
        now += compute
    assert waits[20:] == [0] * 40
    assert made.count <= way // compute + 3
