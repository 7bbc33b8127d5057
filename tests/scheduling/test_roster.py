"""The roster tells from either side what a look at all constructors would tell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megadask.scheduling.life import Owner
from megadask.scheduling.roster import Roster
from tests.strategies import laws

BUCKETS = 6


@laws
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "take", "take", "drop", "clear", "merge"]),
            st.integers(1, 3),
            st.integers(0, BUCKETS),
        )
    )
)
def test_a_roster_finds_what_it_holds(moves: list[tuple[str, int, int]]) -> None:
    roster, plain = Roster(), dict[tuple[int, ...], Owner]()
    count = 2
    for number, (move, new_count, first) in enumerate(moves):
        parts = [tuple(range(BUCKETS))[one::count] for one in range(count)]
        part = parts[first % count]
        if move == "take":  # also from the one before it
            roster[part] = plain[part] = Owner("worker", f"life-{number}")
        elif move == "merge":
            more = {one: Owner("worker", f"life-{number}-{n}") for n, one in enumerate(parts)}
            roster.update(more)
            plain.update(more)
        elif move == "drop" and part in plain:
            del roster[part], plain[part]
        elif move == "clear":
            roster.clear()
            plain.clear()
            count = new_count
        assert list(roster.items()) == list(plain.items())
        for bucket in range(BUCKETS):
            found = [owner for part, owner in plain.items() if bucket in part]
            assert roster.of_bucket(bucket) == (found[0] if found else None)
        for part, owner in plain.items():
            assert roster.buckets_of(owner.incarnation) == part
        assert roster.buckets_of("another") is None
