"""``connect(group=)``: one rank of a gloo group fetches and broadcasts, in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import megadask as md
from megadask.trainer.groups import _Layout
from tests.megadask.helpers.data import corpus, pipeline, unfold
from tests.megadask.helpers.gloo import Members, start_members
from tests.megadask.helpers.ranks import connect, run
from tests.megadask.helpers.seen import digest

pytestmark = pytest.mark.timeout(300)  # processes start, on a machine that may be busy

DATA = corpus({"a": 30, "b": 10}, longest=300)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """Four ranks, of which a job may use the first ones."""
    with start_members(4, tmp_path_factory.mktemp("gloo")) as made:
        yield made


def along_tp(graph: md.DGraph) -> None:
    graph.distribute("dp").broadcast_at("tp")


def along_tp_and_pp(graph: md.DGraph) -> None:
    graph.distribute("dp").broadcast_at(("tp", "pp"))


def fail_at_20(record: Any) -> Any:
    if record["id"] == 20:
        raise LookupError("record 20 is not what it seems")
    return unfold(record)


def test_a_group_gets_the_batches_of_its_first_rank(
    client: Client, members: Members, name: str
) -> None:
    """dp=2 x tp=2: bit-equal along tp, and only the first rank of each group fetched bytes."""
    with md.serve(pipeline(DATA), client, name=f"{name}-1") as service:
        expected = [[digest(batch) for batch in seen] for seen in run(service, list)]
    made = pipeline(DATA, topology=md.ClientPlaceTree(dp=2, tp=2), strategy=along_tp)
    with md.serve(made, client, name=name) as service:
        ranks = members.run(service, "drain", [[0, 1], [2, 3]])
        assert service.audit()["ok"]
    for rank, got in enumerate(ranks):
        assert got["seen"] == ranks[rank // 2 * 2]["seen"]
        assert [row[0] for row in got["seen"]] == expected[rank // 2]
        assert (got["stats"]["fetched_bytes"] > 0) == (rank % 2 == 0)


def test_several_axes_other_forms_and_overwritten_batches(
    client: Client, members: Members, name: str
) -> None:
    """Along tp and pp from one root, in the form of Hugging Face; nobody sees what others write."""
    tree = md.ClientPlaceTree(pp=3, tp=1)
    options: dict[str, Any] = {"preset": "hf", "names": {"input_ids": "ids"}}
    with md.serve(pipeline(DATA), client, name=f"{name}-1") as service:
        (alone, _) = run(service, list, **options)
    made = pipeline(DATA, topology=tree, strategy=along_tp_and_pp, global_batch=4)
    with md.serve(made, client, name=name) as service:
        (whole,) = run(service, list, ranks=[0], **options)
    with md.serve(made, client, name=f"{name}-2") as service:
        ranks = members.run(service, "mutate", [[0, 1, 2]], options=options)
    assert set(whole[0]) == set(alone[0])
    expected = [digest(batch) for batch in whole]
    assert [got["seen"] for got in ranks] == [expected] * 3


def test_keys_are_chosen_by_each_rank(client: Client, members: Members, name: str) -> None:
    made = pipeline(DATA, topology=md.ClientPlaceTree(tp=2), strategy=along_tp)
    with md.serve(made, client, name=name) as service:
        first, second = members.run(
            service, "drain", [[0, 1]], options={"keys": ["tokens", "loss_mask"]}
        )
    assert first["seen"] == second["seen"]
    assert {"tokens", "loss_mask"} <= set(first["seen"][0][1])
    assert "labels" not in first["seen"][0][1]


def test_an_error_of_the_data_reaches_all(client: Client, members: Members, name: str) -> None:
    made = pipeline(
        DATA,
        topology=md.ClientPlaceTree(tp=2),
        strategy=along_tp,
        sources={"transform": fail_at_20},
    )
    with md.serve(made, client, name=name) as service:
        ranks = members.run(service, "drain", [[0, 1]])
    assert [got["error"] for got in ranks] == ["LookupError"] * 2


def test_an_error_of_the_first_rank_alone_reaches_all(
    client: Client, members: Members, name: str
) -> None:
    """Another trainer takes the rank of the one that fetches."""
    made = pipeline(DATA, topology=md.ClientPlaceTree(tp=2), strategy=along_tp)
    with md.serve(made, client, name=name) as service:
        ranks = members.run(service, "lose_rank", [[0, 1]], options={"prefetch": 1})
    assert [got["error"] for got in ranks] == ["ClaimError"] * 2
    assert ["by rank 0" in note for got in ranks for note in got["notes"]] == [True]


def test_a_rank_that_waits_alone_gets_a_named_error(
    client: Client, members: Members, name: str
) -> None:
    made = pipeline(DATA, topology=md.ClientPlaceTree(tp=2), strategy=along_tp)
    with md.serve(made, client, name=name) as service:
        first, second = members.run(service, "leave_early", [[0, 1]])
    assert first == {"taken": [0, 1]}
    assert second["error"] == "DeadlineError"
    assert "rank 0" in second["message"]


@pytest.mark.parametrize(
    ("tree", "groups", "strategy", "match"),
    [
        (md.ClientPlaceTree(dp=2), [[0, 1]], None, "nothing is broadcast"),
        (md.ClientPlaceTree(dp=2, tp=1), [[0, 1]], along_tp, "nothing is broadcast"),
        (md.ClientPlaceTree(dp=2, tp=2), [[0, 1, 2, 3]], along_tp, "not the ranks"),
    ],
)
def test_groups_that_are_not_those_of_the_broadcast_are_refused(
    client: Client, members: Members, name: str, tree: Any, groups: Any, strategy: Any, match: str
) -> None:
    made = pipeline(DATA, topology=tree, strategy=strategy)
    with md.serve(made, client, name=name) as service:
        for got in members.run(service, "only_connect", groups):
            assert got["error"] == "ConfigError"
            assert match in got["message"]


def test_a_group_without_torch_distributed_is_refused(client: Client, name: str) -> None:
    with (
        md.serve(pipeline(DATA), client, name=name) as service,
        pytest.raises(md.errors.ConfigError, match="init_process_group"),
    ):
        connect(service, 0, group=object())


def test_torch_checkpoints_hold_a_loader(
    client: Client, members: Members, name: str, tmp_path: Path
) -> None:
    """A loader is Stateful: dcp saves and loads it on two ranks, in the middle of a step."""
    with md.serve(pipeline(DATA), client, name=name) as service:
        ranks = members.run(service, "save_and_load", [[0, 1]], folder=str(tmp_path / "saved"))
    assert ranks[0] != ranks[1]
    for got in ranks:
        assert got["mark"] == [0, 3]
        assert got["after"] == got["again"]


arrays = st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.tuples(
        st.sampled_from(["<i8", "<f4", "<i4", "|b1", "<f2"]),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    max_size=4,
)


@given(arrays, st.integers(0, 9))
def test_one_buffer_holds_all_arrays(shapes: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = {
        name: rng.integers(0, 99, shape).astype(dtype) for name, (dtype, shape) in shapes.items()
    }
    layout = _Layout.of(made)
    got = layout.split(layout.join(made))
    assert list(got) == list(made)
    for name, array in made.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert np.array_equal(got[name], array)
        assert got[name].flags.writeable
