"""Lets the number of loaders of sources follow the mixture, where they are declared ``"auto"``.

Looks at how busy loaders were while steps were planned; `sizing` decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from megadask.scheduling.custody import Custody
from megadask.scheduling.roles import Roles
from megadask.scheduling.run import Run
from megadask.scheduling.sizing import Demand, Sizing

logger = logging.getLogger(__name__)

#: Time between two looks.
LOOK_S = 5.0


@dataclass
class _Watched:
    """What is known of one run from look to look.

    Attributes
    ----------
    since
        Time of the last look that saw steps planned, by the event loop's clock.
    next_step
        The next step to plan then.
    busy_s
        Incarnation of a loader to how long it had been busy then.
    share
        Source to its share of the mixture then.
    """

    sizing: Sizing = field(default_factory=Sizing)
    since: float = 0.0
    next_step: int = -1
    busy_s: dict[str, float] = field(default_factory=dict)
    share: Mapping[str, float] = field(default_factory=dict)


class Autosize:
    """Sizes the sources of all services of one cluster.

    Parameters
    ----------
    roles
        Knows the workers, and asks loaders.
    custody
        Gives sources other numbers of loaders.
    runs
        The services, by name; they change.
    """

    def __init__(self, roles: Roles, custody: Custody, runs: Mapping[str, Run]) -> None:
        self._roles = roles
        self._custody = custody
        self._runs = runs
        self._watched: dict[str, _Watched] = {}  # by the ident of the run

    async def follow(self) -> None:
        """Look again and again, for as long as the scheduler lives."""
        while True:
            await asyncio.sleep(LOOK_S)
            runs = [run for run in self._runs.values() if run.header["auto"] and not run.over]
            idents = [str(run.header["ident"]) for run in runs]
            self._watched = {one: self._watched.get(one, _Watched()) for one in idents}
            for run, ident in zip(runs, idents, strict=True):
                try:
                    await self._look(run, self._watched[ident])
                except Exception:  # the run may go on as it is
                    if not run.over:
                        logger.exception("%s: cannot size its sources", run.name)

    async def _look(self, run: Run, watched: _Watched) -> None:
        """Take note of how busy loaders are, and act on it where steps were planned meanwhile."""
        record = run.record
        if record.next_step == watched.next_step or not record.history:
            return  # nobody reads: that says nothing of what reading takes
        keys = [key for key in record.loaders if key[0] in run.header["auto"]]
        owners = [record.loaders[key] for key in keys]
        told = await asyncio.gather(*map(self._roles.loader_status, owners))
        now = asyncio.get_running_loop().time()
        busy_s = {
            owner.incarnation: float(status["busy_s"])
            for owner, status in zip(owners, told, strict=True)
            if status
        }
        share: dict[str, float] = record.history[-1]["mixture"]
        before, elapsed_s = watched.busy_s, now - watched.since
        is_first = watched.next_step < 0
        demands, counts, most = {}, {}, {}
        for name in run.header["auto"]:
            lives = [
                owner.incarnation
                for (source, _), owner in zip(keys, owners, strict=True)
                if source == name
            ]
            counts[name] = len(lives)
            most[name] = max(1, min(record.lanes[name], len(self._roles.workers())))
            if all(life in busy_s and life in before for life in lives):
                busy = sum(busy_s[life] - before[life] for life in lives) / elapsed_s
                demands[name] = Demand(
                    busy=busy,
                    share_then=watched.share.get(name, 0.0),
                    share_now=share.get(name, 0.0),
                )
        watched.since, watched.next_step = now, record.next_step
        watched.busy_s, watched.share = busy_s, share
        changes = {} if is_first else watched.sizing.decide(demands, counts, most)
        if changes:
            logger.info("%s: sources get other numbers of loaders: %s", run.name, changes)
            await self._custody.scale(run, changes)
