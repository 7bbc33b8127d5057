"""How long trainers wait when a worker is killed, against the same run where none is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from soaking.party import Party

import megadask as md
from tests.conftest import wait_until
from tests.faults.helpers import WAIT_S, holder

#: A run of this length before each kill is what it is compared with.
QUIET_S = 3.0
#: A kill is over by then.
AFTER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What one kill did, in seconds.

    Attributes
    ----------
    quiet_s, worst_s
        Longest wait of any rank for all of a step: before the kill, and after it.
    step_s
        What a step took before it, all in all.
    noticed_s
        From the kill until the scheduler knew.
    moved_s
        From the kill until the last of what it held had come to others.
    """

    quiet_s: float
    worst_s: float
    step_s: float
    noticed_s: float
    moved_s: float


def worst_wait(party: Party, since_s: float, until_s: float) -> float:
    """Return the longest wait of a rank for the microbatches of one step."""
    waits: dict[tuple[int, int], float] = {}
    for asked_s, got_s, rank, step in list(party.waits):
        if asked_s < until_s and got_s > since_s:
            waits[rank, step] = waits.get((rank, step), 0.0) + got_s - asked_s
    return max(waits.values(), default=0.0)


def step_time(party: Party, since_s: float, until_s: float) -> float:
    """Return the mean time of a step of rank 0."""
    got = [(got_s, step) for _, got_s, rank, step in list(party.waits) if rank == 0]
    inside = [(at, step) for at, step in got if since_s < at < until_s]
    steps = inside[-1][1] - inside[0][1]
    return (inside[-1][0] - inside[0][0]) / max(1, steps)


def kill_again_and_again(
    pipeline: Callable[[int], md.Pipeline],
    role: str,
    *,
    shadows: int,
    kills: int,
    limits: md.Limits,
    batch_s: float,
) -> list[Kill]:
    """Kill the worker that holds a role, so often; its nanny starts another one each time."""

    def made(dp: int) -> md.Pipeline:
        whole = pipeline(dp)
        return replace(whole, sources=[replace(one, shadows=shadows) for one in whole.sources])

    found = []
    with Party(made, workers=4, limits=limits, batch_s=batch_s, nannies=True) as party:
        party.open(2)
        for rank in party.ranks:
            rank.wait_for_event("batch", 20)
        for _ in range(kills):
            party.wait_for_workers()
            if shadows:
                wait_until(lambda: has_shadows(party.service.stats()), WAIT_S)
            quiet_s = time.monotonic()
            time.sleep(QUIET_S)
            lost = holder(party.service, role)
            address, began_s = party.kill(party.name_of(lost))
            time.sleep(AFTER_S)
            party.wait_for_batches()  # a wait that has not ended is not known yet
            moves = [at for at in party.moves.at_s if at > began_s]
            found.append(
                Kill(
                    quiet_s=worst_wait(party, quiet_s, began_s),
                    worst_s=worst_wait(party, began_s, began_s + AFTER_S),
                    step_s=step_time(party, quiet_s, began_s),
                    noticed_s=party.notices.gone_s[address] - began_s,
                    moved_s=max(moves, default=began_s) - began_s,
                )
            )
        party.finish()
        assert party.service.audit()["ok"]
        assert not party.account.problems, party.account.problems
        assert not party.errors, party.errors
    return found


def has_shadows(stats: Mapping[str, list[Mapping[str, object]]]) -> bool:
    """Whether every loader has one that has read something."""
    followed = sum(bool(one.get("cached_samples")) for one in stats["shadows"])
    return followed == len(stats["loaders"])
