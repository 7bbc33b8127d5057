"""From payload to the answer that a rank gets: where its batch lies, or the arrays themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.plan import Plan
from megadask.scheduling.building import Builder
from megadask.scheduling.delivery import PLAN, Reply, reply
from megadask.scheduling.gather import Payload
from megadask.scheduling.portions import Portion
from megadask.scheduling.ring import Ring
from megadask.scheduling.share import Arrays, Share
from megadask.scheduling.shelf import Slot

#: Shares from this size on are moved to shared memory in the thread that built them. Smaller ones,
#: of which many may lie ahead, are moved when they are first asked for: that takes no time.
LARGE_BYTES = 2**20

#: What a trainer says of shared memory with each call: its host, None where it maps none; and what
#: it has of it. Made by `Receiver.use`.
Use = Sequence[Any]


@dataclass(frozen=True)
class Asked:
    """What a trainer asks for, checked; see `ConstructorActor.fetch`.

    was_built: whether the batch was there before.
    """

    rank: int
    token: str
    generation: int
    slot: Slot
    with_plan: bool
    keys: Collection[str] | None
    host: str | None
    was_built: bool


class Handing:
    """Builds shares, and hands them out.

    Parameters
    ----------
    builder
        Knows which arrays a rank gets.
    ring
        The shared memory.
    """

    def __init__(self, builder: Builder, ring: Ring) -> None:
        self._builder = builder
        self._ring = ring

    async def build(
        self,
        plan: Plan,
        microbatch: int,
        rows: Mapping[int, NDArray[np.int64]],
        payload: Payload,
        own: Mapping[int, Arrays],
    ) -> dict[int, Share]:
        """Do as `Builder.shares` in a thread, which goes on whatever becomes of the caller."""

        def build() -> dict[int, Share]:
            built = self._builder.shares(plan, microbatch, rows, payload, own)
            for share in built.values():
                if share.num_bytes >= LARGE_BYTES:
                    self._ring.place(share)
            return built

        job = asyncio.create_task(asyncio.to_thread(build))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(self._drop_result)
            raise

    def drop(self, shares: Iterable[Share]) -> None:
        """Give back what was built for nothing."""
        for share in shares:
            self._ring.drop(share)

    def batch(self, share: Share, portion: Portion, asked: Asked) -> Reply:
        """Return the answer for one rank."""
        rank, slot = asked.rank, asked.slot
        names = self._builder.keys(share, rank, asked.keys)
        header: dict[str, Any] = {
            "microbatch": slot[1],
            "num_loss_tokens": share.targets_of[rank],
            "step": slot[0],
            "generation": asked.generation,
            "cp_layout": portion.plan.cp_layout,
            "was_built": asked.was_built,
            "num_bytes": sum(share.arrays_of[rank][name].nbytes for name in names),
        }
        arrays: Reply = {}
        if asked.with_plan:
            header["facts"] = portion.facts
            arrays[PLAN] = portion.text
        is_near = self._ring.reaches(asked.host)
        if is_near and share.content is None and share.num_bytes < LARGE_BYTES:
            self._ring.place(share)
        if share.content is not None:
            # Granted even if it goes in the message: nobody writes there while that is on its way.
            told = self._ring.give(share, rank, names, asked.token, asked.generation, slot)
        if share.content is not None and is_near:
            header["shared"] = told
        else:
            arrays.update((name, share.arrays_of[rank][name]) for name in names)
        return reply("batch", arrays, **header)

    def _drop_result(self, job: asyncio.Task[dict[int, Share]]) -> None:
        if not job.cancelled() and job.exception() is None:
            self.drop(job.result().values())
