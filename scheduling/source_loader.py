"""A Source Loader: owns lanes of one source, reports metadata, serves samples by id.

Axes: N spans. Everything here blocks and runs in the one thread of the loader's executor; nothing
here knows of Dask.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.batching import Batching
from megadask.planner.errors import ConfigError
from megadask.planner.ids import Verdict
from megadask.planner.metadata import SPAN_COLUMNS, Metadata, Ragged
from megadask.planner.state import LaneCursor
from megadask.scheduling.cache import SampleCache
from megadask.scheduling.errors import SourceError
from megadask.scheduling.fillers import Planned, failure, filler
from megadask.scheduling.forward import Forward
from megadask.scheduling.item_payload import served_items
from megadask.scheduling.lanes import Read, check_failures, describe_lane, read_rows
from megadask.scheduling.policy import skips
from megadask.scheduling.reading import close_rows
from megadask.scheduling.sample_items import item_lengths
from megadask.scheduling.samples import (
    Sample,
    num_targets,
    payload_of,
    weigh,
    whole_because,
)
from megadask.scheduling.serving import served
from megadask.scheduling.spec import SourceSpec

#: So many reasons of skipped records are kept.
KEPT_REASONS = 10
#: After so long, a call for metadata returns what it has: a slow transform must not look like a
#: lost loader.
DESCRIBE_S = 5.0

_Key = tuple[int, int, int]  # epoch, lane, position


@dataclass(frozen=True, eq=False)
class Described:
    """Metadata of the next records of some lanes.

    table
        Spans of the records read, lane after lane; a record that is not OK has one row.
    cursors
        Lane to its next record.
    ended
        Lanes whose epoch has ended.
    num_records
        Records read.
    is_short
        Whether more was asked for, but `DESCRIBE_S` were over.
    """

    table: Metadata
    cursors: Mapping[int, LaneCursor]
    ended: frozenset[int]
    num_records: int
    is_short: bool


class _OpenLane:
    """A lane being read: its place, and the generator that continues from there."""

    def __init__(self, spec: SourceSpec, epoch: int, lane: int, cursor: LaneCursor) -> None:
        self.epoch = epoch
        self.cursor = cursor
        self.reads = describe_lane(spec, epoch, lane, cursor)


class SourceLoader:
    """Reads lanes of a source.

    Parameters
    ----------
    spec
        The source.
    limit_bytes
        Payload to keep ready.
    standby
        Whether it follows another loader until it is promoted.
    lanes
        Its own; None for all of the source.
    """

    def __init__(
        self,
        spec: SourceSpec,
        limit_bytes: int,
        *,
        standby: bool = False,
        lanes: Collection[int] | None = None,
    ) -> None:
        self.spec = spec
        self._lanes = frozenset(range(spec.lanes) if lanes is None else lanes)
        # Where payload is read for planned samples, what was passed on the way takes its share.
        share_bytes = limit_bytes if spec.known is None else limit_bytes // 2
        self.cache = SampleCache(share_bytes, standby=standby)
        self.num_rereads = 0
        self.skip_reasons: list[str] = []
        self.filled: dict[_Key, str] = {}  # what failed when it was planned, why
        self._open: dict[int, _OpenLane] = {}
        self._forward = None if spec.known is None else Forward(spec, share_bytes)
        self._failures = 0

    def describe(self, epoch: int, cursors: Mapping[int, LaneCursor], until: int) -> Described:
        """Read lanes from their cursors up to position ``until`` (excluded).

        Stops short after `DESCRIBE_S` seconds; whoever wants more asks again. Asking again from
        an earlier cursor reads again and gives the same.
        """
        deadline = time.monotonic() + DESCRIBE_S
        rows: list[tuple[Any, ...]] = []
        after, ended, num_records = {}, set(), 0
        for lane, cursor in cursors.items():
            if time.monotonic() >= deadline:
                break
            opened = self._open.get(lane)
            if opened is None or opened.epoch != epoch or opened.cursor != cursor:
                self._close_lane(lane)
                opened = self._open[lane] = _OpenLane(self.spec, epoch, lane, cursor)
            try:
                while opened.cursor.position < until and time.monotonic() < deadline:
                    read = next(opened.reads, None)
                    if read is None:
                        ended.add(lane)
                        break
                    rows.extend(self._spans(epoch, lane, read))
                    num_records += 1
                    opened.cursor = LaneCursor.after(
                        read.position, read.shard, read.row, read.verdict
                    )
            except BaseException:
                self._close_lane(lane)  # a generator that has raised would look like one at its end
                raise
            after[lane] = opened.cursor
            if lane in ended or not self._owns(lane):
                self._close_lane(lane)
        is_short = any(
            lane not in ended and after.get(lane, cursor).position < until
            for lane, cursor in cursors.items()
        )
        return Described(self._table(rows), after, frozenset(ended), num_records, is_short)

    def serve(self, wanted: Metadata) -> dict[str, NDArray[Any]]:
        """Return the payload of spans, packed into flat arrays.

        Parameters
        ----------
        wanted
            Span rows of this source, in any order.

        Returns
        -------
        dict of arrays
            See `serving.served`; and ``filled`` (N,) bool where a sample that failed has a filler
            of its planned length in its place.

        Raises
        ------
        SourceError
            When a sample reads differently than when it was planned; or is not what the lengths
            said that were known of it, under ``on_error="raise"``.
        """
        payload = served(self._samples(wanted), wanted, self.spec.form)
        keys = zip(*(wanted[n].tolist() for n in ("epoch", "lane", "position")), strict=True)
        filled_N = np.array([key in self.filled for key in keys], bool)
        return {**payload, "filled": filled_N} if filled_N.any() else payload

    def serve_items(self, wanted: Metadata, modality: str) -> dict[str, NDArray[Any]]:
        """Return items of samples; see `item_payload.served_items`. Raises as `serve` does."""
        return served_items(self._samples(wanted), wanted, modality)

    def keep(self, lanes: Collection[int]) -> None:
        """Own these lanes from now on; close all others, and forget what was read of them.

        Whoever still asks for another one, not knowing yet that it moved, gets the same as ever;
        nothing of it is kept.
        """
        self._lanes = frozenset(lanes)
        for lane in [lane for lane in self._open if not self._owns(lane)]:
            self._close_lane(lane)
        if self._forward is not None:
            self._forward.retain(self._owns)
        self.cache.retain(lambda key: self._owns(key[1]))

    @property
    def num_open_lanes(self) -> int:
        """Lanes that are being read."""
        return len(self._open)

    def close(self) -> None:
        """Close all files and forget all samples."""
        for lane in list(self._open):
            self._close_lane(lane)
        if self._forward is not None:
            self._forward.close()
        self.cache.clear()

    def _owns(self, lane: int) -> bool:
        return lane in self._lanes

    def _put(self, key: _Key, payload: Sample, size_bytes: int) -> None:
        if self._owns(key[1]):
            self.cache.put(key, payload, size_bytes)

    def _close_lane(self, lane: int) -> None:
        opened = self._open.pop(lane, None)
        if opened is not None:
            close_rows(opened.reads)

    def _spans(self, epoch: int, lane: int, read: Read) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a record: SPAN_COLUMNS, the scalars, the item lengths by modality."""
        place = (self.spec.index, epoch, lane, read.position, read.shard, read.row)
        self._note(read.reason)
        cuts = self._cut(read) if read.verdict is Verdict.OK else []
        if not cuts:
            verdict = Verdict.FILTERED if read.verdict is Verdict.OK else read.verdict
            nothing = (*(np.nan for _ in self.spec.scalars), *([] for _ in self.spec.form.ragged))
            yield (*place, 0, 0, verdict, 0, 0, 0, 0, 0, *nothing)
            return
        length = cuts[-1][1]
        if read.entry is not None:
            size_bytes, checksum = read.entry.size_bytes, read.entry.checksum
            scalars = [read.entry.scalars.get(name, np.nan) for name in self.spec.scalars]
            items = [list(read.entry.items.get(name, ())) for name in self.spec.form.ragged]
            targets = read.entry.num_targets
        else:
            assert read.sample is not None
            payload = payload_of(read.sample, self.spec.form)
            size_bytes, checksum = weigh(payload)
            self._put((epoch, lane, read.position), payload, size_bytes)
            scalars = [read.sample[name] for name in self.spec.scalars]
            items = [item_lengths(read.sample, name) for name in self.spec.form.ragged]
            targets = partial(num_targets, read.sample)
        for start, stop in cuts:
            loss = 1 if self.spec.counts_samples else targets(start, stop, length)
            counts = (stop - start, length, loss, size_bytes, checksum)
            yield (*place, start, stop, Verdict.OK, *counts, *scalars, *items)
            items = [[] for _ in items]  # items come with the first span of their sample

    def _cut(self, read: Read) -> list[tuple[int, int]]:
        batching = self.spec.batching
        if read.entry is not None:
            tokens, whole = read.entry.tokens, read.entry.whole
            is_masked = read.entry.num_targets(0, tokens, tokens) != tokens - 1
        else:
            assert read.sample is not None
            tokens = len(read.sample["tokens"])
            whole = whole_because(read.sample, self.spec.form)
            is_masked = "loss_mask" in read.sample
        if is_masked and batching.pours:
            whole = "a loss_mask"  # targets are counted by where packs end
        try:
            if whole:
                _check_whole(whole, tokens, batching)
            return batching.cut(tokens)
        except ConfigError as error:
            error.add_note(f"MegaDask: source {self.spec.name!r}, {read.where}")
            raise

    def _table(self, rows: list[tuple[Any, ...]]) -> Metadata:
        names = [*SPAN_COLUMNS, *self.spec.scalars, *self.spec.form.ragged]
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        by_name = dict(zip(names, columns, strict=True))
        items = {name: Ragged.of(by_name.pop(name)) for name in self.spec.form.ragged}
        arrays = {
            name: np.array(column, SPAN_COLUMNS.get(name, "float64"))
            for name, column in by_name.items()
        }
        return Metadata(arrays, items)

    def _samples(self, wanted: Metadata) -> dict[_Key, Sample]:
        """Return the samples of all rows, from the cache or read again and checked."""
        self.cache.begin_call()
        found: dict[_Key, Sample] = {}
        missing: dict[_Key, tuple[LaneCursor, Planned]] = {}
        names = ("epoch", "lane", "position", "shard", "row", "length", "checksum")
        columns = [wanted[name].tolist() for name in names]
        whole_N = (wanted["start"] == 0) & (wanted["stop"] == wanted["length"])
        loss_N = np.where(whole_N, wanted["loss_tokens"], -1)
        for epoch, lane, position, shard, row, length, checksum, loss in zip(
            *columns, loss_N.tolist(), strict=True
        ):
            key = (epoch, lane, position)
            if key in found or key in missing:
                continue
            sample = self.cache.get(key)
            if sample is None and key in self.filled:
                sample = filler(length, self.spec.form)
            if sample is None:
                at = LaneCursor(position=position, shard=shard, row=row)
                loss_tokens = None if loss < 0 else loss
                planned = Planned(length=length, loss_tokens=loss_tokens, checksum=checksum)
                missing[key] = (at, planned)
            else:
                found[key] = sample
        for (epoch, lane, _), keys in groupby(
            sorted(missing, key=lambda k: (k[0], k[1], missing[k][0].shard, k[2])),
            key=lambda k: (k[0], k[1], missing[k][0].shard),
        ):
            cursors = [missing[key][0] for key in keys]
            if self._forward is not None:
                reads = self._forward.read(epoch, lane, cursors)
            else:
                reads = read_rows(self.spec, epoch, lane, cursors)
            for read in reads:
                self.num_rereads += self._forward is None
                key = (epoch, lane, read.position)
                found[key] = self._checked(key, read, missing[key][1])
            close_rows(reads)
        if self._forward is not None and not all(self._owns(lane) for _, lane, _ in missing):
            self._forward.retain(self._owns)
        for key, (cursor, _) in missing.items():
            if key not in found:
                raise _changed(self.spec, key, f"shard {cursor.shard} ends before row {cursor.row}")
        return found

    def _checked(self, key: _Key, read: Read, planned: Planned) -> Sample:
        """Return the payload of a planned sample, or what stands in for it."""
        if self.spec.known is not None:
            reason = failure(self.spec, read, planned)
            self._failures = check_failures(self.spec, self._failures, reason)
            if reason is not None:
                return self._fill(key, planned, reason)
        if read.sample is None:
            raise _changed(self.spec, key, f"verdict {read.verdict.name}: {read.reason}")
        payload = payload_of(read.sample, self.spec.form)
        size_bytes, now = weigh(payload)
        is_known = planned.checksum or self.spec.known is None
        if is_known and now != planned.checksum:
            got = f"checksum {now:#010x}, planned with {planned.checksum:#010x}"
            raise _changed(self.spec, key, got)
        self._put(key, payload, size_bytes)
        return payload

    def _fill(self, key: _Key, planned: Planned, reason: str) -> Sample:
        """Return a filler, if the policy allows it (rule 6)."""
        unlike = SourceError(
            f"source {self.spec.name!r}: a sample is not what was known of it",
            got=reason,
            remedy="Lengths must be those that the transform makes; index the source anew, or "
            'let Source(on_error="skip") put fillers in their place.',
        )
        has_items = planned.checksum and self.spec.modalities
        where = f"source {self.spec.name!r}, {reason}"
        if has_items or not skips(self.spec.on_error, unlike, where):
            raise unlike
        self._note(reason)
        self.filled[key] = reason
        return filler(planned.length, self.spec.form)

    def _note(self, reason: str | None) -> None:
        if reason is not None and len(self.skip_reasons) < KEPT_REASONS:
            self.skip_reasons.append(reason)


def _changed(spec: SourceSpec, key: _Key, got: str) -> SourceError:
    epoch, lane, position = key
    return SourceError(
        f"source {spec.name!r}: sample {epoch}/{lane}/{position} reads differently than before",
        got=got,
        remedy="The data must not change during a run; random transforms must draw from `rng`.",
    )


def _check_whole(what: str, tokens: int, batching: Batching) -> None:
    """Raise ConfigError where a sample that cannot be cut would be."""
    if batching.pours:
        raise ConfigError(
            f"{type(batching).__name__} cuts anywhere, which {what} does not allow",
            remedy="Take Packed.",
        )
    if tokens > batching.seq_len and batching.overflow != "drop":
        raise ConfigError(
            f"{what} is longer than the sequence and cannot be cut",
            got=f"{tokens} tokens",
            limit=f"at most seq_len={batching.seq_len}",
            remedy='Choose a longer seq_len, or overflow="drop".',
        )
