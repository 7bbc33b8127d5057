"""Texts of values that are equal wherever the values are, and names of what has no such text."""

from __future__ import annotations

import argparse
import array
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
    *(datetime.timezone, array.array),
}
#: Values with content that code can change.
CONTAINERS = (dict, list, set, deque, bytearray, array.array, np.ndarray)


def all_plain(values: Any) -> bool:
    """Whether the repr of each of some values tells all of it."""
    return set(map(type, values)) <= _PLAIN


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether a value is of a class: ``isinstance`` asks the value itself, which may raise."""
    return issubclass(type(value), kinds)


def plain_text(value: Any) -> str | None:
    """Return a text that tells all of a value, None where it is of another kind."""
    if type(value) in _PLAIN or (type(value) is tuple and all_plain(value)):
        return repr(value)
    if is_a(value, Enum):
        text = plain_text(value.value)
        return None if text is None else f"{type_name(value)}.{value.name}={text}"
    if is_a(value, np.ma.MaskedArray):
        return None
    if is_a(value, np.generic):
        return f"{value.dtype.str}({value.item()!r})"
    if is_a(value, np.ndarray):
        return _array_text(value)
    if is_a(value, re.Pattern):
        return f"re({value.pattern!r}, {value.flags})"
    if is_a(value, PurePath):
        return f"path({value.as_posix()!r})"
    for kind in (str, bytes, int, float):
        if is_a(value, kind):
            return f"{type_name(value)}({kind.__repr__(value)})"
    return None


def qualified_name(value: Any) -> str:
    """Return the name of a module, a class or a function, of anything else that of its class."""
    if is_a(value, ModuleType):
        return str(value.__name__)
    name, module = attribute(value, "__qualname__"), attribute(value, "__module__")
    if not is_a(name, str):
        return type_name(value)
    return f"{module if is_a(module, str) else 'builtins'}.{name}"


def attribute(value: Any, name: str) -> Any:
    """Return an attribute, None where there is none: objects may raise anything when asked."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def type_name(value: Any) -> str:
    """Return the name of the class of a value."""
    cls = type(value)  # which may raise, too, where it is of a class of classes
    return f"{attribute(cls, '__module__')}.{attribute(cls, '__qualname__')}"


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a record of any package, None where it is another kind of object.

    Those of a dataclass in which two equal ones may differ, as in how a cost was fitted, are none.
    """
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
    elif is_a(value, (SimpleNamespace, argparse.Namespace)):
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


def _array_text(values: np.ndarray[Any, Any]) -> str | None:
    if is_a(values, np.memmap):  # may be huge
        return f"array({values.dtype.descr}, {values.shape})"
    if values.dtype.hasobject:  # its bytes are addresses
        return None
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    return f"array({values.dtype.descr}, {values.shape}, {digest})"
