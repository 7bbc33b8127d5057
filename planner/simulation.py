"""The time of one step on an idealised trainer, where nothing but the planned work takes time.

Axes: B buckets, M microbatches, P parts of the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megadask.planner.checks import check_above_0, check_integer
from megadask.planner.errors import ConfigError
from megadask.planner.pipelining import one_forward_one_backward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Sync = Literal["step", "microbatch"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """How the ranks of a training job wait for each other.

    A load is the time of a forward and a backward pass on one rank. Parts run one after the other,
    and all buckets meet between them.

    Parameters
    ----------
    sync
        ``"step"``: buckets meet once a step (in each part), as those of plain data parallelism do;
        the part takes as long as its slowest bucket. ``"microbatch"``: they meet in every
        microbatch, as where parameters are gathered layer by layer (FSDP); each microbatch takes
        as long as that of the slowest bucket.
    pp
        Stages of the pipeline that each bucket runs through, by the 1F1B schedule. Every stage does
        1 / pp of each microbatch. With ``"microbatch"``, a pass takes as long as that of the
        slowest bucket.
    backward
        Time of a backward pass over that of its forward pass.
    """

    sync: Sync = "step"
    pp: int = 1
    backward: float = 2.0

    def __post_init__(self) -> None:
        if self.sync not in get_args(Sync):
            raise ConfigError(
                "simulate(sync=)", got=repr(self.sync), limit=f"one of {get_args(Sync)}"
            )
        check_integer("simulate(pp=)", self.pp, 1)
        check_above_0("simulate(backward=)", self.backward)

    def run(
        self,
        loads: ArrayLike,
        *,
        speeds: ArrayLike | None = None,
        encoders: Sequence[ArrayLike] = (),
    ) -> Simulation:
        """Return what becomes of a step.

        Parameters
        ----------
        loads
            (B, M, P) >= 0, the time of every microbatch, at the speed of its bucket.
        speeds
            (B,) > 0, relative speeds of the buckets, which the ideal weighs them by; all alike
            without it.
        encoders
            (E, T, P) each, the times of the turns that the encoder of a modality takes before the
            microbatches. All ranks meet after every turn.
        """
        load_BMP = np.asarray(loads, np.float64)
        if load_BMP.ndim != 3 or 0 in load_BMP.shape[::2]:
            raise ConfigError(
                "simulate: loads",
                got=f"shape {load_BMP.shape}",
                limit="(buckets, microbatches, parts)",
            )
        alone_BP = self._times(load_BMP)
        if self.sync == "microbatch":
            met_BMP = load_BMP.max(axis=0, keepdims=True)
            step_time = self._times(met_BMP).sum()
            smooth = met_BMP.sum() / self.pp
        else:
            step_time = alone_BP.max(axis=0).sum()
            smooth = load_BMP.sum(axis=1).max(axis=0).sum() / self.pp
        work_B = load_BMP.sum(axis=(1, 2)) / self.pp
        speed_B = np.ones(len(work_B)) if speeds is None else np.asarray(speeds, np.float64)
        ideal = float((work_B * speed_B).sum() / speed_B.sum())
        turns = [np.asarray(load_ETP, np.float64) for load_ETP in encoders]
        encoding = sum(float(load_ETP.mean(axis=0).sum()) for load_ETP in turns)
        waiting = sum(float(load_ETP.max(axis=0).sum()) for load_ETP in turns)
        return Simulation(
            trainer=self,
            load_BMP=load_BMP,
            step_time=float(step_time) + waiting,
            ideal=ideal + encoding,
            bubble=max(0.0, float(step_time - smooth)),
            idle=1 - (work_B + encoding) / (step_time + waiting)
            if step_time
            else np.zeros_like(work_B),
            alone=alone_BP.sum(axis=1),
        )

    def _times(self, load_BMP: Floats) -> Floats:
        """Return (B, P) the time of each part in each bucket, if nobody waits for others."""
        if self.pp == 1:
            return np.asarray(load_BMP.sum(axis=1))
        ends = [
            one_forward_one_backward(load_BM, self.pp, self.backward).end_B
            for load_BM in np.moveaxis(load_BMP, 2, 0)
        ]
        return np.stack(ends, axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What becomes of one step on an idealised trainer.

    Times are in the unit of the loads.

    Attributes
    ----------
    trainer
        Who waits for whom.
    load_BMP
        (B, M, P) float64, the loads.
    step_time
        From the first pass to the moment at which all ranks are done.
    ideal
        The same work spread evenly over all ranks, without bubbles: the mean over buckets, by pp.
    bubble
        What of the step time is owed to the filling and draining of pipelines; 0 with pp = 1.
    idle
        (B,) share of the step time in which the ranks of each bucket do nothing; of the encoders,
        all count as their mean.
    alone
        (B,) time that each bucket would take if it waited for no other, without the encoders.
    """

    trainer: Trainer
    load_BMP: Floats
    step_time: float
    ideal: float
    bubble: float
    idle: Floats
    alone: Floats

    @property
    def efficiency(self) -> float:
        """Ideal over step time; 1 for a step without work."""
        return self.ideal / self.step_time if self.step_time else 1.0

    @property
    def imbalance(self) -> float:
        """What of the step time is owed to waiting for slower buckets."""
        return max(0.0, self.step_time - self.ideal - self.bubble)

    @property
    def slowest(self) -> int:
        """The bucket that would take the longest alone, the first of equals."""
        return int(self.alone.argmax())

    def __repr__(self) -> str:
        trainer = self.trainer
        return (
            f"Simulation(sync={trainer.sync!r}, pp={trainer.pp}: step time {self.step_time:.4g} = "
            f"ideal {self.ideal:.4g} + imbalance {self.imbalance:.4g} + bubble {self.bubble:.4g}; "
            f"efficiency {self.efficiency:.1%}; slowest bucket {self.slowest} of {len(self.idle)})"
        )

    def plot(self) -> Figure:
        """Return a figure of the buckets, or of the slowest pipeline; needs matplotlib."""
        from megadask.planner.plots import plot_simulation

        return plot_simulation(self)

    def _repr_html_(self) -> str:
        """Show what the step time consists of as one bar."""
        parts = (
            ("work", self.ideal, "hsl(210, 55%, 50%)"),
            ("imbalance", self.imbalance, "hsl(20, 75%, 55%)"),
            ("bubble", self.bubble, "hsl(0, 0%, 70%)"),
        )
        scale = 640 / self.step_time if self.step_time else 0.0
        bars, left = [], 0.0
        for name, time, colour in parts:
            label = f"{name} {time * scale / 640:.1%}"
            width = time * scale
            bars.append(
                f'<rect x="{left:.1f}" width="{width:.1f}" height="24" fill="{colour}">'
                f"<title>{label}</title></rect>"
            )
            if width > 7 * len(label):
                bars.append(f'<text x="{left + 4:.1f}" y="16" font-size="12">{label}</text>')
            left += width
        return (
            f"<div><code>{escape(repr(self))}</code></div>"
            f'<svg width="640" height="24" role="img" aria-label="what the step time consists of">'
            f"{''.join(bars)}</svg>"
        )
