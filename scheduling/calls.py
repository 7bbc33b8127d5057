"""What planners, constructors and trainers ask the Supervisor about one run.

Each function is one call. It decides by the record, and where the caller can do nothing before
something changes, it waits for that, up to ``wait_s`` seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megadask.planner.errors import StateError
from megadask.scheduling.errors import StaleError
from megadask.scheduling.point import Point
from megadask.scheduling.roles import actor_key
from megadask.scheduling.run import Run

logger = logging.getLogger(__name__)

#: How long a trainer waits for its constructor's answer before it looks whether that is the same
#: still; and how many trainers may look in a second, of however many that wait.
LISTEN_S = 2.0
MOST_LOOKS = 500
#: How long an actor that the record does not know yet may be one that is just being started.
START_GRACE_S = 5.0


async def pull(
    run: Run, incarnation: str, generation: int, next_step: int | None, wait_s: float
) -> dict[str, Any]:
    """Let a planner plan the next step, and tell it where the record stands."""
    record = run.record

    def may_plan() -> bool:
        lead = record.next_step - record.low[0]
        idle = run.error is not None or not run.active or record.ended
        return not idle and lead <= int(run.header["lead_steps"])

    def is_current() -> bool:
        return record.planner is not None and record.planner.incarnation == incarnation

    await run.changed.wait_until(lambda: run.over or is_current(), START_GRACE_S)
    await run.changed.wait_until(lambda: run.over or not is_current() or may_plan(), wait_s)
    if run.over:
        return run.farewell()
    if not is_current():
        raise StaleError(f"{record.name}: this planner was replaced", got=incarnation)
    if not may_plan():
        return {"status": "wait"}
    order: dict[str, Any] = {
        "status": "plan",
        "generation": record.generation,
        "num_casts": record.num_casts,
        "events": [[event.step, dict(event.weights)] for event in record.events],
    }
    if generation != record.generation or next_step != record.next_step:
        order["point"] = record.planner_point.to_json()
    return order


async def commit(
    run: Run,
    incarnation: str,
    generation: int,
    step: int,
    num_events: int,
    plan: bytes,
    unread: Mapping[str, int | None],
) -> bool:
    """Commit a step; False when the planner has to pull again, as something came between."""
    record = run.record
    async with run.commits:
        run.check_open()
        record.check_planner(incarnation)
        if not record.is_turn(generation, step, num_events):
            return False
        await run.commit(incarnation, plan, unread)
    run.bump()
    return True


async def event(run: Run, weights: Mapping[str, float], at_step: int | None) -> int:
    """Commit weights that the driver sets, above every committed plan."""
    async with run.commits:
        run.check_open()
        step = run.record.event_step(at_step)
        await run.add_event(weights, step)
    run.bump()
    return step


async def fail(run: Run, incarnation: str, error: bytes) -> None:
    """Note that a role cannot go on; trainers get its error behind what is committed."""
    if run.record.is_actor(incarnation) and not run.over:
        logger.error("%s failed at step %d", run.name, run.record.next_step)
        run.error = error
        run.bump()


async def plans(
    run: Run, incarnation: str, generation: int, from_step: int, newer_than: int, wait_s: float
) -> dict[str, Any]:
    """Give a constructor its part of the committed plans, claims and watermarks."""
    record = run.record
    await run.changed.wait_until(lambda: run.over or record.is_actor(incarnation), START_GRACE_S)
    run.bulletin.hear(incarnation, newer_than)
    await run.bulletin.wait_for_news(incarnation, newer_than, lambda: run.over, wait_s)
    if run.over:
        return run.farewell()
    buckets = record.constructors.buckets_of(incarnation)
    if buckets is None:
        run.bulletin.forget(incarnation)
        raise StaleError(f"{record.name}: this constructor was replaced", got=incarnation)
    ranks = [rank for bucket in buckets for rank in record.ranks_of_bucket[bucket]]
    first = from_step if generation == record.generation else 0
    return {
        "status": "plans",
        "version": run.version,
        "generation": record.generation,
        "num_casts": record.num_casts,
        "tokens": [[rank, record.claims[rank].token] for rank in ranks if rank in record.claims],
        "marks": [[rank, *record.watermarks[rank]] for rank in ranks],
        "finished": [rank for rank in ranks if rank in record.finished],
        "hold": None if record.hold is None else [record.hold.number, record.hold.step],
        "error": run.error,
        "plans": [
            committed.of(buckets)
            for step, committed in sorted(record.plans.items())
            if step >= first
        ],
    }


async def reached(run: Run, incarnation: str, number: int, step: int) -> None:
    """Take a constructor's word of which step, of a delivery held back, it has given nothing."""
    hold = run.record.hold
    if hold is not None and hold.number == number:
        hold.reached[incarnation] = step
        run.changed.set()


