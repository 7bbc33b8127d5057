"""What options may be, checked in one way. A bool is no number here."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from megadask.planner.errors import ConfigError


def is_integer(value: Any, least: float = -math.inf) -> TypeGuard[int]:
    """Whether a value is an int, and not below the least."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_integer(what: str, value: Any, least: int) -> None:
    """Raise ConfigError naming what is not an integer, or below the least."""
    if not is_integer(value, least):
        raise ConfigError(what, got=repr(value), limit=f"an integer >= {least}")


def check_number(what: str, value: Any, least: int) -> None:
    """Raise ConfigError naming what is not a finite number, or below the least."""
    if not _is_number(value) or not least <= value < math.inf:
        raise ConfigError(what, got=repr(value), limit=f"a number >= {least}")


def check_above_0(what: str, value: Any) -> None:
    """Raise ConfigError naming what is not a finite number above 0."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ConfigError(what, got=repr(value), limit="a number above 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
