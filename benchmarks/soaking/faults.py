"""Carry out the faults of a schedule on a `Party`."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from soaking.party import Party
from soaking.schedule import Fault

import megadask as md
from tests.faults.helpers import WAIT_S

T = TypeVar("T")

TOPOLOGIES = (1, 2, 4)
#: How long a trainer that is stopped stays so.
PAUSE_S = 2.0


def pick(share: float, among: Sequence[T]) -> T:
    """Return one of several, by a share of their number."""
    return among[int(share * len(among))]


@dataclass
class Doer:
    """Does what a fault says, and notes whom it befell.

    Attributes
    ----------
    kills
        Roles that a killed process had, counted.
    mixtures
        Weights that were set, by the step from which they hold.
    """

    party: Party
    sources: Sequence[str]
    kills: Counter[str] = field(default_factory=Counter)
    mixtures: dict[int, dict[str, float]] = field(default_factory=dict)

    def do(self, fault: Fault) -> float:
        """Carry it out; return when it came, on the monotonic clock."""
        what, _, whom = fault.kind.partition(" ")
        if what == "kill" and whom != "trainer":
            return self._kill(fault, whom)
        act = getattr(self, f"_{fault.kind.replace(' ', '_')}")
        began_s = time.monotonic()
        act(fault)
        return began_s

    def _holders(self) -> dict[str, list[str]]:
        """Return the roles of every worker that holds any, by its name."""
        stats = self.party.service.stats()
        held = [("planner", stats["planner"])]
        for role in ("constructor", "loader", "shadow"):
            held += [(role, one["worker"]) for one in stats[f"{role}s"]]
        found: dict[str, list[str]] = {}
        for role, address in held:
            if name := self.party.name_of(address):
                found.setdefault(name, []).append(role)
        return found

    def _kill(self, fault: Fault, whom: str) -> float:
        holders = self._holders()
        host = whom == "host"
        names = sorted(n for n, roles in holders.items() if host or whom in roles)
        name = pick(fault.where, names or sorted(self.party.hosts))
        self.kills.update(set(holders.get(name, ())))
        self.kills["host" if host else "worker"] += 1
        address, began_s = self.party.kill(name, host=host)
        self.party.wait_for_loss(address)  # whom the next fault hits must be there
        self.party.top_up()
        return began_s

    def _stop_worker(self, fault: Fault) -> None:
        """It hangs until its roles have moved, and goes on as if nothing were."""
        party = self.party
        name = pick(fault.where, sorted(party.hosts))
        party.asleep[name] = party.pid_of(name)
        os.kill(party.asleep[name], signal.SIGSTOP)
        time.sleep(2 * party._limits.silent_s)
        os.kill(party.asleep.pop(name), signal.SIGCONT)
        party.wait_for_workers()

    def _retire_worker(self, fault: Fault) -> None:
        party = self.party
        name = pick(fault.where, sorted(party.hosts))
        party.client.retire_workers([party.service.retire(name)])
        party.hosts[name].popen.wait(WAIT_S)
        party.hosts.pop(name).end()
        party.top_up()

    def _kill_trainer(self, fault: Fault) -> None:
        self.kills["trainer"] += 1
        self.party.replace(pick(fault.where, range(self.party.dp)))

    def _stop_trainer(self, fault: Fault) -> None:
        rank = pick(fault.where, self.party.ranks)
        os.kill(rank.popen.pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.kill(rank.popen.pid, signal.SIGCONT)

    def _reshard(self, fault: Fault) -> None:
        party, dp = self.party, pick(fault.size, TOPOLOGIES)
        before = [rank.heard["resharded"] for rank in party.ranks]
        step = party.service.reshard(md.ClientPlaceTree(dp=dp))
        for rank, count in zip(party.ranks, before, strict=True):
            rank.wait_for_event("resharded", count)
        party.begin(step, dp)

    def _scale(self, fault: Fault) -> None:
        source = pick(fault.where, self.sources)
        self.party.service.scale({source: 1 + int(4 * fault.size)})

    def _set_mixture(self, fault: Fault) -> None:
        heavy = pick(fault.where, self.sources)
        weights = dict.fromkeys(self.sources, 1.0) | {heavy: 1.0 + 3 * fault.size}
        self.mixtures[self.party.service.set_mixture(weights)] = weights

    def _restart(self, fault: Fault) -> None:
        """All of it ends at once; a new cluster goes on from the ranks' state and the journal."""
        party = self.party
        self.kills.update(trainer=party.dp, host=len(party.hosts))
        state = party.crash()
        party.open(pick(fault.size, TOPOLOGIES), state)
