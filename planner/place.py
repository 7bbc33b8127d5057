"""Place the spans of a drawn step on buckets, microbatches and packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.balance import Problem, balance, bucket_loads, lower_bound
from megadask.planner.batching import Batching
from megadask.planner.costs import unit_of
from megadask.planner.cp import Packs, choose_layout
from megadask.planner.draw import Draw
from megadask.planner.packing import Packing
from megadask.planner.plan import Plan, draw_digest
from megadask.planner.problem import sums
from megadask.planner.routing import route_all
from megadask.planner.sequences import padded_table, sequences_of
from megadask.planner.strategy import Strategy, relative_speeds
from megadask.planner.topology import ClientPlaceTree


def place(
    draw: Draw,
    strategy: Strategy,
    batching: Batching,
    topology: ClientPlaceTree,
    mixture: Mapping[str, float],
) -> Plan:
    """Return the plan of a drawn step.

    Every rank gets the same number of microbatches: as many as the packs that the draw filled need.
    Where context-parallel ranks share a bucket, they take slices of its packs.
    """
    num_buckets = topology.num_buckets(strategy.axis)
    if not draw.table.num_rows:
        return _end(draw, num_buckets, batching, mixture)
    used = int(draw.canonical_pack_N.max()) + 1
    num_microbatches = -(-used // (num_buckets * batching.micro_batch))
    problem, item_N = _problem(draw, strategy, batching, topology, num_microbatches)
    bin_I = balance(problem, strategy.method, **strategy.options)
    bin_N = bin_I[item_N]
    size_N = batching.padded(draw.table["tokens"])
    plan = Plan(
        **_drawn(draw, mixture),
        bucket_N=bin_N // problem.packs_per_bucket,
        microbatch_N=bin_N % problem.packs_per_bucket // problem.num_packs,
        pack_N=bin_N % problem.num_packs,
        offset_N=_offsets(bin_N, size_N),
        loads_BMP=bucket_loads(problem, bin_I),
        bound=lower_bound(replace(problem, equal_counts=False), bin_I),
        speeds=relative_speeds(problem.speed_B),
        num_packs=problem.num_packs,
        num_loss_tokens=int(draw.table["loss_tokens"].sum()),
    )
    cp = topology.num_slices(strategy.axis)
    parts = sequences_of(draw.table, batching)
    packs = Packs(
        size_N=parts.size_D,
        pack_N=bin_N[parts.row_D],
        offset_N=plan.offset_N[parts.row_D] + parts.first_D,
        num_packs=problem.num_bins,
        seq_len=batching.seq_len,
    )
    layout = choose_layout(strategy.context, packs, cp, num_buckets, num_microbatches)
    plan = replace(
        plan,
        unit=unit_of(strategy.cost),
        sync=strategy.sync,
        cp_layout=layout,
        capacity_tokens=_capacity(plan, batching),
    )
    return _routed(plan, strategy, topology, assignment_digest="")


def place_rest(
    draw: Draw,
    strategy: Strategy,
    batching: Batching,
    topology: ClientPlaceTree,
    mixture: Mapping[str, float],
    *,
    consumed_N: NDArray[np.bool_],
    first_microbatch: int,
    assignment_digest: str,
) -> Plan:
    """Return the plan of what is left of a step that was interrupted at ``first_microbatch``.

    Where the step would be placed as it was, the rest stays where it was; on another topology it
    is placed anew, in microbatches numbered from ``first_microbatch`` on.
    """
    whole = place(draw, strategy, batching, topology, mixture)
    left_N = ~consumed_N
    if whole.assignment_digest == assignment_digest:
        loads_BMP = whole.loads_BMP.copy()
        loads_BMP[:, :first_microbatch] = 0
        left = replace(
            whole,
            loads_BMP=loads_BMP,
            first_microbatch=first_microbatch,
            bucket_N=np.where(consumed_N, -1, whole.bucket_N),
            microbatch_N=np.where(consumed_N, -1, whole.microbatch_N),
            pack_N=np.where(consumed_N, -1, whole.pack_N),
            offset_N=np.where(consumed_N, -1, whole.offset_N),
        )
        left = replace(left, capacity_tokens=_capacity(left, batching))
        return _routed(left, strategy, topology, assignment_digest)
    rest = replace(
        draw,
        table=draw.table.take(left_N),
        canonical_pack_N=_repack(draw, batching, np.flatnonzero(left_N)),
    )
    part = place(rest, strategy, batching, topology, mixture)
    done_BMP = np.zeros((part.num_buckets, first_microbatch, part.loads_BMP.shape[2]), np.int64)
    moved = replace(
        whole,
        loads_BMP=np.concatenate([done_BMP, part.loads_BMP], axis=1),
        bound=part.bound,
        capacity_tokens=part.capacity_tokens,
        cp_layout=part.cp_layout,
        first_microbatch=first_microbatch,
        assignment_digest="",
        bucket_N=_widen(part.bucket_N, left_N),
        microbatch_N=_widen(part.microbatch_N + first_microbatch, left_N),
        pack_N=_widen(part.pack_N, left_N),
        offset_N=_widen(part.offset_N, left_N),
    )
    return _routed(moved, strategy, topology, assignment_digest="")


def _widen(part_n: NDArray[np.int64], left_N: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return (N,) the values of a part of the spans at their places, -1 elsewhere."""
    whole_N = np.full(len(left_N), -1, np.int64)
    whole_N[left_N] = part_n
    return whole_N


