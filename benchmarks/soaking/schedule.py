"""What happens when: a schedule of faults that a seed gives, whatever the run does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "kill loader",
    "kill constructor",
    "kill planner",
    "kill host",
    "stop worker",
    "retire worker",
    "kill trainer",
    "stop trainer",
    "reshard",
    "scale",
    "set mixture",
    "restart",
]
#: Kinds that come twice as often as the others.
OFTEN: tuple[Kind, ...] = ("kill loader", "kill constructor", "kill planner", "kill trainer")
#: Seconds of quiet before a fault, once the run has recovered from the one before it.
QUIET_S = (1.0, 4.0)
#: Share of the faults that do not wait for that.
SOON = 0.2


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes
    ----------
    kind
        What happens.
    quiet_s
        How long after the run has recovered from the one before it; None for one that comes at
        once, in the middle of that.
    where
        Which of those that it may befall: a share of their number, in [0, 1).
    size
        The same for what else is to be chosen, such as a topology.
    """

    kind: Kind
    quiet_s: float | None
    where: float
    size: float


def schedule(seed: int) -> Iterator[Fault]:
    """Yield faults without end: deck after deck of all kinds, each in another order."""
    rng = random.Random(seed)
    while True:
        deck = [*get_args(Kind), *OFTEN]
        rng.shuffle(deck)
        for kind in deck:
            quiet_s = None if rng.random() < SOON else rng.uniform(*QUIET_S)
            yield Fault(kind=kind, quiet_s=quiet_s, where=rng.random(), size=rng.random())
