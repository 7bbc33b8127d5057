"""What the source of a function says of what it changes: containers, and objects that it makes."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

#: Methods of containers that change them.
_FILLERS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end"),
    *("pop", "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update"),
}
#: Functions of the standard library that change their first argument.
_FILL_FIRST = {
    *("heapify", "heappop", "heappush", "heappushpop", "heapreplace"),
    *("insort", "insort_left", "insort_right"),
}


class Tree:
    """The syntax tree of a function, and of the functions inside it.

    Parameters
    ----------
    source
        Where it stands; it may be indented, as that of a method is.
    """

    def __init__(self, source: str) -> None:
        try:  # not dedented, as a text of several lines in it may not be indented
            tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
        except SyntaxError:
            tree = ast.parse("")
        self._nodes = list(ast.walk(tree))
        self._bound = Counter(name for node in self._nodes if (name := _bound(node)))
        self._arguments = Counter(node.arg for node in self._nodes if isinstance(node, ast.arg))

    def filled(self) -> Iterator[ast.Attribute | ast.Name]:
        """Yield the variables and the attributes whose content is changed."""
        aliases = {
            name: node.value
            for name, node in self._assigned()
            if self._bound[name] == 1 and name not in self._arguments
        }
        for node in self._nodes:
            root = _root(_container(node))
            if isinstance(root, ast.Name) and root.id in aliases:
                root = _root(aliases[root.id])
            if isinstance(root, ast.Attribute | ast.Name):
                yield root

    def made(self, read: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield the attributes that are assigned on objects made here, and on no others.

        Each comes after the name of what is called to make the object.

        read
            The globals that are read: only these can be called, and are no objects made here.
        """
        makers = defaultdict(list)
        for name, node in self._assigned():
            if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
                makers[name].append(node.value.func.id)
        own = {
            name: calls
            for name, calls in makers.items()
            if len(calls) == self._bound[name] and name not in {*read, *self._arguments}
            if all(call in read for call in calls)
        }
        stored = [
            (node.value.id if isinstance(node.value, ast.Name) else "", node.attr)
            for node in self._nodes
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        ]
        others = {attr for name, attr in stored if name not in own}
        for name, attr in stored:
            if attr not in others:
                yield from ((call, attr) for call in own[name])

    def is_steady(self, argument: str) -> bool:
        """Whether an argument means the same object throughout."""
        return self._arguments[argument] == 1 and argument not in self._bound

    def _assigned(self) -> Iterator[tuple[str, ast.Assign]]:
        for node in self._nodes:
            if isinstance(node, ast.Assign):
                yield from ((one.id, node) for one in node.targets if isinstance(one, ast.Name))


def _bound(node: ast.AST) -> str | None:
    """Return the name that a node gives another value, but for arguments."""
    if isinstance(node, ast.Name):
        return None if isinstance(node.ctx, ast.Load) else node.id
    return getattr(node, "asname", None) or getattr(node, "name", None)


def _container(node: ast.AST) -> ast.expr | None:
    """Return what a node of a syntax tree changes the content of, None for nothing."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return node.value
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr in _FILLERS:
        return node.func.value
    name = getattr(node.func, "attr", getattr(node.func, "id", None))
    return node.args[0] if node.args and name in _FILL_FIRST else None


def _root(node: ast.expr | None) -> ast.expr | None:
    """Return ``a`` of ``a[1][2]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node
