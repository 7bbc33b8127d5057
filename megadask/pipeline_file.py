"""The YAML form of a pipeline: what `megadask.Pipeline.from_yaml` reads.

A component is written ``{Name: arguments}``, with arguments a mapping of keywords, or one value; or
``Name`` alone. Names are those of `megadask.readers`, `megadask.transforms` and `megadask.costs` at
their places, or the import path ``package.module:name`` of anything else; what stands alone behind
an import path is taken as it is. A mapping whose keys are integers is a schedule of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import fsspec
import yaml

import megadask as md
from megadask.planner.errors import ConfigError
from megadask.planner.graph import DGraph
from megadask.planner.names import from_import_path
from megadask.source import Source

#: Words of a strategy: primitives of the graph, in the order they are to be recorded.
_WORDS = ("mix", "distribute", "cost", "balance", "defer", "context", "broadcast_at", "select")
#: Those of the graph of a modality.
_ITEM_WORDS = ("distribute", "cost", "balance")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is given twice, where YAML would keep the last one and drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping; raises ConfigError naming the line of a second key."""
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(
                    f"{self.name}, line {key_node.start_mark.line + 1}",
                    got=f"{key!r} a second time",
                )
            seen.add(key)
        return dict(super().construct_mapping(node, deep))


def load(path: str) -> dict[str, Any]:
    """Return the arguments of the `Pipeline` that a YAML file declares.

    path: local or any that fsspec opens. Raises ConfigError naming the place of what is wrong.
    """
    try:
        with fsspec.open(path, "rt") as file:
            data = yaml.load(file, _Loader)
    except OSError as error:
        got = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the pipeline file {path} cannot be read", got=got) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML", got=str(error)) from error
    data = _mapping(path, data)
    known: dict[str, Callable[[str, Any], Any]] = {
        "sources": _sources,
        "topology": _topology,
        "strategy": _strategy,
        "batching": lambda where, value: _component(where, value, _batchings()),
        "collate": _collate,
    }
    return {
        name: known[name](f"{path}: {name}", value) if name in known else value
        for name, value in data.items()
    }


