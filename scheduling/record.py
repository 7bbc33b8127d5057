"""The committed record of one running pipeline: what is decided, and what was delivered.

Pure bookkeeping, no IO and no Dask: the Supervisor guards one `RunRecord` for every pipeline and
acts on what it says. Every change is by compare-and-set on (generation, incarnation, step).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megadask.planner.errors import ConfigError, StateError
from megadask.planner.ledger import Ledger
from megadask.planner.plan import Plan
from megadask.planner.state import MixtureEvent, PlannerState
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.errors import ClaimError, ServiceError, StaleError
from megadask.scheduling.point import Point

#: The next microbatch that a rank has not acknowledged: (step, microbatch).
Watermark = tuple[int, int]


@dataclass(frozen=True)
class Owner:
    """One life of one role, on one worker."""

    address: str
    incarnation: str


@dataclass
class Claim:
    """The trainer that a rank belongs to: its Dask client, its process, and its token."""

    client: str
    process: str
    token: str


@dataclass(frozen=True, eq=False)
class Committed:
    """A committed plan, as the Planner sent it and as it reads."""

    data: bytes
    plan: Plan


@dataclass
class RunRecord:
    """What is committed of one pipeline.

    Attributes
    ----------
    generation
        The timeline; it grows with every restart from a state.
    origin
        The point that the generation began at.
    planner
        The Planner that may commit.
    loaders
        (source, lanes) to their owner.
    plans
        Committed plans that some rank has not yet acknowledged, by step.
    next_step
        The step that the next commit must have.
    watermarks
        What every rank has acknowledged.
    """

    name: str
    topology: ClientPlaceTree
    axis: Any
    lanes: Mapping[str, int]
    origin: Point
    generation: int = 0
    planner: Owner | None = None
    loaders: dict[tuple[str, tuple[int, ...]], Owner] = field(default_factory=dict)
    constructors: dict[tuple[int, ...], Owner] = field(default_factory=dict)
    plans: dict[int, Committed] = field(default_factory=dict)
    next_step: int = 0
    events: list[MixtureEvent] = field(default_factory=list)
    claims: dict[int, Claim] = field(default_factory=dict)
    watermarks: dict[int, Watermark] = field(default_factory=dict)
    rewinds: dict[int, Point] = field(default_factory=dict)
    refused: tuple[int, str] = (0, "")
    history: list[dict[str, Any]] = field(default_factory=list)
    draw_digest: str = ""
    assignment_digest: str = ""
    unread: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def low(self) -> Watermark:
        """What every rank has acknowledged."""
        return min(self.watermarks.values())

    def __post_init__(self) -> None:
        self.open_generation(self.origin)

    # The planner ------------------------------------------------------------------------------

    def open_generation(self, origin: Point) -> None:
        """Begin a new timeline at ``origin``; what was planned beyond it is void."""
        self.generation += 1
        self.origin = origin
        self.plans.clear()
        self.events.clear()
        self.rewinds.clear()
        self.history.clear()
        self.draw_digest = self.assignment_digest = ""
        self.unread = {}
        self.next_step = origin.step
        self.watermarks = dict.fromkeys(
            range(self.topology.world_size), (origin.step, origin.microbatch)
        )
        self._state_before = {origin.step: origin.state}
        self._ledger = Ledger(PlannerState.from_json(origin.state))
        self._audited = dict(self.watermarks)

    @property
    def ended(self) -> bool:
        """Whether the end of the data is committed."""
        last = self.plans.get(self.next_step - 1)
        return last is not None and last.plan.end

    def check_planner(self, incarnation: str) -> None:
        """Raise StaleError for a planner of another life."""
        planner = self.planner
        if planner is None or planner.incarnation != incarnation:
            raise StaleError(
                f"{self.name}: this planner was replaced",
                got=f"incarnation {incarnation}",
                limit=f"incarnation {planner.incarnation}" if planner else "none",
            )

    def is_turn(self, generation: int, step: int, num_events: int) -> bool:
        """Whether a plan made for this generation, step and number of events can be committed."""
        current = (self.generation, self.next_step, len(self.events))
        return (generation, step, num_events) == current and not self.ended

    def commit(
        self, generation: int, incarnation: str, step: int, num_events: int, data: bytes
    ) -> bool:
        """Commit the plan of ``step``; False when the planner has to look at the record again.

        Raises StaleError for a planner of another life.
        """
        self.check_planner(incarnation)
        if not self.is_turn(generation, step, num_events):
            return False
        plan = Plan.from_arrow(data)
        self.plans[step] = Committed(data, plan)
        self.next_step = step + 1
        self._state_before[step + 1] = plan.state
        self._ledger.plan(plan.table, plan.passed, plan.bucket_N >= 0)
        self.draw_digest = _chain(self.draw_digest, plan.draw_digest)
        self.assignment_digest = _chain(self.assignment_digest, plan.assignment_digest)
        if not plan.end:
            self.history.append(_summary(plan))
            del self.history[:-1000]
        return True

    def event_step(self, at_step: int | None) -> int:
        """Return the step from which an event would hold: above every committed plan."""
        if self.ended:
            raise ServiceError(f"{self.name}: the data has ended at step {self.next_step - 1}")
        if at_step is not None and at_step < self.next_step:
            raise ConfigError(
                "set_mixture(at_step=)",
                got=at_step,
                limit=f"at least {self.next_step}: the steps before it are committed",
            )
        return self.next_step if at_step is None else at_step

    def add_event(self, weights: Mapping[str, float], at_step: int | None) -> int:
        """Commit new mixture weights; return the step from which they hold."""
        step = self.event_step(at_step)
        self.events.append(MixtureEvent(step=step, weights=dict(weights)))
        return step

    def is_actor(self, incarnation: str) -> bool:
        """Whether this is the present life of the planner or of a constructor."""
        owners = [*self.constructors.values(), *([self.planner] if self.planner else [])]
        return any(owner.incarnation == incarnation for owner in owners)

    def constructor_of(self, rank: int) -> Owner | None:
        """Return the constructor that serves a rank, None while there is none."""
        bucket = self.topology.bucket_of(rank, self.axis)
        return next((o for part, o in self.constructors.items() if bucket in part), None)

    # The ranks --------------------------------------------------------------------------------

    def join(self, rank: int, client: str, process: str, *, force: bool) -> Claim:
        """Give a rank to a trainer; a process that asks again takes it from its older loader.

        Raises ConfigError outside the mesh, ClaimError if another process has it.
        """
        self.check_rank(rank)
        held = self.claims.get(rank)
        if held is not None and held.process != process and not force:
            raise ClaimError(
                f"rank {rank} of {self.name} belongs to another trainer",
                got=f"process {process}",
                limit=f"process {held.process}",
                remedy="Close that loader, or take the rank with connect(force=True).",
            )
        self.claims[rank] = Claim(client, process, uuid.uuid4().hex)
        self.rewinds.pop(rank, None)
        return self.claims[rank]

    def check_rank(self, rank: int) -> None:
        """Raise ConfigError if the mesh has no such rank."""
        world = self.topology.world_size
        if not 0 <= rank < world:
            raise ConfigError(
                f"rank outside the topology of {self.name}",
                got=rank,
                limit=f"0 to {world - 1}",
                remedy="Check ClientPlaceTree(dp=, pp=, cp=, tp=) and the launcher's world size.",
            )

    def check_token(self, rank: int, token: str) -> None:
        """Raise ClaimError if the rank was taken over."""
        claim = self.claims.get(rank)
        if claim is None or claim.token != token:
            raise ClaimError(
                f"rank {rank} of {self.name} no longer belongs to this trainer",
                remedy="Another trainer took it, or its lease lapsed; connect again.",
            )

    def leave(self, rank: int, token: str) -> None:
        """Give a rank back."""
        claim = self.claims.get(rank)
        if claim is not None and claim.token == token:
            del self.claims[rank]

    def drop_client(self, client: str) -> None:
        """Free the ranks of a trainer that is gone."""
        for rank in [rank for rank, claim in self.claims.items() if claim.client == client]:
            del self.claims[rank]

    def acknowledge(self, generation: int, marks: Mapping[int, Watermark]) -> None:
        """Merge watermarks by maximum, and free what every rank has behind it."""
        if generation != self.generation:
            return
        for rank, mark in marks.items():
            if mark > self.watermarks[rank]:
                self.watermarks[rank] = mark
                self.rewinds.pop(rank, None)
        self._audit_delivered()
        low = self.low[0]
        for step in [step for step in self.plans if step < low and not self.plans[step].plan.end]:
            del self.plans[step]
        for step in [step for step in self._state_before if step < low]:
            del self._state_before[step]

    @property
    def planner_point(self) -> Point:
        """Where a planner takes up the generation."""
        if self.next_step == self.origin.step:
            return self.origin
        return Point(step=self.next_step, state=self._state_before[self.next_step])

    def point_at(self, mark: Watermark) -> Point:
        """Return the resumable point of a watermark that is not yet freed."""
        step, microbatch = mark
        state = self._state_before[step]
        if mark == (self.origin.step, self.origin.microbatch):
            return self.origin
        if microbatch == 0:
            return Point(step=step, state=state)
        return Point.inside(self.plans[step].plan, state, microbatch)

    # Going back -------------------------------------------------------------------------------

    def stands_at(self, rank: int, point: Point) -> bool:
        """Whether a rank can go on from ``point`` as it is: at the generation's beginning."""
        return point == self.origin and self.watermarks[rank] == (point.step, point.microbatch)

    def rewind(self, rank: int, token: str, point: Point) -> bool:
        """Ask to go back to ``point``; True when a new generation is to be opened there.

        That is when all ranks have asked for the same point and some do not stand there already.
        Raises StateError naming the ranks when they ask for unlike points.
        """
        self.check_token(rank, token)
        self.rewinds[rank] = point
        waiting = {r: asked for r, asked in self.rewinds.items() if not self.stands_at(r, asked)}
        places: dict[str, list[int]] = {}
        for other, asked in sorted(waiting.items()):
            places.setdefault(asked.digest, []).append(other)
        if len(places) > 1:
            asked_at = [(ranks, waiting[ranks[0]]) for ranks in places.values()]
            self.rewinds.clear()
            detail = "; ".join(
                f"ranks {ranks}: step {at.step}, microbatch {at.microbatch}"
                for ranks, at in asked_at
            )
            self.refused = (self.refused[0] + 1, detail)
            raise unequal_points(self.name, detail)
        agreed = [asked for asked in self.rewinds.values() if asked == point]
        return bool(waiting) and len(agreed) == self.topology.world_size

    def refuse(self) -> None:
        """Raise the error of the last refused attempt to go back."""
        raise unequal_points(self.name, self.refused[1])

    # What users ask ---------------------------------------------------------------------------

    def audit(self) -> dict[str, Any]:
        """Return committed plans times watermarks, per source."""
        pending = []
        for step, committed in self.plans.items():
            plan = committed.plan
            waiting = np.zeros(plan.table.num_rows, bool)
            for bucket in range(plan.num_buckets):
                mark = self._bucket_mark(bucket)
                mine = plan.bucket_N == bucket
                waiting |= (
                    mine & ((plan.microbatch_N >= mark[1]) | (step > mark[0])) & (step >= mark[0])
                )
            pending.append(plan.table.take(waiting))
        last = self.plans.get(self.next_step - 1)
        state = self._state_before[self.next_step] if last is None else last.plan.state
        return self._ledger.report(PlannerState.from_json(state), pending, self.unread)

    def _bucket_mark(self, bucket: int) -> Watermark:
        ranks = self.topology.ranks_of(bucket, self.axis)
        return min(self.watermarks[rank] for rank in ranks)

    def _audit_delivered(self) -> None:
        """Enter in the ledger what all ranks of a bucket have acknowledged since the last time."""
        num_buckets = self.topology.num_buckets(self.axis)
        for bucket in range(num_buckets):
            before, mark = self._audited_bucket(bucket), self._bucket_mark(bucket)
            for step in range(before[0], mark[0] + 1):
                committed = self.plans.get(step)
                if committed is None:
                    continue
                plan = committed.plan
                first = before[1] if step == before[0] else 0
                last = mark[1] if step == mark[0] else plan.num_microbatches
                between = (plan.microbatch_N >= first) & (plan.microbatch_N < last)
                rows = np.flatnonzero((plan.bucket_N == bucket) & between)
                if len(rows):
                    self._ledger.deliver(plan.table, rows)
        self._audited = dict(self.watermarks)

    def _audited_bucket(self, bucket: int) -> Watermark:
        return min(self._audited[rank] for rank in self.topology.ranks_of(bucket, self.axis))


def unequal_points(name: str, detail: str) -> StateError:
    """Return the error for ranks that load different states."""
    return StateError(
        f"the ranks of {name} load states of different points",
        got=detail,
        limit="the same step and microbatch on every rank",
        remedy="Load the state that all ranks saved at the same point of the loop.",
    )


def _chain(digest: str, link: str) -> str:
    import hashlib

    return hashlib.blake2b(f"{digest}{link}".encode(), digest_size=16).hexdigest()


def _summary(plan: Plan) -> dict[str, Any]:
    """Return what `stats` keeps of a plan."""
    return {
        "step": plan.step,
        "num_spans": plan.table.num_rows,
        "num_tokens": int(plan.table["tokens"].sum()),
        "num_microbatches": plan.num_microbatches,
        "imbalance": plan.imbalance,
        "bound": plan.bound,
        "draw_digest": plan.draw_digest,
        "assignment_digest": plan.assignment_digest,
        "mixture": dict(plan.mixture),
    }
