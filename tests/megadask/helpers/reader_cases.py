"""Every reader of files, how to write data for it, and what it makes of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from megadask.readers import (
    ArrowIpc,
    Csv,
    HuggingFace,
    ImageFolder,
    InMemory,
    Jsonl,
    Mds,
    Parquet,
    Tar,
    Text,
)

Records = Sequence[dict[str, Any]]
Write = Callable[[Path, Records], None]

RECORDS: Records = [
    {
        "text": f"document {i}: {'grün 🌱 ' * (i % 7)}",
        "number": i,
        "ids": list(range(i % 5)),
        "nothing": None,
        "nested": [[{"a": i}], []],
    }
    for i in range(53)
]

_FILES = 3


def _same(records: Records) -> Records:
    return records


@dataclass(frozen=True)
class Case:
    """A reader, and how to make its data.

    write
        Puts records into files of a folder.
    make
        Returns a reader of that folder, a path or URL, or of the records themselves.
    expected
        What the reader makes of the records.
    holds_file
        Whether a file is open while a shard is read.
    index
        Names of files that say what there is, and hold no records.
    """

    name: str
    write: Write
    make: Callable[[str, Records], Any]
    expected: Callable[[Records], Records] = _same
    in_files: bool = True
    holds_file: bool = True
    index: tuple[str, ...] = ()

    def data_files(self, folder: Path) -> list[str]:
        """Return the files in a folder that hold records."""
        found = (path for path in folder.rglob("*") if path.is_file())
        return sorted(str(path) for path in found if path.name not in self.index)


def plain(value: Any) -> Any:
    """Return a record with lists in place of arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def split(records: Records) -> list[Records]:
    bounds = [len(records) * i // _FILES for i in range(_FILES + 1)]
    return [records[a:b] for a, b in pairwise(bounds)]


def write_parquet(folder: Path, records: Records) -> None:
    for i, part in enumerate(split(records)):
        table = pa.Table.from_pylist(list(part))
        # Not compressed, so that tests can find what they break.
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=7, compression="none")


def json_lines(records: Records) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def _in_files(name: str, encode: Callable[[Records], bytes]) -> Write:
    def write(folder: Path, records: Records) -> None:
        for i, part in enumerate(split(records)):
            (folder / name.format(i)).write_bytes(encode(part))

    return write


def _arrow_writer(new: Callable[..., Any]) -> Write:
    def write(folder: Path, records: Records) -> None:
        for i, part in enumerate(split(records)):
            table = pa.Table.from_pylist(list(part))
            with new(str(folder / f"{i}.arrow"), table.schema) as writer:
                writer.write_table(table, max_chunksize=5)

    return write


def text_lines(records: Records) -> bytes:
    return "".join(f"{record['text']}\n" for record in records).encode()


def texts(records: Records) -> Records:
    return [{"text": record["text"]} for record in records]


def _blocks(records: Records) -> bytes:
    return "\n".join(f"{r['text']}\n{r['number']}\n" for r in records).encode()


def _block_texts(records: Records) -> Records:
    return [{"body": f"{r['text']}\n{r['number']}"} for r in records]


def _write_text_files(folder: Path, records: Records) -> None:
    for i, record in enumerate(records):
        (folder / f"{i:03d}.txt").write_text(record["text"])


def csv_table(records: Records) -> bytes:
    lines = io.StringIO(newline="")
    writer = csv.writer(lines)
    writer.writerow(["number", "text", "ids"])
    for r in records:
        writer.writerow([r["number"], f'{r["text"]},"\n\nquoted"\n', r["ids"]])
    return lines.getvalue().encode()


def _csv_rows(records: Records) -> Records:
    return [{"text": f'{r["text"]},"\n\nquoted"\n', "number": r["number"]} for r in records]


def tar_of(members: Iterable[tuple[str, bytes]], **options: Any) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return archive.getvalue()


def _parts(records: Records) -> Iterable[tuple[str, bytes]]:
    for r in records:
        key = f"{'long/' * 30}{r['number']}" if r["number"] % 9 == 8 else f"folder/{r['number']}"
        yield f"{key}.JSON", json.dumps(r).encode()
        if r["number"] % 2:
            yield f"{key}.seg.txt", r["text"].encode()


def _samples(records: Records) -> Records:
    samples: dict[str, dict[str, Any]] = {}
    for name, data in _parts(records):
        key, _, extension = name.partition(".")
        samples.setdefault(key, {"__key__": key})[extension.lower()] = data
    return list(samples.values())


def _tar(records: Records) -> bytes:
    return tar_of(_parts(records))


def _write_images(folder: Path, records: Records) -> None:
    for label, part in zip(("ant", "bee", "cat"), split(records), strict=True):
        (folder / label / "deep").mkdir(parents=True, exist_ok=True)
        for record in part:
            path = folder / label / "deep" / f"{record['number']:03d}.PNG"
            path.write_bytes(record["text"].encode())


def _images(records: Records) -> Records:
    return [
        {
            "image": record["text"].encode(),
            "label": label,
            "path": f"{label}/deep/{record['number']:03d}.PNG",
        }
        for label, part in zip(("ant", "bee", "cat"), split(records), strict=True)
        for record in part
    ]


def _write_saved(folder: Path, records: Records) -> None:
    split_folder = folder / "train"
    split_folder.mkdir(exist_ok=True)
    _arrow_writer(pa.ipc.new_stream)(split_folder, records)
    files = [{"filename": f"{i}.arrow"} for i in range(_FILES)]
    (split_folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (split_folder / "dataset_info.json").write_text("{}")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))


