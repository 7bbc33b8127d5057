"""Values that change with the training step: mixture weights, batch sizes.

A schedule is a pure function of the step, so that a plan can be made at any time and anywhere.
Axis: S sources.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.planner.names import from_import_path, import_path
from megadask.planner.weights import check_names, finite, not_negative, quantise

#: What a schedule gives: a number, or weights by source name. A source without one has weight 0.
Value = float | dict[str, float]

#: So many steps ahead a function is asked where its weights change.
LOOK_AHEAD = 10_000

# How values are kept: weights as pairs in order of the names, which hash, compare and pickle.
_Stored = float | tuple[tuple[str, float], ...]


class StepSchedule(ABC):
    """A value for every step, from 0 on. Made by `Schedule`; frozen, comparable, picklable."""

    def at(self, step: int) -> Value:
        """Return the value at a step: a number, or a new dict of weights by source name."""
        if step < 0:
            raise ConfigError("step of a schedule", got=step, limit=">= 0")
        value = self._at(step)
        return dict(value) if isinstance(value, tuple) else value

    @abstractmethod
    def _at(self, step: int) -> _Stored: ...

    def integer(self, step: int) -> int:
        """Return the value at a step rounded to an integer (halves to even), at least 1.

        Raises ConfigError if it is below that, or weights.
        """
        value = self.at(step)
        if isinstance(value, dict) or round(value) < 1:
            raise ConfigError(f"schedule at step {step}", got=value, limit="a number >= 1")
        return round(value)

    def weights_at(self, step: int, names: Sequence[str]) -> NDArray[np.int64]:
        """Return (S,) the shares of the named sources at a step; they sum to 2**32.

        Quantised by the largest remainder, ties by index, in exact arithmetic. A source has a share
        of 0 if and only if its weight is 0. Raises ConfigError for numbers instead of weights, and
        for weights of sources that are not among the names.
        """
        value = self.at(step)
        if not isinstance(value, dict):
            raise ConfigError(
                f"schedule at step {step}", got=value, limit="weights, a dict by source name"
            )
        check_names(value, names)
        return quantise([value.get(name, 0.0) for name in names])

    @property
    def source_names(self) -> tuple[str, ...]:
        """Sources that it ever gives a weight (a function: at step 0); () for numbers."""
        value = self.at(0)
        return tuple(value) if isinstance(value, dict) else ()

    def changes_after(self, step: int) -> Iterable[int]:
        """Return later steps, in order, from which other sources may have a weight."""
        return ()

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return a JSON form; see `from_dict`. Raises ConfigError for a function without a path."""

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StepSchedule:
        """Invert `to_dict`."""
        arguments = {name: value for name, value in data.items() if name != "kind"}
        kind = data.get("kind")
        if kind not in _MAKERS:
            raise ConfigError("kind of schedule", got=repr(kind), limit=f"one of {sorted(_MAKERS)}")
        try:
            return _MAKERS[kind](**arguments)
        except TypeError as error:
            raise ConfigError(f"fields of a {kind} schedule", got=sorted(arguments)) from error


