"""Laws of who encodes which items, and who sends what to whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner import costs
from megadask.planner.metadata import Metadata, Ragged, empty_spans
from megadask.planner.plan import Plan
from megadask.planner.routing import route_all
from megadask.planner.strategy import Selection, Strategy
from megadask.planner.topology import AXES, ClientPlaceTree
from megadask.scheduling.items import Duty, duties, items_used
from tests.strategies import laws

sizes = st.integers(1, 3)
trees = st.builds(
    ClientPlaceTree,
    dp=sizes,
    pp=sizes,
    cp=st.integers(1, 2),
    tp=st.integers(1, 2),
    order=st.permutations(AXES).map(tuple),
)
axes = st.sampled_from(["world", "dp", ("dp", "cp"), ("dp", "tp"), ("dp", "cp", "tp"), "cp"])


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Strategy, ClientPlaceTree]:
    """Plans of spans anywhere in their packs, some of them delivered before."""
    tree = draw(trees)
    encode = draw(st.sampled_from(["step", "microbatch"]))
    axis = draw(st.sampled_from(["dp", ("dp", "cp")]))
    cost = costs.VisionEncoder("image", hidden=64, layers=2)
    selection = Selection(axis=draw(axes), encode=encode, cost=cost)
    strategy = Strategy(
        axis=axis,
        selections={"image": selection},
        broadcast_axes=draw(st.sampled_from([(), ("tp",)])),
    )
    images = draw(st.lists(st.lists(st.integers(1, 99), max_size=3), min_size=1, max_size=12))
    num_spans, num_microbatches = len(images), 3
    first = draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    integers = rng.integers
    bucket_N = integers(0, tree.num_buckets(axis), num_spans)
    microbatch_N = integers(0, num_microbatches, num_spans)
    bucket_N[microbatch_N < first] = -1
    columns = {
        name: np.zeros(num_spans, column.dtype) for name, column in empty_spans().columns.items()
    }
    table = Metadata(columns, {"image": Ragged.of(images)})
    plan = Plan(
        step=0,
        sources=("a",),
        table=table,
        bucket_N=bucket_N,
        microbatch_N=microbatch_N,
        pack_N=integers(0, 2, num_spans),
        offset_N=rng.permutation(1000)[:num_spans],  # no two spans begin at one place
        loads_BMP=np.zeros((tree.num_buckets(axis), num_microbatches, 1), np.int64),
        bound=1.0,
        num_packs=2,
        first_microbatch=first,
        num_loss_tokens=0,
        mixture={},
        draw_digest="",
        passed=empty_spans(),
        state="",
        routing=route_all(
            strategy.selections, tree, table, bucket_N, microbatch_N, num_microbatches
        ),
    )
    return plan, strategy, tree


def items(plan: Plan, duty: Duty) -> list[tuple[int, int]]:
    return list(zip(duty.span_K.tolist(), duty.item_K.tolist(), strict=True))


def deliver(all_duties: dict[int, Duty], plan: Plan) -> dict[tuple[int, int], dict[int, Any]]:
    """Carry out an exchange; return (rank, microbatch) to the items that came, by their place."""
    wires: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for rank, duty in all_duties.items():
        assert duty.send_X2 is not None
        assert (np.diff(duty.send_X2[:, 0]) >= 0).all()
        for user, number in duty.send_X2.tolist():
            wires[rank, user].append(items(plan, duty)[number])
    came: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
    for rank, duty in all_duties.items():
        assert duty.receive_Y3 is not None
        assert (np.diff(duty.receive_Y3[:, 0]) >= 0).all()
        for server, microbatch, place in duty.receive_Y3.tolist():
            assert place not in came[rank, microbatch]
            came[rank, microbatch][place] = wires[server, rank].pop(0)
    assert not any(wires.values()), "something is sent that nobody receives"
    return came


@laws
@given(plans())
def test_every_item_is_encoded_once_a_turn_and_comes_where_it_is_used(
    case: tuple[Plan, Strategy, ClientPlaceTree],
) -> None:
    plan, strategy, tree = case
    selection = strategy.selections["image"]
    encoded: Counter[tuple[int, int]] = Counter()
    came: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
    for microbatch in range(plan.first_microbatch, plan.num_microbatches):
        found = duties(plan, "image", strategy, tree, microbatch, range(tree.world_size))
        if selection.encode == "step" and microbatch > plan.first_microbatch:
            assert not found
            continue
        for duty in found.values():
            encoded.update(items(plan, duty))
        for key, by_place in deliver(found, plan).items():
            came[key] |= by_place
    placed = np.flatnonzero(plan.bucket_N >= 0)
    spans, numbers = items_used(plan, "image", placed)
    # Peers that share an encoder bucket encode the same, once each.
    peers = tree.world_size // tree.num_buckets(selection.axis)
    if "pp" not in tree.axes(selection.axis):
        peers //= tree.pp
    assert encoded == dict.fromkeys(zip(spans.tolist(), numbers.tolist(), strict=True), peers)
    for rank in range(tree.world_size):
        embeds = tree.coords(rank)["pp"] == 0
        for microbatch in range(plan.num_microbatches):
            rows = plan.rows_of(tree.bucket_of(rank, strategy.axis), microbatch)
            used = list(zip(*map(np.ndarray.tolist, items_used(plan, "image", rows)), strict=True))
            got = came[rank, microbatch]
            assert [got[place] for place in range(len(got))] == (used if embeds else [])


@laws
@given(plans())
def test_ranks_that_differ_along_axes_without_encoders_serve_their_own(
    case: tuple[Plan, Strategy, ClientPlaceTree],
) -> None:
    plan, strategy, tree = case
    other = set(AXES) - set(tree.axes(strategy.selections["image"].axis)) - {"pp"}
    for microbatch in range(plan.first_microbatch, plan.num_microbatches):
        found = duties(plan, "image", strategy, tree, microbatch, range(tree.world_size))
        for rank, duty in found.items():
            assert duty.send_X2 is not None
            for user in set(duty.send_X2[:, 0].tolist()):
                assert all(tree.coords(user)[axis] == tree.coords(rank)[axis] for axis in other)


@laws
@given(plans())
def test_without_a_selection_ranks_with_payload_get_their_own(
    case: tuple[Plan, Strategy, ClientPlaceTree],
) -> None:
    plan, strategy, tree = case
    plain = Strategy(axis=strategy.axis, broadcast_axes=strategy.broadcast_axes)
    for microbatch in range(plan.num_microbatches):
        found = duties(plan, "image", plain, tree, microbatch, range(tree.world_size))
        assert set(found) == {
            rank
            for rank in range(tree.world_size)
            if tree.delivery(rank, plain.broadcast_axes, plain.axis) == "payload"
            and tree.coords(rank)["pp"] == 0
        }
        for rank, duty in found.items():
            rows = plan.rows_of(tree.bucket_of(rank, plain.axis), microbatch)
            used = zip(*map(np.ndarray.tolist, items_used(plan, "image", rows)), strict=True)
            assert items(plan, duty) == list(used)
            assert duty.send_X2 is duty.receive_Y3 is None
