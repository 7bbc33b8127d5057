"""Laws of plans: they survive Arrow, and their digests say what they are digests of."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.errors import StateError
from megadask.planner.ids import SampleId
from megadask.planner.metadata import Metadata
from megadask.planner.plan import VERSION, Plan, draw_digest
from megadask.planner.views import imbalance
from tests.fakes import span_table
from tests.strategies import laws, span_tables

NAMES = ("a", "b")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    table = draw(span_tables(num_sources=len(NAMES)))
    shape = [draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 2))]
    places = st.lists(st.integers(-1, 9), min_size=table.num_rows, max_size=table.num_rows)
    bucket_N, microbatch_N, pack_N, offset_N = (np.array(draw(places), np.int64) for _ in range(4))
    loads = st.lists(
        st.integers(0, 2**60), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))
    )
    return Plan(
        step=draw(st.integers(0, 2**40)),
        sources=NAMES,
        table=table,
        bucket_N=bucket_N,
        microbatch_N=microbatch_N,
        pack_N=pack_N,
        offset_N=offset_N,
        loads_BMP=np.array(draw(loads), np.int64).reshape(shape),
        bound=draw(st.floats(1, 9)),
        num_packs=draw(st.integers(1, 4)),
        cp_layout=draw(st.sampled_from(["document", "sequence"])),
        first_microbatch=draw(st.integers(0, 3)),
        num_loss_tokens=draw(st.integers(0, 2**40)),
        mixture=draw(st.dictionaries(st.sampled_from(["a", "b"]), st.floats(0, 1))),
        draw_digest=draw_digest(3, NAMES, table),
        passed=draw(span_tables()),
        state=draw(st.text()),
        end=draw(st.booleans()),
    )


def assert_equal(one: Metadata, other: Metadata) -> None:
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name])
    assert list(one.ragged) == list(other.ragged)
    for name, ragged in one.ragged.items():
        np.testing.assert_array_equal(ragged.lengths_I, other.ragged[name].lengths_I)
        np.testing.assert_array_equal(ragged.offsets, other.ragged[name].offsets)


@laws
@given(plans())
def test_a_plan_survives_arrow(plan: Plan) -> None:
    read = Plan.from_arrow(plan.to_arrow())
    for field in fields(Plan):
        mine, theirs = getattr(plan, field.name), getattr(read, field.name)
        if isinstance(mine, Metadata):
            assert_equal(mine, theirs)
        elif isinstance(mine, np.ndarray):
            assert theirs.dtype == np.int64
            np.testing.assert_array_equal(mine, theirs)
        else:
            assert mine == theirs, field.name
    assert read.to_arrow() == plan.to_arrow()


@laws
@given(plans(), st.data())
def test_the_draw_digest_depends_on_spans_order_and_step(plan: Plan, data: st.DataObject) -> None:
    table = plan.table
    digest = draw_digest(1, NAMES, table)
    assert digest != draw_digest(2, NAMES, table)
    moved = table.with_columns(shard=table["shard"] ^ 1, row=table["row"] ^ 1)
    assert digest == draw_digest(1, NAMES, moved)  # where a record lies is no part of it
    if not table.num_rows:
        return
    assert digest != draw_digest(1, NAMES, table.take(np.arange(table.num_rows - 1)))
    row = data.draw(st.integers(0, table.num_rows - 1))
    for name in ("source", "epoch", "lane", "position", "start", "stop", "loss_tokens", "checksum"):
        column = table[name].copy()
        column[row] ^= 1
        assert digest != draw_digest(1, NAMES, table.with_columns(**{name: column})), name


@laws
@given(plans())
def test_the_draw_digest_knows_sources_by_name(plan: Plan) -> None:
    later = plan.table.with_columns(source=plan.table["source"] + 1)
    assert draw_digest(1, ("new", *NAMES), later) == draw_digest(1, NAMES, plan.table)
    if plan.table.num_rows:
        assert draw_digest(1, ("c", "d"), plan.table) != draw_digest(1, NAMES, plan.table)


def test_the_draw_digest_knows_the_order() -> None:
    table = small_plan().table
    assert draw_digest(1, NAMES, table) != draw_digest(1, NAMES, table.take(np.arange(4)[::-1]))


@laws
@given(plans(), st.data())
def test_the_assignment_digest_depends_on_places_alone(plan: Plan, data: st.DataObject) -> None:
    digest = plan.assignment_digest

    def digest_with(**changes: object) -> str:
        return replace(plan, assignment_digest="", **changes).assignment_digest  # type: ignore[arg-type]

    assert digest_with(step=plan.step + 1, num_loss_tokens=9, mixture={}, state="") == digest
    assert digest_with(num_packs=plan.num_packs + 1) != digest
    other = "sequence" if plan.cp_layout == "document" else "document"
    assert digest_with(cp_layout=other) != digest
    shape = plan.loads_BMP.shape
    assert digest_with(loads_BMP=np.zeros((shape[0] + 1, *shape[1:]), np.int64)) != digest
    if plan.table.num_rows:
        row = data.draw(st.integers(0, plan.table.num_rows - 1))
        for name in ("bucket_N", "microbatch_N", "pack_N", "offset_N"):
            column = getattr(plan, name).copy()
            column[row] += 1
            assert digest_with(**{name: column}) != digest, name


def small_plan() -> Plan:
    """Return a plan of 4 spans on 2 buckets: bucket 1 has a filler in its microbatch 1."""
    table = span_table([(0, 0, k, 7, 0, 0, 0, 5, 0, 5, 5, 4, 10, 0) for k in range(4)])
    return Plan(
        step=3,
        sources=NAMES,
        table=table,
        bucket_N=np.array([0, 0, 0, 1]),
        microbatch_N=np.array([0, 0, 1, 0]),
        pack_N=np.array([1, 0, 0, 0]),
        offset_N=np.zeros(4, np.int64),
        loads_BMP=np.array([[[10], [5]], [[5], [0]]]),
        bound=1.0,
        num_packs=2,
        num_loss_tokens=16,
        mixture={"a": 1.0},
        draw_digest=draw_digest(3, NAMES, table),
        passed=table.take(np.zeros(0)),
        state="{}",
    )


def test_rows_of_a_microbatch_come_pack_after_pack() -> None:
    plan = small_plan()
    assert plan.rows_of(0, 0).tolist() == [1, 0]
    assert plan.rows_of(0, 1).tolist() == [2]
    assert plan.rows_of(1, 1).tolist() == []
    assert plan.sample_ids(plan.rows_of(0, 0)) == [SampleId("a", 0, 1, 7), SampleId("a", 0, 0, 7)]


def test_imbalance_is_that_of_the_worst_part() -> None:
    assert small_plan().imbalance == 1.5
    assert imbalance(np.array([[[1, 0]], [[1, 6]]])) == 2.0
    assert imbalance(np.zeros((2, 0, 1), np.int64)) == 1.0


def test_a_plan_of_another_version_is_refused() -> None:
    with pa.ipc.open_stream(small_plan().to_arrow()) as reader:
        table = reader.read_all()
    header = json.loads(table.schema.metadata[b"megadask"]) | {"version": 99}
    sink = pa.BufferOutputStream()
    newer = table.replace_schema_metadata({"megadask": json.dumps(header)})
    with pa.ipc.new_stream(sink, newer.schema) as writer:
        writer.write_table(newer)
    with pytest.raises(StateError, match=f"version.*99.*{VERSION}"):
        Plan.from_arrow(bytes(sink.getvalue()))
