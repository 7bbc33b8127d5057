"""Texts of values that are equal wherever the values are, and names of what has no such text."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import re
import sys
from collections import deque
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np

#: Types whose repr tells all, and the same in every process.
_PLAIN = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, type(...), Decimal),
    *(Fraction, UUID, datetime.date, datetime.time, datetime.datetime, datetime.timedelta),
}
#: Values with content that code can change.
CONTAINERS = (dict, list, set, deque, bytearray, np.ndarray)


def all_plain(values: Any) -> bool:
    """Whether the repr of each of some values tells all of it."""
    return set(map(type, values)) <= _PLAIN


def plain_text(value: Any) -> str | None:
    """Return a text that tells all of a value, None where it is of another kind."""
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, Enum):
        return f"{type_name(value)}.{value.name}={flat_text(value.value)}"
    if isinstance(value, np.generic):
        return f"{value.dtype.str}({value.item()!r})"
    if isinstance(value, np.ndarray):
        return _array_text(value)
    if isinstance(value, re.Pattern):
        return f"re({value.pattern!r}, {value.flags})"
    if isinstance(value, PurePath):
        return f"path({value.as_posix()!r})"
    for kind in (str, bytes, int, float):
        if isinstance(value, kind):
            return f"{type_name(value)}({kind.__repr__(value)})"
    return None


def flat_text(value: Any) -> str:
    """Return the text of a key or of a member of a set; of objects no more than a name."""
    plain = plain_text(value)
    if plain is not None:
        return plain
    if isinstance(value, tuple):
        return f"({', '.join(map(flat_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(flat_text, value)))}}}"
    return qualified_name(value)


def qualified_name(value: Any) -> str:
    """Return the name of a module, a class or a function, of anything else that of its class."""
    if isinstance(value, ModuleType):
        return value.__name__
    name = attribute(value, "__qualname__")
    if not isinstance(name, str):
        return type_name(value)
    return f"{attribute(value, '__module__') or 'builtins'}.{name}"


def attribute(value: Any, name: str) -> Any:
    """Return an attribute, None where there is none: objects may raise anything when asked."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def type_name(value: Any) -> str:
    """Return the name of the class of a value."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a record of any package, None where it is another kind of object.

    Those of a dataclass in which two equal ones may differ, as in how a cost was fitted, are none.
    """
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
    elif isinstance(value, SimpleNamespace | argparse.Namespace):
        names = list(vars(value))
    elif hasattr(type(value), "__attrs_attrs__"):
        names = [field.name for field in type(value).__attrs_attrs__]
    elif hasattr(type(value), "__pydantic_fields__"):
        names = list(vars(value))
    else:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def is_own(module: Any, home: str) -> bool:
    """Whether what is defined in a module counts as of the one who wrote the module ``home``.

    That is what lies in the same package, in the main script, or in no installed package; and all
    that is named by a declaration of ours, such as the cost of a strategy.
    """
    if not isinstance(module, str):
        return False
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "megadask":
        return False
    if home.partition(".")[0] in (top, "megadask") or module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & set(PurePath(file).parts)


def _array_text(array: np.ndarray[Any, Any]) -> str:
    kind = f"array({array.dtype.descr}, {array.shape}"
    if array.dtype.hasobject or isinstance(array, np.memmap):  # addresses; what may be huge
        return f"{kind})"
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{kind}, {digest})"
