"""Weights of sources: checked numbers, and the integer shares that they come to.

Axis: S sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError

#: What weights are shares of: the samples (spans) that are drawn, or their tokens.
MixBy = Literal["samples", "tokens"]

#: Integer shares of the sources sum to this.
TOTAL_SHARE = 2**32


def check_names(names: Sequence[str] | Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError if a name is not among the known sources."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(
            "weights of an unknown source", got=unknown, limit=f"sources among {sorted(known)}"
        )


def quantise(weights: Sequence[float]) -> NDArray[np.int64]:
    """Return (S,) shares proportional to the weights, which sum to 2**32.

    As `StepSchedule.weights_at` says. Raises ConfigError if a weight is negative or not finite, or
    if all are zero.
    """
    ratios = [not_negative(weight, "weight").as_integer_ratio() for weight in weights]
    # Denominators are powers of two: the largest is common to all.
    common = max((bottom for _, bottom in ratios), default=1)
    exact = [top * (common // bottom) for top, bottom in ratios]
    total = sum(exact)
    if not total:
        raise ConfigError("weights", got=list(weights), limit="one above 0")
    shares, rests = map(
        list, zip(*(divmod(part * TOTAL_SHARE, total) for part in exact), strict=True)
    )
    missing = TOTAL_SHARE - sum(shares)
    for index in sorted(range(len(rests)), key=lambda i: (-rests[i], i))[:missing]:
        shares[index] += 1
    for index, part in enumerate(exact):
        if part and not shares[index]:
            shares[index] = 1
            shares[max(range(len(shares)), key=lambda i: (shares[i], -i))] -= 1
    return np.array(shares, np.int64)


def finite(value: Any, what: str) -> float:
    """Return a value as a float. Raises ConfigError, saying what it is, unless it is finite."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        raise ConfigError(what, got=repr(value), limit="a number, or a dict of weights")
    try:
        number = float(value)
    except OverflowError:  # an int with more than 300 digits
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(what, got=value, limit="a finite number")
    return number


def not_negative(value: Any, what: str) -> float:
    """Return a value as a float. Raises ConfigError unless it is finite and at least 0."""
    if finite(value, what) < 0:
        raise ConfigError(what, got=value, limit=">= 0")
    return float(value)
