"""Where a run goes on when the sources that have a weight now have ended, and others have not.

Nothing that a source holds is dropped because its stage comes too late: when no source with a
weight has anything left, the next weights that give some to a source that has not ended take over
at once, be they of a later stage or of an event. The end is where there are none. With
``stop="first"`` the first source that has ended ends the run, and this does not apply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megadask.planner.draw import Draw, DrawRules
from megadask.planner.metadata import concat
from megadask.planner.schedule import Schedule, StepSchedule
from megadask.planner.state import PlannerState

#: The step whose weights are in force, and the (S,) int64 shares that they come to.
Shares = tuple[int, NDArray[np.int64]]


def shares_of(state: PlannerState, mixture: StepSchedule, rules: DrawRules) -> Shares:
    """Return the weights to draw ``state.step`` by: its own, or those that took over.

    mixture: the schedule, where no event holds.
    """
    own = state.step, _shares_at(state, mixture, state.step)
    open_S = _open_S(state, rules)
    if open_S is None or own[1][open_S].any():
        return own
    return _later(state, mixture, open_S, state.step) or own


def next_shares(drawn: Draw, mixture: StepSchedule, rules: DrawRules, after: int) -> Shares | None:
    """Return the weights to draw a step by again for which there was nothing left after all.

    after: the step whose weights it was drawn by. None where the step has spans, or at the end of
    the data.
    """
    open_S = _open_S(drawn.state, rules)
    if drawn.table.num_rows or open_S is None:
        return None
    return _later(drawn.state, mixture, open_S, after)


def again(state: PlannerState, drawn: Draw, share_S: NDArray[np.int64]) -> PlannerState:
    """Return the state from which to draw a step without spans again, by other weights.

    state: before the step. Sources that have a share now begin there; what the first draw found of
    the others is done with.
    """
    sources = {
        name: state.sources[name] if share else drawn.state.sources[name]
        for name, share in zip(state.sources, share_S.tolist(), strict=True)
    }
    return replace(drawn.state, step=drawn.step, sources=sources)


def joined(empty: Draw, drawn: Draw, share_S: NDArray[np.int64]) -> Draw:
    """Return the step that was drawn again, with what only the first draw passed over for good."""
    over = empty.passed.take(share_S[empty.passed["source"]] == 0)
    return replace(drawn, passed=concat([over, drawn.passed]))


def _changes(state: PlannerState, mixture: StepSchedule, after: int) -> Iterable[int]:
    """Yield the steps behind ``after`` from which other weights hold, in order."""
    events = [event.step for event in state.events if event.step > after]
    # Once an event holds, the schedule does no more.
    until = min(events, default=None) if state.weights_at(after) is None else after
    for step in mixture.changes_after(after):
        if until is not None and step >= until:
            break
        yield step
    yield from events


def _later(
    state: PlannerState, mixture: StepSchedule, open_S: NDArray[np.bool_], after: int
) -> Shares | None:
    """Return the first weights behind a step that give a share to a source that has not ended."""
    if not open_S.any():
        return None
    for step in _changes(state, mixture, after):
        share_S = _shares_at(state, mixture, step)
        if share_S[open_S].any():
            return step, share_S
    return None


def _shares_at(state: PlannerState, mixture: StepSchedule, step: int) -> NDArray[np.int64]:
    weights = state.weights_at(step)
    schedule = mixture if weights is None else Schedule.constant(weights)
    return schedule.weights_at(step, list(state.sources))


def _open_S(state: PlannerState, rules: DrawRules) -> NDArray[np.bool_] | None:
    """Return (S,) which sources have something that the run has not come to; None: never mind."""
    if rules.stop == "first" or rules.epochs is None:
        return None
    return np.array([not s.ended and s.cursor[0] < rules.epochs for s in state.sources.values()])
