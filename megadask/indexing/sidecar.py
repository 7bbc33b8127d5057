"""An index: one Arrow file that tells of every record what planning needs, without its payload.

A row for each row of the source's shards, shard after shard, each in record batches of its own. The
schema carries a header that says of which data and of which transform it tells.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import megadask
from megadask.planner.errors import ConfigError
from megadask.planner.ids import Verdict
from megadask.readers.paths import absolute
from megadask.readers.storage import ARROW_ERRORS, is_storage_error, open_arrow
from megadask.saved import differing
from megadask.scheduling.known import Entry
from megadask.scheduling.reading import BadRecord, Reader, Shard, TruncatedShard

if TYPE_CHECKING:
    from megadask.scheduling.samples import Form
    from megadask.scheduling.spec import SourceSpec

VERSION = 1
#: Rows of a record batch, but for the last one of a shard: what a loader holds of an index.
BATCH_ROWS = 2**14
_AT_A_TIME = 256  # rows turned into entries
_HEADER = b"megadask.index"
_ITEMS, _SCALAR = "items:", "scalar:"


def header_of(spec: SourceSpec, transform: str) -> dict[str, Any]:
    """Return what an index of a source says of itself, whose transform has this fingerprint."""
    return {
        "version": VERSION,
        "megadask": megadask.__version__,
        "id": uuid.uuid4().hex,
        "source": spec.name,
        "data": spec.reader.fingerprint(),
        "transform": transform,
        "samples": _form(spec.form),
        "scalars": list(spec.scalars),
    }


def schema_of(spec: SourceSpec, header: dict[str, Any]) -> pa.Schema:
    """Return the schema of an index."""
    fields = [
        pa.field("verdict", pa.uint8()),
        pa.field("tokens", pa.int64()),
        pa.field("bytes", pa.int64()),
        pa.field("checksum", pa.uint32()),
        pa.field("reason", pa.string()),
        pa.field("whole", pa.string()),
        pa.field("loss_runs", pa.list_(pa.int64())),
        *(pa.field(f"{_SCALAR}{name}", pa.float64()) for name in spec.scalars),
        *(pa.field(f"{_ITEMS}{name}", pa.list_(pa.int64())) for name in spec.form.ragged),
    ]
    return pa.schema(fields, {_HEADER: json.dumps(header).encode()})


def row_of(verdict: Verdict, entry: Entry | None, reason: str | None) -> dict[str, Any]:
    """Return a row of an index, by the names of its columns."""
    if entry is None:
        return {"verdict": int(verdict), "tokens": 0, "bytes": 0, "checksum": 0, "reason": reason}
    return {
        "verdict": int(verdict),
        "tokens": entry.tokens,
        "bytes": entry.size_bytes,
        "checksum": entry.checksum,
        "whole": entry.whole,
        "loss_runs": None if entry.loss_runs is None else entry.loss_runs.tolist(),
        **{f"{_SCALAR}{name}": value for name, value in entry.scalars.items()},
        **{f"{_ITEMS}{name}": list(items) for name, items in entry.items.items()},
    }


@dataclass(frozen=True, kw_only=True)
class IndexReader:
    """Reads what an index knows of the records of a source.

    Attributes
    ----------
    url
        Of the index.
    reader
        Of the records, which tells the shards.
    ident
        Which index it was when the pipeline was declared.
    first_batches
        Where the record batches of each shard begin, and where those of the last one end.
    """

    url: str
    reader: Reader
    ident: str
    first_batches: tuple[int, ...]

    def shards(self) -> Sequence[Shard]:
        """Return the shards of the records."""
        return self.reader.shards()

    def read(self, shard: int, start: int = 0) -> Iterator[Any]:
        """Yield an entry for each record, or what is bad about it."""
        number, row = divmod(start, BATCH_ROWS)
        for batch in self._batches(range(*self.first_batches[shard : shard + 2])[number:]):
            while row < batch.num_rows:
                part = batch.slice(row, _AT_A_TIME)
                yield from _entries(part)
                row += part.num_rows
            row = 0

    def fingerprint(self) -> str:
        """Return that of the records."""
        return self.reader.fingerprint()

    def paths(self) -> Sequence[str]:
        """Return the files of the records."""
        return self.reader.paths()

    def _batches(self, numbers: Sequence[int]) -> Iterator[pa.RecordBatch]:
        try:
            with open_arrow(self.url) as file, pa.ipc.open_file(file) as index:
                if _header(index).get("id") != self.ident:
                    raise ConfigError(
                        f"index {self.url} is another one than when the pipeline was declared",
                        remedy="Start again.",
                    )
                for number in numbers:
                    batch = index.get_batch(number)
                    batch.validate(full=True)
                    yield batch
        except ARROW_ERRORS as error:
            if is_storage_error(error):
                raise
            raise _no_index(self.url, error) from error


def open_index(path: str, spec: SourceSpec, transform: str) -> IndexReader:
    """Return the reader of an index, having checked that it tells of this source.

    ``transform`` is the fingerprint of its transform.

    Raises ConfigError naming what it is an index of instead.
    """
    (url,) = absolute(path)
    try:
        with open_arrow(url) as file, pa.ipc.open_file(file) as index:
            header, num_batches = _header(index), index.num_record_batches
    except FileNotFoundError as error:
        raise ConfigError(
            f"source {spec.name!r}: there is no index {url}",
            remedy="`megadask index` writes one.",
        ) from error
    except ARROW_ERRORS as error:
        if is_storage_error(error):
            raise
        raise _no_index(url, error) from error
    wanted = header_of(spec, transform)
    for what, words in (
        ("version", "is written in another version of the format"),
        ("data", "is one of other data"),
        ("transform", "was made with another transform"),
        ("samples", "was made for samples that hold something else"),
    ):
        if header.get(what) != wanted[what]:
            raise _wrong(spec, url, words, *_unlike(header.get(what), wanted[what]), header)
    missing = [name for name in spec.scalars if name not in header["scalars"]]
    if missing:
        raise _wrong(spec, url, "lacks scalars", header["scalars"], missing, header)
    first_batches = (0, *accumulate(header["batches"]))
    if (len(first_batches) - 1, first_batches[-1]) != (len(spec.reader.shards()), num_batches):
        got = f"{len(header['batches'])} shards in {num_batches} batches"
        raise _wrong(spec, url, "is damaged", got, f"{len(spec.reader.shards())} shards", header)
    return IndexReader(url=url, reader=spec.reader, ident=header["id"], first_batches=first_batches)


def _unlike(was: Any, wanted: Any) -> tuple[str, str]:
    """Return both sides where they differ, as texts."""
    found = list(differing(was, wanted))
    told = [(": ".join([*keys, ""]), left, right) for keys, left, right in found]
    got, limit = (", ".join(f"{one[0]}{one[side]}" for one in told) for side in (1, 2))
    return got, limit


def _wrong(
    spec: SourceSpec, url: str, words: str, got: Any, limit: Any, header: dict[str, Any]
) -> ConfigError:
    return ConfigError(
        f"source {spec.name!r}: index {url} {words}",
        got=got,
        limit=limit,
        remedy=f"It was made by MegaDask {header.get('megadask')} for source "
        f"{header.get('source')!r}; index this source anew, as part of its pipeline.",
    )


def _no_index(url: str, error: BaseException | str) -> ConfigError:
    return ConfigError(f"{url} is not an index of MegaDask: {error}")


def _header(index: pa.ipc.RecordBatchFileReader) -> dict[str, Any]:
    found = (index.schema.metadata or {}).get(_HEADER)
    if found is None:
        raise pa.ArrowInvalid("an Arrow file without the header of one")
    header = json.loads(found)
    return header if isinstance(header, dict) else {}


def _form(form: Form) -> dict[str, Any]:
    """Return what the lengths and checksums of samples depend on, besides the transform."""
    return {
        "modalities": list(form.modalities),
        "extras": list(form.extras),
        "fields": [json.loads(json.dumps(asdict(field))) for field in form.fields],
        "size": form.size,
        "sequences": form.num_sequences,
        "pad_to_multiple": form.pad_to_multiple if form.num_sequences > 1 else 1,
    }


def _entries(batch: pa.RecordBatch) -> Iterator[Entry | BadRecord]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    scalars, items = (
        {name.removeprefix(kind): columns[name] for name in columns if name.startswith(kind)}
        for kind in (_SCALAR, _ITEMS)
    )
    names = ("verdict", "tokens", "bytes", "checksum", "reason", "whole", "loss_runs")
    rows = zip(*(columns[name] for name in names), strict=True)
    for row, (verdict, tokens, size_bytes, checksum, reason, whole, runs) in enumerate(rows):
        if verdict == Verdict.SKIPPED:
            yield BadRecord(reason)
        elif verdict == Verdict.TOMBSTONE:
            raise TruncatedShard(reason)
        else:
            yield Entry(
                tokens=tokens,
                loss_runs=None if runs is None else np.array(runs, np.int64),
                size_bytes=size_bytes,
                checksum=checksum,
                scalars={name: _number(column[row]) for name, column in scalars.items()},
                items={name: column[row] or () for name, column in items.items()},
                whole=whole,
            )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
