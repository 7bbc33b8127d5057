"""Draw a step: which spans it consists of. Depends on data, seed and schedules, never on topology.

Sources take turns by the exact mixture; the source whose turn it is gives the first span of its
window that fits the canonical packing. The step is full when none fits. A span that was passed over
for `DrawRules.patience` steps can no longer be passed over: the step ends instead, and the next one
begins with it. So the mixture stays exact at every moment, and nothing starves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megadask.planner.batching import Packed
from megadask.planner.errors import ConfigError
from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata, concat
from megadask.planner.mixture import charge, pick, settle
from megadask.planner.packing import Packing
from megadask.planner.state import Cursor, LaneCursor, PlannerState, SourceState, with_since

MixBy = Literal["samples", "tokens"]
Stop = Literal["first", "all", "repeat"]


@dataclass(frozen=True, kw_only=True)
class DrawRules:
    """What the draw of every step goes by.

    Attributes
    ----------
    batching
        Capacity of a step, and how documents are padded.
    mix_by
        Whether weights are shares of the samples (spans) or of the tokens.
    window
        K, how many readable spans of a source are looked at for one that fits.
    patience
        Steps for which a span may be passed over.
    epochs
        How often every source is read; None for ever.
    stop
        With finite epochs: end when the ``"first"`` source has ended; when ``"all"`` have, those
        that ended dropping out; or ``"repeat"`` those until all have ended.
    """

    batching: Packed
    mix_by: MixBy = "samples"
    window: int = 64
    patience: int = 4
    epochs: int | None = None
    stop: Stop = "all"

    def __post_init__(self) -> None:
        for name, value in (("mix_by", self.mix_by), ("stop", self.stop)):
            choices = get_args(MixBy if name == "mix_by" else Stop)
            if value not in choices:
                raise ConfigError(f"{name}=", got=repr(value), limit=f"one of {choices}")
        for name in ("window", "patience", "epochs"):
            value = getattr(self, name)
            valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not valid and not (name == "epochs" and value is None):
                raise ConfigError(f"{name}=", got=repr(value), limit="an integer >= 1")


@dataclass(frozen=True, eq=False)
class Rows:
    """What is known of a source from its state on.

    table
        Spans in canonical order, those outstanding first; verdicts of all kinds.
    complete_epochs
        Every record of the epochs below this one is in the table or lies before it.
    """

    table: Metadata
    complete_epochs: int


@dataclass(frozen=True)
class Starved:
    """The draw needs more rows of this source; nothing was decided."""

    source: str


@dataclass(frozen=True, eq=False)
class Draw:
    """What one step consists of.

    table
        (N rows) the spans in the order drawn.
    canonical_pack_N
        (N,) pack of each span in the packing that proves that they fit.
    passed
        Records passed over for good: filtered, skipped, tombstones.
    state
        The state before the next step.
    """

    step: int
    table: Metadata
    canonical_pack_N: NDArray[np.int64]
    num_packs: int
    passed: Metadata
    state: PlannerState


def draw(
    state: PlannerState, rows: Mapping[str, Rows], share_S: NDArray[np.int64], rules: DrawRules
) -> Draw | Starved:
    """Draw ``state.step``.

    Parameters
    ----------
    state
        Where the run stands; not modified.
    rows
        Source name to what is known of it; needed for sources with a share.
    share_S
        (S,) shares of the sources in the state's order.
    rules
        How to draw.

    Returns
    -------
    Draw or Starved
        A draw without spans is the end of the data.
    """
    names = list(state.sources)
    feeds = [
        _Feed(state.sources[name], rows[name] if share else None, rules)
        for name, share in zip(names, share_S.tolist(), strict=True)
    ]
    if starved := _starved(names, feeds):
        return starved
    step = _Step(state.step, feeds, rules)
    # A span that was passed over waits no longer because its source has lost its weight.
    step.take_overdue(np.flatnonzero(share_S == 0), state.step - rules.patience)
    deficit_S = np.array([state.deficits[name] for name in names], np.int64)
    deficit_S = step.take_turns(deficit_S, share_S)
    if not step.taken:  # the end, but for spans that were passed over
        step.take_overdue(np.arange(len(feeds)), state.step)
    if starved := _starved(names, feeds):
        return starved
    return _finish(state, step, dict(zip(names, deficit_S.tolist(), strict=True)))


class _Step:
    """A step that is being drawn from one feed for each source.

    taken, packs: source and canonical pack of each span, in the order drawn.
    """

    def __init__(self, number: int, feeds: Sequence[_Feed], rules: DrawRules) -> None:
        self.feeds = feeds
        self.num_packs = rules.batching.global_batch_at(number)
        self.taken: list[int] = []
        self.packs: list[int] = []
        self._rules = rules
        self._due_since = number - rules.patience
        self._packing = Packing(self.num_packs, rules.batching)

    def take_overdue(self, sources: NDArray[np.int64], since: int) -> None:
        """Take the spans of some sources that were passed over by a step, as far as they fit."""
        for source in sources.tolist():
            feed = self.feeds[source]
            while (place := feed.overdue(since, self._packing.room)) is not None:
                self._take(source, place)

    def take_turns(
        self, deficit_S: NDArray[np.int64], share_S: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Let the sources take turns until the step is full; return the deficits after that."""
        by_tokens = self._rules.mix_by == "tokens"
        alive_S = np.array([not feed.exhausted for feed in self.feeds])
        deficit_S, live_S = settle(deficit_S, np.where(alive_S, share_S, 0))
        head_S = np.array([feed.head_tokens for feed in self.feeds]) if by_tokens else None
        while not self._is_over():
            source = pick(deficit_S, live_S, head_S)
            if source < 0:
                break
            feed = self.feeds[source]
            place = feed.choose(self._packing.room, self._due_since)
            if place is None:
                break
            tokens = self._take(source, place)
            deficit_S = charge(deficit_S, live_S, source, tokens if by_tokens else 1)
            if feed.starved:
                break
            if feed.exhausted:
                live_S[source] = 0
                deficit_S, live_S = settle(deficit_S, live_S)
            if head_S is not None:
                head_S[source] = feed.head_tokens
        return deficit_S

    def _take(self, source: int, place: int) -> int:
        """Take a span that fits; return its tokens."""
        size, tokens = self.feeds[source].take(place)
        self.packs.append(self._packing.add(size))
        self.taken.append(source)
        return tokens

    def _is_over(self) -> bool:
        if self._rules.stop == "all":
            return False
        finished = (feed.finished for feed in self.feeds if feed.has_weight)
        return any(finished) if self._rules.stop == "first" else all(finished)


