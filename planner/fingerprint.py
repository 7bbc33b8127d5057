"""Names and fingerprints of declared values: functions, cost models, schedules.

A fingerprint is the same in every process and on every host that declares the same thing. It enters
digests, so that a resumed run notices a changed declaration.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np

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


def fingerprint(value: Any) -> str:
    """Return a hash (hexadecimal) of what was declared.

    Takes plain values, arrays, containers, dataclasses and functions. Functions that can be
    imported count by their path, others (lambdas, notebook cells) by their code, which differs
    between versions of Python. Raises ConfigError for objects that cannot be told apart reliably.
    """
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _canonical(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"array({value.dtype.str}, {value.shape}, {digest})"
    if isinstance(value, Mapping):
        pairs = sorted((_canonical(key), _canonical(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_canonical, value)) + ")"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_canonical, value))) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # What two equal values may differ in, such as how a cost was fitted, does not count.
        compared = [field.name for field in dataclasses.fields(value) if field.compare]
        fields = {name: getattr(value, name) for name in compared}
        return f"{_class_name(type(value))}{_canonical(fields)}"
    if isinstance(value, functools.partial):
        return f"partial{_canonical((value.func, value.args, value.keywords))}"
    path = import_path(value)
    if path is not None:
        return path
    if isinstance(value, types.MethodType):
        return f"method{_canonical((value.__func__, value.__self__))}"
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = (_code(value.__code__), value.__defaults__, value.__kwdefaults__, cells)
        return f"function{_canonical(parts)}"
    raise ConfigError(
        "a declared object has no fingerprint",
        got=f"an instance of {_class_name(type(value))}",
        limit="a function, a dataclass, an array or plain values",
        remedy="Make it a frozen dataclass.",
    )


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _code(code: types.CodeType) -> list[Any]:
    consts = [_code(item) if isinstance(item, types.CodeType) else item for item in code.co_consts]
    return [code.co_code, code.co_names, code.co_varnames, consts]
