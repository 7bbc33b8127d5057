"""What options may be, checked in one way. A bool is no number here."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from megadask.planner.errors import ConfigError

#: Longest wait that can be asked for: a year. Beyond some years Python's own timers fail.
LONGEST_S = 365 * 24 * 3600
#: The largest step, or count, that every layer can hold.
LARGEST = 2**63 - 1


def is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Whether a value is an int, and neither below the least nor above the most."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_name(value: Any) -> TypeGuard[str]:
    """Whether it is a text that can be written down: not empty, no half of a surrogate pair."""
    if not isinstance(value, str) or not value:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def check_integer(what: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ConfigError naming what is not an integer, below the least, or above the most."""
    if not is_integer(value, least, math.inf if most is None else most):
        upper = "" if most is None else f", and at most {most}"
        raise ConfigError(what, got=repr(value), limit=f"an integer >= {least}{upper}")


def check_number(what: str, value: Any, least: int) -> None:
    """Raise ConfigError naming what is not a finite number, or below the least."""
    if not _is_number(value) or not least <= value < math.inf:
        raise ConfigError(what, got=repr(value), limit=f"a number >= {least}")


def check_above_0(what: str, value: Any) -> None:
    """Raise ConfigError naming what is not a finite number above 0."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ConfigError(what, got=repr(value), limit="a number above 0")


def check_seconds(what: str, value: Any) -> None:
    """Raise ConfigError naming what is not a time that one can wait: above 0, up to a year."""
    if not _is_number(value) or not 0 < value <= LONGEST_S:
        limit = f"a number of seconds above 0, and at most {LONGEST_S} (a year)"
        raise ConfigError(what, got=repr(value), limit=limit)


def check_bool(what: str, value: Any) -> None:
    """Raise ConfigError naming what is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigError(what, got=repr(value), limit="True or False")


def check_name(what: str, value: Any) -> None:
    """Raise ConfigError naming what is no name: a text that is not empty."""
    if not is_name(value):
        raise ConfigError(what, got=repr(value), limit="a name, which is not empty")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
