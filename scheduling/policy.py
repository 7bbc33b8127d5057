"""What becomes of records that are bad: the word or the function of ``Source(on_error=)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from megadask.planner.errors import ConfigError

Action = Literal["raise", "skip"]
#: An action; or what decides on one, from the error and the place of the record.
OnError = Action | Callable[[Exception, str], Action]


def skips(on_error: OnError, error: Exception, where: str) -> bool:
    """Return whether a bad record is passed over, not fatal.

    Raises ConfigError for a function that returns anything but an action.
    """
    action = on_error if isinstance(on_error, str) else on_error(error, where)
    if action not in get_args(Action):
        raise ConfigError(
            "Source(on_error=): what the function returned",
            got=repr(action),
            limit=f"one of {get_args(Action)}",
        ) from error
    return action == "skip"
