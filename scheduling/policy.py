"""What becomes of records that are bad: the word or the function of ``Source(on_error=)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from megadask.planner.errors import ConfigError
from megadask.scheduling.errors import SourceError, told

Action = Literal["raise", "skip"]
#: An action; or what decides on one, from the error and the place of the record.
OnError = Action | Callable[[Exception, str], Action]


def skips(on_error: OnError, error: Exception, where: str) -> bool:
    """Return whether a bad record is passed over, not fatal.

    where: source, shard and row as text. Raises ConfigError for a function that returns anything
    but an action, SourceError for one that raises.
    """
    action = on_error if isinstance(on_error, str) else _asked(on_error, error, where)
    if not isinstance(action, str) or action not in get_args(Action):
        raise ConfigError(
            f"{where}: what the function of Source(on_error=) returned for {told(error)}",
            got=repr(action) if isinstance(action, str) else _kind(action),
            limit=f"one of {get_args(Action)}",
        ) from error
    return action == "skip"


def _asked(function: Callable[[Exception, str], Action], error: Exception, where: str) -> Any:
    try:
        return function(error, where)
    except BaseException as failed:  # the user's code may raise anything
        raise SourceError(
            f"{where}: the function of Source(on_error=) fails itself, asked about {told(error)}",
            got=told(failed),
            limit=f"that it returns one of {get_args(Action)}",
        ) from failed


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
