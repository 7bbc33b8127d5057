"""``megadask look``: what is in files, before a run.

Parsing needs neither numpy nor Dask; everything else is imported when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megadask as md
from megadask.cli.sources import count, named_paths, natural


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
        help="Parquet, JSON lines or Arrow files; paths without a name are one source, 'data'",
    )
    add("--column", default="text", help="column of the texts, or of the tokens")
    add("--tokens", action="store_true", help="the column holds lists of tokens")
    add("--tokenizer", metavar="PATH", help="tokenizer.json for the texts; without it, bytes")
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
    if options.tokens and options.tokenizer:
        parser.error("--tokens and --tokenizer exclude each other")
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"--plot: there is no folder {options.plot.absolute().parent}")
    from rich.console import Console

    from megadask.indexing.file_lengths import reader_of

    paths, weights = named_paths(options.sources)
    given = [weight for weight in weights.values() if weight is not None]
    if given:
        raise md.errors.ConfigError("a source of look has no weight", got=given)
    transform: Any = md.transforms.Bytes(options.column)
    if options.tokens:
        transform = Ids(options.column)
    elif options.tokenizer:
        transform = md.transforms.Tokenizer(options.tokenizer, options.column)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    looks = {}
    for name, globs in paths.items():
        source = md.Source(name, reader_of(globs, [options.column]), transform=transform)
        found = md.look(source, options.records, spread=not options.first, samples=options.samples)
        looks[name] = found[name]
        console.print(repr(found))
    if options.plot:
        md.Look(looks).plot().savefig(options.plot)
    empty = [name for name, source in looks.items() if not len(source.lengths)]
    if empty:
        raise md.errors.ConfigError("no sample could be made of a source", got=empty)
    return 0
