"""How many loaders a source should have, by how busy they are and how its weight changes.

Pure: `autosize` measures, and acts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: Loaders that are busier than this share of the time get help; so many that `AIM` is left of it.
#: One that trainers wait for rests between calls, too, while the planner plans: 0.7 was seen.
HIGH, AIM = 0.6, 0.5
#: Some go where those that stay would be no busier than this.
LOW = 0.4
#: So many looks in a row have to want more loaders, or fewer.
LOOKS_TO_GROW, LOOKS_TO_SHRINK = 2, 6


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one source asked of its loaders, and what it will ask.

    Attributes
    ----------
    busy
        Seconds that its loaders were busy, all together, in one second.
    share_then, share_now
        Its share of the mixture meanwhile, and that which is in force now.
    """

    busy: float
    share_then: float
    share_now: float

    @property
    def expected(self) -> float:
        """What will be asked, as `busy` says it. A source that has had no share tells nothing."""
        return self.busy * (self.share_now / self.share_then) if self.share_then else self.busy


def size(expected: float, now: int, most: int) -> int:
    """Return how many loaders a source should have.

    Parameters
    ----------
    expected
        Seconds that they will be busy, all together, in one second.
    now
        Those that it has.
    most
        Those that it may have, at least one.
    """
    aim = min(most, max(1, math.ceil(expected / AIM)))
    if expected > HIGH * now:
        return max(now, aim)
    if now > most or expected < LOW * (now - 1):
        return min(now, aim)
    return now


class Sizing:
    """Gives sources other numbers of loaders only where look after look wants it."""

    def __init__(self) -> None:
        self._votes: dict[str, int] = {}  # looks in a row that want more, negative for fewer

    def decide(
        self, demands: Mapping[str, Demand], now: Mapping[str, int], most: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the sources that get another number of loaders, with that number.

        demands: of a source that is not among them nothing is known, and nothing changes.
        """
        changes = {}
        for name, demand in demands.items():
            wanted = size(demand.expected, now[name], most[name])
            votes = self._votes.get(name, 0)
            if wanted > now[name]:
                votes = max(votes, 0) + 1
            elif wanted < now[name]:
                votes = min(votes, 0) - 1
            else:
                votes = 0
            if votes >= LOOKS_TO_GROW or votes <= -LOOKS_TO_SHRINK:
                changes[name] = wanted
                votes = 0
            self._votes[name] = votes
        return changes