async def acknowledge(run: Run, generation: int, marks: list[list[int]]) -> None:
    """Take the watermarks that a constructor passes on."""
    record = run.record
    before = record.low
    record.acknowledge(generation, {rank: (step, micro) for rank, step, micro in marks})
    if record.low > before:
        async with run.commits:
            await run.note_low()
        run.changed.set()  # without a new version, which would be news for constructors


async def filled(run: Run, incarnation: str, generation: int, step: int, rows: list[int]) -> None:
    """Note spans of a committed plan that a constructor has put fillers in the place of."""
    if run.record.is_actor(incarnation):
        run.record.fill(generation, step, rows)


async def owners(run: Run, newer_than: int, num_casts: int, wait_s: float) -> dict[str, Any]:
    """Tell a planner or constructor who owns which lanes, if it does not know of all changes.

    Who waits long for a loader asks often; and the loaders may be a thousand.
    """
    await run.changed.wait_until(lambda: run.version > newer_than, wait_s)
    run.check_open()
    record = run.record
    known = {"version": run.version, "num_casts": record.num_casts}
    if num_casts == record.num_casts:
        return known
    loaders: dict[str, list[list[Any]]] = {source: [] for source in record.lanes}
    shadows: dict[str, list[list[Any]]] = {source: [] for source in record.lanes}
    for (source, lanes), owner in record.loaders.items():
        loaders[source].append([list(lanes), owner.address, owner.incarnation])
    for (source, lanes), standbys in record.shadows.items():
        for owner in standbys:
            shadows[source].append([list(lanes), owner.address, owner.incarnation])
    return {**known, "loaders": loaders, "shadows": shadows}


async def shadow_differs(run: Run, incarnation: str, shadow: str, what: str) -> None:
    """Take a planner's word that a standby reads other samples than its primary; it is no more."""
    run.record.check_planner(incarnation)
    owner = run.record.drop_shadow(shadow)
    if owner is not None:
        logger.error("%s: a shadow on %s was dropped: %s", run.name, owner.address, what)
        run.dropped.append(owner)
        run.record.num_casts += 1
        run.record.note("shadow dropped", worker=owner.address, reason=what)
        run.bump()


async def join(run: Run, rank: int, client: str, process: str, force: bool) -> dict[str, Any]:
    """Give a trainer its rank."""
    run.check_open()
    claim = run.record.join(rank, client, process, force=force)
    run.bump_for(rank)
    if claim.is_successor:
        await run.fence(rank)
    run.record.claims.check(rank, claim.token)
    await run.turn_pass()
    return {
        "ident": run.header["ident"],
        "token": claim.token,
        "sources": list(run.record.lanes),
        "components": run.header["components"],
        "restart": run.header["restart"],
        "pass": run.record.passes.next_of(rank),
        "beginning": run.beginning.packed,
        "place": place(run, rank),
        **standing(run, rank),
    }


async def look(
    run: Run,
    rank: int,
    token: str,
    step: int,
    lost: str | None,
    with_point: bool,
    wait_s: float,
) -> dict[str, Any]:
    """Tell a trainer where its rank stands, who serves it now, and what holds it up.

    step: the one that it wants to read. lost: a constructor that does not answer the trainer; one
    in its place is waited for. with_point: whether it is to know the point, too, which is large.
    """

    def is_served() -> bool:
        if token in run.record.claims.resharded:
            return True  # the mesh may have no such rank any more
        owner = run.record.constructor_of(rank)
        return owner is not None and actor_key(owner.incarnation) != lost

    await run.turned.wait_until(lambda: run.over or is_served(), wait_s)
    if run.over:
        return run.farewell()
    run.record.claims.check(rank, token)
    return {"holdup": holdup(run, step), **standing(run, rank, with_point=with_point)}


async def holds(run: Run, rank: int, token: str) -> bool:
    """Tell a constructor whether a rank belongs to the trainer with this token."""
    return run.record.claims.holds(rank, token)


async def leave(run: Run, rank: int, token: str) -> None:
    """Take a rank back."""
    if run.record.leave(rank, token):
        run.bump_for(rank)
    await run.turn_pass()