def _problem(
    draw: Draw,
    strategy: Strategy,
    batching: Batching,
    topology: ClientPlaceTree,
    num_microbatches: int,
) -> tuple[Problem, NDArray[np.int64]]:
    """Return what is to be balanced, spans or whole packs; and (N,) the item of each span."""
    size_N, pack_N = batching.padded(draw.table["tokens"]), draw.canonical_pack_N
    problem = strategy.problem(
        padded_table(draw.table, batching),  # caps and costs count padded tokens
        topology,
        num_microbatches=num_microbatches,
        num_packs=batching.micro_batch,
    )
    # Packs in the order drawn, dealt to the buckets in turn: what a plain loader would do.
    bucket_N, slot_N = pack_N % problem.num_buckets, pack_N // problem.num_buckets
    start_N = bucket_N * problem.packs_per_bucket + slot_N
    item_N = np.arange(draw.table.num_rows)
    if batching.pours:
        problem, item_N = problem.joined(pack_N), pack_N
        size_N = sums(size_N, pack_N, problem.num_items)
        start_N = start_N[np.searchsorted(pack_N, np.arange(problem.num_items))]
    room = replace(
        problem,
        size_N=size_N,
        capacity=batching.seq_len,
        max_items=1 if batching.pours else batching.documents_limit,
        start_N=start_N,
        equal_counts=bool(strategy.equal_counts),
    )
    return room, item_N


def _drawn(draw: Draw, mixture: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a plan that say what the step consists of."""
    names = tuple(draw.state.sources)
    return {
        "step": draw.step,
        "sources": names,
        "table": draw.table,
        "mixture": mixture,
        "draw_digest": draw_digest(draw.step, names, draw.table),
        "passed": draw.passed,
        "state": draw.state.to_json(),
    }


def _end(draw: Draw, num_buckets: int, batching: Batching, mixture: Mapping[str, float]) -> Plan:
    """Return the plan that says that the data has ended."""
    none = np.empty(0, np.int64)
    return Plan(
        **_drawn(draw, mixture),
        bucket_N=none,
        microbatch_N=none,
        pack_N=none,
        offset_N=none,
        loads_BMP=np.zeros((num_buckets, 0, 1), np.int64),
        bound=1.0,
        num_packs=batching.micro_batch,
        num_loss_tokens=0,
        end=True,
    )


def _capacity(plan: Plan, batching: Batching) -> int:
    """Return the tokens of all packs from the first microbatch on, pads included."""
    placed_N = plan.bucket_N >= 0
    size_n = batching.padded(plan.table["tokens"][placed_N])
    num_left = plan.num_microbatches - plan.first_microbatch
    group_n = plan.bucket_N[placed_N] * num_left
    group_n += plan.microbatch_N[placed_N] - plan.first_microbatch
    width_G = batching.widths(size_n, group_n, plan.num_buckets * num_left)
    return int(width_G.sum()) * plan.num_packs


def _offsets(bin_N: NDArray[np.int64], size_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (N,) where each span begins in its pack; spans of a pack follow in the order drawn."""
    order = np.argsort(bin_N, kind="stable")
    starts = np.cumsum(size_N[order]) - size_N[order]
    first = np.flatnonzero(np.diff(bin_N[order], prepend=-1))
    counts = np.diff(np.append(first, len(order)))
    offset_N = np.empty(len(order), np.int64)
    offset_N[order] = starts - np.repeat(starts[first], counts)
    return offset_N


def _routed(
    plan: Plan, strategy: Strategy, topology: ClientPlaceTree, assignment_digest: str
) -> Plan:
    """Return the plan with the routing of the items whose spans it places; "": a digest anew."""
    routing = route_all(
        strategy.selections,
        topology,
        plan.table,
        plan.bucket_N,
        plan.microbatch_N,
        plan.num_microbatches,
    )
    return replace(plan, routing=routing, assignment_digest=assignment_digest)


def _repack(draw: Draw, batching: Batching, left: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return packs for a part of a draw: tight if the longest-first packing fits, else its own.

    Poured packs stay whole: what is left of the draw is some of them.
    """
    if batching.pours:
        return np.unique(draw.canonical_pack_N[left], return_inverse=True)[1]
    size_N = batching.padded(draw.table["tokens"])[left]
    packing = Packing(draw.num_packs, batching)
    tight_N = np.empty(len(left), np.int64)
    for item in np.argsort(-size_N, kind="stable").tolist():
        if size_N[item] > packing.room:
            return draw.canonical_pack_N[left]
        tight_N[item] = packing.add(int(size_N[item]))
    return tight_N
