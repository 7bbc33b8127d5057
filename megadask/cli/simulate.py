"""``megadask simulate``: what balancing would gain on lengths that the user has.

Parsing needs neither numpy nor Dask; everything else is imported when the command runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megadask as md
from megadask.cli.sources import MIXES, CliSource, count, files, laws, natural

if TYPE_CHECKING:
    from megadask.planner.batching import Batching
    from megadask.planner.stream_report import StreamReport

#: How the table calls ways of placing.
_LABELS = {"none": "arrival order"}


def add_options(parser: argparse.ArgumentParser, methods: Sequence[str]) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add(
        "sources",
        nargs="*",
        metavar="[NAME=]GLOB[:WEIGHT]",
        help="Parquet, JSON lines or Arrow files; paths without a name are one source, 'data'",
    )
    add("--length-column", help="column of the lengths, or of lists of tokens")
    add("--text-column", help="column of texts, of which each byte counts as a token")
    add(
        "--lengths",
        action="append",
        metavar="[NAME=]lognormal:MEDIAN,SIGMA[:WEIGHT]",
        help=f"made-up lengths instead of files, may be given again; or one of {', '.join(MIXES)}",
    )
    add("--dp", type=count, default=8, help="data-parallel ranks")
    add("--microbatches", type=count, default=8, help="microbatches of a rank in a step")
    add("--context", type=count, default=8192, help="tokens of a sequence")
    add(
        "--batching",
        choices=("packed", "padded", "fixed"),
        default="packed",
        help="whole documents packed into sequences, one padded document a sequence, or documents "
        "one after the other, cut where a sequence ends",
    )
    add("--documents", type=count, help="most documents of a sequence")
    add(
        "--overflow",
        choices=("split", "truncate", "drop"),
        help="what becomes of documents longer than the context: split, or if padded truncate",
    )
    add("--hidden", type=count, default=4096, help="width of the model")
    add("--layers", type=count, default=32, help="layers of the model")
    add(
        "--balance",
        choices=[method for method in methods if method != "none"],
        default="assignment",
        help="placement to compare with arrival order and greedy",
    )
    add(
        "--defer",
        type=count,
        metavar="STEPS",
        help="also let documents that cost too much for a step wait so many steps for others",
    )
    add(
        "--sync",
        choices=("step", "microbatch"),
        default="step",
        help="whether ranks wait for each other once a step, or in each microbatch (FSDP)",
    )
    add("--pp", type=count, default=1, help="pipeline stages of a rank (1F1B)")
    add("--steps", type=count, default=50, help="steps to plan")
    add("--seed", type=natural, default=0, help="of made-up lengths")
    add("--records", type=count, default=200_000, help="records of a source to read, about")
    add("--json", type=Path, help="file to write all figures to")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the table and write the figures; return the exit code."""
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.absolute().parent}")
    sources = _sources(options, parser)
    cost = md.costs.Transformer(hidden=options.hidden, layers=options.layers)
    weights = {name: source.weight for name, source in sources.items()}

    def strategy(graph: md.DGraph) -> None:
        graph.mix(weights).cost(cost).balance(options.balance)

    def deferring(graph: md.DGraph) -> None:
        strategy(graph)
        graph.defer(steps=options.defer, ways=options.dp)

    stream = md.Stream(
        {name: source.lengths for name, source in sources.items()},
        topology=md.ClientPlaceTree(dp=options.dp, pp=options.pp),
        strategy=strategy,
        batching=_batching(options, parser),
        steps=options.steps,
        seed=options.seed,
    )
    timed: dict[str, Any] = {"sync": options.sync, "clock": time.perf_counter}
    report = md.simulate(stream, against=("none", "greedy"), **timed)
    deferred = None
    if options.defer is not None:
        deferred = md.simulate(replace(stream, strategy=deferring), against=(), **timed)
    said = verdict(report, deferred)
    _print(report, deferred, sources, said)
    if options.json:
        figures = {
            "sources": {name: source.facts for name, source in sources.items()},
            "verdict": said,
            **report.to_dict(),
            "deferred": None if deferred is None else deferred.to_dict(),
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def verdict(report: StreamReport, deferred: StreamReport | None = None) -> str:
    """Return in plain words what balancing gains, and what stands in the way of more."""
    method, arrival = report.method, 1 / report.efficiency("none")
    gain, most = arrival * report.efficiency(method), arrival / report.bound
    if gain < 1.02:
        said = f"There is little to gain by placing: {method} makes steps {gain:.2f} x as fast"
    else:
        said = f"Balanced by {method}, steps are {gain:.2f} x as fast as in arrival order"
    said += f"; no placement of whole documents makes them more than {most:.2f} x as fast."
    if deferred is not None:
        said += (
            f" With documents that wait for others as long, steps are "
            f"{arrival * deferred.efficiency(method):.2f} x as fast as in arrival order."
        )
    elif report.bound > 1.02:
        said += (
            f" In some steps one document costs more than a rank's share: an even spread, which "
            f"takes deferral (--defer) or splitting, would be {arrival:.2f} x as fast."
        )
    return said


def _print(
    report: StreamReport,
    deferred: StreamReport | None,
    sources: Mapping[str, CliSource],
    said: str,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from megadask.planner.stream_report import describe

    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, source in sources.items():
        console.print(f"{name}: {_describe(source.facts)}")
    console.print(
        f"{report.num_steps} steps over {report.num_buckets} ranks, on average "
        f"{report.spans_T.mean():,.0f} documents and {report.tokens_T.mean():,.0f} tokens"
    )
    table = Table()
    table.add_column("placed by")
    for heading in ("max/mean", "worst", "step time", "speed-up", "planning"):
        table.add_column(heading, justify="right")
    arrival = 1 / report.efficiency("none")
    rows = [(_LABELS.get(row.method, row.method), row) for row in report.rows()]
    if deferred is not None:
        rows += [(f"{row.method}, deferred", row) for row in deferred.rows()]
    for name, row in rows:
        gain = f"{arrival / row.over_ideal:.2f}"
        times = (f"{row.imbalance:.3f}", f"{row.worst:.3f}", f"{row.over_ideal:.3f}")
        table.add_row(name, *times, gain, f"{row.planning_s * 1e3:,.0f} ms")
    for name, some in (("bound", report), ("bound, deferred", deferred)):
        if some is not None:
            table.add_row(name, "", "", f"{some.bound:.3f}", f"{arrival / some.bound:.2f}", "")
    console.print(table)
    console.print("max/mean: cost of the slowest rank; step time: 1 is an even spread of the work")
    if deferred is not None and deferred.drift is not None:
        console.print(describe(deferred.drift))
    console.print(said)


def _describe(facts: Mapping[str, Any]) -> str:
    if "law" in facts:
        return f"{facts['law']}; weight {facts['weight']:g}"
    words = [
        f"{facts['read'] - facts['skipped']:,} lengths",
        f"median {facts['median']:,}",
        f"longest {facts['longest']:,}",
        f"weight {facts['weight']:g}",
    ]
    if facts["skipped"]:
        words.append(f"{facts['skipped']:,} records without a length")
    if facts["records"] != facts["read"]:
        total = f"{facts['records']:,}" if facts["records"] else "more"
        words.append(f"{facts['read']:,} of {total} records read")
    return ", ".join(words)


def _batching(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Batching:
    """Return how documents become batches; end the process where the options do not go together."""
    kinds: dict[str, type[Batching]] = {"packed": md.Packed, "padded": md.Padded, "fixed": md.Fixed}
    kind = kinds[options.batching]
    given = {"overflow": options.overflow, "max_documents": options.documents}
    given = {name: value for name, value in given.items() if value is not None}
    words = {"overflow": "--overflow", "max_documents": "--documents"}
    for name in given:
        if name not in {field.name for field in fields(kind)}:
            parser.error(f"{words[name]} makes no sense with --batching {options.batching}")
    if options.batching == "fixed" and options.defer is not None:
        parser.error("--defer makes no sense with --batching fixed: its sequences are all full")
    return kind(options.context, options.dp * options.microbatches, **given)


def _sources(options: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, CliSource]:
    """Return the sources that were given; end the process where the options make no sense."""
    if bool(options.sources) == bool(options.lengths):
        parser.error("files or --lengths are needed, and not both")
    if options.lengths:
        return laws(options.lengths, options.context)
    column, text_column = options.length_column, options.text_column
    if (column is None) == (text_column is None):
        parser.error("files need --length-column or --text-column, and not both")
    return files(
        options.sources,
        column or text_column,
        is_text=column is None,
        most=options.records,
    )
