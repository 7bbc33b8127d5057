"""The Planner's buffer of one source: metadata fetched from its loaders, in canonical order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import numpy as np

from megadask.planner.ahead import Ahead
from megadask.planner.ids import Verdict
from megadask.planner.lines import Rows
from megadask.planner.metadata import Metadata, concat
from megadask.planner.state import NEVER, LaneCursor, SourceState
from megadask.scheduling.errors import SourceError
from megadask.scheduling.mirror import Mirror
from megadask.scheduling.owners import Partners, by_owner
from megadask.scheduling.wire import Signal

#: How long one look for news takes at most; what is fetched has a deadline of its own.
LOOK_S = 10.0
#: Records of one lane that one call asks for, at most.
MOST_PER_CALL = 256


class SourceFeed:
    """Fetches the spans of one source ahead of the draw, while the Planner does other things.

    Fetching is by (epoch, lane, position), so it does not matter which loader answers, nor how
    often it was asked. What is known may be asked for in threads.

    Parameters
    ----------
    name
        Of the source.
    partners
        Calls to its loaders.
    epochs
        Epochs to read, None for ever.
    overrides
        (epoch, lane, position) to the verdict that an earlier reading committed (rule 6).
    mirror
        Passes on to shadows what loaders are asked.
    """

    def __init__(
        self,
        name: str,
        state: SourceState,
        partners: Partners,
        epochs: int | None,
        overrides: Mapping[tuple[int, int, int], int],
        mirror: Mirror,
    ) -> None:
        self.name = name
        self._mirror = mirror
        self._partners = partners
        self._epochs = epochs
        self._overrides = overrides
        self._ahead = Ahead(state)
        self._epoch = state.cursor[0]
        self._cursors = dict(enumerate(state.lanes))
        self._live = set(self._cursors)
        # What came of an epoch is judged only where it was seen from its beginning.
        self._readable = state.cursor[1:] != (0, 0, 0)
        self.last_draw = 0
        self._drawn: SourceState | None = None  # where a draw left it that is not yet trimmed
        self._last_known: tuple[Rows, int] | None = None
        self._lock = threading.RLock()  # held by whoever changes what is known, or looks at it
        self._goal, self._slack = 0, 0
        self._reading: asyncio.Task[None] | None = None
        self._news = Signal()

    @property
    def complete(self) -> bool:
        """Whether there is nothing more to fetch."""
        return self._epochs is not None and self._epoch >= self._epochs

    @property
    def rows(self) -> Rows:
        """What is known of the source, from its state on."""
        return self._known()[0]

    @property
    def num_ready(self) -> int:
        """Readable spans that are known and not yet drawn, but for those held back."""
        return self._known()[1]

    def _known(self) -> tuple[Rows, int]:
        """Return `rows` and `num_ready`, made once for both: with many sources that takes long."""
        with self._lock:
            if self._last_known is None:
                if self._drawn is not None:
                    self._ahead.trim(self._drawn)
                    self._drawn = None
                rows = self._ahead.rows(self._epoch)
                ready_N = (rows.table["verdict"] == Verdict.OK) & (rows.table["held"] == NEVER)
                self._last_known = (rows, int(np.count_nonzero(ready_N)))
            return self._last_known

    def lacks(self, num_ready: int) -> int:
        """Return how many more spans have to be fetched for so many ready, if there are so many."""
        return 0 if self.complete else max(0, num_ready - self.num_ready)

    def read_on(self, num_ready: int, slack: int = 0) -> None:
        """Begin to fetch what so many ready spans lack, and ``slack`` more each time it is asked.

        What fails here is raised by `until`, and tried again when it is next begun.
        """
        self._goal, self._slack = num_ready, slack
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name=f"read {self.name}")
            self._reading.add_done_callback(self._ended)

    async def until(self, num_ready: int) -> None:
        """Wait until so many spans are ready, or all there are; after `read_on` for as many."""
        reading = self._reading

        def is_over() -> bool:
            return reading is None or reading.done() or not self.lacks(num_ready)

        while not await self._news.wait_until(is_over, LOOK_S):
            pass
        if self.lacks(num_ready) and reading is not None:
            reading.result()

    def close(self) -> None:
        """Fetch no more."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        while lacking := self.lacks(self._goal):
            await self.fetch(lacking + self._slack)
            self._news.set()

    def _ended(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            reading.exception()  # who needs what it was to fetch hears of it by `until`
        self._news.set()

    async def fetch(self, num_spans: int) -> None:
        """Fetch about so many more spans, at least one more record of the lanes furthest back.

        Where it fails, or is cancelled, nothing is known that was not before.
        """
        if self.complete:
            return
        cursors, live = dict(self._cursors), set(self._live)
        per_lane = max(1, min(MOST_PER_CALL, num_spans // max(1, len(live))))
        # Lanes of a saved state need not stand at the same position.
        until = min(cursors[lane].position for lane in live) + per_lane
        tables: list[Metadata] = []
        while behind := {k: cursors[k] for k in sorted(live) if cursors[k].position < until}:
            parts = by_owner(await self._partners.loaders(self.name), behind)
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._ask(part, until)) for part in parts]
            for table, after, ended in (task.result() for task in asked):
                tables.append(table)
                cursors.update(after)
                live.difference_update(ended)
        with self._lock:
            self._know(concat(tables))
            self._cursors, self._live = cursors, live
            if not live:
                self._next_epoch()

    def trim(self, state: SourceState, num_drawn: int) -> None:
        """Forget what a committed draw took or passed over, when next somebody looks."""
        with self._lock:
            self.last_draw = num_drawn
            self._drawn, self._last_known = state, None

    def _know(self, table: Metadata) -> None:
        self._ahead.add(_canonical(table))
        self._last_known = None
        self._readable = self._readable or bool((table["verdict"] == Verdict.OK).any())

    async def _ask(
        self, cursors: Mapping[int, LaneCursor], until: int
    ) -> tuple[Metadata, dict[int, LaneCursor], list[int]]:
        """Return spans of some lanes, the cursors behind them, and the lanes that end there."""
        asked = {
            "epoch": self._epoch,
            "cursors": {str(k): [c.position, c.shard, c.row] for k, c in cursors.items()},
            "until": until,
        }
        answer = await self._partners.read(self.name, min(cursors), "describe", **asked)
        reply = answer.reply
        after = {
            int(lane): LaneCursor(position=position, shard=shard, row=row)
            for lane, (position, shard, row) in reply["cursors"].items()
        }
        table = Metadata.unpack(reply["table"])
        if not answer.by_shadow:
            self._mirror.follow(self.name, cursors, asked, table)
        return self._overridden(table), after, reply["ended"]

    def _overridden(self, table: Metadata) -> Metadata:
        """Put committed verdicts in the place of those of this reading."""
        if not self._overrides or not table.num_rows:
            return table
        verdict = table["verdict"].copy()
        keys = zip(*(table[n].tolist() for n in ("epoch", "lane", "position")), strict=True)
        for row, key in enumerate(keys):
            verdict[row] = self._overrides.get(key, verdict[row])
        return table.with_columns(verdict=verdict)

    def _next_epoch(self) -> None:
        if not self._readable:
            raise SourceError(
                f"source {self.name!r} has nothing readable in epoch {self._epoch}",
                remedy="Look at the reasons of skipped and filtered records in service.stats().",
            )
        self._epoch += 1
        self._readable = False
        self._cursors = {lane: LaneCursor() for lane in self._cursors}
        self._live = set(self._cursors)


def _canonical(table: Metadata) -> Metadata:
    """Return spans in canonical order."""
    keys = (table["start"], table["lane"], table["position"], table["epoch"])
    return table.take(np.lexsort(keys))
