"""What `connect` may be given; what cannot work is refused before a client is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distributed import Security

from megadask.planner.checks import (
    LARGEST,
    check_bool,
    check_integer,
    check_name,
    check_seconds,
    is_name,
)
from megadask.planner.errors import ConfigError


def check_connect(
    service: Any,
    pipeline: Any,
    *,
    prefetch: Any,
    timeout: Any,
    force: Any,
    security: Any,
    confirm: Any,
) -> None:
    """Raise ConfigError for what `connect` cannot work with."""
    check_name("connect(service=)", service)
    if pipeline is not None:
        check_name("connect(pipeline=)", pipeline)
    if prefetch is not None:
        check_integer("connect(prefetch=)", prefetch, 1, LARGEST)
    check_seconds("connect(timeout=)", timeout)
    check_bool("connect(force=)", force)
    check_bool("connect(confirm=)", confirm)
    if security is not None and not isinstance(security, Security):
        raise ConfigError(
            "connect(security=)", got=repr(security), limit="a distributed.Security, or None"
        )


def names_of(keys: Any) -> tuple[str, ...] | None:
    """Return the names of ``connect(keys=)``. Raises ConfigError for what is no list of names."""
    if keys is None:
        return None
    is_list = isinstance(keys, Iterable) and not isinstance(keys, str | Mapping)
    names = tuple(keys) if is_list else ()
    if not is_list or not all(is_name(name) for name in names):
        raise ConfigError("connect(keys=)", got=repr(keys), limit="a list of names, or None")
    return names
