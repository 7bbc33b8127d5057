"""What the code of a function reads, and what it changes while it runs."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Literal

from megadask.fingerprints.trees import Tree
from megadask.fingerprints.values import attribute

_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}

#: How a name is meant.
Kind = Literal["global", "attribute", "outer", "default"]
Named = frozenset[tuple[Kind, str]]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names in a code, and in those of the functions inside it.

    Attributes
    ----------
    reads
        Globals that it reads, each with the attributes that it asks them for at once:
        ``("config", "limit")`` for ``config.limit``.
    mentions
        All names of globals and of attributes.
    assigns
        Names that it gives another value: globals, attributes, variables of an outer function.
    fills
        Names of the containers whose content it changes.
    made
        Attributes that it assigns on objects that it made itself, and on no others, each after the
        global that it calls to make the object.
    """

    reads: frozenset[tuple[str, ...]]
    mentions: frozenset[str]
    assigns: Named
    fills: Named
    made: frozenset[tuple[str, str]]

    def settled(self, values: Mapping[str, Any]) -> Names:
        """Return the names without the attributes that are assigned on new objects only.

        values
            The globals of the code: calling what is no plain class may return an old object.
        """
        others = {attr for maker, attr in self.made if not _makes_new(values.get(maker))}
        made = {("attribute", attr) for _, attr in self.made if attr not in others}
        return replace(self, assigns=self.assigns - made)


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """Return the names in a code, and in those of the functions inside it."""
    codes = list(_nested(code))
    reads = frozenset(path for one in codes for path in _reads(one))
    mentions = frozenset(name for one in codes for name in one.co_names)
    heads = {path[0] for path in reads}
    tree = Tree(source_of(code) or "")
    return Names(
        reads=reads,
        mentions=mentions,
        assigns=frozenset(named for one in codes for named in _assigned(one)),
        fills=frozenset(_filled(code, tree, heads, mentions)),
        made=frozenset((maker, _mangled(attr, mentions)) for maker, attr in tree.made(heads)),
    )


def source_of(code: CodeType) -> str | None:
    """Return the source of a function; None where there is none, and for a lambda.

    The source of a lambda is its line, which others may stand in, too; so is that of the code
    inside a lambda, for which this is not to be asked.
    """
    return None if code.co_name == "<lambda>" else _source(code, code.co_filename)


@functools.lru_cache(maxsize=4096)
def _source(code: CodeType, file: str) -> str | None:
    """Return the source of a code; that of another file may differ, though the codes are equal."""
    try:
        return inspect.getsource(code)
    except Exception:  # there are as many ways to have no source as to be declared
        return None


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _nested(const)


def _reads(code: CodeType) -> Iterator[tuple[str, ...]]:
    path: list[str] = []
    for step in dis.get_instructions(code):
        if path and step.opname in _ATTRIBUTES:
            path.append(step.argval)
            continue
        if path:
            yield tuple(path)
        path = [step.argval] if step.opname in _READS else []
    if path:
        yield tuple(path)


def _assigned(code: CodeType) -> Iterator[tuple[Kind, str]]:
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield "global", step.argval
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield "attribute", step.argval
        elif step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars:
            yield "outer", step.argval


def _filled(
    code: CodeType, tree: Tree, read: Collection[str], mentions: Collection[str]
) -> Iterator[tuple[Kind, str]]:
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for node in tree.filled():
        if isinstance(node, ast.Attribute):
            yield "attribute", _mangled(node.attr, mentions)
        elif node.id in read:
            yield "global", node.id
        elif node.id in code.co_freevars:
            yield "outer", node.id
        elif node.id in arguments and tree.is_steady(node.id):
            yield "default", node.id


def _mangled(attr: str, mentions: Collection[str]) -> str:
    """Return the name that an attribute has outside its class: ``_Cut__cache`` of ``__cache``."""
    if attr.startswith("__") and attr not in mentions:
        return min((name for name in mentions if name.endswith(attr)), default=attr)
    return attr


def _makes_new(maker: Any) -> bool:
    """Whether a call surely makes another object: one of a class that leaves this to Python."""
    new: Any = attribute(maker, "__new__")
    return type(maker) is type and new is object.__new__
