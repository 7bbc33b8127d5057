"""What of the committed plans was delivered: plans times watermarks, entered in a ledger.

Axes: B buckets, N spans of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.ledger import Ledger
from megadask.planner.plan import Plan
from megadask.planner.state import PlannerState, SourcesIn

Marks = Mapping[int, tuple[int, int]]  # rank to the first (step, microbatch) not acknowledged


class Delivered:
    """The audit of one generation (rule 11).

    Parameters
    ----------
    state
        Where it began.
    ranks_of_bucket
        (B,) the ranks that share each bucket: it is delivered once all of them acknowledged it.
    marks
        Where the ranks began.
    """

    def __init__(
        self, state: PlannerState, ranks_of_bucket: Sequence[Sequence[int]], marks: Marks
    ) -> None:
        self._ledger = Ledger(state)
        self._ranks_of_bucket = ranks_of_bucket
        self._audited = dict(marks)

    def plan(self, plan: Plan) -> None:
        """Enter a plan that was committed."""
        self._ledger.plan(plan.table, plan.passed, plan.bucket_N >= 0, SourcesIn(plan.state))

    def fill(self, plan: Plan, rows: Sequence[int]) -> None:
        """Enter spans of a plan that a filler stands in for."""
        self._ledger.fill(plan.table.take(np.array(rows, np.int64)))

    def deliver(self, plans: Iterable[Plan], marks: Marks) -> None:
        """Enter what all ranks of a bucket have acknowledged since the last time."""
        furthest = max(marks.values())[0]
        before_B2, low_B2 = self._low_B2(self._audited), self._low_B2(marks)
        for plan in plans:
            if plan.step > furthest:
                continue
            first_N = _done_B(plan, before_B2)[plan.bucket_N]
            stop_N = _done_B(plan, low_B2)[plan.bucket_N]
            between_N = (first_N <= plan.microbatch_N) & (plan.microbatch_N < stop_N)
            self._ledger.deliver(plan.table, np.flatnonzero((plan.bucket_N >= 0) & between_N))
        self._audited = dict(marks)

    def report(
        self, plans: Iterable[Plan], marks: Marks, unread: Mapping[str, int | None]
    ) -> dict[str, Any]:
        """Return the audit, per source; plans: all that some rank has not acknowledged."""
        plans = list(plans)
        self.deliver(plans, marks)
        pending, low_B2 = [], self._low_B2(marks)
        for plan in plans:
            due_N = plan.microbatch_N >= _done_B(plan, low_B2)[plan.bucket_N]
            pending.append(plan.table.take((plan.bucket_N >= 0) & due_N))
        return self._ledger.report(pending, unread)

    def _low_B2(self, marks: Marks) -> NDArray[np.int64]:
        """Return (B, 2) the lowest step and microbatch of the ranks of each bucket."""
        lowest = [min([marks[rank] for rank in ranks]) for ranks in self._ranks_of_bucket]
        return np.array(lowest, np.int64)


def _done_B(plan: Plan, low_B2: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (B,) how many microbatches of a plan all ranks of each bucket have behind them."""
    step_B, microbatch_B = low_B2.T
    here_B = np.where(step_B == plan.step, microbatch_B, 0)
    return np.where(step_B > plan.step, plan.num_microbatches, here_B)
