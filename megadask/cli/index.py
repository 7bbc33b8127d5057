"""``megadask index``: read sources once, so that steps can be planned without their payload."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import megadask as md

if TYPE_CHECKING:
    from megadask.indexing.index import Indexed
    from megadask.pipeline import Pipeline
    from megadask.source import Source

_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="MODULE:NAME of a pipeline, a source, several of them, or a function that returns "
        "them; or files of one source: Parquet, JSON lines or Arrow, as paths, globs or URLs",
    )
    add(
        "--out",
        required=True,
        help="folder for an index of each source, NAME.arrow; or, for one source, a file that ends "
        "in .arrow",
    )
    add("--column", help="of files: the column that holds the texts")
    add(
        "--transform",
        default="bytes",
        help="of files: bytes, the path of a tokenizer.json, or MODULE:NAME of a transform",
    )
    add("--workers", type=_count, default=1, help="processes that read shards")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the indexes, and say what is in them; return the exit code."""
    from megadask.indexing.known import ignored_indexes

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if len(options.sources) == 1 and _OBJECT.fullmatch(options.sources[0]):
        with ignored_indexes():
            sources, pipeline = _declared(imported(options.sources[0]), options.sources[0])
            return _write(sources, pipeline, options)
    if options.column is None and ":" not in options.transform:
        parser.error("files need --column, or a transform of your own")
    return _write([_of_files(options)], None, options)


def imported(path: str) -> Any:
    """Return what MODULE:NAME names. Raises ConfigError where there is no such thing."""
    module, _, name = path.partition(":")
    try:
        return attrgetter(name)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise md.errors.ConfigError(
            "nothing to import",
            got=f"{path!r}: {error}",
            limit="MODULE:NAME of a module in this folder, or of one that is installed",
        ) from error


def _declared(found: Any, name: str) -> tuple[list[Source], Pipeline | None]:
    """Return the sources that an object declares, and the pipeline if it is one."""
    if callable(found) and not isinstance(found, type):
        found = found()
    if isinstance(found, md.Pipeline):
        return list(found.sources), found
    if isinstance(found, md.Source):
        return [found], None
    some = found.values() if isinstance(found, Mapping) else found
    some = list(some) if isinstance(some, Iterable) else []
    if not some or not all(isinstance(one, md.Source) for one in some):
        raise md.errors.ConfigError(
            f"{name} is nothing to index",
            got=type(found).__name__,
            limit="a Pipeline, a Source, several, or a function that returns them",
        )
    return some, None


def _of_files(options: argparse.Namespace) -> Source:
    from megadask.indexing.file_lengths import reader_of

    reader = reader_of(options.sources, None if options.column is None else [options.column])
    return md.Source("data", reader, transform=_transform(options.transform, options.column))


def _transform(text: str, column: str | None) -> Any:
    if text == "bytes":
        return md.transforms.Bytes(column or "text")
    if _OBJECT.fullmatch(text):
        return imported(text)
    return md.transforms.Tokenizer(text, column or "text")


def _write(sources: list[Source], pipeline: Pipeline | None, options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(highlight=False, markup=False, soft_wrap=True)
    is_file = options.out.endswith(".arrow")
    if is_file and len(sources) > 1:
        raise md.errors.ConfigError(
            "--out", got=options.out, limit=f"a folder, for {len(sources)} sources"
        )
    shown = Console(stderr=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as bars:
        for source in sources:
            url = options.out if is_file else f"{options.out.rstrip('/')}/{source.name}.arrow"
            bar = bars.add_task(source.name, total=len(source.reader.shards()))

            def show(done: int, total: int, bar: Any = bar) -> None:
                bars.update(bar, completed=done, total=total)

            done = md.index(
                source,
                url,
                pipeline=pipeline,
                workers=options.workers,
                progress=show,
            )
            console.print(_describe(source.name, done))
    return 0


def _describe(name: str, done: Indexed) -> str:
    words = [f"{done.num_samples:,} samples", f"{done.num_tokens:,} tokens"]
    for what, count in (
        ("dropped", done.num_filtered),
        ("bad", done.num_skipped),
        ("truncated shards", done.num_truncated),
    ):
        if count:
            words.append(f"{count:,} {what}")
    first = f" (the first: {done.first_reason})" if done.first_reason else ""
    return f"{name}: {', '.join(words)}{first}; in {done.url}"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected an integer >= 1")
    return int(text)
