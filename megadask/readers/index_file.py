"""The small JSON files that say what a data set consists of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from megadask.planner.errors import ConfigError
from megadask.readers.storage import open_binary

Kind = TypeVar("Kind")


def read_index(url: str) -> dict[str, Any]:
    """Return a JSON object; raises ConfigError where the file holds none."""
    with open_binary(url) as file:
        data = b"".join(iter(lambda: file.read(2**20), b""))
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{url} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{url}: a JSON {type(content).__name__}", limit="an object")
    return content


def field(content: Mapping[str, Any], name: str, kind: type[Kind], url: str) -> Kind:
    """Return a field of an object; raises ConfigError where it is missing or of another kind."""
    value = content.get(name)
    if not isinstance(value, kind):
        raise ConfigError(
            f"{url}: field {name!r}", got=repr(value)[:100], limit=f"a JSON {kind.__name__}"
        )
    return value
