"""Names of functions: those that other processes find them by, and those for messages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

from megadask.planner.errors import ConfigError


def import_path(value: Any) -> str | None:
    """Return the ``"module:name"`` that other processes find this object under, or None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or module == "__main__":
        return None
    try:
        found = attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is value else None


def from_import_path(path: str) -> Callable[..., Any]:
    """Invert `import_path`. Raises ConfigError when there is no such callable."""
    module, _, name = path.partition(":")
    try:
        found = attrgetter(name)(import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "nothing to import", got=repr(path), limit='"module:name" that imports here'
        ) from error
    if not callable(found):
        raise ConfigError("what was imported cannot be called", got=repr(path))
    return found  # type: ignore[no-any-return]


def display_name(value: Any) -> str:
    """Return a short name for messages and reports."""
    if isinstance(value, functools.partial):
        return display_name(value.func)
    return str(getattr(value, "__qualname__", type(value).__qualname__))
