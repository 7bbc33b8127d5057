"""Which workers or clients were silent for too long, by the heartbeats that Dask takes of them.

Pure: somebody else brings the times of the last heartbeats, and acts on what is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class _Heard:
    """When a worker was last heard of, by its own news, and how long it has been silent since."""

    last_seen: float
    silent_s: float = 0.0


class Silence:
    """Counts for how long each worker has been silent.

    What counts is the time between looks, and of each at most ``most_s``: where the scheduler
    itself stood still, all workers seem silent, and are not to be given up for it.
    """

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._given_up: set[str] = set()

    def look(
        self, last_seen: Mapping[str, float], *, elapsed_s: float, most_s: float, limit_s: float
    ) -> list[str]:
        """Return the workers that are to be given up from now on.

        Parameters
        ----------
        last_seen
            Address of every worker that there is to the time of its last heartbeat.
        elapsed_s
            Time since the last look.
        limit_s
            How long a worker may be silent.
        """
        for address in [address for address in self._heard if address not in last_seen]:
            del self._heard[address]
            self._given_up.discard(address)
        lost = []
        for address, seen in last_seen.items():
            known = self._heard.get(address)
            if known is None or known.last_seen != seen:
                self._heard[address] = _Heard(seen)
                continue
            known.silent_s += min(elapsed_s, most_s)
            if known.silent_s > limit_s and address not in self._given_up:
                self._given_up.add(address)
                lost.append(address)
        return lost

    @property
    def awake(self) -> list[str]:
        """Workers that were given up, and have been heard of since."""
        return sorted(one for one in self._given_up if self._heard[one].silent_s == 0)

    def welcome(self, address: str) -> None:
        """Take a worker back."""
        self._given_up.discard(address)
