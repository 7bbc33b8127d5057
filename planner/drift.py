"""How far a stream of deferred steps drifts from what it would have been without deferral.

Axes: T steps, S sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.metadata import Metadata, concat

Floats = NDArray[np.float64]

#: Columns that identify a span.
SPAN = ("source", "epoch", "lane", "position", "start")


@dataclass(frozen=True, kw_only=True, eq=False)
class Drift:
    """Deferred steps beside undeferred ones.

    Attributes
    ----------
    sample_mixture_T, token_mixture_T
        (T,) largest difference of a source's share of the step, over the sources: in samples, and
        in tokens.
    length_T
        (T,) Kolmogorov-Smirnov statistic of the lengths of the two steps: the largest difference
        of their distribution functions.
    length
        The same over all steps together.
    mean_delay, max_delay
        Steps by which spans come later that do; 0 where none does.
    delayed
        Share of the spans that come later, among those that both streams drew.
    waiting
        Spans that only the undeferred stream drew.
    """

    sample_mixture_T: Floats
    token_mixture_T: Floats
    length_T: Floats
    length: float
    mean_delay: float
    max_delay: int
    delayed: float
    waiting: int


def drift(deferred: Sequence[Metadata], plain: Sequence[Metadata]) -> Drift:
    """Compare the steps of two streams from the same data.

    Parameters
    ----------
    deferred, plain
        Tables of the spans of each step, from the same step on; as many of both.

    Returns
    -------
    Drift
        Lengths are compared by the test of Kolmogorov (1933) and Smirnov (1939) for two samples.

    Raises
    ------
    ConfigError
        For streams of different numbers of steps, or without any.
    """
    if len(deferred) != len(plain) or not plain:
        raise ConfigError(
            "drift(deferred, plain)",
            got=f"{len(deferred)} and {len(plain)} steps",
            limit="equal numbers, at least one",
        )
    num_sources = 1 + max(int(t["source"].max(initial=0)) for t in (*deferred, *plain))
    pairs = list(zip(deferred, plain, strict=True))
    delay_n, waiting = _delays(deferred, plain)
    late_n = delay_n[delay_n > 0]
    return Drift(
        sample_mixture_T=np.array(
            [np.abs(_shares(a, num_sources) - _shares(b, num_sources)).max() for a, b in pairs]
        ),
        token_mixture_T=np.array(
            [
                np.abs(
                    _shares(a, num_sources, a["tokens"]) - _shares(b, num_sources, b["tokens"])
                ).max()
                for a, b in pairs
            ]
        ),
        length_T=np.array([ks_statistic(a["tokens"], b["tokens"]) for a, b in pairs]),
        length=ks_statistic(
            *(np.concatenate([t["tokens"] for t in tables]) for tables in (deferred, plain))
        ),
        mean_delay=float(late_n.mean()) if len(late_n) else 0.0,
        max_delay=int(late_n.max(initial=0)),
        delayed=len(late_n) / max(1, len(delay_n)),
        waiting=waiting,
    )


def ks_statistic(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return the largest difference of two samples' distribution functions; 1 if one is empty."""
    if not len(one) or not len(other):
        return float(len(one) != len(other))
    one, other = np.sort(one), np.sort(other)
    at = np.concatenate([one, other])
    below = [np.searchsorted(side, at, side="right") / len(side) for side in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def _shares(table: Metadata, num_sources: int, size_N: NDArray[np.int64] | None = None) -> Floats:
    """Return (S,) shares of the sources of a step."""
    amount_S = np.bincount(table["source"], size_N, minlength=num_sources)
    return np.asarray(amount_S / max(1, amount_S.sum()), np.float64)


def _delays(
    deferred: Sequence[Metadata], plain: Sequence[Metadata]
) -> tuple[NDArray[np.int64], int]:
    """Return (n,) by how many steps the spans that both drew come later, and how many do not."""
    key_n, step_n = _first_steps(plain)
    other_m, other_step_m = _first_steps(deferred)
    both, index_n, index_m = np.intersect1d(key_n, other_m, assume_unique=True, return_indices=True)
    return other_step_m[index_m] - step_n[index_n], len(key_n) - len(both)


def _first_steps(tables: Sequence[Metadata]) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Return (n,) what identifies each span, and the step that it is in."""
    table = concat(tables)
    key_nC = np.stack([table[name].astype(np.int64) for name in SPAN], axis=1)
    key_n = np.ascontiguousarray(key_nC).view([(name, np.int64) for name in SPAN]).ravel()
    step_n = np.repeat(np.arange(len(tables)), [t.num_rows for t in tables])
    key_n, first_n = np.unique(key_n, return_index=True)
    return key_n, step_n[first_n]
