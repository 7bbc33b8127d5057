"""Look at data before a run: reads records as a loader would, without a cluster.

Axes: N samples that are OK.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from megadask.looking.looks import Look, Preview, ShardLook, SourceLook
from megadask.pipeline import Pipeline
from megadask.planner.batching import Packed
from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.planner.ids import SampleId, Verdict
from megadask.planner.metadata import Ragged
from megadask.planner.state import LaneCursor
from megadask.scheduling.errors import SourceError
from megadask.scheduling.lanes import Read, lane_shards, read_lane
from megadask.scheduling.reading import Shard
from megadask.scheduling.samples import num_targets
from megadask.scheduling.spec import SourceSpec
from megadask.source import Source

#: Shards that are open at a time.
MOST_OPEN = 16
#: So many reasons of skipped records are kept.
MOST_REASONS = 10
#: Tokens of a sample that are decoded for its preview.
PREVIEW_TOKENS = 160

#: Records, each with its lane.
_Reads = Generator[tuple[int, Read], None, None]


def look(
    what: Source | Pipeline, num: int = 1000, *, spread: bool = True, samples: int = 5
) -> Look:
    """Read some records of a source, or of every source of a pipeline, and say what they are.

    Readers and transforms run here, in this process, as they would in a loader. Bad records are
    passed over and reported, whatever the source's ``on_error`` is, and so is storage that fails.

    Parameters
    ----------
    what
        A source, or a pipeline.
    num
        Records to read of every source; fewer where there are not as many.
    spread
        Read the beginnings of up to 16 shards, spread evenly over all. Otherwise the first records
        in the order of a run.
    samples
        Samples of every source to show.

    Returns
    -------
    Look
        Source name to `SourceLook`.

    Raises
    ------
    ConfigError
        Naming what is not a source, or has nothing to read.
    """
    for name, value, least in (("num", num, 1), ("samples", samples, 0)):
        check_integer(f"look({name}=)", value, least)
    if isinstance(what, Source):
        # Batching does not matter: records are looked at before they are cut.
        what = Pipeline(sources=[what], batching=Packed(seq_len=1024, global_batch=1))
    if not isinstance(what, Pipeline):
        raise ConfigError("look(what)", got=type(what).__name__, limit="a Source or a Pipeline")
    specs = what.source_specs().items()
    return Look({name: _look(spec, num, spread, samples) for name, spec in specs})


@dataclass
class _Watched:
    """A transform that remembers what it was last given, and what it made of it."""

    transform: Callable[..., Any] | None
    record: Any = None
    record_bytes: int = 0  # counted before the transform, which may change the record
    sample: Any = None

    def __call__(self, record: Any, **words: Any) -> Any:
        self.record, self.record_bytes = record, _size_of(record)
        self.sample = record if self.transform is None else self.transform(record, **words)
        return self.sample


@dataclass
class _Notes:
    """What is gathered of one source while it is read."""

    spec: SourceSpec
    watched: _Watched
    verdicts: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(Verdict, 0))
    reasons: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    read_of: dict[int, int] = field(default_factory=dict)  # shard to its records read
    lengths: list[int] = field(default_factory=list)
    loss_tokens: list[int] = field(default_factory=list)
    sample_bytes: list[int] = field(default_factory=list)
    record_bytes: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    items: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    previews: list[Preview] = field(default_factory=list)

    def add(self, lane: int, read: Read, shows: bool) -> None:
        """Take note of a record; ``shows`` asks for a preview of it."""
        self.verdicts[read.verdict] += 1
        shard = lane_shards(self.spec, lane)[read.shard]
        self.read_of[shard] = self.read_of.get(shard, 0) + 1
        if read.reason is not None and len(self.reasons) < MOST_REASONS:
            self.reasons.append(read.reason)
        if read.sample is None:
            return
        number, tokens = len(self.lengths), read.sample["tokens"]
        self.lengths.append(len(tokens))
        self.loss_tokens.append(num_targets(read.sample, 0, len(tokens), len(tokens)))
        # The transform's own sample has what is not declared, too.
        sample = self.watched.sample
        self.sample_bytes.append(_size_of(sample))
        self.record_bytes += self.watched.record_bytes
        for name, value in sample.items():
            if name not in self.fields:
                self.fields[name] = _describe(value)
            if name in self.spec.modalities or _is_items(value):
                lengths = [len(item) for item in ([] if value is None else value)]
                self.items.setdefault(name, {})[number] = lengths
            elif isinstance(value, int | float | np.number | bool):
                self.scalars.setdefault(name, {})[number] = float(value)
        if shows:
            self.previews.append(self._preview(lane, read))

    def _preview(self, lane: int, read: Read) -> Preview:
        assert read.sample is not None
        tokens = read.sample["tokens"][:PREVIEW_TOKENS]
        rest = {name: value for name, value in self.watched.sample.items() if name != "tokens"}
        return Preview(
            id=SampleId(self.spec.name, 0, lane, read.position),
            where=read.where,
            num_tokens=len(read.sample["tokens"]),
            tokens=np.array(tokens),
            text=_decoded(self.watched.transform, tokens),
            fields={name: _describe(value) for name, value in rest.items()},
            record={name: _describe(value) for name, value in dict(self.watched.record).items()},
        )


def _look(spec: SourceSpec, num: int, spread: bool, num_samples: int) -> SourceLook:
    watched = _Watched(spec.transform)
    spec = replace(spec, transform=watched, on_error="skip", max_consecutive_errors=2**62)
    notes = _Notes(spec, watched)
    parts = _some_shards(spec, notes) if spread else _all_lanes(spec, notes)
    every = max(1, num // max(1, num_samples))
    seconds = 0.0
    with closing(_in_turns(parts, MOST_OPEN if spread else spec.lanes)) as reads:
        for number in range(num):
            began = time.perf_counter()
            record = next(reads, None)
            seconds += time.perf_counter() - began
            if record is None:
                break
            due = number >= every * len(notes.previews) and len(notes.previews) < num_samples
            notes.add(*record, due)
    return _summed_up(spec.name, notes, seconds)


def _in_turns(parts: Iterator[_Reads], most: int) -> _Reads:
    """Yield from some parts one record each, in turns; the next part follows one that has ended."""
    turns = deque(islice(parts, most))
    try:
        while turns:
            record = next(turns[0], None)
            if record is None:
                turns.popleft()
                turns.extendleft(islice(parts, 1))
                continue
            turns.rotate(-1)
            yield record
    finally:
        for part in turns:
            part.close()


def _all_lanes(spec: SourceSpec, notes: _Notes) -> Iterator[_Reads]:
    """Yield every lane: one record of each after the other is the order of a run."""
    for lane in range(spec.lanes):
        yield _reads(spec, lane, LaneCursor(), notes, whole_lane=True)


def _some_shards(spec: SourceSpec, notes: _Notes) -> Iterator[_Reads]:
    """Yield shards that are spread evenly over all, then those between them."""
    shards = spec.reader.shards()
    count = min(len(shards), MOST_OPEN)
    first = dict.fromkeys(len(shards) * number // count for number in range(count))
    for index in {**first, **dict.fromkeys(range(len(shards)))}:
        lane, ordinal = index % spec.lanes, index // spec.lanes
        before = [shards[i].rows or 0 for i in lane_shards(spec, lane)[:ordinal]]
        cursor = LaneCursor(position=sum(before), shard=ordinal)
        yield _reads(spec, lane, cursor, notes, whole_lane=False)


def _reads(
    spec: SourceSpec, lane: int, start: LaneCursor, notes: _Notes, *, whole_lane: bool
) -> _Reads:
    """Yield the records of a lane from a place to the end of its shard, or of the lane."""
    reads: Any = read_lane(spec, 0, lane, start)
    try:
        for read in reads:
            if not whole_lane and read.shard != start.shard:
                return
            yield lane, read
    except (SourceError, OSError) as error:  # storage, or a transform that would end the process
        notes.failures.append(str(error))
    finally:
        reads.close()


def _summed_up(name: str, notes: _Notes, seconds: float) -> SourceLook:
    count = len(notes.lengths)
    scalars = {
        name: np.array([values.get(n, np.nan) for n in range(count)], np.float64)
        for name, values in notes.scalars.items()
    }
    items = {
        name: Ragged.of([rows.get(n, []) for n in range(count)])
        for name, rows in notes.items.items()
    }
    shards = notes.spec.reader.shards()
    return SourceLook(
        name=name,
        verdicts={verdict.name.lower(): number for verdict, number in notes.verdicts.items()},
        reasons=tuple(notes.reasons),
        failures=tuple(notes.failures),
        lengths=np.array(notes.lengths, np.int64),
        loss_tokens=np.array(notes.loss_tokens, np.int64),
        sample_bytes=np.array(notes.sample_bytes, np.int64),
        record_bytes=notes.record_bytes,
        fields=notes.fields,
        scalars=scalars,
        items=items,
        samples=tuple(notes.previews),
        shards=tuple(_shard_look(shard, notes.read_of.get(n, 0)) for n, shard in enumerate(shards)),
        seconds=seconds,
    )


def _shard_look(shard: Shard, num_read: int) -> ShardLook:
    return ShardLook(
        name=shard.name, rows=shard.rows, size_bytes=shard.size_bytes, num_read=num_read
    )


def _is_items(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(item, np.ndarray) and item.ndim for item in value)
    )


def _size_of(value: Any) -> int:
    """Return the bytes of what a record or a sample holds, names left out."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size_of, value.values()))
    if isinstance(value, list | tuple):
        plain = len(value) > 0 and isinstance(value[0], int | float)
        return 8 * len(value) if plain else sum(map(_size_of, value))
    return 8 if isinstance(value, int | float | np.number) else 0


def _describe(value: Any) -> str:
    """Return what a field is, in a few words."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, list | tuple):
        inner = ", ".join(_describe(item) for item in value[:3])
        return f"{len(value)} items: {inner}{', ...' if len(value) > 3 else ''}"
    if isinstance(value, bytes) and not value[:60].isascii():
        return f"{len(value)} bytes"
    text = repr(value[:80] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _decoded(transform: Any, tokens: Any) -> str | None:
    """Return tokens as text where the transform, or one of its chain, can decode them."""
    steps = [transform, *reversed(getattr(transform, "transforms", ()))]
    for step in steps:
        decode = getattr(step, "decode", None)
        if callable(decode):
            return str(decode(tokens))
    return None
