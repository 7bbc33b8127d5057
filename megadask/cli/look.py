"""``megadask look``: what is in files or sources, before a run.

Parsing needs neither numpy nor Dask; everything else is imported when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megadask as md
from megadask.cli.sources import (
    OBJECT,
    count,
    declared,
    import_from_here,
    named_paths,
    natural,
    transform_of,
)

if TYPE_CHECKING:
    from megadask.looking.looks import SourceLook
    from megadask.pipeline import Pipeline
    from megadask.source import Source


@dataclass(frozen=True)
class Ids:
    """Take a column of token ids as it is."""

    column: str

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens of a record."""
        return {"tokens": record[self.column]}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        metavar="[NAME=]GLOB",
        help="Parquet, JSON lines or Arrow files; paths without a name are one source, 'data'. Or "
        "MODULE:NAME of a pipeline, a source, several of them, or a function that returns them",
    )
    add("--column", default="text", help="of files: column of the texts, or of the tokens")
    add("--tokens", action="store_true", help="of files: the column holds lists of tokens")
    add(
        "--transform",
        default="bytes",
        help="of files: bytes, the path of a tokenizer.json, or MODULE:NAME of a transform",
    )
    add("--records", type=count, default=1000, help="records of a source to read")
    add(
        "--first",
        action="store_true",
        help="read the first records in the order of a run, not the beginnings of many shards",
    )
    add("--samples", type=natural, default=3, help="samples of a source to show")
    add("--plot", type=Path, metavar="FILE", help="file to draw the lengths to, such as a .png")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print what was found; return the exit code.

    Raises ConfigError where a source has no sample at all.
    """
    if options.tokens and options.transform != "bytes":
        parser.error("--tokens and --transform exclude each other")
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot: there is no folder {options.plot.absolute().parent}")
    is_declared = len(options.sources) == 1 and OBJECT.fullmatch(options.sources[0])
    of_files = (options.column, options.tokens, options.transform)
    if is_declared and of_files != ("text", False, "bytes"):
        parser.error(f"--column, --tokens and --transform are of files, not {options.sources[0]}")
    from rich.console import Console

    from megadask.indexing.known import ignored_indexes

    import_from_here()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    looks: dict[str, SourceLook] = {}
    # Indexes may not be there yet, and records are read whole here.
    with ignored_indexes():
        for what in _declared(options.sources[0]) if is_declared else _of_files(options):
            found = md.look(
                what, options.records, spread=not options.first, samples=options.samples
            )
            looks.update(found)
            console.print(repr(found))
    if options.plot:
        md.Look(looks).plot().savefig(options.plot)
    empty = [name for name, source in looks.items() if not len(source.lengths)]
    if empty:
        raise md.errors.ConfigError("no sample could be made of a source", got=empty)
    return 0


def _declared(path: str) -> list[Source] | list[Pipeline]:
    sources, pipeline = declared(path, "look at")
    return sources if pipeline is None else [pipeline]


def _of_files(options: argparse.Namespace) -> Iterator[Source]:
    from megadask.indexing.file_lengths import reader_of

    paths, weights = named_paths(options.sources)
    given = [weight for weight in weights.values() if weight is not None]
    if given:
        raise md.errors.ConfigError("a source of look has no weight", got=given)
    transform = transform_of(options.transform, options.column)
    if options.tokens:
        transform = Ids(options.column)
    # A transform of somebody's own may read others.
    columns = None if OBJECT.fullmatch(options.transform) else [options.column]
    for name, globs in paths.items():
        yield md.Source(name, reader_of(globs, columns), transform=transform)
