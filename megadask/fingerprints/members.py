"""What functions, classes and objects hold, by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, MemberDescriptorType
from typing import Any

from megadask.fingerprints.changes import Changes
from megadask.fingerprints.codes import Names, source_of
from megadask.fingerprints.values import attribute, is_a

#: What classes have whose methods are written by a library: those have no source.
_GENERATORS = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__", "_fields")


def closure_of(function: FunctionType, names: Names) -> Iterator[tuple[str, Any]]:
    """Yield the variables of outer functions, but for those that the function changes."""
    changes = Changes(names.assigns, names.fills)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if not changes.has("outer", name, value):
            yield name, value


def defaults_of(function: FunctionType, names: Names) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of arguments, but for containers that the function fills."""
    changes = Changes(names.assigns, names.fills)
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    values = function.__defaults__ or ()
    found = dict(zip(reversed(arguments), reversed(values), strict=False))
    for name, value in {**found, **(function.__kwdefaults__ or {})}.items():
        if not changes.has("default", name, value):
            yield name, value


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class defines: functions, and plain attributes."""
    is_generated = any(hasattr(cls, name) for name in _GENERATORS)
    for name, member in vars(cls).items():
        found = _unwrapped(member)
        if is_dunder(name):
            if not (callable(found) or is_a(found, functools.partialmethod)):
                continue
            if is_generated and is_a(found, FunctionType) and source_of(found.__code__) is None:
                continue
        yield name, found


def state_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, or what it says that it pickles as."""
    getstate: Any = type(value).__getstate__
    if getstate is not object.__getstate__ and getstate.__module__ != "dataclasses":
        with suppress(Exception):  # it may not pickle before it is used, or for another reason
            state = value.__getstate__()
            return _by_name(state) if isinstance(state, dict) else {"state": state}
    classes = [vars(cls) for cls in type(value).__mro__]
    slots = {  # named as they are stored: the slot __cut of a class Out is _Out__cut
        name
        for held in classes
        if "__slots__" in held
        for name, member in held.items()
        if is_a(member, MemberDescriptorType)
    }
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found.update(attribute(value, "__dict__") or {})
    cached = {
        name
        for held in classes
        for name, member in held.items()
        if is_a(member, functools.cached_property)
    }
    return _by_name({name: one for name, one in found.items() if name not in cached})


def _by_name(state: dict[Any, Any]) -> dict[str, Any]:
    """Return a state as attributes; what is under other keys than texts is under one of these."""
    named = {key: one for key, one in state.items() if isinstance(key, str)}
    others = {key: one for key, one in state.items() if key not in named}
    return {**named, "": others} if others else named


def is_dunder(name: str) -> bool:
    """Whether Python gives a name its meaning."""
    return name.startswith("__") and name.endswith("__")


def _unwrapped(member: Any) -> Any:
    if is_a(member, (staticmethod, classmethod)):
        return member.__func__
    if is_a(member, property):
        return member.fget
    return member.func if is_a(member, functools.cached_property) else member