def call(where: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return what is made of keyword arguments; an unfit one is a ConfigError at its place."""
    try:
        return make(**arguments)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # it was called, and failed within
        raise ConfigError(where, got=str(error)) from error
    except ConfigError as error:
        error.add_note(f"MegaDask: {where}")
        raise


@dataclass(frozen=True)
class FileStrategy:
    """A strategy of words: calls the primitives of a graph as a file lists them.

    words
        (where, word, value) in order; values as in the file.
    """

    words: tuple[tuple[str, str, Any], ...]

    def __call__(self, graph: DGraph) -> None:
        """Record all words."""
        for where, word, value in self.words:
            _say(graph, where, word, value)


def _say(graph: Any, where: str, word: str, value: Any) -> None:
    """Record one word: a mapping holds its keywords, anything else is its only argument."""
    primitive = getattr(graph, word)
    if word == "select":
        value = dict(_mapping(where, value))
        words = _words(where, value.pop("words", {}), _ITEM_WORDS)
        items = call(where, primitive, value)
        for place, name, inner in words:
            _say(items, place, name, inner)
    elif word == "mix":
        value = _mapping(where, value)
        with_by = set(value) == {"weights", "by"}
        by = {"by": value["by"]} if with_by else {}
        call(where, primitive, {"schedule": _value(value["weights"] if with_by else value), **by})
    elif word == "cost":
        call(where, primitive, {"cost": _component(where, value, md.costs)})
    elif isinstance(value, Mapping):
        call(where, primitive, {name: _value(item) for name, item in value.items()})
    else:
        call(where, partial(primitive, _value(value)), {})


def _strategy(where: str, value: Any) -> Callable[..., Any] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return from_import_path(value)
    return FileStrategy(tuple(_words(where, value, _WORDS)))


def _words(where: str, value: Any, known: tuple[str, ...]) -> list[tuple[str, str, Any]]:
    words = _mapping(where, value)
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ConfigError(f"{where}: words", got=unknown, limit=f"some of {known}")
    return [(f"{where}.{word}", word, said) for word, said in words.items()]


def _sources(where: str, value: Any) -> list[Source]:
    sources = []
    for name, said in _mapping(where, value).items():
        place = f"{where}.{name}"
        arguments = dict(_mapping(place, said))
        unknown = sorted(set(arguments) - {item.name for item in fields(Source)})
        if unknown or "reader" not in arguments:
            got = unknown or "no reader"
            raise ConfigError(place, got=got, limit=f"{[item.name for item in fields(Source)]}")
        arguments["reader"] = _component(f"{place}.reader", arguments["reader"], md.readers)
        if arguments.get("transform") is not None:
            arguments["transform"] = _component(
                f"{place}.transform", arguments["transform"], md.transforms
            )
        on_error = arguments.get("on_error")
        if isinstance(on_error, str) and ":" in on_error:
            arguments["on_error"] = from_import_path(on_error)
        sources.append(call(place, Source, {"name": name, **arguments}))
    return sources


def _collate(where: str, value: Any) -> Any:
    """Return a function by its import path; with arguments, what it makes of them."""
    return None if value is None else _component(where, value, SimpleNamespace())


def _batchings() -> SimpleNamespace:
    return SimpleNamespace(Fixed=md.Fixed, Packed=md.Packed, Padded=md.Padded)


def _topology(where: str, value: Any) -> md.ClientPlaceTree:
    return call(where, md.ClientPlaceTree, _mapping(where, value))  # type: ignore[no-any-return]


def _component(where: str, value: Any, home: object) -> Any:
    """Return the object that a component stands for."""
    if isinstance(value, str):
        found = _find(where, value, home)
        return call(where, found, {}) if isinstance(found, type) else found
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ConfigError(where, got=repr(value), limit="Name, or {Name: arguments}")
    ((name, arguments),) = value.items()
    make, place = _find(where, name, home), f"{where}.{name}"
    if isinstance(arguments, Mapping) and not _is_schedule(arguments):
        inner = {key: _inner(f"{place}.{key}", item, home) for key, item in arguments.items()}
        return call(place, make, inner)
    if isinstance(arguments, list) and name == "Chain":
        steps = [_component(f"{place}[{i}]", item, home) for i, item in enumerate(arguments)]
        return call(place, partial(make, *steps), {})
    return call(place, partial(make, _inner(place, arguments, home)), {})


def _inner(where: str, value: Any, home: object) -> Any:
    """Return an argument: a component where it looks like one, else a value."""
    if isinstance(value, Mapping) and len(value) == 1:
        (name,) = value
        if _is_offered(name, home) or (isinstance(name, str) and ":" in name):
            return _component(where, value, home)
    return _value(value)


def _value(value: Any) -> Any:
    """Return a plain value: lists as tuples, mappings of integers as schedules."""
    if isinstance(value, list):
        return tuple(_value(item) for item in value)
    if isinstance(value, Mapping) and _is_schedule(value):
        return md.Schedule.stages(dict(value))
    return value


def _is_schedule(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(type(key) is int for key in value)


def _find(where: str, name: Any, home: object) -> Any:
    if isinstance(name, str) and ":" in name:
        return from_import_path(name)
    if not _is_offered(name, home):
        offered = [other for other in sorted(dir(home)) if _is_offered(other, home)]
        others = f", or one of {offered}" if offered else ""
        raise ConfigError(where, got=repr(name), limit=f"an import path module:name{others}")
    return getattr(home, name)


def _is_offered(name: Any, home: object) -> bool:
    """Whether there is a class of ours by that name."""
    if not isinstance(name, str) or not name[:1].isupper():
        return False
    found = getattr(home, name, None)
    return isinstance(found, type) and found.__module__.startswith("megadask.")


def _mapping(where: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(where, got=repr(value), limit="a mapping")
    return value
