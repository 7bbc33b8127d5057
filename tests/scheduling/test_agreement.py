"""The agreement of ranks is what a look at each of them would tell, however many there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.errors import StateError
from megadask.scheduling.agreement import Agreement
from megadask.scheduling.point import Point
from tests.strategies import laws

RANKS = 3
#: The first one is where the generation begins.
POINTS = [Point(step=step, state="") for step in range(3)]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "wait", "wait", "rest", "grant", "move", "leave", "anew"]),
        st.integers(0, RANKS - 1),
        st.sampled_from([POINTS[0], *POINTS]),
    ),
    max_size=40,
)


class Plain:
    """An agreement that looks at every rank."""

    def __init__(self) -> None:
        self.asked: dict[int, Point] = {}
        self.waiting: set[int] = set()
        self.granted: set[int] = set()
        self.moved: set[int] = set()

    def stands(self, rank: int, point: Point) -> bool:
        return point == POINTS[0] and rank not in self.moved

    def ask(self, rank: int, point: Point, *, waits: bool) -> bool | None:
        """Return None for a refusal."""
        self.asked[rank] = point
        if waits:
            self.waiting.add(rank)
        if len({self.asked[other] for other in self.waiting}) > 1:
            self.asked.clear()
            self.waiting.clear()
            return None
        agreed = all(self.asked.get(other) == point for other in range(RANKS))
        return agreed and not all(self.stands(other, point) for other in range(RANKS))

    def grant(self, rank: int, point: Point) -> bool:
        others = set(range(RANKS)) - {rank}
        granted = self.stands(rank, point) and all(
            self.stands(other, point) or other in self.granted for other in others
        )
        self.granted |= {rank} if granted else set()
        return granted

    def forget(self, rank: int) -> None:
        self.asked.pop(rank, None)
        self.waiting.discard(rank)


@laws
@given(MOVES)
def test_what_is_counted_is_what_a_look_at_all_ranks_tells(
    moves: list[tuple[str, int, Point]],
) -> None:
    plain, agreement = Plain(), Agreement("train", RANKS)
    num_refusals = 0
    for move, rank, point in moves:
        if move in ("ask", "wait"):
            waits = move == "wait"
            expected = plain.ask(rank, point, waits=waits)
            try:
                found: bool | None = agreement.ask(rank, point, plain.stands, waits=waits)
            except StateError:
                found = None
            assert found == expected
            num_refusals += expected is None
        elif move == "rest":
            plain.waiting.discard(rank)
            agreement.rest(rank)
        elif move == "grant":
            assert agreement.grant(rank, point, plain.stands) == plain.grant(rank, point)
        elif move == "move":
            plain.forget(rank)
            plain.moved.add(rank)
            agreement.moved(rank)
        elif move == "leave":
            plain.forget(rank)
            plain.granted.discard(rank)
            agreement.left(rank)
        else:
            plain = Plain()
            agreement.reset()
        assert agreement.num_refusals == num_refusals
