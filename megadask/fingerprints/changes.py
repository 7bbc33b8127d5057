"""What code changes while it runs, found from the functions that an encoder met."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from megadask.fingerprints.codes import Kind, Names
from megadask.fingerprints.values import CONTAINERS, is_a

#: Methods that make an object: what they assign is declared.
_MAKING = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__setstate__"}


@dataclass(frozen=True)
class Changes:
    """Names that code changes while it runs: given another value, or other content."""

    assigned: Collection[tuple[Kind, str]] = ()
    filled: Collection[tuple[Kind, str]] = ()

    def has(self, kind: Kind, name: str, value: Any) -> bool:
        """Whether a value is not what was declared, but what use made of it."""
        key = (kind, name)
        return key in self.assigned or (key in self.filled and is_a(value, CONTAINERS))


@dataclass(frozen=True)
class Met:
    """A function that was met: its name, its module, the names in it, whether of a class."""

    name: str
    module: str
    names: Names
    is_method: bool


def changes_of(met: Collection[Met]) -> Changes:
    """Return what functions change when the transform is used, rather than made."""
    used = {one for one in met if not one.is_method or _is_entry(one.name)}
    while True:
        mentioned = {name for one in used for name in one.names.mentions}
        more = {one for one in met if one.name in mentioned} - used
        if not more:
            break
        used |= more
    assigned = {_key(one, *named) for one in used for named in one.names.assigns}
    filled = {_key(one, *named) for one in used for named in one.names.fills}
    return Changes(assigned, filled)


def _key(met: Met, kind: Kind, name: str) -> tuple[Kind, str]:
    return kind, f"{met.module}:{name}" if kind == "global" else name


def _is_entry(name: str) -> bool:
    """Whether a method of this name is called from elsewhere when an object is used."""
    is_dunder = name.startswith("__") and name.endswith("__")
    return name in ("batch", "<lambda>") or (is_dunder and name not in _MAKING)
