"""What each rank is sent, over random meshes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.topology import AXES, Axis, ClientPlaceTree
from megadask.scheduling.assemble import ARRAY_KEYS, SHAPE_KEYS
from megadask.scheduling.stages import INPUT_KEYS, TARGET_KEYS, keys_sent

HAVE = (*ARRAY_KEYS, "attention_mask", "pixels")
sizes = st.integers(1, 3)
trees = st.builds(
    ClientPlaceTree,
    dp=sizes,
    pp=sizes,
    cp=sizes,
    tp=sizes,
    order=st.permutations(AXES).map(tuple),
)
asks = st.none() | st.sets(st.sampled_from([*HAVE, "nothing"]))


@st.composite
def meshes(draw: st.DrawFn) -> tuple[ClientPlaceTree, Axis, tuple[str, ...]]:
    axis = draw(st.sampled_from(["dp", ("dp", "cp"), ("dp", "pp")]))
    free = [name for name in AXES if name not in axis]
    return draw(trees), axis, tuple(draw(st.sets(st.sampled_from(free))))


@given(meshes(), asks)
def test_who_is_sent_what(
    mesh: tuple[ClientPlaceTree, Axis, tuple[str, ...]], asked: set[str] | None
) -> None:
    tree, axis, along = mesh
    for rank in range(tree.world_size):
        sent = keys_sent(tree, rank, along, axis, HAVE, asked)
        assert sent == [key for key in HAVE if key in sent]
        if tree.delivery(rank, along, axis) == "broadcast":
            assert sent == []
        elif asked is not None:
            assert set(sent) == asked & set(HAVE)  # on any stage
        else:
            assert set(SHAPE_KEYS) | {"attention_mask"} <= set(sent)
            stage, last = tree.coords(rank)["pp"], tree.pp - 1
            if tree.pp == 1 or "pp" in (*along, *axis):
                assert sent == list(HAVE)
            else:
                assert set(INPUT_KEYS) <= set(sent) if stage == 0 else not {*INPUT_KEYS} & {*sent}
                assert (
                    set(TARGET_KEYS) <= set(sent) if stage == last else not {*TARGET_KEYS} & {*sent}
                )
                assert ("pixels" in sent) == (stage in (0, last))


@given(meshes())
def test_all_that_there_is_reaches_every_bucket(
    mesh: tuple[ClientPlaceTree, Axis, tuple[str, ...]],
) -> None:
    tree, axis, along = mesh
    for bucket in range(tree.num_buckets(axis)):
        ranks = tree.ranks_of(bucket, axis)
        sent = {key for rank in ranks for key in keys_sent(tree, rank, along, axis, HAVE, None)}
        assert sent == set(HAVE)
