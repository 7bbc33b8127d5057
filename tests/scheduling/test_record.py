"""Laws of the committed record: who may change what, and what it knows after that."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.draw import Draw, DrawRules
from megadask.planner.errors import ConfigError, StateError
from megadask.planner.ids import Verdict
from megadask.planner.place import place_rest
from megadask.planner.plan import Plan
from megadask.planner.state import MixtureEvent, PlannerState, check_lanes
from megadask.planner.strategy import Strategy
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.errors import ClaimError, ServiceError, StaleError
from megadask.scheduling.life import Owner
from megadask.scheduling.point import Point
from megadask.scheduling.record import RunRecord
from tests.fakes import Driver, MemorySource, Record, initial_state, ok, without
from tests.strategies import few_laws

BATCHING = Packed(seq_len=4, global_batch=8)
RULES = DrawRules(batching=BATCHING, epochs=1)
#: Two buckets of two ranks each; steps of four microbatches.
TOPOLOGY = ClientPlaceTree(dp=2, tp=2)
PLANNER = Owner("tcp://one", "planner-1")


def sources(num_records: int = 40) -> list[MemorySource]:
    odd = [Record(4), Record(0, Verdict.FILTERED), Record(0, Verdict.SKIPPED)]
    return [
        MemorySource("a", 0, [[*odd, *ok(*[4] * num_records)], ok(*[4] * num_records)], BATCHING),
        MemorySource("b", 1, [ok(*[2, 6] * num_records)], BATCHING),
    ]


class Run:
    """A record, and a driver in the place of its planner."""

    def __init__(self, num_records: int = 40, topology: ClientPlaceTree = TOPOLOGY) -> None:
        self.sources = sources(num_records)
        state = initial_state(self.sources)
        self.record = RunRecord(
            name="main",
            topology=topology,
            axis="dp",
            lanes={source.name: len(source.lanes) for source in self.sources},
            origin=Point(step=0, state=state.to_json()),
            planner=PLANNER,
        )
        self.take_up()

    def take_up(self) -> None:
        """Plan on from where the record stands, as a new planner does."""
        self.point = self.record.planner_point
        self.driver = Driver(
            self.sources,
            RULES,
            state=check_lanes(PlannerState.from_json(self.point.state), self.record.lanes),
            num_buckets=self.record.topology.num_buckets("dp"),
        )
        for event in self.record.events:
            self.driver.state = self.driver.state.with_event(event)

    def plan(self) -> Plan:
        drawn = self.driver.draw()
        point, self.point = self.point, Point(step=drawn.step + 1, state="")
        return self.rest(drawn, point) if point.microbatch else self.driver.place(drawn)

    def rest(self, drawn: Draw, point: Point) -> Plan:
        return place_rest(
            drawn,
            Strategy(),
            BATCHING,
            self.record.topology,
            self.driver.mixture,
            consumed_N=point.consumed_N(drawn.table.num_rows),
            first_microbatch=point.microbatch,
            assignment_digest=point.assignment_digest,
        )

    def commit(self, plan: Plan | None = None, **changes: Any) -> bool:
        plan = plan or self.plan()
        given = {
            "generation": self.record.generation,
            "incarnation": PLANNER.incarnation,
            "step": plan.step,
            "num_events": len(self.record.events),
        } | changes
        return self.record.commit(**given, data=plan.to_arrow())

    def acknowledge(self, *marks: tuple[int, int]) -> None:
        """Acknowledge for every rank; one mark stands for all of them."""
        ranks = self.record.topology.world_size
        every = marks * ranks if len(marks) == 1 else marks
        self.record.acknowledge(self.record.generation, dict(enumerate(every)))

    def join(self) -> list[str]:
        """Claim all ranks; return their tokens."""
        record = self.record
        ranks = range(record.topology.world_size)
        return [record.join(rank, "client", f"p{rank}", force=True).token for rank in ranks]

    def delivered(self) -> int:
        return int(self.record.audit()["total"]["spans"]["delivered"])


# Commits --------------------------------------------------------------------------------------


def test_plans_are_committed_in_turn() -> None:
    run = Run()
    first, second = run.plan(), run.plan()
    assert not run.commit(second)
    assert run.commit(first)
    assert not run.commit(first)
    assert run.commit(second)
    assert sorted(run.record.plans) == [0, 1]
    assert run.record.next_step == 2
    assert run.record.plans[1].plan.to_arrow() == second.to_arrow()


@pytest.mark.parametrize("incarnation", ["planner-0", ""])
def test_a_planner_of_another_life_is_stale(incarnation: str) -> None:
    run = Run()
    with pytest.raises(StaleError, match=r"replaced.*planner-1"):
        run.commit(incarnation=incarnation)
    run.record.planner = None
    with pytest.raises(StaleError, match=r"replaced.*none"):
        run.commit()
    assert not run.record.plans


@pytest.mark.parametrize("generation", [0, 2])
def test_a_plan_for_another_generation_is_not_committed(generation: int) -> None:
    run = Run()
    assert run.record.generation == 1
    assert not run.commit(generation=generation)
    assert not run.record.plans


def test_a_plan_that_does_not_know_an_event_is_not_committed() -> None:
    run = Run()
    plan = run.plan()
    assert run.record.add_event({"a": 1.0}, None) == 0
    assert not run.commit(plan, num_events=0)
    run.take_up()
    assert run.commit()
    assert set(run.record.plans[0].plan.table["source"]) == {0}


def test_events_hold_above_every_committed_plan() -> None:
    run = Run()
    run.commit()
    run.commit()
    with pytest.raises(ConfigError, match=r"at_step.*1.*at least 2"):
        run.record.add_event({"a": 1.0}, 1)
    assert run.record.add_event({"a": 1.0}, None) == 2
    assert run.record.add_event({"b": 1.0}, 7) == 7
    assert [event.step for event in run.record.events] == [2, 7]


def test_nothing_is_committed_behind_the_end() -> None:
    run = Run(num_records=1)
    while not run.record.ended:
        assert run.commit()
    last = run.record.next_step - 1
    assert run.record.plans[last].plan.end
    assert not run.commit()
    with pytest.raises(ServiceError, match=f"ended at step {last}"):
        run.record.add_event({"a": 1.0}, None)
    run.acknowledge((last, 0))
    assert run.record.ended  # it stays, for ranks that come late
    assert list(run.record.plans) == [last]
    assert len(run.record.history) == last


def test_a_new_planner_goes_on_where_the_record_stands() -> None:
    one, other = Run(), Run()
    for _ in range(5):
        one.commit()
        other.commit()
        other.take_up()
    assert one.record.draw_digest == other.record.draw_digest
    assert one.record.assignment_digest == other.record.assignment_digest
    assert one.record.planner_point == other.record.planner_point
    assert one.record.planner_point.step == 5


# Watermarks -----------------------------------------------------------------------------------

marks = st.dictionaries(
    st.integers(0, 3), st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4
)


@few_laws
@given(st.lists(marks, max_size=8), st.randoms(use_true_random=False))
def test_watermarks_merge_by_maximum_in_any_order(
    news: list[dict[int, tuple[int, int]]], rng: random.Random
) -> None:
    """However often, and in whatever order, they arrive."""
    one, other = Run(), Run()
    for run in (one, other):
        for _ in range(4):
            run.commit()
    for message in news:
        one.record.acknowledge(1, message)
    shuffled = [*news, *rng.sample(news, len(news) // 2)]
    rng.shuffle(shuffled)
    for message in shuffled:
        other.record.acknowledge(1, message)
    assert one.record.watermarks == other.record.watermarks
    counts = [one.record.history[step]["num_microbatches"] for step in range(4)]
    places = {(step, m) for step in range(4) for m in range(counts[step])} | {(4, 0)}
    expected = {
        rank: max([(0, 0), *(m[rank] for m in news if rank in m and m[rank] in places)])
        for rank in range(4)
    }
    assert one.record.watermarks == expected
    low = min(expected.values())
    assert one.record.low == low
    held = {step for step, _ in expected.values()}
    assert sorted(one.record.plans) == [s for s in range(4) if s >= low[0] or s in held]
    assert sorted(one.record.plans) == sorted(other.record.plans)
    assert one.record.audit() == other.record.audit()
    assert one.record.audit()["ok"]


def test_plans_are_freed_when_every_rank_has_them_behind() -> None:
    run = Run()
    for _ in range(3):
        run.commit()
    run.acknowledge((2, 0), (2, 0), (2, 1), (0, 3))
    assert sorted(run.record.plans) == [0, 1, 2]
    run.acknowledge((2, 0), (2, 0), (2, 1), (1, 2))
    assert sorted(run.record.plans) == [1, 2]
    assert run.record.low == (1, 2)


def test_a_watermark_of_a_rank_outside_the_mesh() -> None:
    run = Run()
    run.commit()
    with pytest.raises(ConfigError, match=r"got 4; expected 0 to 3"):
        run.record.acknowledge(1, {0: (1, 0), 4: (1, 0)})
    assert run.record.watermarks[0] == (0, 0)


def test_watermarks_of_another_generation_count_for_nothing() -> None:
    run = Run()
    run.commit()
    run.record.acknowledge(0, dict.fromkeys(range(4), (1, 0)))
    run.record.acknowledge(2, dict.fromkeys(range(4), (1, 0)))
    assert run.record.low == (0, 0)


def test_watermarks_beyond_what_is_committed_count_for_nothing() -> None:
    run = Run()
    run.commit()
    run.acknowledge((1, 1))
    run.acknowledge((10**12, 0))
    run.acknowledge((0, run.record.plans[0].plan.num_microbatches))
    assert run.record.low == (0, 0)
    run.acknowledge((1, 0))
    assert run.record.low == (1, 0)


def test_every_watermark_is_a_point_to_resume_from() -> None:
    run = Run()
    for _ in range(3):
        run.commit()
    record = run.record
    assert record.point_at((0, 0)) == record.origin
    for step, microbatch in itertools.product(range(3), range(4)):
        point = record.point_at((step, microbatch))
        plan = record.plans[step].plan
        assert (point.step, point.microbatch) == (step, microbatch)
        assert PlannerState.from_json(point.state).step == step
        if microbatch:
            np.testing.assert_array_equal(
                point.consumed_N(plan.table.num_rows), plan.microbatch_N < microbatch
            )
    assert record.point_at((3, 0)).state == record.plans[2].plan.state


def test_a_rank_that_is_done_does_not_hold_back_the_others() -> None:
    """And what it has behind it can still be told, though the others are far ahead."""
    run = Run()
    for _ in range(5):
        run.commit()
    run.acknowledge((1, 2))
    run.record.passes.end(0, 0)
    run.acknowledge((1, 2), (4, 0), (4, 0), (4, 0))
    record = run.record
    assert record.low == (4, 0)
    assert sorted(record.plans) == [1, 4]
    assert record.point_at(record.watermarks[0]).step == 1


# The audit ------------------------------------------------------------------------------------


def test_a_span_is_delivered_when_all_ranks_of_its_bucket_have_it_behind() -> None:
    run = Run()
    run.commit()
    plan = run.record.plans[0].plan
    run.acknowledge((0, 2), (0, 0), (0, 0), (0, 0))
    assert run.delivered() == 0
    first = int(((plan.bucket_N == 0) & (plan.microbatch_N < 1)).sum())
    run.acknowledge((0, 2), (0, 1), (0, 0), (1, 0))
    assert run.delivered() == first
    run.acknowledge((0, 2), (0, 1), (1, 0), (1, 0))
    assert run.delivered() == first + int((plan.bucket_N == 1).sum())
    run.acknowledge((1, 0))
    assert run.delivered() == plan.table.num_rows
    assert run.record.audit()["ok"]


def test_a_whole_run_audits_clean() -> None:
    run = Run(num_records=9)
    while not run.record.ended:
        run.commit()
        run.acknowledge((max(0, run.record.next_step - 2), 3))
        assert run.record.audit()["ok"]
    run.acknowledge((run.record.next_step - 1, 0))
    audit = run.record.audit()
    assert audit["ok"]
    assert audit["sources"]["a"]["samples"] == {
        "planned": 19,
        "delivered": 19,
        "repeated": 0,
        "lost": 0,
        "skipped": 1,
        "filtered": 1,
        "unread": 0,
    }
    assert audit["sources"]["b"]["samples"]["delivered"] == 18
    assert audit["sources"]["b"]["spans"]["delivered"] == 27
    assert audit["total"]["tokens"]["delivered"] == 19 * 4 + 9 * 8


def test_a_span_that_a_plan_left_out_is_lost() -> None:
    run = Run()
    run.commit(without(run.plan(), np.array([0])))
    assert run.record.audit()["total"]["samples"]["lost"] == 1
    assert not run.record.audit()["ok"]


def test_a_span_that_no_rank_gets_is_lost() -> None:
    run = Run()
    plan = run.plan()
    plan.microbatch_N[0] = 99
    run.commit(plan)
    run.commit()
    run.acknowledge((2, 0))
    assert run.record.audit()["total"]["samples"]["lost"] == 1


# Going back -----------------------------------------------------------------------------------


def test_ranks_go_back_when_all_have_asked() -> None:
    run = Run()
    for _ in range(3):
        run.commit()
    run.acknowledge((2, 0))
    tokens = run.join()
    point = run.record.point_at((2, 1))
    for rank in range(3):
        assert not run.record.rewind(rank, tokens[rank], point)
        assert not run.record.may_go_on(rank, point)
    assert not run.record.rewind(1, tokens[1], point)  # asking again changes nothing
    assert run.record.rewind(3, tokens[3], point)
    before = run.record.generation
    run.record.open_generation(point)
    assert run.record.generation == before + 1
    assert run.record.watermarks == dict.fromkeys(range(4), (2, 1))
    assert not run.record.plans
    assert run.record.planner_point == point
    assert all(run.record.may_go_on(rank, point) for rank in range(4))


def test_unequal_points_are_named_with_their_ranks() -> None:
    run = Run()
    for _ in range(3):
        run.commit()
    run.acknowledge((1, 0))
    tokens = run.join()
    one, other = run.record.point_at((1, 1)), run.record.point_at((2, 0))
    run.record.rewind(0, tokens[0], one)
    run.record.rewind(2, tokens[2], one)
    with pytest.raises(StateError) as caught:
        run.record.rewind(1, tokens[1], other)
    message = str(caught.value)
    assert "ranks [0, 2]: step 1, microbatch 1" in message
    assert "ranks [1]: step 2, microbatch 0" in message
    assert run.record.agreement.num_refusals == 1
    # Nothing of it is left: all may ask anew.
    assert [run.record.rewind(rank, tokens[rank], one) for rank in range(4)] == [False] * 3 + [True]


def test_what_a_rank_does_not_wait_for_contradicts_nobody() -> None:
    """Rank 0 loads one state and another at once; rank 1 is still at the first one."""
    run = Run()
    for _ in range(3):
        run.commit()
    run.acknowledge((1, 0))
    tokens = run.join()
    one, other = run.record.point_at((1, 1)), run.record.point_at((2, 0))
    for point in (one, other):
        assert not run.record.rewind(0, tokens[0], point, waits=False)
    assert not run.record.rewind(0, tokens[0], other)  # now it reads
    for rank in (1, 2, 3):
        assert not run.record.rewind(rank, tokens[rank], one, waits=False)
    assert [run.record.rewind(rank, tokens[rank], other) for rank in (1, 2, 3)] == [
        False,
        False,
        True,
    ]


def test_a_rank_that_gave_up_waiting_contradicts_nobody() -> None:
    run = Run()
    for _ in range(3):
        run.commit()
    run.acknowledge((1, 0))
    tokens = run.join()
    one, other = run.record.point_at((1, 1)), run.record.point_at((2, 0))
    run.record.rewind(0, tokens[0], one)
    run.record.agreement.rest(0)
    assert [run.record.rewind(rank, tokens[rank], other) for rank in (1, 2, 3, 0)] == [
        *[False] * 3,
        True,
    ]


def test_a_rank_waits_for_all_that_have_to_come_back() -> None:
    """Going on as it is, it could not come back with a rank that is elsewhere and has asked."""
    run = Run()
    run.commit()
    tokens = run.join()
    origin = run.record.origin
    run.acknowledge((0, 0), (0, 1), (0, 0), (0, 0))
    for rank in (1, 0):
        assert not run.record.rewind(rank, tokens[rank], origin)
    assert not run.record.may_go_on(0, origin)
    assert [run.record.rewind(rank, tokens[rank], origin) for rank in (2, 3)] == [False, True]


def test_equal_steps_of_unlike_runs_are_unequal_points() -> None:
    run = Run()
    tokens = run.join()
    one = Point(step=3, state=run.record.origin.state)
    run.record.rewind(0, tokens[0], one)
    with pytest.raises(StateError, match=r"\[0\].*\[1\]"):
        run.record.rewind(1, tokens[1], Point(step=3, state="another"))


def test_ranks_that_stand_at_the_origin_go_on_as_they_are() -> None:
    run = Run()
    run.commit()
    tokens = run.join()
    origin = run.record.origin
    for rank in range(4):
        assert not run.record.rewind(rank, tokens[rank], origin)
        assert run.record.may_go_on(rank, origin)
    assert run.record.generation == 1


def test_a_rank_at_the_origin_waits_for_one_that_has_to_go_back_there() -> None:
    run = Run()
    run.commit()
    tokens = run.join()
    origin = run.record.origin
    run.acknowledge((0, 1), (0, 0), (0, 0), (0, 0))
    assert not run.record.rewind(1, tokens[1], origin)
    assert not run.record.may_go_on(1, origin)  # rank 0 has gone on, and would have to come back
    assert [run.record.rewind(rank, tokens[rank], origin) for rank in (2, 3, 0)] == [
        False,
        False,
        True,
    ]


def test_a_rank_that_was_let_go_on_counts_as_long_as_its_trainer_lives() -> None:
    """The others may load the same state much later, when it has moved already."""
    run = Run()
    for _ in range(2):
        run.commit()
    tokens = run.join()
    record, origin = run.record, run.record.origin
    for rank in range(4):
        record.rewind(rank, tokens[rank], origin)
    assert record.may_go_on(0, origin)
    run.acknowledge((0, 1), (0, 0), (0, 0), (0, 0))
    assert record.may_go_on(1, origin)
    record.leave(0, tokens[0])
    assert not record.may_go_on(2, origin)


def test_a_new_generation_lets_nobody_go_on_for_what_an_earlier_one_granted() -> None:
    run = Run()
    run.commit()
    run.join()
    assert run.record.may_go_on(0, run.record.origin)
    point = run.record.point_at((0, 2))
    run.record.open_generation(point)
    run.take_up()
    run.commit()
    run.acknowledge((0, 3), (0, 2), (0, 2), (0, 2))
    assert not run.record.may_go_on(1, point)
    assert not run.record.may_go_on(0, point)  # it does not stand there any more


def test_a_trainer_that_is_gone_wants_nothing_any_more() -> None:
    run = Run()
    for _ in range(3):
        run.commit()
    run.acknowledge((1, 0))
    tokens = run.join()
    one, other = run.record.point_at((1, 1)), run.record.point_at((2, 0))
    run.record.rewind(0, tokens[0], one)
    run.record.leave(0, tokens[0])
    assert not run.record.rewind(1, tokens[1], other)
    with pytest.raises(ClaimError, match="rank 0"):
        run.record.rewind(0, tokens[0], other)


def test_a_rank_that_went_on_wants_nothing_any_more() -> None:
    run = Run()
    for _ in range(2):
        run.commit()
    tokens = run.join()
    run.record.rewind(0, tokens[0], run.record.origin)
    run.acknowledge((1, 0))
    point = run.record.point_at((1, 1))
    assert [run.record.rewind(rank, tokens[rank], point) for rank in range(4)] == [False] * 3 + [
        True
    ]


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("mark", [(0, 0), (1, 0), (1, 1), (1, 3), (1, 4), (2, 0)])
def test_a_run_that_goes_back_delivers_the_rest_exactly(mark: tuple[int, int], dp: int) -> None:
    """From any point, on the same topology and on another: everything comes once behind it."""
    run = Run(num_records=9)
    for _ in range(3):
        run.commit()
    run.acknowledge(mark)
    point = run.record.point_at(mark)
    before = run.record.plans[mark[0]].plan
    run.record.topology = ClientPlaceTree(dp=dp)
    run.record.open_generation(point)
    run.take_up()
    while not run.record.ended:
        assert run.commit()
    fresh = [committed.plan for committed in run.record.plans.values()]
    again = sum(int((plan.bucket_N >= 0).sum()) for plan in fresh)
    run.acknowledge((run.record.next_step - 1, 0))
    audit = run.record.audit()
    assert audit["ok"], audit
    assert audit["total"]["spans"]["delivered"] == again
    if mark[1] and dp == 2:
        first = fresh[0]
        left = before.microbatch_N >= mark[1]
        np.testing.assert_array_equal(first.bucket_N[left], before.bucket_N[left])
        np.testing.assert_array_equal(first.microbatch_N[left], before.microbatch_N[left])
        assert first.assignment_digest == before.assignment_digest


def test_events_for_later_steps_survive_going_back() -> None:
    run = Run()
    run.record.add_event({"b": 1.0}, 1)
    run.record.add_event({"a": 1.0}, 5)
    run.take_up()
    for _ in range(3):
        run.commit()
    digests = [run.record.plans[step].plan.draw_digest for step in (1, 2)]
    run.record.open_generation(run.record.point_at((1, 0)))
    run.take_up()
    run.commit()
    run.commit()
    assert [run.record.plans[step].plan.draw_digest for step in (1, 2)] == digests
    assert run.driver.state.events[-1] == MixtureEvent(step=5, weights={"a": 1.0})


def test_a_source_that_the_state_does_not_know_is_audited() -> None:
    """Where a pipeline has grown, in front of the sources that were there."""
    run = Run(num_records=3)
    run.commit()
    state = run.record.plans[0].plan.state
    new = MemorySource("new", 0, [ok(4, 4, 4)], BATCHING)
    old = [MemorySource(s.name, s.index + 1, s.lanes, BATCHING) for s in run.sources]
    run.sources = [new, *old]
    run.record = RunRecord(
        name="main",
        topology=TOPOLOGY,
        axis="dp",
        lanes={source.name: len(source.lanes) for source in run.sources},
        origin=Point(step=1, state=state),
        planner=PLANNER,
    )
    run.take_up()
    while not run.record.ended:
        run.commit()
    run.acknowledge((run.record.next_step - 1, 0))
    audit = run.record.audit()
    assert audit["ok"], audit
    assert audit["sources"]["new"]["samples"]["delivered"] == 3


# Claims ---------------------------------------------------------------------------------------


def test_a_rank_belongs_to_one_process() -> None:
    record = Run().record
    first = record.join(0, "client-1", "host:1", force=False)
    with pytest.raises(ClaimError, match=r"host:2.*host:1.*force"):
        record.join(0, "client-2", "host:2", force=False)
    again = record.join(0, "client-3", "host:1", force=False)
    assert again.token != first.token
    with pytest.raises(ClaimError, match="rank 0"):
        record.claims.check(0, first.token)
    record.claims.check(0, again.token)
    taken = record.join(0, "client-2", "host:2", force=True)
    record.leave(0, again.token)  # an old token gives nothing back
    record.claims.check(0, taken.token)
    record.leave(0, taken.token)
    with pytest.raises(ClaimError):
        record.claims.check(0, taken.token)


def test_a_client_that_is_gone_frees_its_ranks() -> None:
    record = Run().record
    for rank, client in enumerate(["one", "one", "two"]):
        record.join(rank, client, f"host:{client}", force=False)
    record.drop_client("one")
    assert list(record.claims) == [2]
    record.join(0, "three", "host:three", force=False)


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_mesh_are_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"{rank}; expected 0 to 3"):
        Run().record.join(rank, "client", "host:1", force=True)


def test_a_rank_is_served_by_the_constructor_of_its_bucket() -> None:
    record = Run().record
    record.constructors.update({(0,): Owner("one", "c-0"), (1,): Owner("two", "c-1")})
    served = [record.constructor_of(rank) for rank in range(4)]
    assert [owner.incarnation if owner else None for owner in served] == [
        f"c-{TOPOLOGY.bucket_of(rank, 'dp')}" for rank in range(4)
    ]
    assert record.is_actor("c-1")
    assert record.is_actor("planner-1")
    assert not record.is_actor("c-2")
