"""What the code of a function reads, and what it changes while it runs."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Literal

_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
#: Methods of containers that change them.
_FILLERS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end"),
    *("pop", "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update"),
}


#: How a name is meant.
Kind = Literal["global", "attribute", "outer"]
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
    """

    reads: frozenset[tuple[str, ...]]
    mentions: frozenset[str]
    assigns: Named
    fills: Named


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """Return the names in a code, and in those of the functions inside it."""
    codes = list(_nested(code))
    reads = frozenset(path for one in codes for path in _reads(one))
    return Names(
        reads=reads,
        mentions=frozenset(name for one in codes for name in one.co_names),
        assigns=frozenset(named for one in codes for named in _assigned(one)),
        fills=frozenset(_filled(code, {path[0] for path in reads})),
    )


@functools.lru_cache(maxsize=4096)
def source_of(code: CodeType) -> str | None:
    """Return the source of a function; None where there is none, and for a lambda.

    The source of a lambda is its line, which others may stand in, too.
    """
    if code.co_name == "<lambda>":
        return None
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


def _filled(code: CodeType, read: Collection[str]) -> Iterator[tuple[Kind, str]]:
    try:
        tree = ast.parse(textwrap.dedent(source_of(code) or ""))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        container = _container(node)
        while isinstance(container, ast.Subscript):
            container = container.value
        if isinstance(container, ast.Attribute):
            yield "attribute", container.attr
        elif isinstance(container, ast.Name) and container.id in read:
            yield "global", container.id
        elif isinstance(container, ast.Name) and container.id in code.co_freevars:
            yield "outer", container.id


def _container(node: ast.AST) -> ast.expr | None:
    """Return what a node of a syntax tree changes the content of, None for nothing."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if node.func.attr in _FILLERS else None
    return None