MDS_COLUMNS: dict[str, tuple[str, Callable[[Any], bytes], int | None]] = {
    "ids": ("ndarray", lambda ids: mds_array(np.array(ids)), None),
    "number": ("int", lambda n: np.int64(n).tobytes(), 8),
    "nested": ("json", lambda value: json.dumps(value).encode(), None),
    "text": ("str", str.encode, None),
}


def mds_array(array: np.ndarray[Any, Any]) -> bytes:
    """Encode an array of int64 with its type and shape."""
    shape = np.array(array.shape, np.uint8).tobytes()
    return bytes([65, len(array.shape) << 2]) + shape + array.astype(np.int64).tobytes()


def mds_shard(
    records: Records,
    columns: Mapping[str, tuple[str, Callable[[Any], bytes], int | None]] = MDS_COLUMNS,
) -> bytes:
    """Encode a shard by Streaming's description of the format."""
    rows = []
    for record in records:
        values = [encode(record[name]) for name, (_, encode, _) in columns.items()]
        sizes = [
            np.uint32(len(value)).tobytes()
            for value, (_, _, size) in zip(values, columns.values(), strict=True)
            if size is None
        ]
        rows.append(b"".join([*sizes, *values]))
    config = json.dumps({"format": "mds"}).encode()
    first = 4 * (len(rows) + 2) + len(config)
    bounds = first + np.cumsum([0, *map(len, rows)])
    head = np.array([len(rows), *bounds], np.uint32).tobytes()
    return head + config + b"".join(rows)


def mds_entry(name: str, data: bytes, rows: int, **changes: Any) -> dict[str, Any]:
    """Return what an index says of a shard."""
    return {
        "column_names": list(MDS_COLUMNS),
        "column_encodings": [encoding for encoding, _, _ in MDS_COLUMNS.values()],
        "column_sizes": [size for _, _, size in MDS_COLUMNS.values()],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
        "samples": rows,
        "version": 2,
        "zip_data": None,
        **changes,
    }


def _mds_writer(suffix: str, pack: Callable[[bytes], bytes]) -> Write:
    def write(folder: Path, records: Records) -> None:
        shards = []
        for i, part in enumerate(split(records)):
            data, name = mds_shard(part), f"shard.{i:05d}.mds"
            packed = {"basename": name + suffix, "bytes": len(pack(data)), "hashes": {}}
            (folder / (name + suffix)).write_bytes(pack(data))
            shards.append(mds_entry(name, data, len(part), zip_data=packed if suffix else None))
        (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))

    return write


def _mds_rows(records: Records) -> Records:
    return [{name: record[name] for name in MDS_COLUMNS} for record in records]


def _write_nothing(folder: Path, records: Records) -> None:
    pass


def _lines(suffix: str, encode: Callable[[bytes], bytes]) -> Write:
    return _in_files(f"{{}}.jsonl{suffix}", lambda records: encode(json_lines(records)))


CASES = [
    Case("parquet", write_parquet, lambda folder, _: Parquet(f"{folder}/*.parquet", batch_rows=4)),
    Case("jsonl", _lines("", bytes), lambda folder, _: Jsonl(f"{folder}/*.jsonl")),
    Case("gz", _lines(".gz", gzip.compress), lambda folder, _: Jsonl(f"{folder}/*.gz")),
    Case("zst", _lines(".zst", zstandard.compress), lambda folder, _: Jsonl(f"{folder}/*")),
    Case("arrow file", _arrow_writer(pa.ipc.new_file), lambda folder, _: ArrowIpc(f"{folder}/*")),
    Case("arrow stream", _arrow_writer(pa.ipc.new_stream), lambda f, _: ArrowIpc(f"{f}/*.arrow")),
    Case(
        "hugging face",
        _write_saved,
        lambda folder, _: HuggingFace(folder, "train"),
        index=("state.json", "dataset_info.json", "dataset_dict.json"),
    ),
    Case("text", _in_files("{}.txt", text_lines), lambda folder, _: Text(f"{folder}/*"), texts),
    Case(
        "text zst",
        _in_files("{}.zst", lambda records: zstandard.compress(text_lines(records))),
        lambda folder, _: Text(f"{folder}/*"),
        texts,
    ),
    Case(
        "text blocks",
        _in_files("{}.txt", _blocks),
        lambda folder, _: Text(f"{folder}/*", "block", column="body"),
        _block_texts,
    ),
    Case("text files", _write_text_files, lambda folder, _: Text(f"{folder}/*", "file"), texts),
    Case(
        "csv",
        _in_files("{}.csv", csv_table),
        lambda folder, _: Csv(f"{folder}/*", ["text", "number"], types={"number": "int"}),
        _csv_rows,
    ),
    Case("tar", _in_files("{}.tar", _tar), lambda folder, _: Tar(f"{folder}/*"), _samples),
    Case(
        "tar.gz",
        _in_files("{}.tar.gz", lambda records: gzip.compress(_tar(records))),
        lambda folder, _: Tar(f"{folder}/*"),
        _samples,
    ),
    Case(
        "tar.zst",
        _in_files("{}.tar.zst", lambda records: zstandard.compress(_tar(records))),
        lambda folder, _: Tar(f"{folder}/*"),
        _samples,
    ),
    Case(
        "images",
        _write_images,
        lambda folder, _: ImageFolder(folder, shard_images=5),
        _images,
        holds_file=False,
    ),
    Case("mds", _mds_writer("", bytes), lambda f, _: Mds(f), _mds_rows, index=("index.json",)),
    Case(
        "mds zstd",
        _mds_writer(".zstd", zstandard.compress),
        lambda folder, _: Mds(folder),
        _mds_rows,
        index=("index.json",),
    ),
    Case("memory", _write_nothing, lambda _, records: InMemory(records, shards=4), in_files=False),
]
IN_FILES = [case for case in CASES if case.in_files]
