"""Sources as the command line names them: files, laws of lengths, or what a module declares."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import megadask as md

if TYPE_CHECKING:
    from megadask.pipeline import Pipeline
    from megadask.planner.supply import SourceLike
    from megadask.source import Source

#: Names of `megadask.lengths.mix`.
MIXES = ("longctx", "mixed", "vl", "web")
#: [NAME=]GLOB[:WEIGHT] and [NAME=]lognormal:MEDIAN,SIGMA[:WEIGHT].
_NUMBER = r"\d+(?:\.\d*)?"
_FILES = re.compile(rf"(?:([\w.-]+)=)?(.+?)(?::({_NUMBER}))?")
#: MODULE:NAME of something to import.
OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_LAW = re.compile(rf"(?:([\w.-]+)=)?lognormal:({_NUMBER}),({_NUMBER})(?::({_NUMBER}))?")


@dataclass(frozen=True, kw_only=True, eq=False)
class CliSource:
    """A source to simulate.

    Attributes
    ----------
    lengths
        Its lengths, or their law.
    weight
        Its share of the samples.
    facts
        What is known of it, as plain values.
    """

    lengths: SourceLike
    weight: float
    facts: dict[str, Any]


def laws(texts: Sequence[str], context: int) -> dict[str, CliSource]:
    """Return sources of made-up lengths: one named mixture, or a law each.

    Raises ConfigError for what is neither, and for a name that comes twice.
    """
    if len(texts) == 1 and texts[0] in MIXES:
        made, weights = md.lengths.mix(texts[0], context)
        return {name: _source(law, weights[name], law=str(law)) for name, law in made.items()}
    sources: dict[str, CliSource] = {}
    weighted: dict[str, str | None] = {}
    for text in texts:
        match = _LAW.fullmatch(text)
        if match is None:
            raise md.errors.ConfigError(
                "--lengths",
                got=repr(text),
                limit=f"[NAME=]lognormal:MEDIAN,SIGMA[:WEIGHT], or one of {MIXES} alone",
            )
        name, median, sigma, weight = match.groups()
        name = name or "lengths"
        if name in sources:
            raise _named_twice(name)
        law = md.lengths.Lognormal(float(median), float(sigma))
        sources[name] = _source(law, float(weight or 1), law=str(law))
        weighted[name] = weight
    _check_weights(weighted)
    return sources


def files(texts: Sequence[str], column: str, *, is_text: bool, most: int) -> dict[str, CliSource]:
    """Return sources of lengths from files; without weights they weigh what they hold.

    Raises ConfigError as `file_lengths.read_lengths` does, and for names or weights that do not
    make sense.
    """
    import numpy as np

    from megadask.indexing.file_lengths import read_lengths

    paths, weighted = named_paths(texts)
    sources = {}
    for name, globs in paths.items():
        found = read_lengths(globs, column, is_text=is_text, most=most)
        weight = weighted[name]
        weighs = found.num_documents if weight is None else float(weight)
        if weighs is None and len(paths) > 1:
            raise md.errors.ConfigError(
                f"size of source {name!r}",
                got=f"only its first {found.num_read} records were read",
                remedy="Give all sources weights, or read more with --records.",
            )
        sources[name] = _source(
            found.lengths_N,
            1.0 if weighs is None else weighs,
            records=found.num_records,
            read=found.num_read,
            skipped=found.num_skipped,
            median=int(np.median(found.lengths_N)),
            longest=int(found.lengths_N.max()),
        )
    return sources


def named_paths(texts: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    """Return the globs of each source, and its weight, of words ``[NAME=]GLOB[:WEIGHT]``.

    Raises ConfigError for names or weights that do not make sense.
    """
    named: set[str] = set()
    paths: dict[str, list[str]] = {}
    weighted: dict[str, str | None] = {}
    for text in texts:
        match = _FILES.fullmatch(text)
        if match is None:
            raise md.errors.ConfigError("a source", got=repr(text), limit="[NAME=]GLOB[:WEIGHT]")
        name, path, weight = match.groups()
        if name is None and weight is not None:
            raise md.errors.ConfigError(
                "a weight without a name", got=repr(text), limit="NAME=GLOB:WEIGHT"
            )
        if name in paths or (name is None and "data" in named):
            raise _named_twice(name or "data")
        if name is not None:
            named.add(name)
        paths.setdefault(name or "data", []).append(path)
        weighted[name or "data"] = weight
    _check_weights(weighted)
    return paths, weighted


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


def declared(path: str, use: str) -> tuple[list[Source], Pipeline | None]:
    """Return the sources that MODULE:NAME declares, and the pipeline if it is one.

    Raises ConfigError where there is no such thing, or nothing to ``use`` in this way.
    """
    found = imported(path)
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
            f"{path} is nothing to {use}",
            got=type(found).__name__,
            limit="a Pipeline, a Source, several, or a function that returns them",
        )
    return some, None


def import_from_here() -> None:
    """Let modules in the working folder be imported, as ``python -m`` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def transform_of(text: str, column: str) -> Any:
    """Return the transform that ``--transform`` names, of a column of texts."""
    if text == "bytes":
        return md.transforms.Bytes(column)
    if OBJECT.fullmatch(text):
        return imported(text)
    return md.transforms.Tokenizer(text, column)


def count(text: str) -> int:
    """Parse an integer of 1 or more."""
    return _at_least(text, 1)


def natural(text: str) -> int:
    """Parse an integer of 0 or more."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text}, expected an integer >= {least}")
    return int(text)


def _source(lengths: SourceLike, weight: float, **facts: Any) -> CliSource:
    return CliSource(lengths=lengths, weight=weight, facts={**facts, "weight": weight})


def _named_twice(name: str) -> md.errors.ConfigError:
    return md.errors.ConfigError(
        "two sources have one name", got=repr(name), remedy="Rename one, or use a brace list."
    )


def _check_weights(weighted: dict[str, str | None]) -> None:
    without = sorted(name for name, weight in weighted.items() if weight is None)
    if without and len(without) < len(weighted):
        raise md.errors.ConfigError(
            "weights", got=f"none for {without}", limit="one for every source, or none at all"
        )
