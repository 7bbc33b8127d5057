"""Laws of topologies: ranks, coordinates and buckets correspond one to one."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.errors import ConfigError
from megadask.planner.topology import AXES, ClientPlaceTree

sizes = st.integers(1, 4)
trees = st.builds(
    ClientPlaceTree, dp=sizes, pp=sizes, cp=sizes, tp=sizes, order=st.permutations(AXES).map(tuple)
)
axes = st.sampled_from([*AXES, "world"]) | st.lists(
    st.sampled_from(AXES), min_size=1, unique=True
).map(tuple)


@given(trees)
def test_coordinates_are_a_bijection(tree: ClientPlaceTree) -> None:
    seen = {tuple(sorted(tree.coords(rank).items())) for rank in range(tree.world_size)}
    assert len(seen) == tree.world_size
    for rank in range(tree.world_size):
        coords = tree.coords(rank)
        place = 0
        for axis in tree.order:
            place = place * getattr(tree, axis) + coords[axis]
        assert place == rank


@given(trees, axes)
def test_buckets_partition_the_ranks(tree: ClientPlaceTree, axis: str | tuple[str, ...]) -> None:
    groups = [tree.ranks_of(bucket, axis) for bucket in range(tree.num_buckets(axis))]
    assert sorted(rank for group in groups for rank in group) == list(range(tree.world_size))
    assert len({len(group) for group in groups}) == 1
    for bucket, group in enumerate(groups):
        assert {tree.bucket_of(rank, axis) for rank in group} == {bucket}
        named = tree.axes(axis)
        assert len({tuple(tree.coords(rank)[name] for name in named) for rank in group}) == 1


@given(trees, st.lists(st.sampled_from(AXES), unique=True))
def test_one_rank_of_a_broadcast_group_fetches(tree: ClientPlaceTree, axes: list[str]) -> None:
    fetching = [r for r in range(tree.world_size) if tree.delivery(r, axes) == "payload"]
    others = tuple(axis for axis in AXES if axis not in axes)
    assert len(fetching) == (tree.num_buckets(others) if others else 1)


@given(trees)
def test_forms_survive_the_trip(tree: ClientPlaceTree) -> None:
    assert ClientPlaceTree.from_dict(tree.to_dict()) == tree
    assert pickle.loads(pickle.dumps(tree)) == tree
    assert f"{tree.world_size} ranks" in tree.describe()


def test_default_order_is_that_of_megatron() -> None:
    tree = ClientPlaceTree(dp=2, pp=2, cp=2, tp=2)
    assert tree.coords(1) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert tree.coords(2) == {"pp": 0, "dp": 0, "cp": 1, "tp": 0}
    assert tree.coords(4) == {"pp": 0, "dp": 1, "cp": 0, "tp": 0}
    assert tree.ranks_of(1, "dp") == [4, 5, 6, 7, 12, 13, 14, 15]
    assert tree.cp_slice(6) == (1, 2)
    assert [tree.num_slices(axis) for axis in ("dp", ("dp", "cp"), "world")] == [2, 1, 1]
    assert [tree.bucket_of(rank, "world") for rank in range(16)] == list(range(16))


@pytest.mark.parametrize(
    ("environ", "sizes", "dp"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, {}, 8),
        ({"RANK": "3", "WORLD_SIZE": "8"}, {"tp": 2}, 4),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "12"}, {"cp": 2, "pp": 3}, 2),
        ({"SLURM_NTASKS": "12", "WORLD_SIZE": "4", "RANK": "1"}, {"dp": 4}, 4),
    ],
)
def test_from_env(environ: dict[str, str], sizes: dict[str, int], dp: int) -> None:
    assert ClientPlaceTree.from_env(environ, **sizes) == ClientPlaceTree(**{**sizes, "dp": dp})


@pytest.mark.parametrize(
    ("environ", "sizes", "match"),
    [
        ({}, {}, "WORLD_SIZE or SLURM_NTASKS"),
        ({"WORLD_SIZE": "8"}, {"tp": 3}, "tp=3 .*8 ranks; expected a multiple of 3"),
        ({"WORLD_SIZE": "8"}, {"dp": 4}, "dp=4 .*8 ranks; expected 4"),
        ({"WORLD_SIZE": "2"}, {"tp": 4}, "2 ranks"),
        ({"WORLD_SIZE": "eight"}, {}, "WORLD_SIZE; got eight"),
        ({"WORLD_SIZE": "8", "RANK": "8"}, {}, "rank; got 8; expected 0 to 7"),
        ({"WORLD_SIZE": "8"}, {"ep": 2}, "ep"),
    ],
)
def test_from_env_names_what_is_wrong(
    environ: dict[str, str], sizes: dict[str, int], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        ClientPlaceTree.from_env(environ, **sizes)


def mesh(shape: tuple[int, ...], *names: str, ranks: object = None) -> SimpleNamespace:
    result = SimpleNamespace(mesh_dim_names=names or None, shape=shape)
    if ranks is not None:
        result.mesh = ranks
    return result


@pytest.mark.parametrize(
    ("given_mesh", "tree"),
    [
        (mesh((8,), "dp"), ClientPlaceTree(dp=8)),
        (mesh((2, 4), "dp_replicate", "dp_shard"), ClientPlaceTree(dp=8)),
        (mesh((2, 2, 4), "pp", "fsdp", "tp"), ClientPlaceTree(pp=2, dp=2, tp=4)),
        (mesh((2, 1, 4), "dp", "ep", "tp"), ClientPlaceTree(dp=2, tp=4)),
        (mesh((2, 1, 3), "dp_replicate", "cp", "dp_shard"), ClientPlaceTree(dp=6)),
        (
            mesh((2, 4), "tp", "dp", ranks=np.arange(8).reshape(2, 4)),
            ClientPlaceTree(dp=4, tp=2, order=("pp", "cp", "tp", "dp")),
        ),
    ],
)
def test_from_device_mesh(given_mesh: SimpleNamespace, tree: ClientPlaceTree) -> None:
    assert ClientPlaceTree.from_device_mesh(given_mesh) == tree


@pytest.mark.parametrize(
    ("given_mesh", "match"),
    [
        (mesh((8,)), "mesh_dim_names"),
        (mesh((2, 2, 2), "dp_replicate", "cp", "dp_shard"), "'dp_shard'"),
        (mesh((2, 4), "dp", "ep"), "'ep'"),
        (mesh((4,), "dp", ranks=np.array([0, 2, 4, 6])), "counting up"),
    ],
)
def test_from_device_mesh_names_what_is_wrong(given_mesh: SimpleNamespace, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ClientPlaceTree.from_device_mesh(given_mesh)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ClientPlaceTree(dp=0), r"dp=\); got 0"),
        (lambda: ClientPlaceTree(tp=2.0), r"tp=\); got 2.0"),
        (lambda: ClientPlaceTree(order=("dp", "tp")), "order"),
        (lambda: ClientPlaceTree(dp=2).coords(2), "rank; got 2; expected 0 to 1"),
        (lambda: ClientPlaceTree(dp=2).bucket_of(-1, "dp"), "rank; got -1"),
        (lambda: ClientPlaceTree(dp=2).ranks_of(2, "dp"), "bucket along 'dp'; got 2"),
        (lambda: ClientPlaceTree().num_buckets("ddp"), "'ddp'; expected one or several of"),
        (lambda: ClientPlaceTree().num_buckets(("dp", "dp")), "axis"),
        (lambda: ClientPlaceTree().num_buckets(()), r"axis; got \(\)"),
        (lambda: ClientPlaceTree.from_dict({"dp": 2, "ep": 2}), "ep"),
    ],
)
def test_bad_declarations_are_named(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()  # type: ignore[operator]
