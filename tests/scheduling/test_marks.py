"""Watermarks of ranks: what is known of all of them at once is what a look at each tells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megadask.scheduling.marks import Marks
from tests.strategies import laws

steps = st.tuples(st.integers(0, 3), st.integers(0, 2))


@laws
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), steps)), st.sets(st.integers(0, 4)))
def test_the_lowest_of_all_ranks(
    world: int, moves: list[tuple[int, tuple[int, int]]], without: set[int]
) -> None:
    marks, plain = Marks(world, (0, 0)), dict.fromkeys(range(world), (0, 0))
    for rank, mark in moves:
        if rank < world and mark > plain[rank]:
            marks.raise_to(rank, mark)
            plain[rank] = mark
        assert plain[marks.slowest] == min(plain.values())
    assert marks == plain
    assert marks.low(()) == min(plain.values())
    others = [mark for rank, mark in plain.items() if rank not in without]
    assert marks.low(without) == min(others, default=None)
    assert marks.steps == {step for step, _ in plain.values()}
