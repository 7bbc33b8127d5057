"""A cost fitted to measured times: what the model at hand takes on the machine at hand.

Axes: L launches that were measured, K terms of the law, N spans of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megadask.planner.errors import ConfigError, CostError
from megadask.planner.fitview import html_of, text_of
from megadask.planner.metadata import Metadata
from megadask.planner.sequences import num_sequences, square_sums

#: Digits of a coefficient: far below what a measurement resolves, far above where the arithmetic of
#: two platforms differs, so that the same samples give the same cost everywhere.
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a law met the launches it was fitted to.

    Attributes
    ----------
    num_documents, tokens, token_squares
        Of every launch: its documents, their lengths added up, and the squares of their lengths.
    seconds, fitted_s, linear_s
        What every launch took; what the law says; and what the best law without squares says.
    """

    num_documents: tuple[int, ...]
    tokens: tuple[int, ...]
    token_squares: tuple[int, ...]
    seconds: tuple[float, ...]
    fitted_s: tuple[float, ...]
    linear_s: tuple[float, ...]

    @property
    def residuals(self) -> tuple[float, ...]:
        """Seconds that every launch took beyond what the law says."""
        pairs = zip(self.seconds, self.fitted_s, strict=True)
        return tuple(taken - fitted for taken, fitted in pairs)

    @property
    def r2(self) -> float:
        """Share of the variance of the times that the law explains; 0 where they do not vary."""
        return _r2(self.seconds, self.fitted_s)

    @property
    def linear_r2(self) -> float:
        """The same of the best law without squares."""
        return _r2(self.seconds, self.linear_s)


@dataclass(frozen=True, init=False, repr=False)
class Measured:
    """Cost of a span of l tokens in seconds: c0 + a l + b l**2, fitted to measured launches.

    The coefficients are the non-negative ones of the least squared error (Lawson and Hanson,
    Solving Least Squares Problems, 1974, ch. 23), rounded to six digits. Two costs with the same
    coefficients are equal, however they were come by.

    Parameters
    ----------
    samples
        A pair of every launch: the lengths of its documents in tokens, one integer or several, and
        what it took in seconds. Three different lengths at least.
    per_launch
        Whether a launch takes a constant besides, such as for starting its kernels. It needs
        launches of different numbers of documents, is no part of the cost of a span, and keeps c0
        free of what all documents of a launch share. Without it c0 is all there is besides tokens.
    modality
        What the lengths are of: the items of this modality, each of which costs c0 + a l + b l**2,
        or the spans themselves (None).

    Attributes
    ----------
    per_document_s, per_token_s, per_token2_s, per_launch_s
        c0, a, b, and the constant of a launch.
    fit
        How the law met its launches; None for given coefficients.

    Raises
    ------
    ConfigError
        A sample is no pair of lengths >= 1 and seconds > 0; or more than one law fits the samples.
    """

    per_document_s: float
    per_token_s: float
    per_token2_s: float
    modality: str | None
    per_launch_s: float = field(compare=False)
    fit: Fit | None = field(compare=False)

    #: Seconds of one step of the integer cost: a picosecond; a table may cost 48 days.
    unit: ClassVar[float] = 2.0**-40

    def __init__(
        self,
        samples: Iterable[tuple[ArrayLike, float]],
        *,
        per_launch: bool = False,
        modality: str | None = None,
    ) -> None:
        lengths, second_L = _read(samples)
        terms_of = ((1, len(of), of.sum(), (of**2).sum()) for of in lengths)
        term_LK = np.array(list(terms_of), np.float64).reshape(-1, 4)
        terms = [0, 1, 2, 3] if per_launch else [1, 2, 3]
        _check_determined(lengths, term_LK[:, terms], per_launch=per_launch)
        coefficient_K = _solve(term_LK, second_L, terms)
        fit = Fit(
            num_documents=tuple(len(of) for of in lengths),
            tokens=tuple(int(of.sum()) for of in lengths),
            token_squares=tuple(int((of**2).sum()) for of in lengths),
            seconds=tuple(second_L.tolist()),
            fitted_s=tuple((term_LK @ coefficient_K).tolist()),
            linear_s=tuple((term_LK @ _solve(term_LK, second_L, terms[:-1])).tolist()),
        )
        self._set(coefficient_K.tolist(), modality, fit)

    @classmethod
    def from_coefficients(
        cls,
        per_document_s: float,
        per_token_s: float,
        per_token2_s: float,
        *,
        modality: str | None = None,
    ) -> Measured:
        """Return the cost of a law that was fitted before."""
        coefficients = (per_document_s, per_token_s, per_token2_s)
        if not all(0 <= value < np.inf for value in coefficients) or not any(coefficients):
            raise ConfigError(
                "Measured.from_coefficients",
                got=coefficients,
                limit="finite numbers >= 0, in seconds, not all of them 0",
            )
        cost = cls.__new__(cls)
        cost._set([0.0, *map(float, coefficients)], modality, None)
        return cost

    def __call__(self, table: Metadata) -> NDArray[np.float64]:
        """Return (N,) seconds. Raises CostError if the table lacks the modality."""
        if self.modality is None:
            length_N = table["tokens"].astype(np.float64)
            power_3N = np.stack([num_sequences(table), length_N, square_sums(table)])
        else:
            items = table.ragged.get(self.modality)
            if items is None:
                raise CostError(
                    f"{self!r}: modality",
                    got=repr(self.modality),
                    limit=f"among {sorted(table.ragged)}",
                )
            power_3N = np.stack([items.sum(power).astype(np.float64) for power in range(3)])
        cost_N = (
            self.per_document_s * power_3N[0]
            + self.per_token_s * power_3N[1]
            + self.per_token2_s * power_3N[2]
        )
        return np.asarray(cost_N, np.float64)

    @property
    def r2(self) -> float:
        """R^2 of the fit, see `Fit.r2`. Raises ConfigError for given coefficients."""
        return self._known_fit().r2

    @property
    def residuals(self) -> tuple[float, ...]:
        """Seconds of every launch beyond the law. Raises ConfigError for given coefficients."""
        return self._known_fit().residuals

    def report(self) -> str:
        """Return the law and how it met its launches, as text."""
        return text_of(self)

    def __repr__(self) -> str:
        law = f"{self.per_document_s:g} + {self.per_token_s:g} l + {self.per_token2_s:g} l^2 s"
        of = "" if self.modality is None else f" per {self.modality!r}"
        return f"Measured({law}{of})"

    def _repr_html_(self) -> str:
        return html_of(self)

    def _set(self, coefficients: Sequence[float], modality: str | None, fit: Fit | None) -> None:
        per_launch_s, per_document_s, per_token_s, per_token2_s = coefficients
        values = (per_document_s, per_token_s, per_token2_s, modality, per_launch_s, fit)
        for each, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, each.name, value)

    def _known_fit(self) -> Fit:
        if self.fit is None:
            raise ConfigError(f"{self!r} was not fitted", remedy="Give Measured its samples.")
        return self.fit