class _Feed:
    """The moving window over one source during one draw."""

    def __init__(self, state: SourceState, rows: Rows | None, rules: DrawRules) -> None:
        self.state = state
        # Without weight, only what was passed over can be drawn.
        self.has_weight = rows is not None
        self.rows = rows if rows is not None else Rows(state.outstanding, state.cursor[0])
        self._rules = rules
        table = self.rows.table
        self._ok = np.flatnonzero(table["verdict"] == Verdict.OK).tolist()
        self._epoch = table["epoch"].tolist()
        self._tokens = table["tokens"].tolist()
        self._size = rules.batching.padded(table["tokens"]).tolist()
        self._since = table["since"].tolist()
        self._next = 0
        self.window: list[int] = []
        self.taken: list[int] = []
        self.starved = False
        self._refill()

    @property
    def epoch(self) -> int:
        """Epoch that the window shows, or the one that comes next where it is empty."""
        return self._epoch[self.window[0]] if self.window else self.rows.complete_epochs

    @property
    def finished(self) -> bool:
        """Whether all epochs have been drawn."""
        return self._rules.epochs is not None and self.epoch >= self._rules.epochs

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing to draw in turn now."""
        return not (self.has_weight and self.window)

    @property
    def head_tokens(self) -> int:
        """Tokens of the first span in the window, 0 if there is none."""
        return int(self._tokens[self.window[0]]) if self.window else 0

    def overdue(self, since: int, room: int) -> int | None:
        """Return the place in the window of the first span passed over by ``since``, if it fits."""
        for place, row in enumerate(self.window):
            if self._since[row] <= since:
                return place if self._size[row] <= room else None
        return None

    def choose(self, room: int, due_since: int) -> int | None:
        """Return the place in the window of the first span that fits, if any may be taken."""
        for place, row in enumerate(self.window):
            if self._size[row] <= room:
                return place
            if self._since[row] <= due_since:
                return None
        return None

    def take(self, place: int) -> tuple[int, int]:
        """Draw the span at a place in the window; return its padded size and its tokens."""
        row = self.window.pop(place)
        self.taken.append(row)
        self._refill()
        return self._size[row], self._tokens[row]

    def _refill(self) -> None:
        """Show up to K spans of one epoch; the next epoch only after the last span of this one."""
        while len(self.window) < self._rules.window:
            if self._next == len(self._ok):
                self.starved = not self._known_to_end()
                return
            row = self._ok[self._next]
            if self.window and self._epoch[row] != self._epoch[self.window[0]]:
                return
            self.window.append(row)
            self._next += 1

    def _known_to_end(self) -> bool:
        """Whether the window is all that can be shown: its epoch, or the source, is complete."""
        if not self.has_weight:
            return True
        complete = self.rows.complete_epochs
        if self.window:
            return bool(self._epoch[self.window[0]] < complete)
        return self._rules.stop != "repeat" and complete == self._rules.epochs

    def advance(self, step: int) -> tuple[SourceState, Metadata]:
        """Return the state after what was taken, and the records passed over for good."""
        table = self.rows.table
        cursor = self.state.cursor
        if self.taken:
            cursor = max(cursor, _after(table, max(self.taken)))
        if self.epoch > cursor[0]:
            cursor = (self.epoch, 0, 0, 0)
        before = is_before(table, cursor)
        left = np.ones(table.num_rows, bool)
        left[self.taken] = False
        ok = table["verdict"] == Verdict.OK
        outstanding = table.take(before & left & ok)
        since = np.minimum(outstanding["since"], step)
        lengths = self.state.lengths
        if cursor[0] > self.state.cursor[0]:
            last_epoch = (cursor[0] - 1, NEVER, 0, 0)
            lengths = tuple(k.position for k in _lanes_after(self.state, table, last_epoch))
        state = replace(
            self.state,
            cursor=cursor,
            lanes=_lanes_after(self.state, table, cursor),
            outstanding=outstanding.with_columns(since=since),
            lengths=lengths,
            ended=not self.window if self.has_weight else self.state.ended,
        )
        return state, table.take(before & ~ok)


#: ``since`` of a span that was never passed over.
NEVER = np.iinfo(np.int64).max


def is_before(table: Metadata, cursor: Cursor) -> NDArray[np.bool_]:
    """Return (N,) whether each span comes before ``cursor`` in canonical order."""
    before = np.zeros(table.num_rows, bool)
    equal = np.ones(table.num_rows, bool)
    for name, value in zip(("epoch", "position", "lane", "start"), cursor, strict=True):
        before |= equal & (table[name] < value)
        equal &= table[name] == value
    return before


def rows_after(state: SourceState, fetched: Metadata, complete_epochs: int) -> Rows:
    """Return what a draw from ``state`` looks at, from spans fetched in canonical order."""
    fresh = with_since(fetched.take(~is_before(fetched, state.cursor)), NEVER)
    tables = [table for table in (state.outstanding, fresh) if table.num_rows]
    return Rows(concat(tables) if tables else fresh, complete_epochs)


def _after(table: Metadata, row: int) -> Cursor:
    epoch, position, lane = (int(table[name][row]) for name in ("epoch", "position", "lane"))
    stop = int(table["stop"][row])
    if stop < int(table["length"][row]):
        return (epoch, position, lane, stop)
    return (epoch, position, lane + 1, 0)


def _lanes_after(state: SourceState, table: Metadata, cursor: Cursor) -> tuple[LaneCursor, ...]:
    """Return the next record of every lane; one of which spans are left stays the next."""
    same_epoch = cursor[0] == state.cursor[0]
    lanes = list(state.lanes) if same_epoch else [LaneCursor()] * len(state.lanes)
    epoch, position, lane, _ = cursor
    passed = (table["epoch"] == epoch) & (
        (table["position"] < position) | ((table["position"] == position) & (table["lane"] < lane))
    )
    columns = (
        table[name][passed].tolist() for name in ("lane", "position", "shard", "row", "verdict")
    )
    for lane, *record in zip(*columns, strict=True):
        if record[0] >= lanes[lane].position:
            lanes[lane] = LaneCursor.after(*record)
    return tuple(lanes)


def _starved(names: Sequence[str], feeds: Sequence[_Feed]) -> Starved | None:
    pairs = zip(names, feeds, strict=True)
    return next((Starved(name) for name, feed in pairs if feed.starved), None)


def _finish(state: PlannerState, step: _Step, deficits: dict[str, int]) -> Draw:
    advanced = [feed.advance(state.step) for feed in step.feeds]
    spans = concat([feed.rows.table.take(np.array(feed.taken, int)) for feed in step.feeds])
    in_turn = np.argsort(np.argsort(step.taken, kind="stable"))
    sources = dict(zip(state.sources, (source for source, _ in advanced), strict=True))
    return Draw(
        step=state.step,
        table=spans.take(in_turn),
        canonical_pack_N=np.array(step.packs, np.int64),
        num_packs=step.num_packs,
        passed=concat([passed for _, passed in advanced]),
        state=replace(state, step=state.step + 1, sources=sources, deficits=deficits),
    )
