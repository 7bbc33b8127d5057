"""The committed record of one running pipeline: what is decided, and what was delivered.

Pure bookkeeping, no IO and no Dask: the Supervisor guards one `RunRecord` for every pipeline and
acts on what it says. Every change is by compare-and-set on (generation, incarnation, step).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from megadask.planner.errors import ConfigError
from megadask.planner.plan import Plan
from megadask.planner.state import MixtureEvent, PlannerState, check_lanes
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.agreement import Agreement
from megadask.scheduling.claims import Claim, Claims
from megadask.scheduling.delivered import Delivered
from megadask.scheduling.errors import ServiceError, StaleError
from megadask.scheduling.history import chain, summary
from megadask.scheduling.hold import Hold
from megadask.scheduling.life import Owner
from megadask.scheduling.marks import Marks, Watermark
from megadask.scheduling.passes import Passes
from megadask.scheduling.point import Point
from megadask.scheduling.portions import Portions
from megadask.scheduling.roster import Roster

#: So many events are kept for `stats`.
MOST_NEWS = 1000


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
    shadows
        (source, lanes) to the standbys that follow their owner.
    news
        What befell the roles, newest last.
    num_casts
        Changes of who holds which role.
    plans
        Committed plans that some rank has not yet acknowledged, by step.
    next_step
        The step that the next commit must have.
    watermarks
        What every rank has acknowledged.
    passes
        How far ranks are in a pipeline that restarts; nobody moves where it does not.
    pass_number
        The pass that the generation is of.
    hold
        What constructors hold back while the topology is about to change.
    """

    name: str
    topology: ClientPlaceTree
    axis: Any
    lanes: Mapping[str, int]
    origin: Point
    generation: int = 0
    planner: Owner | None = None
    loaders: dict[tuple[str, tuple[int, ...]], Owner] = field(default_factory=dict)
    shadows: dict[tuple[str, tuple[int, ...]], list[Owner]] = field(default_factory=dict)
    constructors: Roster = field(default_factory=Roster)
    plans: dict[int, Portions] = field(default_factory=dict)
    next_step: int = 0
    events: list[MixtureEvent] = field(default_factory=list)
    claims: Claims = field(init=False)
    watermarks: Marks = field(init=False)
    agreement: Agreement = field(init=False)
    passes: Passes = field(init=False)
    pass_number: int = 0
    hold: Hold | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    draw_digest: str = ""
    assignment_digest: str = ""
    num_tokens: int = 0  # of the plans of this generation, and what their packs have room for
    capacity_tokens: int = 0
    unread: Mapping[str, int | None] = field(default_factory=dict)
    news: list[dict[str, Any]] = field(default_factory=list)
    num_casts: int = 0

    @property
    def finished(self) -> AbstractSet[int]:
        """Ranks that are done with the pass."""
        return self.passes.finished

    @property
    def low(self) -> Watermark:
        """What every rank that is not done with its pass has acknowledged."""
        return self.watermarks.low(self.finished) or (self.next_step, 0)

    def __post_init__(self) -> None:
        self._num_holds = 0
        self.agreement = Agreement(self.name, self.topology.world_size)
        self.passes = Passes(self.topology.world_size)
        self.claims = Claims(self.name)
        self.open_generation(self.origin)

    # The planner ------------------------------------------------------------------------------

    def open_generation(self, origin: Point) -> None:
        """Begin a new timeline at ``origin``; what was planned beyond it is void.

        Events for later steps stay: the same steps come again, and shall be the same.
        """
        self.generation += 1
        self.origin = origin
        self.plans.clear()
        self.events = [event for event in self.events if event.step >= origin.step]
        self.agreement.reset()
        self.pass_number = self.passes.current
        self.history.clear()
        self.draw_digest = self.assignment_digest = ""
        self.num_tokens = self.capacity_tokens = 0
        self.unread = {}
        self.next_step = origin.step
        self.watermarks = Marks(self.topology.world_size, (origin.step, origin.microbatch))
        # Where ranks may stand: before whole steps, and what was asked for of places inside.
        self._points = {(origin.step, 0): Point(step=origin.step, state=origin.state)}
        buckets = range(self.topology.num_buckets(self.axis))
        self.ranks_of_bucket = [self.topology.ranks_of(one, self.axis) for one in buckets]
        # The pipeline may have sources that the state does not know.
        sources = check_lanes(PlannerState.from_json(origin.state), self.lanes)
        self._delivered = Delivered(sources, self.ranks_of_bucket, self.watermarks)

    @property
    def ended(self) -> bool:
        """Whether the end of the data is committed."""
        return self.is_end(self.next_step - 1)

    def is_end(self, step: int) -> bool:
        """Whether the data ends before ``step``, by a committed plan."""
        committed = self.plans.get(step)
        return committed is not None and committed.plan.end

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
        self.plans[step] = Portions(plan)
        self.next_step = step + 1
        self._points[step + 1, 0] = Point(step=step + 1, state=plan.state)
        self._delivered.plan(plan)
        self.draw_digest = chain(self.draw_digest, plan.draw_digest)
        self.assignment_digest = chain(self.assignment_digest, plan.assignment_digest)
        self.num_tokens += plan.num_tokens
        self.capacity_tokens += plan.capacity_tokens
        if not plan.end:
            self.history.append(summary(plan))
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

    # Another topology -------------------------------------------------------------------------

    @property
    def constructor_lives(self) -> list[str]:
        """Incarnations of the present constructors."""
        return [owner.incarnation for owner in self.constructors.values()]

    @property
    def first_whole_step(self) -> int:
        """The first step of the generation that begins with its first microbatch."""
        return self.origin.step + (self.origin.microbatch > 0)

    def hold_delivery(self) -> Hold:
        """Let constructors hand out nothing, until the hold has a step or is lifted."""
        self._num_holds += 1
        self.hold = Hold(self._num_holds)
        return self.hold

    def reshard(self, step: int, topology: ClientPlaceTree, axis: Any) -> None:
        """Go on with ``step``, of which nothing was delivered, on another topology."""
        assert self.low >= (step, 0)
        self.claims.retire(step)
        self.topology, self.axis = topology, axis
        self.agreement = Agreement(self.name, topology.world_size)
        self.passes = Passes(topology.world_size)
        self.hold = None
        self.open_generation(self._points[step, 0])

    def note(self, what: str, **facts: Any) -> None:
        """Add to the news; the oldest go."""
        self.news.append({"event": what, "next_step": self.next_step, **facts})
        del self.news[:-MOST_NEWS]

    def drop_shadow(self, incarnation: str) -> Owner | None:
        """Forget a standby; return it, if there was one of this life."""
        for standbys in self.shadows.values():
            for owner in standbys:
                if owner.incarnation == incarnation:
                    standbys.remove(owner)
                    return owner
        return None

    def is_actor(self, incarnation: str) -> bool:
        """Whether this is the present life of the planner or of a constructor."""
        if self.planner is not None and self.planner.incarnation == incarnation:
            return True
        return self.constructors.buckets_of(incarnation) is not None

    def constructor_of(self, rank: int) -> Owner | None:
        """Return the constructor that serves a rank, None while there is none."""
        return self.constructors.of_bucket(self.bucket_of(rank))

    def bucket_of(self, rank: int) -> int:
        """Return the bucket that a rank consumes."""
        return self.topology.bucket_of(rank, self.axis)

    # The ranks --------------------------------------------------------------------------------

    def join(self, rank: int, client: str, process: str, *, force: bool) -> Claim:
        """Give a rank to a trainer; a process that asks again takes it from its older loader.

        Raises ConfigError outside the mesh, ClaimError if another process has it.
        """
        self.check_rank(rank)
        claim = self.claims.take(rank, client, process, force=force)
        self.agreement.left(rank)
        self.passes.left(rank)
        return claim

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

    def leave(self, rank: int, token: str) -> bool:
        """Give a rank back; return whether this trainer had it."""
        if held := self.claims.holds(rank, token):
            self._free(rank)
        return held

    def drop_client(self, client: str) -> list[int]:
        """Free the ranks of a trainer that is gone, and return them."""
        lost = self.claims.of_client(client)
        for rank in lost:
            self._free(rank)
        if lost and not self.claims:
            self.passes.level(range(self.topology.world_size))
        return lost

    def _free(self, rank: int) -> None:
        """Free a rank, and forget where its trainer wanted to go back to."""
        del self.claims[rank]
        self.agreement.left(rank)
        self.passes.left(rank)

    def acknowledge(self, generation: int, marks: Mapping[int, Watermark]) -> None:
        """Merge watermarks by maximum, and free what every rank has behind it.

        Those of another generation, and beyond what is committed, count for nothing. Raises
        ConfigError outside the mesh.
        """
        for rank in marks:
            self.check_rank(rank)
        if generation != self.generation:
            return
        before = self.low
        for rank, mark in marks.items():
            if self.watermarks[rank] < mark and self._is_committed(mark):
                self.watermarks.raise_to(rank, mark)
                self.agreement.moved(rank)
        if self.low[0] > before[0] or self.finished:
            self._free_plans()

    def _free_plans(self) -> None:
        """Enter in the audit what was delivered, and forget what no rank needs any more.

        Where a rank stands can always be told, also of one that is done with its pass.
        """
        self._delivered.deliver(self._open_plans, self.watermarks)
        held, low = self.watermarks.steps, self.low[0]
        for mark in [mark for mark in self._points if mark[0] < low and mark[0] not in held]:
            if not self.is_end(mark[0]):
                self.plans.pop(mark[0], None)
                del self._points[mark]

    def _is_committed(self, mark: Watermark) -> bool:
        """Whether the committed plans have a place like this."""
        step, microbatch = mark
        if microbatch == 0 or step >= self.next_step:
            return mark <= (self.next_step, 0)
        committed = self.plans.get(step)  # one that is freed is behind every rank that reads
        return committed is None or microbatch < committed.plan.num_microbatches

    @property
    def planner_point(self) -> Point:
        """Where a planner takes up the generation."""
        begins = self.next_step == self.origin.step
        return self.origin if begins else self._points[self.next_step, 0]

    def point_at(self, mark: Watermark) -> Point:
        """Return the resumable point of a watermark.

        That of a rank which is done with its pass may be freed; then it can only begin anew.
        """
        step, microbatch = mark
        before = self._points.get((step, 0))
        if before is None or mark == (self.origin.step, self.origin.microbatch):
            return self.origin
        if mark not in self._points:  # kept, as it is told all ranks
            self._points[mark] = Point.inside(self.plans[step].plan, before.state, microbatch)
        return self._points[mark]

    # Going back -------------------------------------------------------------------------------

    def stands_at(self, rank: int, point: Point) -> bool:
        """Whether a rank can go on from ``point`` as it is: at the generation's beginning."""
        return point == self.origin and self.watermarks[rank] == (point.step, point.microbatch)

    def rewind(self, rank: int, token: str, point: Point, *, waits: bool = True) -> bool:
        """Ask to go back to ``point``; True when a new generation is to be opened there.

        Raises StateError naming the ranks when they wait for unlike points.
        """
        self.claims.check(rank, token)
        return self.agreement.ask(rank, point, self.stands_at, waits=waits)

    def may_go_on(self, rank: int, point: Point) -> bool:
        """Whether a rank that asked for ``point`` may go on from there."""
        return self.agreement.grant(rank, point, self.stands_at)

    def fill(self, generation: int, step: int, rows: list[int]) -> None:
        """Note spans of a committed plan that a filler stands in for."""
        committed = self.plans.get(step)
        if generation == self.generation and committed is not None:
            self._delivered.fill(committed.plan, rows)

    # What users ask ---------------------------------------------------------------------------

    def audit(self) -> dict[str, Any]:
        """Return committed plans times watermarks, per source."""
        return self._delivered.report(self._open_plans, self.watermarks, self.unread)

    @property
    def _open_plans(self) -> list[Plan]:
        return [committed.plan for committed in self.plans.values()]
