"""The Planner as a Dask actor: fetches metadata, draws and places each step, commits the plan.

Deciding is the planner package's; this actor only feeds it. It owns nothing that the Supervisor
does not have too: a new Planner continues from the committed record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from distributed import get_worker

from megadask.planner.draw import Draw, Starved, draw
from megadask.planner.errors import StateError
from megadask.planner.ledger import unread_records
from megadask.planner.onward import again, joined, next_shares, shares_of
from megadask.planner.place import place, place_rest
from megadask.planner.plan import Plan, draw_digest
from megadask.planner.state import MixtureEvent, PlannerState, check_lanes
from megadask.scheduling.errors import in_user_code, pack_error, root_error
from megadask.scheduling.feed import SourceFeed
from megadask.scheduling.mirror import Mirror
from megadask.scheduling.owners import Partners
from megadask.scheduling.point import Point
from megadask.scheduling.spec import RunSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long one call waits at the supervisor for permission to plan on.
PULL_S = 10.0
#: While a step is planned, sources are read for the next one, and for so many more.
AHEAD_STEPS = 2


class PlannerActor:
    """Plans the steps of one pipeline.

    Parameters
    ----------
    run
        Name of the pipeline's record at the supervisor.
    incarnation
        The life that the supervisor gave to this actor.
    blob
        Pickled `RunSpec`.
    """

    def __init__(self, run: str, incarnation: str, blob: bytes) -> None:
        self._worker = get_worker()
        self._incarnation = incarnation
        self._spec: RunSpec = pickle.loads(blob)
        self._partners = Partners(self._worker, run, self._spec.limits)
        self._mirror = Mirror(self._partners, incarnation)
        self._run = run
        self._generation = 0
        self._feeds: dict[str, SourceFeed] = {}
        self._overrides: dict[str, dict[tuple[int, int, int], int]] = {}
        self._state: PlannerState | None = None
        self._rest: Point | None = None
        self._num_events = 0
        self._task: asyncio.Task[None] | None = None
        self._preparing: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Begin to plan; returns at once."""
        # Beside the first calls for metadata; a step that is placed sooner loads it by itself.
        self._preparing = asyncio.ensure_future(asyncio.to_thread(self._spec.strategy.prepare))
        self._task = asyncio.create_task(self._plan_on(), name=f"plan {self._run}")

    async def close(self) -> None:
        """Stop planning."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._mirror.close()

    async def _plan_on(self) -> None:
        try:
            while await self._turn():
                pass
        except Exception as caught:  # whatever it is, the trainers must hear of it
            error = root_error(caught)
            if self._partners.is_over(error):
                logger.info("planner of %s stops: %s", self._run, error)
                return
            logger.error("planner of %s failed", self._run, exc_info=error)
            await self._partners.supervisor(
                "fail", incarnation=self._incarnation, error=pack_error(error)
            )
        finally:
            self._forget()

    async def _turn(self) -> bool:
        """Wait for permission, plan and commit one step; return False when it is all over."""
        order = await self._pull()
        if order["status"] == "closed":
            return False
        if "point" in order:
            self._restart(order)
        await self._partners.learn(order["num_casts"])
        assert self._state is not None
        for step, weights in order["events"][self._num_events :]:
            self._state = self._state.with_event(MixtureEvent(step=step, weights=weights))
        self._num_events = len(order["events"])
        drawn, plan = await self._plan(self._state)
        committed = await self._partners.supervisor(
            "commit",
            incarnation=self._incarnation,
            generation=self._generation,
            step=plan.step,
            num_events=self._num_events,
            plan=await asyncio.to_thread(plan.to_arrow),
            unread=self._unread(drawn) if plan.end else {},
        )
        if committed:
            self._advance(drawn)
            if plan.end:
                self._forget()  # another pass begins with a point
        return True

    async def _pull(self) -> dict[str, Any]:
        """Wait for permission to plan a step."""
        status = "wait"
        while status == "wait":
            order: dict[str, Any] = await self._partners.supervisor(
                "pull",
                incarnation=self._incarnation,
                generation=self._generation,
                next_step=None if self._state is None else self._state.step,
                wait_s=PULL_S,
            )
            status = order["status"]
        return order

    def _restart(self, order: dict[str, Any]) -> None:
        """Take up a generation where the supervisor's record stands."""
        point = Point.from_json(order["point"])
        self._generation = order["generation"]
        self._num_events = 0
        self._state = check_lanes(PlannerState.from_json(point.state), self._spec.lanes)
        self._rest = point if point.microbatch else None
        for event in point.mixture_events():
            self._state = self._state.with_event(event)
        self._forget()
        self._overrides = {name: {} for name in self._spec.lanes}
        for source, epoch, lane, position, verdict in point.verdicts:
            self._overrides[source][epoch, lane, position] = verdict

    async def _plan(self, state: PlannerState) -> tuple[Draw, Plan]:
        """Draw and place one step."""
        spec, step = self._spec, state.step
        at, share_S = _decided(step, lambda: shares_of(state, spec.mixture, spec.rules))
        drawn = await self._draw(state, share_S)
        while later := _decided(step, partial(next_shares, drawn, spec.mixture, spec.rules, at)):
            at, share_S = later
            more = await self._draw(again(state, drawn, share_S), share_S)
            drawn = joined(drawn, more, share_S)
        total = int(share_S.sum())
        mixture = {n: int(s) / total for n, s in zip(spec.lanes, share_S, strict=True) if s}
        inputs = (drawn, spec.strategy, spec.batching, spec.topology, mixture)
        if self._rest is None:
            return drawn, await asyncio.to_thread(_decided, step, partial(place, *inputs))
        digest = draw_digest(drawn.step, list(spec.lanes), drawn.table)
        if digest != self._rest.draw_digest:
            raise StateError(
                f"step {drawn.step} was drawn otherwise when its state was saved",
                got=digest,
                limit=self._rest.draw_digest,
                remedy="The data or the pipeline changed in between; serve those that saved it.",
            )
        plan_rest = partial(
            place_rest,
            *inputs,
            consumed_N=self._rest.consumed_N(drawn.table.num_rows),
            first_microbatch=self._rest.microbatch,
            assignment_digest=self._rest.assignment_digest,
        )
        return drawn, await asyncio.to_thread(_decided, step, plan_rest)

    async def _draw(self, state: PlannerState, share_S: np.ndarray[Any, Any]) -> Draw:
        """Draw the step, fetching metadata until there is enough for it."""
        active = [n for n, share in zip(self._spec.lanes, share_S, strict=True) if share > 0]

        def look() -> list[SourceFeed]:
            """Return the feeds that lack something, in a thread: sources are many."""
            feeds = [self._feed(name, state) for name in active]
            return [feed for feed in feeds if feed.lacks(self._wanted(feed, ahead=True))]

        async with asyncio.TaskGroup() as group:
            for feed in await asyncio.to_thread(look):
                feed.read_on(self._wanted(feed, ahead=True), self._slack)
                group.create_task(feed.until(self._wanted(feed, ahead=False)))

        def attempt() -> Draw | Starved:
            rows = {name: self._feed(name, state).rows for name in active}
            return draw(state, rows, share_S, self._spec.rules)

        while True:
            result = await asyncio.to_thread(_decided, state.step, attempt)
            if isinstance(result, Draw):
                return result
            async with asyncio.TaskGroup() as group:
                for name, num_spans in result.wanted.items():
                    feed = self._feed(name, state)
                    num_ready = feed.num_ready + num_spans
                    feed.read_on(num_ready)
                    group.create_task(feed.until(num_ready))

    def _feed(self, name: str, state: PlannerState) -> SourceFeed:
        if name not in self._feeds:
            rules = self._spec.rules
            epochs = None if rules.stop == "repeat" else rules.epochs
            source, overrides = state.sources[name], self._overrides[name]
            self._feeds[name] = SourceFeed(
                name, source, self._partners, epochs, overrides, self._mirror
            )
        return self._feeds[name]

    def _forget(self) -> None:
        """Begin with the sources anew."""
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()

    @property
    def _slack(self) -> int:
        """Spans more than are needed: else sources of which steps take one were asked each step."""
        return self._spec.rules.window // 8

    def _wanted(self, feed: SourceFeed, *, ahead: bool) -> int:
        """Return how many spans of a source have to be ready: for a step, or for later ones, too.

        Transforms come in batches, and lanes need them when they do: some steps take several times
        as long as others.
        """
        window, draw = self._spec.rules.window, feed.last_draw
        return window + draw + (draw + min(window, AHEAD_STEPS * draw) if ahead else 0)

    def _advance(self, drawn: Draw) -> None:
        """Go on behind a committed draw."""
        self._state, self._rest = drawn.state, None
        for index, name in enumerate(self._spec.lanes):
            if name in self._feeds:
                self._feeds[name].trim(drawn.state.sources[name], int(drawn.taken_S[index]))

    def _unread(self, drawn: Draw) -> dict[str, int | None]:
        """Return how many records of each source the end of the data leaves unread."""
        spec = self._spec
        return {
            name: unread_records(source, spec.lane_rows[name], spec.rules.epochs)
            for name, source in drawn.state.sources.items()
        }


def _decided(step: int, decide: Callable[[], T]) -> T:
    """Decide something of a step, by costs and schedules that may be a user's."""
    return in_user_code(decide, "costs and schedules", f"MegaDask: planning step {step}")