async def rewind(
    run: Run, rank: int, token: str, point: bytes, refusals: int, wait_s: float
) -> dict[str, Any]:
    """Take a trainer back to a point, with all other ranks.

    refusals: how many refused attempts the caller knows of, -1 when it asks for the first time.
    wait_s: 0 when the caller goes on without an answer, and may yet ask for something else.
    """
    record = run.record
    if run.over or run.error is not None:
        return run.farewell()
    agreement = record.agreement
    asked = Point.unpack(point)
    if refusals < 0:
        refusals = agreement.num_refusals
    if agreement.num_refusals != refusals:
        agreement.refuse()
    generation = record.generation
    try:
        opens = record.rewind(rank, token, asked, waits=wait_s > 0)
    except StateError:
        run.turned.set()  # others that wait are refused, too
        raise
    try:
        if opens:
            await run.open_generation(asked)

        def is_done() -> bool:
            opened = record.generation != generation and record.origin.digest == asked.digest
            return opened or record.may_go_on(rank, asked)

        await run.turned.wait_until(
            lambda: run.over or agreement.num_refusals != refusals or is_done(), wait_s
        )
    finally:
        agreement.rest(rank)
    if run.over:
        return run.farewell()
    if agreement.num_refusals != refusals:
        agreement.refuse()
    status = {"status": "done" if is_done() else "wait", "refusals": agreement.num_refusals}
    return {**status, **standing(run, rank)}


async def begin_pass(run: Run, rank: int, token: str, number: int, wait_s: float) -> dict[str, Any]:
    """Let a trainer begin a pass, once all ranks are done with the one before."""
    record = run.record
    record.claims.check(rank, token)
    await run.turned.wait_until(
        lambda: run.over or run.error is not None or record.pass_number == number, wait_s
    )
    if run.over or run.error is not None:
        return run.farewell()
    record.claims.check(rank, token)
    if record.pass_number != number:
        behind = [r for r in range(record.topology.world_size) if r not in record.finished]
        return {"status": "wait", "behind": behind}
    record.passes.begin(rank, number)
    if not run.active:
        run.active = True
        run.bump()
    return {"status": "done", **standing(run, rank)}


async def finish(run: Run, rank: int, token: str, number: int) -> None:
    """Note that a trainer is done with a pass; free what is held when all are."""
    run.record.claims.check(rank, token)
    run.record.passes.end(rank, number)
    run.bump_for(rank)
    await run.turn_pass()


def holdup(run: Run, step: int) -> str:
    """Return what a rank that waits for a microbatch of a step waits for, as far as it is known."""
    record = run.record
    lead = int(run.header["lead_steps"])
    if step < record.next_step:
        return "the payload, which its constructor waits for"
    slowest = record.watermarks.slowest
    low = record.watermarks[slowest]
    if not record.ended and record.next_step - low[0] > lead:
        return (
            f"rank {slowest}, which has acknowledged what is before step {low[0]}, microbatch "
            f"{low[1]}; Limits(lead_steps={lead}) is how far one may go ahead of that"
        )
    return f"the plan of step {record.next_step}, for which the planner waits for its sources"


def place(run: Run, rank: int) -> dict[str, Any]:
    """Return how a rank comes by its batches: what `trainer.groups` needs to pass them on."""
    tree, axis = run.record.topology, run.record.axis
    along = run.header["broadcast_axes"]
    return {
        "delivery": tree.delivery(rank, along, axis),
        "root": tree.broadcast_root(rank, along),
        "world_size": tree.world_size,
        "num_slices": tree.num_slices(axis),
        "broadcast_axes": list(along),
        "keys": run.header["keys"],
        "collates": run.header["collates"],
        "lead_steps": run.header["lead_steps"],
        "listen_s": max(LISTEN_S, tree.world_size / MOST_LOOKS),
    }


def standing(run: Run, rank: int, *, with_point: bool = True) -> dict[str, Any]:
    """Return where a rank stands and who serves it."""
    record = run.record
    mark = record.watermarks[rank]
    owner = record.constructor_of(rank)
    return {
        "generation": record.generation,
        "origin": record.origin.digest,
        "mark": list(mark),
        "point": record.point_at(mark).packed if with_point else None,
        "constructor": actor_key(owner.incarnation) if owner else None,
    }


#: Every call that a role, a trainer or the driver can make about a run.
CALLS: dict[str, Callable[..., Awaitable[Any]]] = {
    call.__name__: call
    for call in (
        acknowledge,
        begin_pass,
        commit,
        event,
        fail,
        filled,
        finish,
        holds,
        join,
        leave,
        look,
        owners,
        plans,
        pull,
        reached,
        rewind,
        shadow_differs,
    )
}
