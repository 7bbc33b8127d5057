"""Documents that every machine with Python has: source code, prose about it, and docstrings."""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

#: Folders that hold no documents of their own; site-packages is a root itself.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})

_PROSE_SUFFIXES = (".md", ".rst", ".txt")
_PROSE_STEMS = (
    "authors",
    "changelog",
    "changes",
    "copying",
    "license",
    "licence",
    "notice",
    "readme",
)
#: Lists for machines, not prose.
_NOT_PROSE = frozenset(
    {
        "dependency_links.txt",
        "entry_points.txt",
        "namespace_packages.txt",
        "requirements.txt",
        "requires.txt",
        "sources.txt",
        "top_level.txt",
    }
)
_MIN_PROSE_CHARACTERS = 64

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Root:
    """A folder to take documents from, and what to call it in their names."""

    label: str
    path: Path


@dataclass(frozen=True)
class File:
    """A file of a root; its name starts with the root's label and holds no absolute path."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True)
class Document:
    """A text, and where it is from."""

    name: str
    text: str

    @property
    def size_bytes(self) -> int:
        """Length in UTF-8."""
        return len(self.text.encode())


def installed_roots() -> tuple[Root, ...]:
    """Return the standard library and the installed packages of this Python."""
    paths = sysconfig.get_paths()
    roots = {Path(paths["stdlib"]): "stdlib", Path(paths["purelib"]): "site-packages"}
    roots.setdefault(Path(paths["platlib"]), "site-packages-platform")
    return tuple(Root(label, path) for path, label in roots.items() if path.is_dir())


def find(roots: Iterable[Root], accept: Callable[[str], bool]) -> list[File]:
    """Return the files whose base name is accepted, sorted by name."""
    found = []
    for root in roots:
        for folder, subfolders, names in os.walk(root.path):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
            for name in filter(accept, names):
                path = Path(folder, name)
                relative = path.relative_to(root.path).as_posix()
                if path.is_file() and relative.isprintable():
                    found.append(File(f"{root.label}/{relative}", path, path.stat().st_size))
    return sorted(found, key=lambda file: file.name)


def choose(files: Sequence[File], max_bytes: int) -> list[File]:
    """Return files of at most ``max_bytes`` in all, in their order.

    A quarter of the bytes goes to the largest files, so that the tail of the lengths stays heavy;
    the rest to a sample that hangs on nothing but names.
    """
    if sum(file.size_bytes for file in files) <= max_bytes:
        return list(files)
    chosen: set[str] = set()
    total_bytes = 0
    largest = sorted(files, key=lambda file: (-file.size_bytes, file.name))
    sample = sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
    for limit_bytes, candidates in ((max_bytes // 4, largest), (max_bytes, sample)):
        for file in candidates:
            if file.name not in chosen and total_bytes + file.size_bytes <= limit_bytes:
                chosen.add(file.name)
                total_bytes += file.size_bytes
    return [file for file in files if file.name in chosen]


def is_code(name: str) -> bool:
    """Whether a file of this base name is Python source."""
    return name.endswith(".py")


def is_prose(name: str) -> bool:
    """Whether a file of this base name is prose, or holds some."""
    lower = name.lower()
    if lower in _NOT_PROSE or lower.endswith((".py", ".pyi", ".pyc", ".so")):
        return False
    return name == "METADATA" or lower.endswith(_PROSE_SUFFIXES) or lower.startswith(_PROSE_STEMS)


def texts(files: Iterable[File]) -> Iterator[Document]:
    """Yield the files that are UTF-8 and not blank."""
    for file in files:
        text = _read(file)
        if text.strip():
            yield Document(file.name, text)


def prose(files: Iterable[File]) -> Iterator[Document]:
    """Yield prose files, and of packages' metadata the description only."""
    for file in files:
        text = _description(file) if file.path.name == "METADATA" else _read(file)
        if len(text.strip()) >= _MIN_PROSE_CHARACTERS:
            yield Document(file.name, text)


def docstrings(files: Iterable[File]) -> Iterator[Document]:
    """Yield every docstring of Python files, in the order of the source."""
    for document in texts(files):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of other people's code
            try:
                tree = ast.parse(document.text)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # test data of Python's own parser, templates
        yield from _docstrings(tree, document.name)


def distinct(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield each text once, the first time."""
    seen: set[bytes] = set()
    for document in documents:
        digest = hashlib.sha256(document.text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield document


def _read(file: File) -> str:
    """Return the text of a file, or nothing where it is not UTF-8."""
    try:
        return file.path.read_bytes().decode()
    except UnicodeDecodeError:
        return ""


def _description(file: File) -> str:
    try:
        description = Distribution.at(file.path.parent).metadata.json.get("description", "")
    except UnicodeDecodeError:
        return ""
    return description if isinstance(description, str) else ""


def _docstrings(node: ast.AST, name: str) -> Iterator[Document]:
    if isinstance(node, ast.Module | _Definition) and (text := ast.get_docstring(node)):
        # A lone surrogate can be written in a literal, but not in UTF-8.
        text = text.encode(errors="replace").decode()
        if text.strip():
            yield Document(name, text)
    # Definitions hide in statements only, and most of a tree is expressions.
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        children = getattr(node, field, ())
        for child in children if isinstance(children, list) else ():
            inner = f"{name}:{child.name}" if isinstance(child, _Definition) else name
            yield from _docstrings(child, inner)
