"""Laws of lineage: every span is found where the plan put it, and every rank's step adds up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner import DGraph
from megadask.planner.errors import ConfigError
from megadask.planner.ids import SampleId
from megadask.planner.lineage import Place, lineage, made_of, where
from megadask.planner.plan import Plan
from megadask.planner.tableplan import TablePlan
from megadask.planner.topology import ClientPlaceTree
from tests.strategies import few_laws, laws, worlds


@st.composite
def planned(draw: st.DrawFn, num_buckets: int) -> Plan:
    """The largest of the first plans of a world, its spans anywhere or nowhere in it."""
    plans = draw(worlds()).driver(num_buckets=num_buckets).plans(most=3)
    plan = max(plans, key=lambda plan: plan.table.num_rows)
    num_rows = plan.table.num_rows

    def any_of(low: int, high: int) -> np.ndarray:
        values = st.lists(st.integers(low, high), min_size=num_rows, max_size=num_rows)
        return np.array(draw(values), np.int64)

    bucket_N = any_of(-1, num_buckets - 1)
    places = {
        "microbatch_N": any_of(0, max(0, plan.num_microbatches - 1)),
        "pack_N": any_of(0, 1),
        "offset_N": np.array(draw(st.permutations(range(num_rows))), np.int64),
    }
    placed = {name: np.where(bucket_N < 0, -1, column) for name, column in places.items()}
    return replace(plan, bucket_N=bucket_N, **placed)


def table_plan(**columns: object) -> TablePlan:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 4096, 48)
    graph = DGraph.from_metadata({"tokens": tokens, **columns}, topology=ClientPlaceTree(dp=4))
    return graph.distribute("dp", microbatches=3).balance("greedy").plan()


trees = st.builds(
    ClientPlaceTree,
    dp=st.integers(1, 3),
    pp=st.integers(1, 2),
    tp=st.integers(1, 2),
    order=st.permutations(("pp", "dp", "cp", "tp")).map(tuple),
)


@laws
@given(st.data())
def test_every_span_is_found_where_it_was_put(data: st.DataObject) -> None:
    plan = data.draw(planned(num_buckets=2))
    found: list[int] = []
    for sample in dict.fromkeys(plan.sample_ids(np.arange(plan.table.num_rows))):
        places = where(plan, sample)
        assert [place.span for place in places] == sorted(place.span for place in places)
        for place in places:
            row = place.row
            assert plan.sample_ids(np.array([row])) == [sample]
            assert place == Place(
                step=plan.step,
                bucket=int(plan.bucket_N[row]),
                microbatch=int(plan.microbatch_N[row]),
                pack=int(plan.pack_N[row]),
                span=(int(plan.table["start"][row]), int(plan.table["stop"][row])),
                row=row,
            )
            assert where(plan, row) == [place]
            found.append(row)
    assert sorted(found) == list(range(plan.table.num_rows))


@laws
@given(st.data())
def test_what_buckets_are_made_of_makes_up_the_plan(data: st.DataObject) -> None:
    plan = data.draw(planned(num_buckets=3))
    buckets = [made_of(plan, bucket).tolist() for bucket in range(plan.num_buckets)]
    taken = np.flatnonzero(plan.bucket_N >= 0).tolist()
    assert sorted(row for rows in buckets for row in rows) == taken
    for bucket, rows in enumerate(buckets):
        parts = [made_of(plan, bucket, m) for m in range(plan.num_microbatches)]
        for microbatch, part in enumerate(parts):
            np.testing.assert_array_equal(part, plan.rows_of(bucket, microbatch))
        assert [row for part in parts for row in part.tolist()] == rows


@laws
@given(trees, st.sampled_from(["dp", ("dp", "tp"), "world"]), st.data())
def test_lineage_leads_to_the_ranks_that_consume_a_span(
    tree: ClientPlaceTree, axis: str | tuple[str, ...], data: st.DataObject
) -> None:
    plan = data.draw(planned(num_buckets=tree.num_buckets(axis)))
    way = lineage(plan, tree, axis)
    expected = [
        (row, rank)
        for row, bucket in enumerate(plan.bucket_N.tolist())
        for rank in ([-1] if bucket < 0 else tree.ranks_of(bucket, axis))
    ]
    assert list(zip(way["row"].tolist(), way["rank"].tolist(), strict=True)) == expected
    rows = way["row"]
    ids = zip(*(way[name].tolist() for name in SampleId._fields), strict=True)
    assert list(ids) == plan.sample_ids(rows)
    np.testing.assert_array_equal(way["stop"] - way["start"], way["tokens"])
    np.testing.assert_array_equal(way["bucket"], plan.bucket_N[rows])
    np.testing.assert_array_equal(way["microbatch"], plan.microbatch_N[rows])
    assert set(way["step"].tolist()) <= {plan.step}
    short = lineage(plan)
    assert short.num_rows == plan.table.num_rows
    assert "rank" not in short


def test_rows_stand_for_the_samples_of_a_table_without_ids() -> None:
    plan = table_plan(source=["web", "code"] * 24)
    tokens = plan.table["tokens"].tolist()
    for row in range(48):
        (place,) = where(plan, row)
        assert place.span == (0, tokens[row])
        assert (place.step, place.pack) == (0, 0)
        assert row in made_of(plan, place.bucket, place.microbatch)
    way = lineage(plan, ClientPlaceTree(dp=4, tp=2))
    assert way.num_rows == 96
    assert way["source"][:4].tolist() == ["web", "web", "code", "code"]
    with pytest.raises(ConfigError, match=r"without ids; got no column \['epoch'.*row"):
        where(plan, SampleId("web", 0, 0, 3))


def test_a_table_with_ids_is_asked_by_them() -> None:
    position = np.arange(48)
    plan = table_plan(source=["web"] * 48, epoch=position * 0, lane=position % 2, position=position)
    (place,) = where(plan, SampleId("web", 0, 1, 5))
    assert place == where(plan, 5)[0]
    assert where(plan, ("web", 0, 0, 5)) == []
    assert where(plan, SampleId("code", 0, 1, 5)) == []


def test_a_span_of_several_buckets_is_part_of_each() -> None:
    table = table_plan().table.take(np.arange(3))
    plan = SimpleNamespace(
        table=table,
        assignment=np.array([0, 2, -1]),
        cp_degree=np.array([2, 1, 4]),
        microbatch=np.array([0, 1, -1]),
        num_buckets=4,
        num_microbatches=2,
    )
    assert [made_of(plan, bucket).tolist() for bucket in range(4)] == [[0], [0], [1], []]
    assert where(plan, 0)[0].cp_degree == 2
    tree = ClientPlaceTree(dp=2, cp=2, tp=2)
    way = lineage(plan, tree, ("dp", "cp"))
    assert way["row"].tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert way["rank"].tolist() == [0, 1, 2, 3, 4, 5, -1]


def test_questions_that_have_no_answer_are_named() -> None:
    plan = table_plan()
    with pytest.raises(ConfigError, match="row of a plan; got 48; expected 0 to 47"):
        where(plan, 48)
    with pytest.raises(ConfigError, match="bucket of a plan; got 4; expected 0 to 3"):
        made_of(plan, 4)
    with pytest.raises(ConfigError, match="microbatch of a plan; got 3; expected 0 to 2"):
        made_of(plan, 0, 3)
    with pytest.raises(ConfigError, match="plan for 4 buckets; got a topology of 2"):
        lineage(plan, ClientPlaceTree(dp=2))


@few_laws
@given(planned(num_buckets=1))
def test_a_source_that_the_plan_does_not_know_is_named(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="source of a sample id; got 'wbe'"):
        where(plan, SampleId("wbe", 0, 0, 0))
    with pytest.raises(ConfigError, match="sample id; got"):
        where(plan, ("source0", 0, 0))  # type: ignore[arg-type]
