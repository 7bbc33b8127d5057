"""The errors of the planner, and the shape that every MegaDask error has."""

from __future__ import annotations

from typing import Any


class MegaDaskError(Exception):
    """Base of every error that MegaDask raises on purpose.

    Parameters
    ----------
    what
        What went wrong, naming the thing it went wrong with.
    got
        The offending value, where there is one.
    limit
        What would have been accepted.
    remedy
        What the reader can do about it.
    """

    def __init__(
        self, what: str, *, got: object = None, limit: object = None, remedy: str | None = None
    ) -> None:
        self.what = what
        self.got = None if got is None else str(got)
        self.limit = None if limit is None else str(limit)
        self.remedy = remedy
        parts = [what]
        if self.got is not None:
            parts.append(f"got {self.got}")
        if self.limit is not None:
            parts.append(f"expected {self.limit}")
        message = "; ".join(parts)
        super().__init__(message if remedy is None else f"{message.rstrip('.')}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (type(self), self.what, self.got, self.limit, self.remedy)
        notes = getattr(self, "__notes__", None)
        return (
            (_rebuild, arguments) if notes is None else (_rebuild, arguments, {"__notes__": notes})
        )


def _rebuild(
    cls: type[MegaDaskError], what: str, got: str | None, limit: str | None, remedy: str | None
) -> MegaDaskError:
    return cls(what, got=got, limit=limit, remedy=remedy)


class ConfigError(MegaDaskError, ValueError):
    """A declaration (pipeline, topology, schedule, graph, option) that cannot work."""


class CostError(MegaDaskError, ValueError):
    """A cost function returned something that is not a cost."""


class PlanError(MegaDaskError, ValueError):
    """A step cannot be planned as asked: no placement fits, or a plan does not add up."""


class StateError(MegaDaskError, ValueError):
    """A saved state does not fit this pipeline, this version, or the other ranks."""
