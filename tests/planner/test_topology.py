"""Laws of topologies: ranks, coordinates and buckets correspond one to one."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.errors import ConfigError
from megadask.planner.topology import AXES, ClientPlaceTree

sizes = st.integers(1, 4)


@st.composite
def expert_sizes(draw: st.DrawFn, tree: ClientPlaceTree) -> dict[str, int]:
    stage = tree.world_size // tree.pp
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    rest = stage // etp
    return {
        "etp": etp,
        "ep": draw(st.sampled_from([n for n in range(1, rest + 1) if not rest % n])),
    }


@st.composite
def tree_of_any_kind(draw: st.DrawFn) -> ClientPlaceTree:
    tree = ClientPlaceTree(
        **{axis: draw(sizes) for axis in AXES}, order=tuple(draw(st.permutations(AXES)))
    )
    return replace(tree, **draw(expert_sizes(tree)))


trees = tree_of_any_kind()
axis_lists = st.lists(st.sampled_from(AXES), unique=True)
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


@given(trees, axis_lists, axes)
def test_every_rank_fetches_or_has_one_that_does(
    tree: ClientPlaceTree, broadcast_axes: list[str], axis: str | tuple[str, ...]
) -> None:
    ways = [tree.delivery(rank, broadcast_axes, axis) for rank in range(tree.world_size)]
    for rank, way in enumerate(ways):
        root = tree.broadcast_root(rank, broadcast_axes)
        apart = [name for name in AXES if tree.coords(root)[name] != tree.coords(rank)[name]]
        assert set(apart) <= set(broadcast_axes)
        if way == "shapes":
            assert 0 < tree.coords(rank)["pp"] < tree.pp - 1
            assert "pp" not in (*broadcast_axes, *tree.axes(axis))
        else:
            assert ways[root] == "payload"
            assert (way == "payload") == (root == rank)
    if tree.pp <= 2:
        assert "shapes" not in ways
        others = tuple(name for name in AXES if name not in broadcast_axes)
        assert ways.count("payload") == (tree.num_buckets(others) if others else 1)


def test_only_the_ends_of_a_pipeline_need_tokens() -> None:
    tree = ClientPlaceTree(pp=4, tp=2)
    ways = [tree.delivery(rank, ("tp",)) for rank in range(8)]
    assert ways == ["payload", "broadcast", *4 * ["shapes"], "payload", "broadcast"]
    assert {tree.delivery(rank, (), "world") for rank in range(8)} == {"payload"}
    assert [tree.delivery(rank, ("pp",)) for rank in range(4)] == 2 * ["payload"] + 2 * [
        "broadcast"
    ]


@given(trees)
def test_expert_groups_divide_the_stages(tree: ClientPlaceTree) -> None:
    groups = {tuple(tree.expert_group(rank)) for rank in range(tree.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(tree.world_size))
    for group in groups:
        assert len(group) == tree.ep
        assert len({tree.coords(rank)["pp"] for rank in group}) == 1


def test_expert_groups_are_those_of_megatron() -> None:
    # Megatron-Core's expert grid, fastest first: etp, ep, expert dp, pp.
    tree = ClientPlaceTree(pp=2, dp=2, cp=2, tp=2, ep=4)
    assert tree.expert_group(5) == [4, 5, 6, 7]
    same_tp = ClientPlaceTree(pp=2, dp=2, cp=2, tp=2, ep=4, etp=2)
    assert same_tp.expert_group(5) == [1, 3, 5, 7]
    assert same_tp.expert_group(12) == [8, 10, 12, 14]
    grid = np.arange(16).reshape(2, 1, 4, 2)
    for rank in range(16):
        stage, block, _, part = np.argwhere(grid == rank)[0]
        assert same_tp.expert_group(rank) == grid[stage, block, :, part].tolist()


@given(trees, axes, axis_lists)
def test_expert_parallelism_changes_nothing_about_data(
    tree: ClientPlaceTree, axis: str | tuple[str, ...], broadcast_axes: list[str]
) -> None:
    plain = replace(tree, ep=1, etp=1)
    for rank in range(tree.world_size):
        assert tree.coords(rank) == plain.coords(rank)
        assert tree.bucket_of(rank, axis) == plain.bucket_of(rank, axis)
        assert tree.delivery(rank, broadcast_axes) == plain.delivery(rank, broadcast_axes)


@given(trees)
def test_forms_survive_the_trip(tree: ClientPlaceTree) -> None:
    assert ClientPlaceTree.from_dict(tree.to_dict()) == tree
    assert pickle.loads(pickle.dumps(tree)) == tree


def visible(html: str) -> list[str]:
    return [line for line in re.sub(r"<[^>]+>", "\n", html).splitlines() if line]


@given(trees, axes, axis_lists)
def test_a_small_tree_shows_every_rank(
    tree: ClientPlaceTree, axis: str | tuple[str, ...], broadcast_axes: list[str]
) -> None:
    lines = tree.describe(axis, broadcast_axes).splitlines()
    assert lines[0].startswith(f"{tree.world_size} rank")
    assert all(f"{name} {getattr(tree, name)}" in lines[0] for name in AXES)
    if 1 < tree.world_size <= 32:
        named = [re.search(r": rank (\d+)", line) for line in lines]
        assert [int(found[1]) for found in named if found] == list(range(tree.world_size))
    assert len(lines) <= 2 * max(32, tree.world_size)


def test_a_tree_says_who_shares_and_who_fetches() -> None:
    tree = ClientPlaceTree(pp=3, dp=2, cp=2, tp=2, ep=2)
    lines = [line.lstrip("├└│ ") for line in tree.describe("dp", ("tp",)).splitlines()]
    assert lines[0].endswith("2 buckets along dp, each of 12 ranks; experts over 2 ranks")
    assert lines[1:7] == [
        "pp 0: ranks 0-7",
        "dp 0: ranks 0-3, bucket 0",
        "cp 0: ranks 0-1, slice 0 of 2",
        "tp 0: rank 0, expert share 0 of 2, fetches",
        "tp 1: rank 1, expert share 1 of 2, by broadcast from rank 0",
        "cp 1: ranks 2-3, slice 1 of 2",
    ]
    assert "pp 1: ranks 8-15, shapes only" in lines
    assert "slice" not in tree.describe(("dp", "cp"))
    assert (
        ClientPlaceTree()
        .describe()
        .endswith("1 bucket along dp, each of 1 rank, bucket 0, fetches")
    )


def test_large_trees_are_folded() -> None:
    tree = ClientPlaceTree(dp=64, pp=4, cp=2, tp=8)
    lines = tree.describe().splitlines()
    assert len(lines) < 20
    assert any("dp 2 to 62: ranks 32-1007, alike" in line for line in lines)
    html = tree._repr_html_()
    assert len(html) < 20_000
    assert html.count("<details open") < 6 < html.count("<details ")
    assert html.count("<details") == html.count("</details>")


def test_the_tree_of_a_notebook_says_what_the_text_does() -> None:
    tree = ClientPlaceTree(dp=2, pp=2, cp=2, tp=2)
    html = tree._repr_html_()
    text = [line.lstrip("├└│ ") for line in tree.describe().splitlines()]
    assert visible(html) == text
    assert html.count("<details open") == html.count("<details")


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
        ({"SLURM_NPROCS": "6"}, {"pp": 3}, 2),
        ({"SLURM_TASKS_PER_NODE": "8(x3),4", "SLURM_PROCID": "27"}, {"tp": 4}, 7),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "8"}, {}, 4),
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2"}, {}, 16),
        ({"WORLD_SIZE": "8"}, {"tp": 2, "ep": 4}, 4),
    ],
)
def test_from_env(environ: dict[str, str], sizes: dict[str, int], dp: int) -> None:
    assert ClientPlaceTree.from_env(environ, **sizes) == ClientPlaceTree(**{**sizes, "dp": dp})


@pytest.mark.parametrize(
    ("environ", "sizes", "match"),
    [
        ({}, {}, "one of WORLD_SIZE, SLURM_NTASKS"),
        ({"WORLD_SIZE": "8"}, {"tp": 3}, "tp=3 .*8 ranks; expected a multiple of 3"),
        ({"WORLD_SIZE": "8"}, {"dp": 4}, "dp=4 .*8 ranks; expected 4"),
        ({"WORLD_SIZE": "2"}, {"tp": 4}, "2 ranks"),
        ({"WORLD_SIZE": "eight"}, {}, "WORLD_SIZE; got eight"),
        ({"WORLD_SIZE": "8", "RANK": "8"}, {}, "rank; got 8; expected 0 to 7"),
        ({"WORLD_SIZE": "8"}, {"ep": 3}, r"ep=3, etp=1\); got blocks of 3 ranks; .*= 8"),
        ({"WORLD_SIZE": "8"}, {"ddp": 2}, "ddp"),
        ({"SLURM_TASKS_PER_NODE": "8(x3"}, {}, r"TASKS_PER_NODE; got 8\(x3; expected counts"),
        ({"SLURM_TASKS_PER_NODE": "8(xx)"}, {}, r"TASKS_PER_NODE; got 8\(xx\)"),
        ({"SLURM_NTASKS_PER_NODE": "8"}, {}, "number of ranks is not in the environment"),
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
        (mesh((2, 4, 2, 2), "pp", "batch", "cp", "tp"), ClientPlaceTree(pp=2, dp=4, cp=2, tp=2)),
        (
            mesh((2, 2, 2, 2), "dp_replicate", "dp_shard_mod_ep", "dp_shard_in_ep", "tp"),
            ClientPlaceTree(dp=8, tp=2),
        ),
        (
            mesh((2, 4), "tp", "dp", ranks=np.arange(8).reshape(2, 4)),
            ClientPlaceTree(dp=4, tp=2, order=("pp", "cp", "tp", "dp")),
        ),
    ],
)
def test_from_device_mesh(given_mesh: SimpleNamespace, tree: ClientPlaceTree) -> None:
    assert ClientPlaceTree.from_device_mesh(given_mesh) == tree


@pytest.fixture
def job_of_16() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("job_of_16")
def test_from_a_mesh_of_torch() -> None:
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=names)
    mesh["dp_replicate", "dp_shard"]._flatten("dp")
    expected = ClientPlaceTree(pp=2, dp=4, tp=2, ep=4)
    assert ClientPlaceTree.from_device_mesh(mesh, ep=4) == expected
    world = torch.distributed.init_device_mesh("cpu", (16,), mesh_dim_names=("world",))
    with pytest.raises(ConfigError, match="'world'"):
        ClientPlaceTree.from_device_mesh(world)


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
        (lambda: ClientPlaceTree.from_dict({"dp": 2, "ddp": 2}), "ddp"),
        (lambda: ClientPlaceTree(ep=0), r"ep=\); got 0"),
        (lambda: ClientPlaceTree(dp=4, pp=3, ep=3), r"ep=3, etp=1.*dp x cp x tp = 4, the ranks"),
        (lambda: ClientPlaceTree(dp=4, ep=2, etp=4), "got blocks of 8 ranks"),
        (lambda: ClientPlaceTree(dp=2).expert_group(2), "rank; got 2"),
        (lambda: ClientPlaceTree(dp=2).delivery(0, ("ddp",)), "'ddp'"),
    ],
)
def test_bad_declarations_are_named(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()  # type: ignore[operator]