def _read(
    samples: Iterable[tuple[ArrayLike, float]],
) -> tuple[list[NDArray[np.int64]], NDArray[np.float64]]:
    """Return the lengths of the documents of every launch, and (L,) its seconds."""
    lengths, seconds = [], []
    for number, sample in enumerate(samples):
        what = f"Measured(samples): sample {number}"
        try:
            of_documents, taken = sample
            length_D = np.atleast_1d(np.asarray(of_documents))
            second = np.asarray(taken, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(what, got=repr(sample), limit="a pair (lengths, seconds)") from error
        if length_D.dtype.kind not in "iu" or length_D.ndim != 1 or not length_D.size:
            raise ConfigError(
                f"{what}: lengths",
                got=f"{length_D.dtype} {length_D.shape}",
                limit="one integer or several",
            )
        if length_D.min() < 1:
            raise ConfigError(f"{what}: lengths", got=length_D.min(), limit=">= 1")
        if second.ndim or not 0 < second < np.inf:
            raise ConfigError(f"{what}: seconds", got=taken, limit="a finite number > 0")
        lengths.append(length_D.astype(np.int64))
        seconds.append(float(second))
    return lengths, np.array(seconds)


def _check_determined(
    lengths: list[NDArray[np.int64]], term_LK: NDArray[np.float64], *, per_launch: bool
) -> None:
    """Check that launches tell the K terms of the law apart."""
    num_launches, num_terms = term_LK.shape
    if num_launches < num_terms:
        raise ConfigError(
            "Measured(samples)",
            got=f"{num_launches} launches",
            limit=f"{num_terms} or more, as the law has {num_terms} coefficients",
        )
    different = np.unique(np.concatenate(lengths))
    if len(different) < 3:
        raise ConfigError(
            "Measured(samples): lengths of the documents",
            got=f"{different.tolist()} only",
            limit="three different ones or more, else they fit more than one law",
        )
    if np.linalg.matrix_rank(term_LK / np.linalg.norm(term_LK, axis=0)) < num_terms:
        raise ConfigError(
            f"Measured(samples{', per_launch=True' if per_launch else ''})",
            got="launches that more than one law fits",
            limit="launches of different numbers of documents, and of documents of different "
            "lengths",
            remedy="Measure launches of one document each, of several lengths"
            + (", and some of many short ones." if per_launch else "."),
        )


def _solve(
    term_LK: NDArray[np.float64], second_L: NDArray[np.float64], terms: list[int]
) -> NDArray[np.float64]:
    """Return (K,) coefficients >= 0, 0 of the terms that are not asked for, rounded.

    Columns are scaled to the same length, as squares of lengths are millions of times their counts.
    """
    from scipy.optimize import nnls  # large; most processes that hold a cost fit none

    scale_K = np.linalg.norm(term_LK[:, terms], axis=0)
    solution_K = nnls(term_LK[:, terms] / scale_K, second_L)[0] / scale_K
    coefficient_K = np.zeros(term_LK.shape[1])
    coefficient_K[terms] = [float(f"{value:.{_DIGITS}g}") for value in solution_K]
    return coefficient_K


def _r2(seconds: Sequence[float], fitted: Sequence[float]) -> float:
    second_L = np.array(seconds)
    variation = float(((second_L - second_L.mean()) ** 2).sum())
    left = float(((second_L - np.array(fitted)) ** 2).sum())
    return 1 - left / variation if variation else 0.0
