"""Laws of passes: ranks may come and go as they like, and pass n meets pass n."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megadask.scheduling.passes import Passes

RANKS = 3
#: What a rank does next: begin its pass if it is open, end it, or lose its trainer.
MOVES = st.lists(
    st.tuples(st.integers(0, RANKS - 1), st.sampled_from(["begin", "end", "left"])), max_size=60
)


@given(MOVES)
def test_only_ranks_of_one_pass_read_at_a_time(moves: list[tuple[int, str]]) -> None:
    passes = Passes(RANKS)
    reading: dict[int, int] = {}  # rank to the pass that it reads
    for rank, move in moves:
        before, number = passes.current, passes.next_of(rank)
        if move == "begin" and number == before:
            passes.begin(rank, number)
            reading[rank] = number
        elif move == "end":
            passes.end(rank, number)
            passes.end(rank, number)  # the answer was lost, and it tells again
            assert passes.next_of(rank) == number + 1
            reading.pop(rank, None)
        elif move == "left":
            passes.left(rank)
            assert passes.next_of(rank) == number + (rank in reading)
            reading.pop(rank, None)
        assert passes.current - before in (0, 1)
        numbers = [passes.next_of(one) for one in range(RANKS)]
        assert passes.current == min(numbers)
        assert passes.finished == {n for n, one in enumerate(numbers) if one > passes.current}
        assert set(reading.values()) <= {passes.current}
        assert not set(reading) & set(passes.finished)
        assert len(passes.finished) < RANKS


def test_ranks_that_were_lost_together_take_up_one_pass() -> None:
    passes = Passes(RANKS)
    passes.begin(0, 0)
    passes.left(0)  # the others had not begun
    passes.level(range(RANKS))
    assert [passes.next_of(rank) for rank in range(RANKS)] == [1] * RANKS
    assert passes.current == 1
    assert not passes.finished
