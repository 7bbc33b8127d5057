"""The buffer of a constructor: bounded, in order, and never in the way of who waits."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megadask.scheduling.share import IDS, Share
from megadask.scheduling.shelf import MOST_BUILDS, Shelf, Slot

SHARE = 40  # bytes
MICROBATCHES = 3


def share(*layouts: dict[str, np.ndarray]) -> Share:
    """Return a share of as many ranks."""
    ranks = range(len(layouts))
    return Share(dict(enumerate(layouts)), dict.fromkeys(ranks, 0), dict.fromkeys(ranks, ()))


def share_of(slot: Slot, bucket: int, size: int = 5) -> Share:
    return share({"tokens": np.array([*slot, bucket, 0, 0], np.int64)[:size]})


def shelf(limit: int, buckets: int = 2, steps: int = 4, most_bytes: int | None = None) -> Shelf:
    """Return a shelf of one rank a bucket, for which some steps are planned."""
    ranks_of = {bucket: frozenset([bucket]) for bucket in range(buckets)}
    made = Shelf(limit * SHARE, ranks_of, most_bytes)
    made.free(dict.fromkeys(range(buckets), (0, 0)))
    for step in range(steps):
        made.expect((step, microbatch) for microbatch in range(MICROBATCHES))
    return made


def build(made: Shelf) -> list[tuple[Slot, list[int]]]:
    """Build all that is wanted, one after the other; return what that was."""
    built = []
    while (wanted := made.next_build()) is not None:
        slot, buckets = wanted
        made.reserve(slot, buckets)
        made.put(slot, {bucket: share_of(slot, bucket) for bucket in buckets})
        built.append((slot, buckets))
    return built


def held(made: Shelf, bucket: int) -> list[Slot]:
    return sorted(slot for slot, one in made._shares if one == bucket)


def test_it_builds_in_order_up_to_the_limit() -> None:
    assert build(shelf(5)) == [((0, 0), [0, 1]), ((0, 1), [0, 1])]


def test_the_first_is_built_even_if_it_does_not_fit() -> None:
    assert build(shelf(0)) == [((0, 0), [0, 1])]


def test_a_share_larger_than_was_thought_takes_the_place_of_what_lies_ahead() -> None:
    made = shelf(6)
    assert len(build(made)) == 3
    made.free({0: (0, 1), 1: (0, 1)})
    made.give((0, 1), 0, 0)
    made.give((0, 1), 1, 1)
    slot, buckets = made.next_build() or ((0, 0), [])
    made.reserve(slot, buckets)
    large = {0: share({"image": np.zeros(3 * SHARE, np.uint8)}), 1: share_of(slot, 1)}
    made.put(slot, large)
    assert made.held_bytes <= made.limit_bytes
    assert held(made, 0) == held(made, 1) == [(0, 2), slot]
    assert made.next_build() is None  # a share may be as large as the largest


def test_arrays_that_ranks_share_count_once() -> None:
    made = shelf(9, buckets=1)
    slot, buckets = made.next_build() or ((0, 0), [])
    made.reserve(slot, buckets)
    image = np.zeros(SHARE, np.uint8)
    ids = np.zeros((6, 3), np.int64)  # few, and never as many: they do not count
    made.put(slot, {0: share({"image": image, IDS: ids}, {"image": image, IDS: ids})})
    assert made.held_bytes == SHARE


def test_what_is_acknowledged_makes_room() -> None:
    made = shelf(4)
    build(made)
    made.free({0: (0, 1), 1: (0, 0)})
    assert build(made) == []  # the next one is for both
    made.free({0: (0, 1), 1: (0, 1)})
    assert build(made) == [((0, 2), [0, 1])]
    made.free({0: (0, 2)})  # bucket 1 is done with its pass
    assert build(made) == [((1, 0), [0]), ((1, 1), [0]), ((1, 2), [0])]


def test_what_was_given_is_evicted_before_what_lies_ahead() -> None:
    made = shelf(6)
    build(made)
    made.give((0, 0), 0, 0)
    made.give((0, 1), 0, 0)
    with made.waiting((1, 0), 0):
        assert build(made) == [((1, 0), [0])]
    assert held(made, 0) == [(0, 1), (0, 2), (1, 0)]
    with made.waiting((2, 0), 0), made.waiting((1, 0), 0):
        build(made)
        assert (1, 0) in held(made, 0)  # somebody waits for it
    made.give((1, 0), 0, 0)
    with made.waiting((2, 0), 0):
        build(made)
    with made.waiting((2, 1), 0):
        build(made)
    assert held(made, 1) == [(0, 0), (0, 1), (0, 2)]
    with made.waiting((2, 2), 0):
        build(made)
    assert held(made, 0) == [(0, 2), (2, 0), (2, 2)]  # (2, 1) was the one furthest ahead
    assert made.num_evicted == 4


def test_what_was_evicted_is_built_again_for_who_asks() -> None:
    made = shelf(0)
    build(made)
    made.give((0, 0), 0, 0)
    with made.waiting((0, 1), 0):
        build(made)
    assert build(made) == []
    with made.waiting((0, 0), 0):
        assert build(made) == [((0, 0), [0])]


def test_a_bucket_of_several_ranks_is_given_when_all_have_it() -> None:
    made = Shelf(2 * SHARE, {0: frozenset([0, 1]), 1: frozenset([2])})
    made.free({0: (0, 0), 1: (0, 0)})
    made.expect([(0, 0), (0, 1)])
    build(made)
    made.give((0, 0), 0, 0)
    made.give((0, 0), 1, 2)
    with made.waiting((0, 1), 1):
        build(made)
    assert held(made, 0) == [(0, 0)]
    made.give((0, 0), 0, 1)
    with made.waiting((0, 1), 0):
        build(made)
    assert held(made, 0) == [(0, 1)]


class Ranks(RuleBasedStateMachine):
    """Ranks that ask ahead, pause, come back and acknowledge in any order; one a bucket."""

    most_bytes: int | None = None

    def share(self, slot: Slot, bucket: int) -> Share:
        return share_of(slot, bucket)

    @initialize(limit=st.integers(0, 8), buckets=st.integers(1, 3))
    def begin(self, limit: int, buckets: int) -> None:
        self.shelf = shelf(limit, buckets, steps=0, most_bytes=self.most_bytes)
        self.buckets = range(buckets)
        self.planned: list[Slot] = []
        self.low = [0] * buckets  # index of the first microbatch that is not acknowledged
        self.at = [0] * buckets  # index of the first one that the rank has not got
        self.waits: dict[tuple[int, int], ExitStack] = {}  # (bucket, index)
        self.building: list[tuple[Slot, list[int]]] = []
        self.num_built = 0

    @rule()
    def plan(self) -> None:
        step = len(self.planned) // MICROBATCHES
        new = [(step, microbatch) for microbatch in range(MICROBATCHES)]
        self.planned += new
        self.shelf.expect(new)

    @rule(data=st.data(), ahead=st.integers(0, 3))
    def ask(self, data: st.DataObject, ahead: int) -> None:
        bucket = data.draw(st.sampled_from(list(self.buckets)))
        index = self.at[bucket] + ahead
        if (bucket, index) not in self.waits:
            slot = (index // MICROBATCHES, index % MICROBATCHES)
            if self.shelf.get(slot, bucket) is None:
                self.waits[bucket, index] = ExitStack()
                self.waits[bucket, index].enter_context(self.shelf.waiting(slot, bucket))
            else:
                self.give(bucket, index)

    def give(self, bucket: int, index: int) -> None:
        slot = self.planned[index]
        got = self.shelf.give(slot, bucket, bucket).arrays_of[0]["tokens"].tolist()
        assert got[:3] == [*slot, bucket]
        self.at[bucket] = max(self.at[bucket], index + 1)

    @precondition(lambda self: self.shelf.next_build() is not None)
    @rule()
    def start(self) -> None:
        wanted = self.shelf.next_build()
        assert wanted is not None
        slot, buckets = wanted
        assert slot in self.planned
        assert all(self.shelf.get(slot, bucket) is None for bucket in buckets)
        self.shelf.reserve(slot, buckets)
        self.building.append(wanted)
        assert len(self.building) <= MOST_BUILDS + len(self.buckets)

    @precondition(lambda self: self.building)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.building) - 1))
        slot, buckets = self.building.pop(number)
        self.shelf.put(slot, {bucket: self.share(slot, bucket) for bucket in buckets})
        self.num_built += 1
        for bucket, index in list(self.waits):  # whoever waits wakes at once
            if index < len(self.planned) and self.shelf.get(self.planned[index], bucket):
                self.waits.pop((bucket, index)).close()
                self.give(bucket, index)

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        bucket = data.draw(st.sampled_from(list(self.buckets)))
        self.low[bucket] = data.draw(st.integers(self.low[bucket], self.at[bucket]))
        for key in [key for key in self.waits if key[0] == bucket and key[1] < self.low[bucket]]:
            self.waits.pop(key).close()
        self.shelf.free({b: (n // MICROBATCHES, n % MICROBATCHES) for b, n in enumerate(self.low)})

    @rule(data=st.data())
    def reconnect(self, data: st.DataObject) -> None:
        """A rank begins anew behind what it has acknowledged."""
        bucket = data.draw(st.sampled_from(list(self.buckets)))
        self.at[bucket] = self.low[bucket]

    @invariant()
    def memory_is_bounded(self) -> None:
        limit = self.shelf.limit_bytes + SHARE * len(self.buckets)
        if self.num_built or self.most_bytes:  # before, nobody knows how large a share is
            assert self.shelf.held_bytes <= limit

    @invariant()
    def whoever_waits_will_get_it(self) -> None:
        due = [index for _, index in self.waits if index < len(self.planned)]
        if due and not self.building:
            wanted = self.shelf.next_build()
            assert wanted is not None
            assert wanted[0] == self.planned[min(due)]

    def teardown(self) -> None:
        for wait in getattr(self, "waits", {}).values():
            wait.close()


class UnevenRanks(Ranks):
    """The same where shares are of unlike sizes, up to one that is known."""

    most_bytes = SHARE

    def share(self, slot: Slot, bucket: int) -> Share:
        step, microbatch = slot
        return share_of(slot, bucket, 3 + (step + microbatch) % 3)


TestRanks = Ranks.TestCase
TestUnevenRanks = UnevenRanks.TestCase
TestRanks.settings = settings(max_examples=60, stateful_step_count=40)
TestUnevenRanks.settings = settings(max_examples=20, stateful_step_count=40)
