"""What `look` has found: figures, samples and shards of some sources, as text, table and figure.

Axes: N samples that are OK.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.planner.ids import SampleId
from megadask.planner.metadata import Metadata, Ragged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Characters of a sample that a report shows.
_SHOWN = 100


@dataclass(frozen=True, kw_only=True)
class ShardLook:
    """A shard of the source.

    Attributes
    ----------
    rows, size_bytes
        As far as they are known without reading it.
    num_read
        Records of it that were read.
    """

    name: str
    rows: int | None
    size_bytes: int | None
    num_read: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Preview:
    """A sample in short.

    Attributes
    ----------
    id
        Its name in epoch 0. Its position is right where the rows of the shards before are known.
    where
        Shard and row that it lies in.
    num_tokens
        Its length.
    tokens
        The first of its tokens.
    text
        These decoded, None where the transform has no ``decode``.
    fields
        What else the sample holds.
    record
        What the reader gave.
    """

    id: SampleId
    where: str
    num_tokens: int
    tokens: NDArray[Any]
    text: str | None
    fields: Mapping[str, str]
    record: Mapping[str, str]

    def __str__(self) -> str:
        shown = repr(self.text) if self.text is not None else str(self.tokens[:16].tolist())
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        rest = "".join(f", {name}: {value}" for name, value in self.fields.items())
        if self.text is None:
            rest += f"; from {', '.join(f'{name}: {v}' for name, v in self.record.items())}"
        return f"{self.where}: {self.num_tokens} tokens {shown}{rest}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SourceLook:
    """What was found in one source.

    Attributes
    ----------
    verdicts
        Records by what became of them: ok, filtered, skipped, tombstone.
    reasons
        Why the first ones were skipped; shard and row are named.
    failures
        Errors that ended the reading of a shard.
    lengths, loss_tokens, sample_bytes
        (N,) int64: tokens, targets that count, bytes of all that the transform returned.
    record_bytes
        Bytes of the records that became these samples, before the transform.
    fields
        What a sample holds, by the first one that has it.
    scalars
        Name to (N,) float64, NaN where a sample has none.
    items
        Modality to the lengths of the items of every sample.
    samples
        Some of them in short.
    shards
        All shards.
    seconds
        Time that reading and transforming took.
    """

    name: str
    verdicts: Mapping[str, int]
    reasons: tuple[str, ...]
    failures: tuple[str, ...]
    lengths: NDArray[np.int64]
    loss_tokens: NDArray[np.int64]
    sample_bytes: NDArray[np.int64]
    record_bytes: int
    fields: Mapping[str, str]
    scalars: Mapping[str, NDArray[np.float64]]
    items: Mapping[str, Ragged]
    samples: tuple[Preview, ...]
    shards: tuple[ShardLook, ...]
    seconds: float

    @property
    def num_read(self) -> int:
        """Records that were read, bad ones too."""
        return sum(self.verdicts.values())

    @property
    def num_bad(self) -> int:
        """Records that were skipped, and truncated shards."""
        return self.verdicts["skipped"] + self.verdicts["tombstone"]

    @property
    def num_records(self) -> int | None:
        """Records of the source, None where only reading them would tell."""
        rows = [shard.rows for shard in self.shards]
        return None if None in rows else sum(count or 0 for count in rows)

    @property
    def tokens_per_byte(self) -> float:
        """Tokens that a byte of the records came to, NaN where nothing was read."""
        return float(self.lengths.sum() / self.record_bytes) if self.record_bytes else float("nan")

    @property
    def records_per_s(self) -> float:
        """Records that one process reads and transforms in a second."""
        return self.num_read / self.seconds if self.seconds else float("nan")

    def row(self) -> dict[str, Any]:
        """Return the figures of the source, one row of `Look.table`."""
        lengths = self.lengths if len(self.lengths) else np.zeros(1, np.int64)
        median, p99 = np.percentile(lengths, [50, 99])
        sizes = [shard.size_bytes for shard in self.shards]
        return {
            "source": self.name,
            "shards": len(self.shards),
            "records": self.num_records,
            "size_bytes": None if None in sizes else sum(size or 0 for size in sizes),
            "read": self.num_read,
            **self.verdicts,
            "mean": float(lengths.mean()),
            "median": float(median),
            "p99": float(p99),
            "longest": int(lengths.max()),
            "tokens": int(self.lengths.sum()),
            "tokens_per_byte": self.tokens_per_byte,
            "records_per_s": self.records_per_s,
            **{f"{name} items": len(ragged.lengths_I) for name, ragged in self.items.items()},
        }

    def __repr__(self) -> str:
        row = self.row()
        total = "an unknown number of" if row["records"] is None else f"{row['records']:,}"
        lines = [
            f"{self.name}: {row['read']:,} of {total} records read in {row['shards']:,} shards, "
            f"{row['records_per_s']:,.0f} records/s",
            "  " + ", ".join(f"{number:,} {name}" for name, number in self.verdicts.items()),
        ]
        if not self.num_read:
            lines[1:] = ["  there is no record"]
        elif not len(self.lengths):
            lines.append("  no sample came of them")
        else:
            density = f"; {row['tokens_per_byte']:.3f} a byte" if self.record_bytes else ""
            lines.append(
                f"  tokens: mean {row['mean']:,.0f}, median {row['median']:,.0f}, 99% "
                f"{row['p99']:,.0f}, longest {row['longest']:,}{density}"
            )
        for name, ragged in self.items.items():
            if len(ragged.lengths_I):
                lines.append(
                    f"  {name}: {len(ragged.lengths_I):,} items, median length "
                    f"{np.median(ragged.lengths_I):,.0f}, longest {ragged.lengths_I.max():,}"
                )
        for name, values in self.scalars.items():
            lines.append(f"  {name}: {np.nanmin(values):g} to {np.nanmax(values):g}")
        lines += [f"  failed: {failure}" for failure in self.failures]
        lines += [f"  skipped: {reason}" for reason in self.reasons]
        if self.num_bad > len(self.reasons):
            lines.append(f"  and {self.num_bad - len(self.reasons):,} more were skipped")
        lines += [f"  {sample}" for sample in self.samples]
        return "\n".join(lines)


class Look(Mapping[str, SourceLook]):
    """What was found, by source; all figures together where there are several.

    Reads like a mapping of names to `SourceLook`.
    """

    def __init__(self, sources: Mapping[str, SourceLook]) -> None:
        self._sources = dict(sources)

    def __getitem__(self, name: str) -> SourceLook:
        try:
            return self._sources[name]
        except KeyError:
            raise KeyError(f"no source {name!r}; there are {sorted(self._sources)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        """Return the number of sources."""
        return len(self._sources)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) tokens of the samples of all sources, source after source."""
        return np.concatenate([source.lengths for source in self.values()])

    @property
    def samples(self) -> list[Preview]:
        """Some samples of every source."""
        return [sample for source in self.values() for sample in source.samples]

    @property
    def reasons(self) -> list[str]:
        """Why the first records of every source were skipped."""
        return [reason for source in self.values() for reason in source.reasons]

    @property
    def ok(self) -> bool:
        """Whether no record was bad, and no shard failed."""
        return not any(source.num_bad or source.failures for source in self.values())

    def table(self) -> list[dict[str, Any]]:
        """Return the figures, one row a source; ``pandas.DataFrame`` takes them as they are."""
        return [source.row() for source in self.values()]

    def to_metadata(self, context: int | None = None) -> Metadata:
        """Return the samples as a table for `DGraph.from_metadata`.

        Columns are ``source`` (index), ``tokens``, ``loss_tokens``, the scalars that some sample
        has, and the item lengths of every modality.

        Parameters
        ----------
        context
            Cut documents longer than this, as ``Packed(overflow="split")`` does. Items stay with
            the first part of theirs. None leaves documents whole.

        Raises
        ------
        ConfigError
            Where no sample was found.
        """
        if not len(self.lengths):
            raise ConfigError("there is no sample to plan with", got="; ".join(self.reasons[:3]))
        if context is not None:
            check_integer("to_metadata(context=)", context, 1)
        counts = [len(source.lengths) for source in self.values()]
        lengths_N = self.lengths
        loss_N = np.concatenate([source.loss_tokens for source in self.values()])
        cut = int(lengths_N.max()) if context is None else context
        pieces_N = -(-lengths_N // cut)
        row_n = np.repeat(np.arange(len(lengths_N)), pieces_N)
        start_n = (np.arange(len(row_n)) - (np.cumsum(pieces_N) - pieces_N)[row_n]) * cut
        tokens_n = np.minimum(lengths_N[row_n] - start_n, cut)
        columns: dict[str, NDArray[Any]] = {
            "source": np.repeat(np.arange(len(counts)), counts)[row_n],
            "tokens": tokens_n,
            # Of a document that is cut, every part counts by its length.
            "loss_tokens": loss_N[row_n] * tokens_n // lengths_N[row_n],
        }
        for name in sorted({name for source in self.values() for name in source.scalars}):
            parts = [s.scalars.get(name, np.full(len(s.lengths), np.nan)) for s in self.values()]
            columns[name] = np.concatenate(parts)[row_n]
        items = {}
        for name in sorted({name for source in self.values() for name in source.items}):
            per_row = [row for source in self.values() for row in _rows(source, name)]
            first_n = start_n == 0
            items[name] = Ragged.of(
                [per_row[row] if first else [] for row, first in zip(row_n, first_n, strict=True)]
            )
        return Metadata(columns, items)

    def plot(self) -> Figure:
        """Return a figure of lengths, shares of the tokens and items; needs matplotlib."""
        from megadask.looking.plots import plot_look

        return plot_look(self)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.values()))

    def _repr_html_(self) -> str:
        """Show the figures as a table, and below it samples and what was skipped."""
        rows = self.table()
        names = list(dict.fromkeys(name for row in rows for name in row))
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_cell(row.get(name)))}</td>" for name in names) + "</tr>"
            for row in rows
        )
        bad = [f"skipped: {reason}" for reason in self.reasons]
        failed = [f"failed: {failure}" for source in self.values() for failure in source.failures]
        lines = [*failed, *bad, *map(str, self.samples)]
        listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
        return f"<table><tr>{head}</tr>{body}</table><ul>{listed}</ul>"


def _rows(source: SourceLook, modality: str) -> list[list[int]]:
    ragged = source.items.get(modality)
    if ragged is None:
        return [[] for _ in source.lengths]
    return [part.tolist() for part in np.split(ragged.lengths_I, ragged.offsets[1:-1])]


def _cell(value: Any) -> str:
    if value is None or value != value:  # NaN: nothing to divide by
        return ""
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
