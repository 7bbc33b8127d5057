"""Laws of the parts of a plan: together they are the plan, and each delivers what it would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner import columnar
from megadask.planner.batching import Packed
from megadask.planner.draw import DrawRules
from megadask.planner.errors import StateError
from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata
from megadask.planner.plan import Plan
from megadask.scheduling.point import Point, verdicts_of
from megadask.scheduling.portions import Portion, Portions, microbatches_of, read_text
from tests.fakes import Driver, MemorySource, Record, ok
from tests.strategies import laws, span_tables

NUM_BUCKETS = 4


def planned(num_buckets: int, num_steps: int) -> list[Plan]:
    """Return the plans of some steps, of several microbatches and with verdicts."""
    batching = Packed(seq_len=4, global_batch=2 * num_buckets)
    odd = [Record(4), Record(0, Verdict.FILTERED), Record(0, Verdict.SKIPPED)]
    documents = ok(*[4] * 40 * num_buckets)
    made = [
        MemorySource("a", 0, [[*odd, *documents], documents], batching),
        MemorySource("b", 1, [ok(*[2, 6] * 40 * num_buckets)], batching),
    ]
    rules = DrawRules(batching=batching, epochs=1)
    driver = Driver(made, rules, num_buckets=num_buckets)
    return [driver.place(driver.draw()) for _ in range(num_steps)]


PLANS = planned(NUM_BUCKETS, 3)


@laws
@given(st.sampled_from(PLANS), st.permutations(range(NUM_BUCKETS)), st.integers(1, NUM_BUCKETS))
def test_parts_tile_the_plan(plan: Plan, order: list[int], count: int) -> None:
    rows = []
    for first in range(count):
        buckets = order[first::count]
        part = Portion.read(Portions(plan).of(buckets), plan.sources)
        rows += part.row_N.tolist()
        for bucket in buckets:
            for microbatch in range(plan.num_microbatches):
                mine = part.plan.rows_of(bucket, microbatch)
                whole = plan.rows_of(bucket, microbatch)
                np.testing.assert_array_equal(part.row_N[mine], whole)
                assert part.plan.sample_ids(mine) == plan.sample_ids(whole)
                for name in ("start", "stop", "checksum"):
                    np.testing.assert_array_equal(
                        part.plan.table[name][mine], plan.table[name][whole]
                    )
    assert sorted(rows) == list(range(plan.table.num_rows))


@laws
@given(st.sampled_from(PLANS), st.sets(st.integers(0, 1000)))
def test_rows_are_read_as_they_were_cut(plan: Plan, numbers: set[int]) -> None:
    rows = np.array(sorted({number % plan.table.num_rows for number in numbers}), np.int64)
    placed = ("bucket", "microbatch", "pack", "offset")
    part = replace(
        plan,
        table=plan.table.take(rows),
        **{f"{name}_N": getattr(plan, f"{name}_N")[rows] for name in placed},
    )
    data = plan.cutter().cut(rows)
    assert Plan.from_cut(data).to_arrow() == part.to_arrow()
    with pytest.raises(StateError, match="another kind"):
        columnar.read_cut("table", 1, data)


@laws
@given(span_tables(), st.data())
def test_rows_of_any_table_are_cut(table: Metadata, data: st.DataObject) -> None:
    """With scalars, items, and integers of any size."""
    numbers = data.draw(st.sets(st.integers(0, max(0, table.num_rows - 1))))
    rows = np.array(sorted(numbers)[: table.num_rows], np.int64)
    found, header = columnar.read_cut(
        "part", 1, columnar.Cutter("part", 1, table, {"a": 1}).cut(rows)
    )
    assert header == {"a": 1}
    expected = table.take(rows)
    assert list(found) == list(expected)
    for name, column in expected.items():
        assert found[name].dtype == column.dtype
        np.testing.assert_array_equal(found[name], column)
    assert list(found.ragged) == list(expected.ragged)
    for name, items in expected.ragged.items():
        np.testing.assert_array_equal(found.ragged[name].offsets, items.offsets)
        np.testing.assert_array_equal(found.ragged[name].lengths_I, items.lengths_I)


@laws
@given(st.sampled_from(PLANS), st.integers(0, NUM_BUCKETS - 1))
def test_a_part_knows_of_the_whole_step(plan: Plan, bucket: int) -> None:
    part = Portion.read(Portions(plan).of([bucket]), plan.sources)
    assert part.plan.step == plan.step
    assert part.plan.num_microbatches == plan.num_microbatches > 1
    assert part.plan.assignment_digest == plan.assignment_digest
    assert part.facts["imbalance"] == plan.imbalance
    text = read_text(part.text.tobytes())
    assert text["state_after"] == plan.state
    for microbatch in range(1, plan.num_microbatches):
        made = Point.of(
            step=plan.step,
            state="",
            microbatch=microbatch,
            microbatch_N=microbatches_of(text),
            draw_digest=text["draw_digest"],
            assignment_digest=text["assignment_digest"],
            verdicts=text["verdicts"],
            events=text["events"],
        )
        assert made == Point.inside(plan, "", microbatch)
    assert tuple(map(tuple, text["verdicts"])) == verdicts_of(plan)


def test_a_part_does_not_grow_with_the_ranks() -> None:
    """What each of N constructors is told of a step of N times as many spans."""
    small, large = (planned(ranks, 2)[1] for ranks in (4, 64))
    assert large.table.num_rows > 10 * small.table.num_rows
    sizes = [len(Portions(plan).of([0])["cut"]) for plan in (small, large)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)
