"""Draw a step: which spans it consists of. Depends on data, seed and schedules, never on topology.

Sources take turns by the exact mixture; the source whose turn it is gives the first span of its
window that fits the canonical packing. The step is full when none fits. A span that was passed over
for `DrawRules.patience` steps can no longer be passed over: the step ends instead, and the next one
begins with it. So the mixture stays exact at every moment, and nothing starves.

With `DrawRules.deferral`, spans that cost too much for the step wait too, but take up no room in
the window. The step is drawn under the highest limit of costs that bears itself; see `deferral`.

Where spans are poured into packs (`Fixed`) every one fits: the source whose turn it is gives its
next one, until the step is full. What is left of the last one is outstanding, and goes first in the
next step, whatever became of its source's weight; the mixture has counted it when it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megadask.planner.behind import Taken, go_behind
from megadask.planner.deferral import Deferral, Forecast, Missing, find_limit
from megadask.planner.lines import Known, Lines, Rows
from megadask.planner.metadata import Metadata
from megadask.planner.mixture import Turns, settle
from megadask.planner.packing import Packing
from megadask.planner.pouring import Pouring, Rest
from megadask.planner.rules import DrawRules as DrawRules
from megadask.planner.rules import Stop as Stop
from megadask.planner.state import PlannerState, without_waits
from megadask.planner.window import Columns, Window


@dataclass(frozen=True)
class Starved:
    """The draw needs more rows; nothing was decided.

    source
        A source that has run out of them.
    wanted
        Source name to about how many more spans are needed: of all sources that ran out, and of
        those that soon would.
    """

    source: str
    wanted: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Draw:
    """What one step consists of.

    table
        (N rows) the spans in the order drawn.
    canonical_pack_N
        (N,) pack of each span in the packing that proves that they fit.
    taken_S
        (S,) spans taken of each source, before any was cut.
    passed
        Records passed over for good: filtered, skipped, tombstones.
    state
        The state before the next step.
    """

    step: int
    table: Metadata
    canonical_pack_N: NDArray[np.int64]
    taken_S: NDArray[np.int64]
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
    known = Known.of(state, rows, share_S)
    drawing = _Drawing(state, known, share_S, rules)
    step = drawing.step() if rules.deferral is None else drawing.deferred_step(rules.deferral)
    if isinstance(step, Starved):
        return step
    if not step.places:  # the end, but for spans that were passed over
        step = drawing.last_step(step)
        if isinstance(step, Starved):
            return step
    states, passed = go_behind(known, drawing.taken(step))
    taken = step.rows()
    table, pack_N = step.packed(without_waits(known.table.take(taken)))
    return Draw(
        step=state.step,
        table=table,
        canonical_pack_N=pack_N,
        taken_S=np.bincount(known.source_N[taken], minlength=len(known.states)),
        num_packs=step.num_packs,
        passed=without_waits(passed),
        state=replace(
            state,
            step=state.step + 1,
            sources=dict(zip(state.sources, states, strict=True)),
            deficits=dict(zip(state.sources, step.deficit_S.tolist(), strict=True)),
        ),
    )


class _Drawing:
    """What all attempts to draw one step have in common."""

    def __init__(
        self,
        state: PlannerState,
        known: Known,
        share_S: NDArray[np.int64],
        rules: DrawRules,
    ) -> None:
        self._state = state
        self._known = known
        self._share_S = share_S
        self._rules = rules
        self._names = list(state.sources)
        may_follow = rules.stop == "repeat"
        self._final_S = ~known.active_S | (
            (known.complete_S == (-1 if rules.epochs is None else rules.epochs)) & (not may_follow)
        )
        due_N = known.table["since"] <= state.step - rules.patience
        if rules.batching.pours:  # nothing is passed over: this is what is left of a span
            due_N = known.outstanding_N
        if rules.deferral is not None:
            due_N |= known.table["held"] <= state.step - rules.deferral.steps
        self._readable = known.readable(rules.batching, due_N)

    def step(self) -> _Step | Starved:
        """Return the step in which no span is held back."""
        return self._attempt(self._readable.lines())

    def deferred_step(self, deferral: Deferral) -> _Step | Starved:
        """Return the step under the highest limit of costs that keeps the rule of deferral."""
        table = self._known.table.take(self._readable.row_n)
        forecast = Forecast(
            readable=self._readable,
            cost_n=deferral.costs(table, self._rules.batching),
            share_S=self._share_S,
            by_tokens=self._rules.mix_by == "tokens",
            final_S=self._final_S,
            num_packs=self._rules.batching.global_batch_at(self._state.step),
            batching=self._rules.batching,
            window=self._rules.window,
        )
        limit = find_limit(forecast, deferral.ways)
        if isinstance(limit, Missing):
            wanted = {self._names[s]: count for s, count in limit.wanted.items()}
            return Starved(next(iter(wanted)), wanted)
        while True:
            lines = forecast.lines(limit.value)
            step = self._attempt(lines)
            if isinstance(step, Starved):
                return step
            places = np.array(step.places, np.int64)
            lower = limit.lowered(*forecast.judged(lines, places, limit.value), deferral.ways)
            if lower is limit:
                return step
            limit = lower

    def last_step(self, empty: _Step) -> _Step | Starved:
        """Return the step of what was passed over, where nothing else is left."""
        readable = self._known.readable(self._rules.batching, self._known.outstanding_N)
        step = self._new_step(readable.lines())
        step.deficit_S = empty.deficit_S
        step.take_due(range(len(self._names)))
        return step.starved(self._names) or step

    def taken(self, step: _Step) -> Taken:
        """Return what a step did to the sources."""
        taken_N, waits_N = (np.zeros(self._known.table.num_rows, bool) for _ in range(2))
        taken_N[step.rows()] = True
        lines = step.lines
        waits_N[lines.readable.row_n[lines.order_n[lines.waits_n]]] = True
        ended = [
            window.is_empty if active else own.ended
            for window, active, own in zip(
                step.windows, self._known.active_S.tolist(), self._known.states, strict=True
            )
        ]
        epoch_S = np.array([window.epoch for window in step.windows], np.int64)
        rest = step.rest(self._known.table)
        if rest is not None:
            source = self._known.source_N[rest.row]
            epoch_S[source] = self._known.table["epoch"][rest.row]
            ended[source] = False
        return Taken(
            step=self._state.step,
            taken_N=taken_N,
            waits_N=waits_N,
            epoch_S=epoch_S,
            ended_S=np.array(ended, bool),
            rest=rest,
        )

    def _attempt(self, lines: Lines) -> _Step | Starved:
        step = self._new_step(lines)
        if starved := step.starved(self._names):
            return starved
        # A span that was passed over waits no longer because its source has lost its weight; what
        # is left of a span goes first.
        is_first_S = (self._share_S == 0) | self._rules.batching.pours
        step.take_due(np.flatnonzero(is_first_S).tolist())
        step.take_turns(self._share_S)
        return step.starved(self._names) or step

    def _new_step(self, lines: Lines) -> _Step:
        complete_S, final_S = self._known.complete_S.tolist(), self._final_S.tolist()
        readable, order_n = lines.readable, lines.order_n
        columns = Columns(
            size=readable.size_n[order_n].tolist(),
            tokens=readable.tokens_n[order_n].tolist(),
            due=readable.due_n[order_n].tolist(),
        )
        windows = [
            Window(
                columns,
                start,
                lines.epochs_of(source),
                complete_S[source],
                final_S[source],
                self._rules.window,
            )
            for source, start in enumerate(lines.first_S.tolist())
        ]
        deficit_S = np.array([self._state.deficits[name] for name in self._names], np.int64)
        return _Step(self._state.step, lines, columns, windows, deficit_S, self._rules)


class _Step:
    """A step that is being drawn from the windows of all sources.

    places, packs: place in the lines and canonical pack of each span (where it begins, if spans are
    cut), in the order drawn.
    deficit_S: (S,) what the mixture owes the sources behind it.
    """

    def __init__(
        self,
        number: int,
        lines: Lines,
        columns: Columns,
        windows: Sequence[Window],
        deficit_S: NDArray[np.int64],
        rules: DrawRules,
    ) -> None:
        self.lines = lines
        self.windows = windows
        self.deficit_S = deficit_S
        self.num_packs = rules.batching.global_batch_at(number)
        self.places: list[int] = []
        self.packs: list[int] = []
        self._columns = columns
        self._rules = rules
        self._packing = (Pouring if rules.batching.pours else Packing)(
            self.num_packs, rules.batching
        )
        self._sizes = columns.tokens if rules.batching.pours else columns.size

    def rows(self) -> NDArray[np.int64]:
        """Return the rows of the spans drawn, in the order drawn."""
        places = np.array(self.places, np.int64)
        return self.lines.readable.row_n[self.lines.order_n[places]]

    def packed(self, table: Metadata) -> tuple[Metadata, NDArray[np.int64]]:
        """Return the spans of the step, from those drawn, and the canonical pack of each."""
        if isinstance(self._packing, Pouring):
            return self._packing.cut(table)
        return table, np.array(self.packs, np.int64)

    def rest(self, table: Metadata) -> Rest | None:
        """Return what is left of the last row drawn, None where it is all in the step."""
        if not isinstance(self._packing, Pouring) or not self._packing.rest_tokens:
            return None
        row = int(self.rows()[-1])
        return Rest(row, int(table["stop"][row]) - self._packing.rest_tokens)

    def take_due(self, sources: Iterable[int]) -> None:
        """Take the spans of some sources that can be passed over no longer, as far as they fit."""
        for source in sources:
            while (place := self.windows[source].draw_due(self._packing.room)) >= 0:
                self._pack(place)

    def take_turns(self, share_S: NDArray[np.int64]) -> None:
        """Let the sources take turns until the step is full."""
        by_tokens = self._rules.mix_by == "tokens"
        tokens, size, packing = self._columns.tokens, self._sizes, self._packing
        live_S = np.where([not window.is_empty for window in self.windows], share_S, 0)
        turns, live_S = self._turns(self.deficit_S, live_S)
        run = turns.run()
        source = -1 if self._is_over(share_S) else next(run, -1)
        while source >= 0:
            window = self.windows[source]
            epoch = window.epoch
            place = window.draw_fitting(packing.room)
            if place < 0:
                break
            self.places.append(place)
            self.packs.append(packing.add(size[place]))
            source = run.send((tokens[place], window.head_tokens) if by_tokens else (1, 1))
            if window.starved:
                break
            if window.epoch != epoch:
                if window.is_empty:
                    live_S = np.where([w.is_empty for w in self.windows], 0, live_S)
                    turns, live_S = self._turns(turns.deficits(), live_S)
                    run = turns.run()
                    source = next(run, -1)
                if self._is_over(share_S):
                    break
        self.deficit_S = turns.deficits()

    def starved(self, names: Sequence[str]) -> Starved | None:
        """Return what sources lack if one has run out of rows, and the others that soon would."""
        first = next((n for n, w in zip(names, self.windows, strict=True) if w.starved), None)
        if first is None:
            return None
        wanted = {
            name: max(window.num_taken, self._rules.window // 4, 1)
            for name, window in zip(names, self.windows, strict=True)
            if window.would_starve()
        }
        return Starved(first, wanted)

    def _turns(
        self, deficit_S: NDArray[np.int64], live_S: NDArray[np.int64]
    ) -> tuple[Turns, NDArray[np.int64]]:
        """Return the turns of the sources that can be drawn from, and their shares."""
        deficit_S, live_S = settle(deficit_S, live_S)
        by_tokens = self._rules.mix_by == "tokens"
        heads = [window.head_tokens for window in self.windows] if by_tokens else None
        return Turns(deficit_S, live_S, heads), live_S

    def _is_over(self, share_S: NDArray[np.int64]) -> bool:
        """Whether the stop policy ends the step because sources have ended."""
        if self._rules.stop == "all" or self._rules.epochs is None:
            return False
        ended = [
            window.epoch >= self._rules.epochs
            for window, share in zip(self.windows, share_S.tolist(), strict=True)
            if share
        ]
        return any(ended) if self._rules.stop == "first" else all(ended)

    def _pack(self, place: int) -> None:
        self.places.append(place)
        self.packs.append(self._packing.add(self._sizes[place]))