@dataclass(frozen=True)
class Constant(StepSchedule):
    """The same value at all steps."""

    value: _Stored

    def _at(self, step: int) -> _Stored:
        return self.value

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON form."""
        return {"kind": "constant", "value": _plain(self.value)}


@dataclass(frozen=True)
class Stages(StepSchedule):
    """The value of the last stage that has begun.

    Attributes
    ----------
    starts
        First step of each stage, rising, from 0.
    values
        Value of each stage.
    """

    starts: tuple[int, ...]
    values: tuple[_Stored, ...]

    def _at(self, step: int) -> _Stored:
        return self.values[bisect_right(self.starts, step) - 1]

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources of all stages."""
        return _names(*self.values)

    def changes_after(self, step: int) -> Iterable[int]:
        """Return the starts of later stages."""
        return self.starts[bisect_right(self.starts, step) :]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON form."""
        stages = zip(self.starts, self.values, strict=True)
        return {"kind": "stages", "stages": {str(start): _plain(value) for start, value in stages}}


@dataclass(frozen=True)
class Ramp(StepSchedule):
    """From ``start_value`` up to step ``start`` to ``end_value`` from step ``stop`` on."""

    start_value: _Stored
    end_value: _Stored
    start: int
    stop: int
    shape: Literal["linear", "cosine"]

    def _at(self, step: int) -> _Stored:
        if step <= self.start:
            return self.start_value
        if step >= self.stop:
            return self.end_value
        part = (step - self.start) / (self.stop - self.start)
        if self.shape == "cosine":
            part = _portable((1.0 - math.cos(math.pi * part)) / 2)
        if isinstance(self.start_value, tuple) or isinstance(self.end_value, tuple):
            before, after = dict(cast(Any, self.start_value)), dict(cast(Any, self.end_value))
            return tuple(
                (name, _between(before.get(name, 0.0), after.get(name, 0.0), part))
                for name in self.source_names
            )
        return _between(self.start_value, self.end_value, part)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources at either end."""
        return _names(self.start_value, self.end_value)

    def changes_after(self, step: int) -> Iterable[int]:
        """Return where the ramp begins and where it has ended."""
        return [change for change in (self.start + 1, self.stop) if change > step]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON form."""
        return {
            "kind": self.shape,
            "start_value": _plain(self.start_value),
            "end_value": _plain(self.end_value),
            "start": self.start,
            "stop": self.stop,
        }


@dataclass(frozen=True)
class Temperature(StepSchedule):
    """Weights size ** (1 / t), with t going linearly from t0 to t1 between two steps."""

    sizes: tuple[tuple[str, float], ...]
    t0: float
    t1: float
    start: int
    stop: int

    def _at(self, step: int) -> _Stored:
        part = min(1.0, max(0.0, (step - self.start) / (self.stop - self.start)))
        exponent = 1.0 / _between(self.t0, self.t1, part)
        largest = max(size for _, size in self.sizes)
        # A source with any data keeps a weight, however small.
        return tuple(
            (name, max(_portable((size / largest) ** exponent), 2.0**-60) if size else 0.0)
            for name, size in self.sizes
        )

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of all sources with a size."""
        return _names(self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON form."""
        return {"kind": "temperature", **vars(self), "sizes": dict(self.sizes)}


@dataclass(frozen=True)
class Function(StepSchedule):
    """What a function says of the step. It must depend on nothing else."""

    function: Callable[[int], float | Mapping[str, float]]

    def _at(self, step: int) -> _Stored:
        return _stored(self.function(step), f"Schedule.function at step {step}")

    def changes_after(self, step: int) -> Iterable[int]:
        """Return the next `LOOK_AHEAD` steps: a function may change at any of them."""
        return range(step + 1, step + 1 + LOOK_AHEAD)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON form. Raises ConfigError if the function cannot be imported."""
        path = import_path(self.function)
        if path is None:
            raise ConfigError(
                "a schedule by a function that cannot be imported has no JSON form",
                got=repr(self.function),
                remedy="Define it at the top level of a module.",
            )
        return {"kind": "function", "function": path}


class Schedule:
    """Makes schedules. Values are numbers, or weights: dicts ``{source name: weight}``.

    Weights need not sum to 1. A source that a dict does not name has weight 0. ConfigError is
    raised for numbers that are not finite, and for weights that are negative or all zero.
    """

    @staticmethod
    def constant(value: float | Mapping[str, float]) -> StepSchedule:
        """Return a schedule of one value."""
        return Constant(_stored(value, "Schedule.constant"))

    @staticmethod
    def stages(stages: Mapping[int, float | Mapping[str, float]]) -> StepSchedule:
        """Return a schedule that changes at once: ``{first step: value}``, one of them at 0."""
        if not stages:
            raise ConfigError("Schedule.stages", got="no stages", limit="at least one, at step 0")
        starts = sorted(_step(start, "Schedule.stages") for start in stages)
        if starts[0] != 0:
            raise ConfigError("Schedule.stages", got=f"first stage at {starts[0]}", limit="step 0")
        values = [_stored(stages[start], f"Schedule.stages at {start}") for start in starts]
        _check_alike("Schedule.stages", *values)
        return Stages(tuple(starts), tuple(values))

    @staticmethod
    def linear(
        start_value: float | Mapping[str, float],
        end_value: float | Mapping[str, float],
        start: int,
        stop: int,
    ) -> StepSchedule:
        """Return a straight line between two values, level before ``start`` and after ``stop``."""
        return _ramp(start_value, end_value, start, stop, "linear")

    @staticmethod
    def cosine(
        start_value: float | Mapping[str, float],
        end_value: float | Mapping[str, float],
        start: int,
        stop: int,
    ) -> StepSchedule:
        """Return half a cosine wave between two values, which begins and ends level."""
        return _ramp(start_value, end_value, start, stop, "cosine")

    @staticmethod
    def temperature(
        sizes: Mapping[str, float], t0: float, t1: float, start: int, stop: int
    ) -> StepSchedule:
        """Return weights ``size ** (1 / t)`` with t from ``t0`` to ``t1`` between two steps.

        At t = 1 sources count by their size; the higher t, the more equally.
        """
        stored = _stored(sizes, "Schedule.temperature(sizes=)")
        if not isinstance(stored, tuple):
            raise ConfigError("Schedule.temperature(sizes=)", got=sizes, limit="a dict of sizes")
        for name, value in (("t0", t0), ("t1", t1)):
            if finite(value, f"Schedule.temperature({name}=)") <= 0:
                raise ConfigError(f"Schedule.temperature({name}=)", got=value, limit="> 0")
        _check_steps("Schedule.temperature", start, stop)
        return Temperature(stored, float(t0), float(t1), start, stop)

    @staticmethod
    def function(function: Callable[[int], float | Mapping[str, float]]) -> StepSchedule:
        """Return a schedule that asks a pure function of the step. Called once here to check it."""
        if not callable(function):
            raise ConfigError(
                "Schedule.function", got=repr(function), limit="a function of the step"
            )
        schedule = Function(function)
        schedule.at(0)
        return schedule


def _ramp(start_value: Any, end_value: Any, start: int, stop: int, shape: Any) -> StepSchedule:
    what = f"Schedule.{shape}"
    before, after = _stored(start_value, what), _stored(end_value, what)
    _check_alike(what, before, after)
    _check_steps(what, start, stop)
    return Ramp(before, after, start, stop, shape)


def _stored(value: object, what: str) -> _Stored:
    """Check a value and return the form in which schedules keep it."""
    if not isinstance(value, Mapping):
        return finite(value, what)
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{what}: name of a source", got=repr(name), limit="a string")
    weights = {
        name: not_negative(value[name], f"{what}: weight of {name!r}") for name in sorted(value)
    }
    if not any(weights.values()):
        raise ConfigError(f"{what}: weights", got=weights, limit="one above 0")
    return tuple(weights.items())


def _step(value: Any, what: str) -> int:
    check_integer(f"{what}: step", value, 0)
    return int(value)


def _check_steps(what: str, start: int, stop: int) -> None:
    if _step(start, what) >= _step(stop, what):
        raise ConfigError(f"{what}: steps", got=f"{start} to {stop}", limit="start < stop")


def _check_alike(what: str, *values: _Stored) -> None:
    if len({isinstance(value, tuple) for value in values}) > 1:
        raise ConfigError(f"{what}: values", got="numbers and dicts", limit="one kind")


def _names(*values: _Stored) -> tuple[str, ...]:
    return tuple(
        sorted({pair[0] for value in values if isinstance(value, tuple) for pair in value})
    )


def _between(before: float, after: float, part: float) -> float:
    return (1.0 - part) * before + part * after


def _portable(value: float) -> float:
    """Round off what mathematical libraries of different platforms may disagree on."""
    return round(value * 2**48) / 2**48


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, tuple) else value


def _stages_from_json(stages: Mapping[str, Any]) -> StepSchedule:
    return Schedule.stages({int(start): value for start, value in stages.items()})


def _function_from_json(function: str) -> StepSchedule:
    return Schedule.function(from_import_path(function))


_MAKERS: dict[str, Callable[..., StepSchedule]] = {
    "constant": Schedule.constant,
    "cosine": Schedule.cosine,
    "function": _function_from_json,
    "linear": Schedule.linear,
    "stages": _stages_from_json,
    "temperature": Schedule.temperature,
}
