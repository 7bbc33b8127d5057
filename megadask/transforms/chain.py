"""Several transforms, one after another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.errors import ConfigError
from megadask.transforms.columns import chain_columns, chain_needs
from megadask.transforms.transform import (
    Record,
    Results,
    Sample,
    Transform,
    wants_rng,
)


class Chain:
    """Apply transforms one after another; the first None drops the record.

    All but the last return what the next one takes as its record.
    """

    def __init__(self, *transforms: Transform) -> None:
        if not transforms:
            raise ConfigError("Chain()", got="no transforms", limit="at least one")
        self._steps = tuple((transform, wants_rng(transform)) for transform in transforms)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms, in the order of their use."""
        return tuple(transform for transform, _ in self._steps)

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns of a record that they read together, None where one of them may read all."""
        return chain_columns(self.transforms)

    @property
    def needed_columns(self) -> frozenset[str]:
        """The columns without which they make nothing of a record, as far as is known."""
        return chain_needs(self.transforms)

    @property
    def wants_rng(self) -> bool:
        """Whether one of them asks for a generator; they share it."""
        return any(wants for _, wants in self._steps)

    @property
    def batch(self) -> Callable[[Sequence[Record]], Results] | None:
        """What transforms several records at once, None unless all of them can."""
        steps: list[Any] = [getattr(transform, "batch", None) for transform in self.transforms]
        if self.wants_rng or not all(map(callable, steps)):
            return None
        return functools.partial(_batch_through, steps)

    def __call__(self, record: Record, rng: np.random.Generator | None = None) -> Sample | None:
        """Return what the last transform makes of a record, or None where one dropped it."""
        value: Mapping[str, Any] | None = record
        for transform, wants in self._steps:
            if value is None:
                return None
            value = transform(value, rng=rng) if wants else transform(value)
        return value

    def fingerprint(self) -> str:
        """Return a text that differs where results would."""
        return f"Chain({', '.join(fingerprint(t) for t in self.transforms)})"

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.transforms))})"

    def __eq__(self, other: object) -> bool:
        return self.transforms == other.transforms if isinstance(other, Chain) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.transforms)


def _batch_through(
    steps: Sequence[Callable[[Sequence[Any]], Results]], records: Sequence[Record]
) -> Results:
    """Return what records become by several batch transforms, one after the other."""
    results: list[Any] = list(records)
    for step in steps:
        is_left = [one is not None and not isinstance(one, BaseException) for one in results]
        left = [n for n, is_one in enumerate(is_left) if is_one]
        made = step([results[n] for n in left]) if left else []
        for n, one in zip(left, made, strict=True):
            results[n] = one
    return results
