"""A Data Constructor as a Dask actor: builds the batches of some buckets from committed plans.

It can hand out committed microbatches until every rank of their bucket has acknowledged them, and
holds their payload within a limit of bytes (`Shelf`): what was evicted is read again by its ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
from distributed import get_worker

from megadask.scheduling.assemble import most_bytes
from megadask.scheduling.building import Builder
from megadask.scheduling.delivery import Reply, closed, reply
from megadask.scheduling.errors import pack_error, root_error, told
from megadask.scheduling.gather import gather
from megadask.scheduling.handing import Asked, Handing, Use
from megadask.scheduling.heard import Heard
from megadask.scheduling.item_delivery import gather_own
from megadask.scheduling.marks import Watermark
from megadask.scheduling.owners import Partners
from megadask.scheduling.portions import Portion
from megadask.scheduling.reach import Reach
from megadask.scheduling.ring import Ring
from megadask.scheduling.shelf import Shelf, Slot
from megadask.scheduling.slots import Report
from megadask.scheduling.spec import RunSpec
from megadask.scheduling.wire import TRUST_S, Signal

logger = logging.getLogger(__name__)

#: How long one call waits at the supervisor for new plans.
FOLLOW_S = 10.0
#: For how long the supervisor may not know of a watermark inside a step.
REPORT_S = 0.1


class ConstructorActor:
    """Builds and hands out the batches of some buckets.

    Parameters
    ----------
    run
        Name of the pipeline's record at the supervisor.
    incarnation
        The life that the supervisor gave to this actor.
    blob
        Pickled `RunSpec`.
    buckets
        The buckets it serves.
    """

    def __init__(self, run: str, incarnation: str, blob: bytes, buckets: tuple[int, ...]) -> None:
        self._worker = get_worker()
        self._run = run
        self._incarnation = incarnation
        self._spec: RunSpec = pickle.loads(blob)
        self._buckets = buckets
        axis, tree = self._spec.strategy.axis, self._spec.topology
        ranks_of = {bucket: frozenset(tree.ranks_of(bucket, axis)) for bucket in buckets}
        self._bucket_of = {rank: bucket for bucket in buckets for rank in ranks_of[bucket]}
        self._partners = Partners(self._worker, run, self._spec.limits)
        self._changed = Signal()
        self._generation = 0
        self._portions: dict[int, Portion] = {}
        most = most_bytes(self._spec.batching)
        limits = self._spec.limits
        self._ring = Ring(limits.most_shared_bytes, len(buckets))
        self._handing = Handing(Builder(self._spec), self._ring)
        self._shelf = Shelf(limits.constructor_bytes, ranks_of, most, self._ring.drop)
        self._heard = Heard()
        self._tokens: dict[int, str] = {}
        self._trusted_until = 0.0  # when what it knows of tokens may be outdated
        self._reach = Reach(self._bucket_of)
        self._version = -1
        self._closed: Reply | None = None
        self._failed: Reply | None = None  # the answer for steps that will never be planned
        self._tasks: list[asyncio.Task[None]] = []
        self._builds: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to follow the committed plans; returns at once."""
        for work in (self._follow, self._build_on, self._report, self._report_reach):
            self._tasks.append(
                asyncio.create_task(self._guard(work), name=f"{self._run} {work.__name__}")
            )

    async def close(self) -> None:
        """Stop and hold nothing any more; whoever waits for a batch is told."""
        self._close(reply("moved"))
        tasks = [*self._tasks, *self._builds]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._portions.clear()
        self._shelf.clear()  # Dask may keep a closed worker, and with it this object
        self._ring.close()

    async def fetch(
        self,
        rank: int,
        token: str,
        generation: int,
        slot: Slot,
        mark: Watermark,
        wait_s: float,
        with_plan: bool,
        keys: list[str] | None,
        use: Use,
    ) -> Reply:
        """Return a microbatch of a rank; ``mark`` acknowledges everything before it.

        Asking again gives the same. Waits for up to ``wait_s`` seconds.

        Parameters
        ----------
        with_plan
            Whether to send along what there is to know of the step.
        keys
            The arrays to send; None for all.
        use
            As in `acknowledge`.
        """
        refused = await self._refuse(rank, token, generation, wait_s)
        if refused is not None:
            return refused
        self._acknowledge(rank, mark, use)
        slot = (slot[0], slot[1])  # it may have travelled as a list
        self._reach.hear(rank, slot)
        bucket = self._bucket_of[rank]

        def ready() -> Portion | Reply | None:
            return self._closed or self._answer(generation, rank, slot)

        answer = ready()
        was_built = answer is not None
        if answer is None:
            with self._shelf.waiting(slot, bucket):
                self._changed.set()
                answer = await self._changed.wait_until(ready, wait_s)
            self._changed.set()
        if answer is None:
            return reply("wait", waiting_for=self._waiting_for(slot))
        if isinstance(answer, dict):
            return answer
        self._reach.gave(rank, slot[0] + 1)
        asked = Asked(rank, token, generation, slot, with_plan, keys, use[0], was_built)
        return self._handing.batch(self._shelf.give(slot, bucket, rank), answer, asked)

    async def acknowledge(
        self, rank: int, token: str, generation: int, mark: Watermark, use: Use
    ) -> Reply:
        """Take note that a rank is done with everything before ``mark``.

        use: on which host its trainer is, None for one that maps no shared memory; and what it
        still has of that.
        """
        refused = await self._refuse(rank, token, generation, 0.0)
        if refused is not None:
            return refused
        self._acknowledge(rank, mark, use)
        self._heard.press()
        self._changed.set()
        await self._changed.wait_until(lambda: self._closed or not self._heard.news(), 5.0)
        return reply("done")

    async def status(self) -> dict[str, Any]:
        """Return what the buffers hold."""
        return {
            "buckets": list(self._buckets),
            "held_bytes": self._shelf.held_bytes,
            "held_microbatches": self._shelf.num_microbatches,
            "limit_bytes": self._shelf.limit_bytes,
            "evicted": self._shelf.num_evicted,
            **self._ring.status(),
            "hedged": self._partners.num_hedged,
        }

    # Answers ----------------------------------------------------------------------------------

    async def _refuse(self, rank: int, token: str, generation: int, wait_s: float) -> Reply | None:
        """Return why a call cannot be answered, after catching up with the supervisor."""
        while self._closed is None:
            is_sure = time.monotonic() < self._trusted_until
            if is_sure and self._tokens.get(rank) == token:
                break
            version = self._version
            if not await self._partners.supervisor("holds", rank=rank, token=token):
                return reply("claim")
            if self._version == version:  # else the answer may be older than what it knows now
                self._tokens[rank] = token
                break
        await self._changed.wait_until(
            lambda: self._closed is not None or self._generation >= generation, wait_s
        )
        if self._closed is not None:
            return self._closed
        if self._tokens.get(rank) != token:
            return reply("claim")
        if self._generation != generation:
            return reply("generation", generation=self._generation)
        return None

    def _answer(self, generation: int, rank: int, slot: Slot) -> Portion | Reply | None:
        """Return what a rank is to be told of a slot, None as long as nothing is known."""
        if generation != self._generation:
            return reply("generation", generation=self._generation)
        if slot < self._heard.marks[rank]:
            # The trainer joined by a watermark from before the last word of the one it follows. It
            # can begin behind that once the supervisor knows it.
            self._heard.press()
            return None if self._heard.news() else reply("behind")
        if self._reach.is_held(slot):
            return None
        portion = self._portions.get(slot[0])
        if portion is None:
            return self._failed
        plan = portion.plan
        if plan.end:
            self._reach.gave(rank, plan.step)
            return reply("end", step=plan.step)
        if slot[1] >= plan.num_microbatches:
            return reply("step_over", num_microbatches=plan.num_microbatches)
        return None if self._shelf.get(slot, self._bucket_of[rank]) is None else portion

    @property
    def _low(self) -> Watermark:
        """What every rank served here has acknowledged."""
        return self._heard.low() or (max(self._portions, default=0), 0)

    def _waiting_for(self, slot: Slot) -> str:
        if self._reach.is_held(slot):
            return "the other ranks to finish the steps before the topology changes"
        if slot[0] not in self._portions:
            return f"the plan of step {slot[0]}"
        return f"the payload of step {slot[0]}, microbatch {slot[1]}"

    # Acknowledgements -------------------------------------------------------------------------

    def _acknowledge(self, rank: int, mark: Watermark, use: Use) -> None:
        mark = (mark[0], mark[1])  # it may have travelled as a list
        report = Report(generation=self._generation, mark=mark, held=frozenset(use[1]))
        self._ring.hear(self._tokens[rank], report)
        if self._heard.hear(rank, mark):
            self._free()

    def _free(self) -> None:
        """Let go of what all ranks concerned are done with: batches by bucket, plans by step."""
        behind: dict[int, Watermark] = {}
        for rank, bucket in self._bucket_of.items():
            if rank not in self._heard.finished:
                mark = self._heard.marks[rank]
                behind[bucket] = min(mark, behind.get(bucket, mark))
        self._shelf.free(behind)
        for step in [step for step in self._portions if step < self._low[0]]:
            del self._portions[step]
        self._changed.set()

    async def _report(self) -> None:
        """Pass watermarks on to the supervisor, many at a time."""
        while self._closed is None:
            if await self._changed.wait_until(self._heard.news, FOLLOW_S):
                await self._changed.wait_until(self._heard.is_due, REPORT_S)
            news = self._heard.report()
            if news:
                generation = self._generation
                marks = [[rank, *mark] for rank, mark in news.items()]
                await self._partners.supervisor("acknowledge", generation=generation, marks=marks)
                if generation == self._generation:
                    self._heard.told(news)
                self._changed.set()

    async def _report_reach(self) -> None:
        """Tell the supervisor, once for every hold, of which step nothing was given out."""
        while self._closed is None:
            number = await self._changed.wait_until(lambda: self._reach.due(self._tokens), FOLLOW_S)
            if number is not None:
                step = self._reach.report(number, self._heard.marks.values())
                await self._partners.supervisor(
                    "reached", incarnation=self._incarnation, number=number, step=step
                )

    # Plans and payload ------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Keep up with the supervisor's record."""
        while self._closed is None:
            asked = time.monotonic()
            news = await self._partners.supervisor(
                "plans",
                incarnation=self._incarnation,
                generation=self._generation,
                from_step=max(self._portions, default=self._low[0] - 1) + 1,
                newer_than=self._version,
                wait_s=FOLLOW_S,
            )
            if news["status"] == "closed":
                self._close(closed(news["reason"], news["error"]))
                return
            if news["error"]:
                self._failed = closed("it failed", news["error"])
            await self._partners.learn(news["num_casts"])
            self._version = news["version"]
            self._tokens = dict(news["tokens"])
            self._trusted_until = asked + TRUST_S
            self._reach.hold(news["hold"], self._tokens)
            if news["generation"] != self._generation:
                self._restart(news)
            for message in news["plans"]:
                portion = Portion.read(message, tuple(self._spec.lanes))
                plan = portion.plan
                self._portions[plan.step] = portion
                numbers = range(plan.first_microbatch, plan.num_microbatches)
                self._shelf.expect((plan.step, number) for number in numbers)
            self._heard.finished = set(news["finished"])
            self._free()
            busy = self._bucket_of.keys() & self._tokens.keys() - self._heard.finished
            self._ring.keep({self._tokens[rank] for rank in busy})

    def _restart(self, news: dict[str, Any]) -> None:
        """Drop what an earlier generation built."""
        for task in self._builds:
            task.cancel()
        self._portions.clear()
        self._shelf.clear()
        self._reach.clear()
        self._generation = news["generation"]
        self._heard.restart({rank: (step, micro) for rank, step, micro in news["marks"]})

    async def _build_on(self) -> None:
        """Build what the shelf wants next."""
        while self._closed is None:
            wanted = await self._changed.wait_until(self._shelf.next_build, FOLLOW_S)
            if wanted is not None:
                self._shelf.reserve(*wanted)
                portion = self._portions[wanted[0][0]]
                task = asyncio.create_task(self._guard(partial(self._build, portion, *wanted)))
                self._builds.add(task)
                task.add_done_callback(self._builds.discard)

    async def _build(self, portion: Portion, slot: Slot, buckets: list[int]) -> None:
        generation, plan = self._generation, portion.plan
        rows = {bucket: plan.rows_of(bucket, slot[1]) for bucket in buckets}
        union = np.concatenate(list(rows.values()))
        async with asyncio.TaskGroup() as group:
            tokens = group.create_task(gather(self._partners, plan.sources, plan.table.take(union)))
            items = group.create_task(
                gather_own(self._partners, self._spec, plan, slot[1], buckets)
            )
        payload, own = tokens.result(), items.result()
        filled = portion.row_N[union[payload.filled_N]].tolist()
        if filled:  # counted before anybody can acknowledge it
            await self._partners.supervisor(
                "filled",
                incarnation=self._incarnation,
                generation=generation,
                step=plan.step,
                rows=filled,
            )
        built = await self._handing.build(plan, slot[1], rows, payload, own)
        if generation == self._generation:
            self._shelf.put(slot, built)
            self._changed.set()
        else:
            self._handing.drop(built.values())

    # The end ----------------------------------------------------------------------------------

    def _close(self, answer: Reply) -> None:
        if self._closed is None:
            self._closed = answer
            self._changed.set()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a part of the actor; what it raises reaches every trainer."""
        try:
            await work()
        except Exception as caught:  # whatever it is, the trainers must hear of it
            error = root_error(caught)
            if self._partners.is_over(error):
                logger.info("constructor of %s stops: %s", self._run, error)
                return self._close(reply("moved"))
            logger.error("constructor of %s failed", self._run, exc_info=error)
            data = pack_error(error)
            self._close(closed(told(error), data))
            await self._partners.supervisor("fail", incarnation=self._incarnation, error=data)
