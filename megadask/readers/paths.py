"""From paths, globs and brace lists to a sorted list of files."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec.core

from megadask.planner.errors import ConfigError

#: One path, glob, brace list or fsspec URL, or several of them.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: The innermost ``{a,b}`` or ``{00..17}`` of a pattern.
_BRACES = re.compile(r"\{([^{}]*,[^{}]*|\d+\.\.\d+)\}")


@dataclass(frozen=True)
class DataFile:
    """A file to read.

    Attributes
    ----------
    url
        Absolute local path, or fsspec URL.
    name
        Path relative to the common parent of all files of the reader.
    size_bytes
        Size when it was listed, None where the file system does not say.
    """

    url: str
    name: str
    size_bytes: int | None


def absolute(paths: Paths) -> tuple[str, ...]:
    """Return the patterns with local ones made absolute, so that any worker can read them."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, Iterable):
        raise ConfigError("paths", got=repr(paths), limit="a path, a glob, a URL, or several")
    patterns = tuple(_absolute(path) for path in paths)
    if not patterns:
        raise ConfigError("paths", got="an empty list", limit="at least one path, glob or URL")
    return patterns


def expand(patterns: Iterable[str]) -> list[DataFile]:
    """Return the files that the patterns name, each once, sorted by name.

    Raises ConfigError for a path that is missing or a directory, and for an empty glob.
    """
    sizes: dict[str, int | None] = {}
    for pattern in patterns:
        for alternative in _alternatives(pattern):
            sizes.update(_match(alternative, pattern))
    names = _names(sizes)
    return [DataFile(url, names[url], sizes[url]) for url in sorted(sizes, key=names.__getitem__)]


def below(folder: str) -> list[DataFile]:
    """Return all files in a folder and its folders, named by their path in it, sorted by name.

    Raises ConfigError where there are none.
    """
    filesystem, root = _filesystem(os.path.normpath(folder) if "://" not in folder else folder)
    found = filesystem.find(root, detail=True)
    root = posixpath.join(root, "")
    files = [
        DataFile(_url(filesystem, name, folder), name.removeprefix(root), info.get("size"))
        for name, info in found.items()
        if name.startswith(root)
    ]
    if not files:
        raise ConfigError(f"there are no files in {folder!r}")
    return sorted(files, key=lambda file: file.name)


def _filesystem(path: str) -> tuple[Any, str]:
    try:
        filesystem, root = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"cannot open {path!r}: {error}") from error
    # Object stores keep what they once listed, and would not see data that changed since.
    filesystem.invalidate_cache()
    return filesystem, root


def _url(filesystem: Any, found: str, asked: str) -> str:
    """Return what a file system found, in the form in which it was asked for."""
    return str(filesystem.unstrip_protocol(found)) if "://" in asked else found


def _absolute(path: str | os.PathLike[str]) -> str:
    text: object = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ConfigError("paths", got=repr(path), limit="a non-empty path, glob or URL")
    if "::" in text:
        raise ConfigError(
            "paths", got=repr(text), limit="a URL without '::'", remedy="Unpack the files first."
        )
    text = re.sub("^(file|local)://", "", text)
    if "://" in text:
        return text
    # Not normalised yet: a ".." may stand inside braces.
    return os.path.join(os.getcwd(), os.path.expanduser(text))


def _alternatives(pattern: str) -> list[str]:
    """Return the patterns that a pattern with brace lists stands for."""
    braces = _BRACES.search(pattern)
    if braces is None:
        return [pattern]
    first, dots, last = braces[1].partition("..")
    if dots and first.isdigit() and last.isdigit():
        choices = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
        if not choices:
            raise ConfigError(f"{pattern!r} has an empty range", got=braces[0], limit="{low..high}")
    else:
        choices = braces[1].split(",")
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [path for choice in choices for path in _alternatives(before + choice + after)]


def _match(path: str, pattern: str) -> dict[str, int | None]:
    """Return url to size of the files that one pattern without brace lists matches."""
    asked = f"(from {pattern!r})" if path != pattern else ""
    if "://" not in path:
        path = os.path.normpath(path)
    filesystem, root = _filesystem(path)
    try:
        # Before globbing, for names that hold a "[" or "*".
        info: dict[str, Any] | None = filesystem.info(root)
    except FileNotFoundError:
        info = None
    if info is not None and info["type"] == "directory":
        raise ConfigError(
            f"{path!r} is a directory {asked}".rstrip(),
            remedy=f"Name the files in it, such as {posixpath.join(path, '*.parquet')!r}.",
        )
    if info is not None:
        return {_url(filesystem, root, path): info.get("size")}
    if not any(sign in root for sign in "*?["):
        raise ConfigError(
            f"there is no file {path!r} {asked}".rstrip(),
            remedy="A relative path is taken from the folder where the reader was made.",
        )
    found = filesystem.glob(root, detail=True)
    files = {
        _url(filesystem, name, path): info.get("size")
        for name, info in found.items()
        if _is_file(info)
    }
    if not files:
        raise ConfigError(
            f"no file matches {path!r} {asked}".rstrip(),
            remedy="A relative path is taken from the folder where the reader was made.",
        )
    return files


def _is_file(info: dict[str, Any]) -> bool:
    return bool(info["type"] != "directory")


def _names(urls: Iterable[str]) -> dict[str, str]:
    """Return every url's path relative to the common parent, which no mount point is part of."""
    split: dict[str, tuple[str, str]] = {}
    for url in urls:
        scheme, mark, path = url.partition("://")
        split[url] = (scheme, path) if mark else ("", url)
    schemes = {scheme for scheme, _ in split.values()}
    parents = {
        scheme: posixpath.commonpath(
            [posixpath.dirname(p) for s, p in split.values() if s == scheme]
        )
        for scheme in schemes
    }
    names = {
        url: posixpath.relpath(path, parents[scheme] or ".")
        for url, (scheme, path) in split.items()
    }
    if len(schemes) > 1:
        names = {url: f"{split[url][0] or 'file'}://{name}" for url, name in names.items()}
    return names
