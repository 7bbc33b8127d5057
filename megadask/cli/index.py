"""``megadask index``: read sources once, so that steps can be planned without their payload."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import megadask as md
from megadask.cli.sources import OBJECT, count, declared, import_from_here, transform_of

if TYPE_CHECKING:
    from megadask.indexing.index import Indexed
    from megadask.pipeline import Pipeline
    from megadask.source import Source


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
    add("--workers", type=count, default=1, help="processes that read shards")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the indexes, and say what is in them; return the exit code."""
    from megadask.indexing.known import ignored_indexes

    import_from_here()
    if len(options.sources) == 1 and OBJECT.fullmatch(options.sources[0]):
        with ignored_indexes():
            sources, pipeline = declared(options.sources[0], "index")
            return _write(sources, pipeline, options)
    if options.column is None and ":" not in options.transform:
        parser.error("files need --column, or a transform of your own")
    return _write([_of_files(options)], None, options)


def _of_files(options: argparse.Namespace) -> Source:
    from megadask.indexing.file_lengths import reader_of

    reader = reader_of(options.sources, None if options.column is None else [options.column])
    return md.Source(
        "data", reader, transform=transform_of(options.transform, options.column or "text")
    )


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
    for what, number in (
        ("dropped", done.num_filtered),
        ("bad", done.num_skipped),
        ("truncated shards", done.num_truncated),
    ):
        if number:
            words.append(f"{number:,} {what}")
    first = f" (the first: {done.first_reason})" if done.first_reason else ""
    return f"{name}: {', '.join(words)}{first}; in {done.url}"
