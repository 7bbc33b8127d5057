"""Slots of shared memory: nobody's data changes under them, and memory is bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megadask.scheduling.slots import Report, Slots, Taken, rounded

KIB = 1024
SIZE = 64 * KIB


def slots(limit: int = 4, least: int = 1, most: int = 100) -> Slots:
    return Slots(limit * SIZE, num_least=least, num_most=most)


def taken(made: Slots, num_bytes: int = SIZE) -> Taken:
    got = made.take(num_bytes)
    assert got is not None
    return got


def report(mark: int, *held: int, generation: int = 0) -> Report:
    return Report(generation=generation, mark=(mark, 0), held=frozenset(held))


def test_a_slot_is_used_again_once_nobody_uses_its_content() -> None:
    made = slots()
    first = taken(made)
    made.grant(first.content, "a", 0, (3, 0))
    assert made.leave(first.content) == []
    assert taken(made).slot != first.slot
    made.hear("a", report(3))  # not acknowledged
    assert taken(made).slot != first.slot
    made.hear("a", report(4, first.content))  # its tensors are there
    assert taken(made).slot != first.slot
    made.hear("a", report(4))
    again = taken(made)
    assert (again.slot, again.is_new) == (first.slot, False)
    assert again.content != first.content


def test_every_reader_has_to_be_done() -> None:
    made = slots()
    first = taken(made)
    for reader in "ab":
        made.grant(first.content, reader, 0, (0, 0))
    made.leave(first.content)
    made.hear("a", report(1))
    assert taken(made).is_new
    made.hear("b", report(1))
    assert not taken(made).is_new


def test_what_a_lost_reader_may_use_is_closed_and_not_used_again() -> None:
    made = slots()
    first, second = taken(made), taken(made)
    for reader in "ab":
        made.grant(first.content, reader, 0, (0, 0))
        made.grant(second.content, reader, 0, (0, 1))
    made.leave(first.content)
    assert made.keep({"a"}) == []  # the other one may need it
    assert made.hear("a", report(1)) == [first.slot]
    assert made.leave(second.content) == [second.slot]
    assert (len(made), made.num_bytes) == (0, 0)


def test_another_generation_lets_go_of_what_was_not_opened() -> None:
    made = slots()
    opened, missed = taken(made), taken(made)
    for one in (opened, missed):
        made.grant(one.content, "a", 0, (7, 0))
        made.leave(one.content)
    made.hear("a", report(2, opened.content, generation=1))
    assert taken(made).slot == missed.slot
    made.hear("a", report(2, generation=1))
    assert taken(made).slot == opened.slot


def test_memory_has_a_limit_and_free_slots_of_other_sizes_give_way() -> None:
    made = slots(limit=4, least=2)
    small = [taken(made) for _ in range(4)]
    assert made.take(1) is None
    for one in small[:3]:
        made.leave(one.content)
    large = taken(made, 3 * SIZE)
    assert large.closed == tuple(one.slot for one in small[:3])
    assert made.num_bytes == 4 * SIZE
    made.leave(large.content)
    assert taken(made, SIZE).closed == (large.slot,)  # too large for so little


def test_a_batch_larger_than_the_limit_has_its_least_number_of_slots() -> None:
    made = slots(limit=1, least=2)
    assert [made.take(9 * SIZE) is None for _ in range(3)] == [False, False, True]


def test_a_slot_that_could_not_be_made_takes_no_room() -> None:
    made = slots(limit=1)
    made.fail(taken(made))
    assert made.num_bytes == 0
    assert taken(made).is_new


def test_free_slots_can_be_dropped() -> None:
    made = slots()
    first, second = taken(made), taken(made)
    made.leave(first.content)
    assert made.drop_free() == [first.slot]
    assert made.num_bytes == second.num_bytes


def test_slots_waste_little() -> None:
    for num_bytes in [1, SIZE, SIZE + 1, 10**6, 16 * 2**20 + 5, 3 * 10**9]:
        size = rounded(num_bytes)
        assert num_bytes <= size <= num_bytes * 17 / 16 + 4096
        assert size % 4096 == 0


@dataclass
class Reader:
    """A trainer: replies on their way to it, and what it has open."""

    name: str
    generation: int = 0
    at: int = 0  # the microbatch that it reads next
    mark: int = 0
    inbox: list[tuple[int, int, int]] = field(default_factory=list)  # generation, at, content
    opened: dict[int, int] = field(default_factory=dict)  # content to what it read there
    said: list[Report] = field(default_factory=list)  # messages on their way


class Ring(RuleBasedStateMachine):
    """Readers that ask ahead, keep what they like, go back and vanish; messages in any order.

    ``memory`` is what lies in each slot; a reader that has a content open sees it.
    """

    @initialize(limit=st.integers(0, 6), readers=st.integers(1, 3))
    def begin(self, limit: int, readers: int) -> None:
        self.slots = Slots(limit * SIZE, num_least=2, num_most=8)
        self.limit = max(limit, 2) * SIZE
        self.readers = {str(n): Reader(str(n)) for n in range(readers)}
        self.zombies: list[Reader] = []
        self.marks = dict.fromkeys(self.readers, 0)  # as the constructor knows them
        self.generation = 0
        self.shelf: dict[int, Taken] = {}  # by microbatch
        self.memory: dict[int, int] = {}  # slot to the content in it, of those that there are
        self.mapped: dict[int, int] = {}  # content to its slot
        self.next_name = readers

    @rule(at=st.integers(0, 5))
    def build(self, at: int) -> None:
        low = min(self.marks.values())
        if low + at in self.shelf:
            return
        got = self.slots.take(SIZE)
        if got is None:
            return
        for slot in got.closed:
            del self.memory[slot]
        assert got.is_new == (got.slot not in self.memory)
        self.memory[got.slot] = got.content
        self.mapped[got.content] = got.slot
        self.shelf[low + at] = got

    @precondition(lambda self: self.shelf)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.shelf)))
        self.close(self.slots.leave(self.shelf.pop(at).content))

    @precondition(lambda self: self.shelf)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        reader = self.draw(data)
        at = data.draw(st.sampled_from(sorted(self.shelf)))
        if self.marks[reader.name] <= at and reader.generation == self.generation:
            content = self.shelf[at].content
            self.slots.grant(content, reader.name, self.generation, (at, 0))
            reader.inbox.append((self.generation, at, content))

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        reader = self.draw(data)
        for reply in reader.inbox:
            generation, at, content = reply
            if (generation, at) == (reader.generation, reader.at):
                reader.inbox.remove(reply)
                reader.opened[content] = content
                reader.at += 1
                self.check(reader)
                return

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        reader = self.draw(data)
        reader.mark = reader.at
        held = frozenset(reader.opened)
        said = Report(generation=reader.generation, mark=(reader.mark, 0), held=held)
        reader.said.append(said)

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        reader = self.draw(data)
        if reader.said:
            number = data.draw(st.integers(0, len(reader.said) - 1))
            said = reader.said.pop(number)
            if said.generation == self.generation:
                self.marks[reader.name] = max(self.marks[reader.name], said.mark[0])
                self.close(self.slots.hear(reader.name, said))

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        reader = self.draw(data)
        if reader.opened:
            del reader.opened[data.draw(st.sampled_from(sorted(reader.opened)))]

    @rule()
    def restart(self) -> None:
        """All go back to the beginning; readers notice when they like (see `notice`)."""
        self.generation += 1
        for at in list(self.shelf):
            self.close(self.slots.leave(self.shelf.pop(at).content))
        self.marks = dict.fromkeys(self.marks, 0)

    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        reader = self.draw(data)
        if reader.generation < self.generation:
            reader.generation = self.generation
            reader.at = reader.mark = 0
            reader.inbox.clear()

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """A reader vanishes, or is stopped and wakes later; another one takes its rank."""
        reader = self.draw(data)
        del self.readers[reader.name]
        self.zombies.append(reader)
        name = str(self.next_name)
        self.next_name += 1
        mark = self.marks.pop(reader.name)
        self.marks[name] = mark
        self.readers[name] = Reader(name, generation=self.generation, at=mark, mark=mark)
        self.close(self.slots.keep(set(self.readers)))

    @invariant()
    def everybody_sees_what_was_granted(self) -> None:
        for reader in [*self.readers.values(), *self.zombies]:
            self.check(reader)

    @invariant()
    def what_a_reader_may_yet_open_is_there(self) -> None:
        for reader in self.readers.values():
            for generation, at, content in reader.inbox:
                if (generation == reader.generation) and at >= reader.at:
                    assert self.memory.get(self.mapped[content], content) == content

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.slots.num_bytes == len(self.memory) * SIZE <= self.limit

    def check(self, reader: Reader) -> None:
        """A slot that is closed keeps its memory until the last mapping goes."""
        for content, saw in reader.opened.items():
            assert self.memory.get(self.mapped[content], saw) == saw

    def close(self, closed: list[int]) -> None:
        for slot in closed:
            del self.memory[slot]

    def draw(self, data: st.DataObject) -> Reader:
        return self.readers[data.draw(st.sampled_from(sorted(self.readers)))]

    def teardown(self) -> None:
        """Once everybody is gone and nothing is on the shelf, all slots are free or closed."""
        if hasattr(self, "slots"):
            for one in self.shelf.values():
                self.slots.leave(one.content)
            self.slots.keep(())
            assert self.slots.leased_bytes == 0
            self.slots.drop_free()
            assert len(self.slots) == 0


TestRing = Ring.TestCase
TestRing.settings = settings(max_examples=100, stateful_step_count=50)
