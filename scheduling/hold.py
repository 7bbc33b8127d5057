"""Delivery that is held back until it is known how far it has come."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Hold:
    """What constructors are told to hold back, and what they said of it.

    Attributes
    ----------
    number
        Of this hold in the run.
    step
        From this one on nothing is handed out; None: nothing at all, until it is known.
    reached
        Incarnation of a constructor to the first step of which it has handed out nothing, by its
        own word.
    """

    number: int
    step: int | None = None
    reached: dict[str, int] = field(default_factory=dict)

    def is_known(self, constructors: Collection[str]) -> bool:
        """Whether these incarnations, which are all there are, have said how far they came."""
        return bool(constructors) and set(constructors) <= self.reached.keys()

    def begin(self, constructors: Collection[str], least: int) -> int:
        """Fix and return the step: the first of which nobody has anything, at least ``least``."""
        self.step = max([least, *(self.reached[incarnation] for incarnation in constructors)])
        return self.step
