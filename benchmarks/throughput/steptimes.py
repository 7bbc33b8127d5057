"""How long the emulated accelerator takes: an interpolation of what a real model took.

Axes: N documents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import megadask as md

PATH = Path(__file__).with_name("step_times.json")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds that microbatches take.

    Attributes
    ----------
    tokens, seconds
        Lengths of single documents that were measured, increasing, and what each took. The first
        is so short that its time is that of a launch: it is left out of all others.
    scale
        What all times are multiplied by.
    floor_tokens
        A microbatch takes at least as long as one document of so many tokens; 0 is no floor.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    scale: float = 1.0
    floor_tokens: int = 0

    def of_documents(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Return (N,) seconds of each of N documents beyond those of a launch.

        Between measured lengths they are a power of the length; in proportion to it below the
        shortest, and as between the last two above the longest.
        """
        length_N = np.asarray(lengths, np.float64)
        at, taken = np.log(self.tokens[1:]), np.log(np.subtract(self.seconds[1:], self.launch_s))
        x_N = np.log(np.maximum(length_N, 1))
        slope = (taken[-1] - taken[-2]) / (at[-1] - at[-2])
        y_N = np.interp(x_N, at, taken) + np.minimum(x_N - at[0], 0)
        y_N += np.maximum(x_N - at[-1], 0) * slope
        return np.asarray(np.where(length_N > 0, np.exp(y_N), 0.0) * self.scale)

    def of_microbatch(self, lengths: ArrayLike) -> float:
        """Return the seconds of a microbatch of documents that attend to themselves alone."""
        taken_s = float(self.of_documents(lengths).sum())
        return max(taken_s, float(self.of_documents(self.floor_tokens)))

    @property
    def launch_s(self) -> float:
        """What a launch takes, whatever it holds; not scaled."""
        return self.seconds[0]

    @cached_property
    def fitted(self) -> md.costs.Measured:
        """What a user makes of these times for the planner, as docs/costs.md says."""
        pairs = zip(self.tokens[1:], self.seconds[1:], strict=True)
        return md.costs.Measured([(tokens, taken - self.launch_s) for tokens, taken in pairs])

    def planned(self, attention: float = 1.0) -> md.costs.Measured:
        """Return the planner's cost, with its quadratic term off by a factor."""
        law = self.fitted
        return md.costs.Measured.from_coefficients(
            law.per_document_s, law.per_token_s, law.per_token2_s * attention
        )

    @property
    def crossover_tokens(self) -> float:
        """Return the length at which the quadratic term equals the linear one."""
        return self.fitted.per_token_s / self.fitted.per_token2_s


def load() -> tuple[StepTimes, dict[str, Any]]:
    """Return the measured times, and all that is known of them."""
    record = json.loads(PATH.read_text("utf-8"))
    times = record["times"]
    return StepTimes(
        tokens=tuple(row["tokens"] for row in times),
        seconds=tuple(row["seconds"] for row in times),
    ), record
