"""An index: one Arrow file that tells of every record what planning needs, without its payload.

A record batch for each shard of the source, a row for each row of the shard. The schema carries a
header that says of which data and of which transform it tells.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import megadask
from megadask.planner.errors import ConfigError
from megadask.planner.ids import Verdict
from megadask.readers.paths import absolute
from megadask.readers.storage import ARROW_ERRORS, is_storage_error, open_arrow
from megadask.scheduling.known import Entry
from megadask.scheduling.reading import BadRecord, Reader, Shard, TruncatedShard
from megadask.transforms import transform_fingerprint

if TYPE_CHECKING:
    from megadask.scheduling.samples import Form
    from megadask.scheduling.spec import SourceSpec

VERSION = 1
_HEADER = b"megadask.index"
_ITEMS, _SCALAR = "items:", "scalar:"


def header_of(spec: SourceSpec) -> dict[str, Any]:
    """Return what an index of a source says of itself."""
    return {
        "version": VERSION,
        "megadask": megadask.__version__,
        "id": uuid.uuid4().hex,
        "source": spec.name,
        "data": spec.reader.fingerprint(),
        "transform": transform_fingerprint(spec.transform),
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
    header
        What the index said of itself when the pipeline was declared, as JSON.
    """

    url: str
    reader: Reader
    header: str

    def shards(self) -> Sequence[Shard]:
        """Return the shards of the records."""
        return self.reader.shards()

    def read(self, shard: int, start: int = 0) -> Iterator[Any]:
        """Yield an entry for each record, or what is bad about it."""
        batch = self._batch(shard)
        columns = {name: batch.column(name) for name in batch.schema.names}
        for row in range(start, batch.num_rows):
            values = {name: column[row] for name, column in columns.items()}
            yield _entry(values)

    def fingerprint(self) -> str:
        """Return that of the records."""
        return self.reader.fingerprint()

    def paths(self) -> Sequence[str]:
        """Return the files of the records."""
        return self.reader.paths()

    def _batch(self, shard: int) -> pa.RecordBatch:
        try:
            with open_arrow(self.url) as file, pa.ipc.open_file(file) as index:
                if _header(index) != json.loads(self.header):
                    raise ConfigError(
                        f"index {self.url} is another one than when the pipeline was declared",
                        remedy="Start again.",
                    )
                batch = index.get_batch(shard)
                batch.validate(full=True)
        except ARROW_ERRORS as error:
            if is_storage_error(error):
                raise
            raise _no_index(self.url, error) from error
        return batch


def open_index(path: str, spec: SourceSpec) -> IndexReader:
    """Return the reader of an index, having checked that it tells of this source.

    Raises ConfigError naming what it is an index of instead.
    """
    (url,) = absolute(path)
    try:
        with open_arrow(url) as file, pa.ipc.open_file(file) as index:
            header, num_shards = _header(index), index.num_record_batches
    except FileNotFoundError as error:
        raise ConfigError(
            f"source {spec.name!r}: there is no index {url}",
            remedy="`megadask index` writes one.",
        ) from error
    except ARROW_ERRORS as error:
        if is_storage_error(error):
            raise
        raise _no_index(url, error) from error
    wanted = header_of(spec)
    for what, words in (
        ("version", "is written in another version of the format"),
        ("data", "is one of other data"),
        ("transform", "was made with another transform"),
        ("samples", "was made for samples that hold something else"),
    ):
        if header.get(what) != wanted[what]:
            raise _wrong(spec, url, words, header.get(what), wanted[what], header)
    missing = [name for name in spec.scalars if name not in header["scalars"]]
    if missing:
        raise _wrong(spec, url, "lacks scalars", header["scalars"], missing, header)
    shards = len(spec.reader.shards())
    if num_shards != shards:
        raise _wrong(spec, url, "is incomplete", f"{num_shards} shards", f"{shards}", header)
    return IndexReader(url=url, reader=spec.reader, header=json.dumps(header))


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


def _entry(values: dict[str, Any]) -> Entry | BadRecord:
    verdict = values["verdict"].as_py()
    if verdict == Verdict.SKIPPED:
        return BadRecord(str(values["reason"].as_py()))
    if verdict == Verdict.TOMBSTONE:
        raise TruncatedShard(str(values["reason"].as_py()))
    runs = values["loss_runs"]
    return Entry(
        tokens=values["tokens"].as_py() if verdict == Verdict.OK else 0,
        loss_runs=runs.values.to_numpy() if runs.is_valid else None,
        size_bytes=values["bytes"].as_py(),
        checksum=values["checksum"].as_py(),
        scalars={
            name.removeprefix(_SCALAR): value.as_py() if value.is_valid else float("nan")
            for name, value in values.items()
            if name.startswith(_SCALAR)
        },
        items={
            name.removeprefix(_ITEMS): value.as_py() or []
            for name, value in values.items()
            if name.startswith(_ITEMS)
        },
        whole=values["whole"].as_py(),
    )


def is_index(path: str) -> bool:
    """Whether a file is an index."""
    try:
        with open_arrow(os.fspath(path)) as file, pa.ipc.open_file(file) as index:
            _header(index)
    except ARROW_ERRORS:
        return False
    return True
