"""What a stream of steps came to on an idealised trainer, by way of placing.

Axes: T steps, L length classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megadask.planner.drift import Drift
from megadask.planner.simulation import Trainer
from megadask.planner.weights import MixBy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """The steps of a stream, placed in one way.

    Attributes
    ----------
    step_time_T
        (T,) float64, time of each step, in the unit of the cost.
    imbalance_T
        (T,) float64, max / mean bucket cost of each step, of the worst part.
    bubble_T
        (T,) float64, what of the step time is owed to pipelines that fill and drain.
    seconds_T
        (T,) float64, time that placing took, 0 without a clock.
    """

    step_time_T: Floats
    imbalance_T: Floats
    bubble_T: Floats
    seconds_T: Floats


class Row(NamedTuple):
    """What is said of one way of placing.

    Attributes
    ----------
    method
        Its name.
    imbalance, worst
        Mean and largest max / mean of the steps.
    over_ideal
        Mean step time over that of an even spread.
    speedup
        How many times as fast steps are as with the first way of the report.
    planning_s
        Median seconds of drawing and placing a step.
    """

    method: str
    imbalance: float
    worst: float
    over_ideal: float
    speedup: float
    planning_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamReport:
    """Steps of a stream: what they consist of, and how long they take by way of placing.

    All ways place the same draws.

    Attributes
    ----------
    trainer
        Who waits for whom.
    method
        The way of placing that the strategy declares.
    num_buckets
        What each step is placed on.
    placed
        Way of placing to what came of it; those compared with come first.
    ideal_T
        (T,) float64, time of each step if its work were spread perfectly evenly.
    bound_T
        (T,) float64, time below which no placement of whole spans can come, bubbles left aside.
    tokens_T, spans_T, packs_T
        (T,) int64, size of each step.
    capacity_T
        (T,) int64, tokens that the packs of the step's microbatches have room for, pads included.
    length_counts_L
        (L,) int64, spans of 2**l tokens up to the next class, over all steps.
    mix_by
        What the mixture counts.
    mixture_error
        Most samples (or tokens, see `mix_by`) that a source was ahead of its share of all that was
        drawn, or behind it, after any step.
    draw_seconds_T
        (T,) float64, time that drawing took, 0 without a clock.
    drift
        Where spans are deferred: how its first steps (up to a million spans) differ from those of
        the undeferred stream.
    """

    trainer: Trainer
    method: str
    num_buckets: int
    placed: Mapping[str, Placed]
    ideal_T: Floats
    bound_T: Floats
    tokens_T: NDArray[np.int64]
    spans_T: NDArray[np.int64]
    packs_T: NDArray[np.int64]
    capacity_T: NDArray[np.int64]
    length_counts_L: NDArray[np.int64]
    mix_by: MixBy
    mixture_error: float
    draw_seconds_T: Floats
    drift: Drift | None = None

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.ideal_T)

    def step_time(self, method: str | None = None) -> float:
        """Return the mean time of a step."""
        return float(self._of(method).step_time_T.mean())

    def efficiency(self, method: str | None = None) -> float:
        """Return ideal over step time, over all steps."""
        return float(self.ideal_T.sum() / self._of(method).step_time_T.sum())

    @property
    def packing_T(self) -> Floats:
        """(T,) float64, packing efficiency of each step: real tokens over `capacity_T`."""
        return np.asarray(self.tokens_T / self.capacity_T, np.float64)

    @property
    def packing(self) -> float:
        """Packing efficiency of all steps: real tokens over what their packs have room for."""
        return float(self.tokens_T.sum() / self.capacity_T.sum())

    def throughput(self, method: str | None = None) -> float:
        """Return tokens per unit of time, over all steps and ranks."""
        return float(self.tokens_T.sum() / self._of(method).step_time_T.sum())

    def speedup(self, method: str | None = None, over: str = "none") -> float:
        """Return how many times as fast the steps are as with another way of placing."""
        return self.step_time(over) / self.step_time(method)

    @property
    def bound(self) -> float:
        """Time below which no placement comes, over the mean ideal: 1 where nothing is in the way.

        Above 1, single spans cost more than a bucket's share of their step.
        """
        return float(self.bound_T.sum() / self.ideal_T.sum())

    @property
    def best_throughput(self) -> float:
        """Tokens per unit of time above which no placement comes."""
        return float(self.tokens_T.sum() / self.bound_T.sum())

    def planning_seconds(self, method: str | None = None) -> float:
        """Return the median time that drawing and placing a step took."""
        return float(np.median(self.draw_seconds_T + self._of(method).seconds_T))

    def rows(self) -> list[Row]:
        """Return a row of figures for each way of placing."""
        first = next(iter(self.placed))
        return [
            Row(
                method=name,
                imbalance=float(placed.imbalance_T.mean()),
                worst=float(placed.imbalance_T.max()),
                over_ideal=1 / self.efficiency(name),
                speedup=self.speedup(name, over=first),
                planning_s=self.planning_seconds(name),
            )
            for name, placed in self.placed.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values, for JSON."""
        return {
            "sync": self.trainer.sync,
            "pp": self.trainer.pp,
            "steps": self.num_steps,
            "buckets": self.num_buckets,
            "method": self.method,
            "bound": self.bound,
            "tokens_per_step": float(self.tokens_T.mean()),
            "spans_per_step": float(self.spans_T.mean()),
            "packs_per_step": float(self.packs_T.mean()),
            "packing_efficiency": self.packing,
            "best_tokens_per_time": self.best_throughput,
            "ideal_times": self.ideal_T.tolist(),
            "bound_times": self.bound_T.tolist(),
            "mixture_error": self.mixture_error,
            "mixture_by": self.mix_by,
            "drift": None
            if self.drift is None
            else {
                "delayed": self.drift.delayed,
                "mean_delay": self.drift.mean_delay,
                "max_delay": self.drift.max_delay,
                "length_ks": self.drift.length,
                "length_ks_of_a_step_mean": float(self.drift.length_T.mean()),
                "token_mixture_of_a_step_max": float(self.drift.token_mixture_T.max()),
            },
            "length_counts": {
                str(2**power): int(count)
                for power, count in enumerate(self.length_counts_L)
                if count
            },
            "placed": {
                row.method: {
                    "imbalance_mean": row.imbalance,
                    "imbalance_max": row.worst,
                    "step_time": self.step_time(row.method),
                    "step_time_over_ideal": row.over_ideal,
                    "tokens_per_time": self.throughput(row.method),
                    "speedup": row.speedup,
                    "planning_seconds": row.planning_s,
                    "step_times": self.placed[row.method].step_time_T.tolist(),
                    "imbalances": self.placed[row.method].imbalance_T.tolist(),
                }
                for row in self.rows()
            },
        }

    def __repr__(self) -> str:
        lines = [
            f"StreamReport: {self.num_steps} steps of {self.spans_T.mean():,.0f} spans over "
            f"{self.num_buckets} buckets, sync={self.trainer.sync!r}, pp={self.trainer.pp}",
            f"{'placed by':<16}{'max/mean':>10}{'worst':>8}{'step time':>11}{'speed-up':>10}"
            f"{'planning':>11}",
        ]
        for row in self.rows():
            planning = f"{row.planning_s * 1e3:,.1f} ms" if row.planning_s else "-"
            lines.append(
                f"{row.method:<16}{row.imbalance:>10.3f}{row.worst:>8.3f}{row.over_ideal:>11.3f}"
                f"{row.speedup:>10.2f}{planning:>11}"
            )
        lines.append(f"{'bound':<16}{'':>18}{self.bound:>11.3f}")
        lines.append(f"{self.packing:.1%} of the packs' tokens are real, the rest is padding")
        lines.append(f"off the mixture by {self.mixture_error:.3g} {self.mix_by} at most")
        if self.drift is not None:
            lines.append(describe(self.drift))
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Return a figure of the steps, lengths and planning times; needs matplotlib."""
        from megadask.planner.plots import plot_stream

        return plot_stream(self)

    def _repr_html_(self) -> str:
        """Show the lines of the report."""
        return f"<pre>{escape(repr(self))}</pre>"

    def _of(self, method: str | None) -> Placed:
        return self.placed[self.method if method is None else method]


def describe(drift: Drift) -> str:
    """Return in words what deferral does to the steps."""
    return (
        f"deferred: {drift.delayed:.1%} of the spans come later, {drift.mean_delay:.1f} steps on "
        f"average and {drift.max_delay} at most; lengths of a step differ from the undeferred ones "
        f"by {drift.length_T.mean():.3f} (Kolmogorov-Smirnov), {drift.length:.3f} over all steps"
    )
