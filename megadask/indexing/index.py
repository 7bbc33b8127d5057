"""Reading a source once, through its transform, to write an index of it; see `sidecar`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import IO, TYPE_CHECKING, Any

import cloudpickle
import fsspec.core
import numpy as np
import pyarrow as pa

from megadask.indexing.sidecar import BATCH_ROWS, header_of, row_of, schema_of
from megadask.planner.batching import Packed
from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.planner.ids import Verdict
from megadask.planner.state import LaneCursor
from megadask.readers.paths import absolute
from megadask.scheduling.batched import transformed_ahead
from megadask.scheduling.known import Entry, mask_runs
from megadask.scheduling.lanes import check_failures, judge, shard_rows, where_is
from megadask.scheduling.sample_items import item_lengths
from megadask.scheduling.samples import payload_of, weigh, whole_because
from megadask.transforms import wants_rng

if TYPE_CHECKING:
    from megadask.pipeline import Pipeline
    from megadask.scheduling.lanes import Read
    from megadask.scheduling.spec import SourceSpec
    from megadask.source import Source

#: Called with the shards that are done, and how many there are.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """What an index holds.

    Attributes
    ----------
    url
        Where it lies.
    num_shards, num_samples, num_filtered, num_skipped, num_truncated
        Shards; records that are samples, were dropped by the transform, or are bad; shards that end
        too soon.
    num_tokens
        Of all samples.
    first_reason
        Why the first bad record is one; None where there is none.
    """

    url: str
    num_shards: int
    num_samples: int
    num_filtered: int
    num_skipped: int
    num_truncated: int
    num_tokens: int
    first_reason: str | None = None


def index(
    source: Source,
    path: str | os.PathLike[str],
    *,
    pipeline: Pipeline | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Indexed:
    """Read a source once and write what planning needs to know of it, for ``Source(index=path)``.

    Every record goes through the transform; what is bad is noted, whatever ``on_error`` says.

    Parameters
    ----------
    source
        The source.
    path
        File to write, a path or fsspec URL. It is there only when it is complete.
    pipeline
        The pipeline that the source belongs to, where its batching or its other sources say what
        samples hold: aligned fields, sequences, modalities, metadata.
    workers
        Processes that read shards. With several, a script needs its ``if __name__ == "__main__"``.
    progress
        Called after each shard.

    Raises
    ------
    ConfigError
        The transform is random, or a name is not in the pipeline.
    SourceError
        Storage fails, or too many records in a row are bad.
    """
    check_integer("index(workers=)", workers, 1)
    spec = _spec(source, pipeline)
    header = header_of(spec, source.transform_text)  # as declared: not yet used
    (url,) = absolute(os.fspath(path))
    counts = dict.fromkeys(Verdict, 0)
    num_tokens, reason = 0, None
    num_batches: list[int] = []
    # The header says how many batches each shard has, and comes first in the file.
    with tempfile.TemporaryFile(prefix="megadask-") as held:
        total = len(spec.reader.shards())
        with (
            pa.ipc.new_stream(held, schema_of(spec, {})) as writer,
            _shards(spec, workers) as shards,
        ):
            for batches in shards:
                num_batches.append(0)
                for batch in batches:
                    writer.write_batch(batch)
                    num_batches[-1] += 1
                    for verdict in Verdict:
                        mask = batch.column("verdict").to_numpy() == verdict
                        counts[verdict] += int(mask.sum())
                    num_tokens += int(batch.column("tokens").to_numpy().sum())
                    if reason is None:
                        reason = next((r for r in batch.column("reason").to_pylist() if r), None)
                if progress is not None:
                    progress(len(num_batches), total)
        _publish(url, held, schema_of(spec, {**header, "batches": num_batches}))
    return Indexed(
        url=url,
        num_shards=total,
        num_samples=counts[Verdict.OK],
        num_filtered=counts[Verdict.FILTERED],
        num_skipped=counts[Verdict.SKIPPED],
        num_truncated=counts[Verdict.TOMBSTONE],
        num_tokens=num_tokens,
        first_reason=reason,
    )


def index_shard(spec: SourceSpec, shard: int) -> Iterator[pa.RecordBatch]:
    """Yield what there is to know of the records of one shard, a row each."""
    name = spec.reader.shards()[shard].name
    rows: list[dict[str, Any]] = []
    failures = 0
    read_rows = shard_rows(spec, spec.reader, shard, 0)
    for row, _, record in transformed_ahead(spec, ((row, row, one) for row, one in read_rows)):
        where = where_is(name, row)
        read = judge(spec, 0, 0, LaneCursor(position=row, row=row), record, where)
        failures = check_failures(spec, failures, read.reason)
        reason = None if read.reason is None else read.reason.removeprefix(f"{where}: ")
        rows.append(row_of(read.verdict, _entry(spec, read), reason))
        if len(rows) == BATCH_ROWS:
            yield _batch(spec, rows)
            rows.clear()
    if rows:
        yield _batch(spec, rows)


def _batch(spec: SourceSpec, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    schema = schema_of(spec, {})
    columns = [pa.array([row.get(f.name) for row in rows], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _entry(spec: SourceSpec, read: Read) -> Entry | None:
    sample = read.sample
    if sample is None:
        return None
    size_bytes, checksum = weigh(payload_of(sample, spec.form))
    mask = sample.get("loss_mask")
    return Entry(
        tokens=len(sample["tokens"]),
        loss_runs=None if mask is None else mask_runs(np.asarray(mask)),
        size_bytes=size_bytes,
        checksum=checksum,
        scalars={name: sample[name] for name in spec.scalars},
        items={name: item_lengths(sample, name) for name in spec.form.ragged},
        whole=whole_because(sample, spec.form),
    )


def _spec(source: Source, pipeline: Pipeline | None) -> SourceSpec:
    """Return the source as a loader gets it; everything is noted and nothing raised."""
    from megadask.pipeline import Pipeline

    plain = replace(source, index=None, length_column=None, loss_column=None, shuffle=False)
    if source.transform is not None and wants_rng(source.transform):
        raise ConfigError(
            f"source {source.name!r} cannot be indexed",
            got="a random transform",
            remedy="What it makes differs by epoch.",
        )
    if pipeline is None:
        pipeline = Pipeline(sources=[plain], batching=Packed(seq_len=1, global_batch=1))
    elif source.name not in [one.name for one in pipeline.sources]:
        raise ConfigError(
            "index(pipeline=)",
            got=[one.name for one in pipeline.sources],
            limit=f"one with source {source.name!r}",
        )
    else:
        sources = [plain if one.name == source.name else _bare(one) for one in pipeline.sources]
        pipeline = replace(pipeline, sources=sources)
    return replace(pipeline.source_specs()[source.name], on_error="skip")


def _bare(source: Source) -> Source:
    """Return a source without its index, which may not be there yet."""
    return replace(source, index=None)


@contextmanager
def _shards(spec: SourceSpec, workers: int) -> Iterator[Iterator[Iterable[pa.RecordBatch]]]:
    """Yield the batches of each shard in order, made here or in so many processes."""
    shards = range(len(spec.reader.shards()))
    if workers == 1:
        yield map(partial(index_shard, spec), shards)
        return
    blob = cloudpickle.dumps(spec)
    # Not forked: threads of Arrow and of tokenizers do not live on in a fork.
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_take, initargs=(blob,)
    ) as pool:
        try:
            yield (pa.ipc.open_stream(data) for data in pool.map(_work, shards))
        finally:
            pool.shutdown(cancel_futures=True)


_taken: list[Any] = []  # of a process of the pool: the source


def _take(blob: bytes) -> None:
    _taken[:] = [cloudpickle.loads(blob)]


def _work(shard: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema_of(_taken[0], {})) as stream:
        for batch in index_shard(_taken[0], shard):
            stream.write_batch(batch)
    return bytes(sink.getvalue())


def _publish(url: str, held: IO[bytes], schema: pa.Schema) -> None:
    """Write the batches that are held to a file that is there only once it is complete."""
    filesystem, path = fsspec.core.url_to_fs(url)
    is_local = "://" not in url
    unfinished = f"{path}.part" if is_local else path
    if is_local:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    held.seek(0)
    try:
        with (
            pa.ipc.open_stream(held) as batches,
            filesystem.open(unfinished, "wb") as file,
            pa.ipc.new_file(file, schema) as writer,
        ):
            for batch in batches:
                writer.write_batch(batch)
    except BaseException:
        if filesystem.exists(unfinished):
            filesystem.rm(unfinished)
        raise
    if is_local:
        os.replace(unfinished, path)
