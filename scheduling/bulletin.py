"""What constructors have to hear of: changes that concern all of them, or a single one.

With thousands of ranks there are hundreds of constructors. When a rank joins, only its own is told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from megadask.scheduling.wire import Signal


class Bulletin:
    """Counts changes, and wakes the constructors that they concern; those go by incarnation.

    Attributes
    ----------
    version
        Grows with every change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._common = 0  # the last change that concerns all
        self._own: dict[str, int] = {}  # the last one that concerns one alone
        self._heard: dict[str, int] = {}  # the last one that it has taken up
        self._changed: defaultdict[str, Signal] = defaultdict(Signal)
        self._told: defaultdict[str, Signal] = defaultdict(Signal)

    def change(self) -> None:
        """Note a change that concerns all constructors."""
        self.version += 1
        self._common = self.version
        for signals in (self._changed, self._told):
            for signal in signals.values():
                signal.set()

    def change_for(self, incarnation: str) -> None:
        """Note a change that concerns one constructor."""
        self.version += 1
        self._own[incarnation] = self.version
        self._changed[incarnation].set()

    def is_news(self, incarnation: str, newer_than: int) -> bool:
        """Whether a constructor that knows so much has something to hear."""
        return max(self._common, self._own.get(incarnation, 0)) > newer_than

    def hear(self, incarnation: str, version: int) -> None:
        """Note that a constructor has taken up everything up to a version."""
        self._heard[incarnation] = version
        if incarnation in self._told:
            self._told[incarnation].set()

    def has_heard(self, incarnation: str, version: int) -> bool:
        """Whether a constructor has taken up a version."""
        return self._heard.get(incarnation, -1) >= version

    async def wait_for_news(
        self, incarnation: str, newer_than: int, is_over: Callable[[], bool], seconds: float
    ) -> None:
        """Wait until there `is_news`, or it is over."""
        await self._changed[incarnation].wait_until(
            lambda: is_over() or self.is_news(incarnation, newer_than), seconds
        )

    async def wait_until_heard(
        self, incarnation: str, version: int, is_over: Callable[[], bool], seconds: float
    ) -> None:
        """Wait until a constructor `has_heard`, or it is over; every `change` is looked at, too."""
        await self._told[incarnation].wait_until(
            lambda: is_over() or self.has_heard(incarnation, version), seconds
        )

    def forget(self, incarnation: str) -> None:
        """Forget a constructor that is none any more."""
        for known in (self._own, self._heard, self._changed, self._told):
            known.pop(incarnation, None)
