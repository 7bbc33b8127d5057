"""Every reader over s3://, against a server of that API on the loopback device."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megadask as md
from megadask.readers.paths import expand
from tests.megadask.helpers.reader_cases import (
    IN_FILES,
    RECORDS,
    Case,
    json_lines,
    plain,
    texts,
)
from tests.megadask.helpers.s3 import s3_server

pytest.importorskip("s3fs", reason="needs the extra test")
pytest.importorskip("moto.server", reason="needs the extra test")

pytestmark = [
    pytest.mark.timeout(120),
    # The sockets of the server's and the client's pools, and what moto's own code warns of.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]

BUCKET = "corpora"


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """A file system on a bucket of a server of its own."""
    with s3_server() as kind:
        # Not the one that readers get, which must see what others write.
        filesystem = kind(skip_instance_cache=True, use_listings_cache=False)
        filesystem.mkdir(BUCKET)
        yield filesystem


@pytest.fixture
def prefix(store: Any, tmp_path: Path) -> Iterator[str]:
    """Where no other test writes, as ``bucket/folder``."""
    yield f"{BUCKET}/{tmp_path.name}"
    if store.exists(f"{BUCKET}/{tmp_path.name}"):
        store.rm(f"{BUCKET}/{tmp_path.name}", recursive=True)


def _put(store: Any, folder: Path, prefix: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.pipe(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())


def _rows(reader: Any) -> list[Any]:
    return [plain(row) for i in range(len(reader.shards())) for row in reader.read(i)]


@pytest.mark.parametrize("case", IN_FILES, ids=lambda case: case.name)
def test_a_bucket_reads_like_a_folder(case: Case, store: Any, prefix: str, tmp_path: Path) -> None:
    records = RECORDS[:24]
    case.write(tmp_path, records)
    _put(store, tmp_path, prefix)
    local, remote = case.make(str(tmp_path), records), case.make(f"s3://{prefix}", records)
    assert remote.fingerprint() == local.fingerprint()
    assert [shard.name for shard in remote.shards()] == [shard.name for shard in local.shards()]
    assert all(path.startswith(f"s3://{prefix}/") for path in remote.paths())
    assert _rows(pickle.loads(pickle.dumps(remote))) == case.expected(records)
    last = len(remote.shards()) - 1
    assert [*map(plain, remote.read(last, 1))] == [*map(plain, local.read(last, 1))]


def test_the_pickle_holds_no_secrets(store: Any, prefix: str) -> None:
    store.pipe(f"{prefix}/0.jsonl", json_lines(RECORDS))
    reader = md.readers.Jsonl(f"s3://{prefix}/*.jsonl")
    reader.shards()
    assert b"loopback" not in pickle.dumps(reader)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["a/*.x"], ["0.x", "1.x"]),
        (["{b,a}/0.x"], ["a/0.x", "b/0.x"]),
        (["a/{0..1}.x"], ["0.x", "1.x"]),
        (["b/0.x", "a/1.x"], ["a/1.x", "b/0.x"]),
        (["**/*.x"], ["a/0.x", "a/1.x", "b/0.x"]),
    ],
)
def test_patterns(store: Any, prefix: str, patterns: list[str], names: list[str]) -> None:
    for name in ("a/0.x", "a/1.x", "b/0.x", "b/0.y"):
        store.pipe(f"{prefix}/{name}", name.encode())
    found = expand([f"s3://{prefix}/{pattern}" for pattern in patterns])
    assert [(file.name, file.size_bytes) for file in found] == [(name, 5) for name in names]


def test_what_is_missing_is_named(store: Any, prefix: str) -> None:
    store.pipe(f"{prefix}/0.jsonl", b"{}\n")
    for pattern, match in (
        ("1.jsonl", rf"no file 's3://{prefix}/1.jsonl'"),
        ("*.x", "no file matches"),
        ("", "is a directory"),
    ):
        with pytest.raises(md.errors.ConfigError, match=match):
            md.readers.Jsonl(f"s3://{prefix}/{pattern}").shards()
    with pytest.raises(md.errors.ConfigError, match="there are no files in"):
        md.readers.ImageFolder(f"s3://{prefix}/images").shards()


def test_an_object_that_is_gone_is_a_failure_of_storage(store: Any, prefix: str) -> None:
    store.pipe(f"{prefix}/0.jsonl", json_lines(RECORDS))
    reader = md.readers.Jsonl(f"s3://{prefix}/0.jsonl")
    reader.shards()
    store.rm(f"{prefix}/0.jsonl")
    with pytest.raises(FileNotFoundError):
        next(reader.read(0))


def test_a_shorter_object_in_its_place_ends_the_shard(store: Any, prefix: str) -> None:
    data = json_lines(RECORDS)
    store.pipe(f"{prefix}/0.jsonl", data)
    reader = md.readers.Jsonl(f"s3://{prefix}/0.jsonl")
    reader.shards()
    store.pipe(f"{prefix}/0.jsonl", data[: len(data) // 2])
    rows = []
    with pytest.raises(md.errors.TruncatedShard, match=r"0\.jsonl cannot be read from row"):
        rows.extend(reader.read(0))
    assert rows == RECORDS[: len(rows)]


def test_columns_that_lie_apart_are_fetched_once(
    store: Any, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3fs.core import S3File

    rng = np.random.default_rng(0)
    columns = {name: [rng.bytes(3000) for _ in range(1000)] for name in "abc"}
    options = {"data_page_size": 2**16, "write_batch_size": 16, "use_dictionary": False}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", **options)
    _put(store, tmp_path, prefix)
    reader = md.readers.Parquet(f"s3://{prefix}/x.parquet", ["a", "c"])
    reader.shards()
    fetched: list[int] = []
    fetch = S3File._fetch_range

    def counted(file: Any, start: int, stop: int) -> Any:
        fetched.append(stop - start)
        return fetch(file, start, stop)

    monkeypatch.setattr(S3File, "_fetch_range", counted)
    assert sum(1 for _ in reader.read(0)) == 1000
    assert sum(fetched) < 1.1 * 2 * 3_000_000
    assert len(fetched) < 20


class TestChangedData:
    """What a resume says of data that are not what they were."""

    def _pipeline(self, prefix: str) -> md.Pipeline:
        return md.Pipeline(
            sources=[
                md.Source(
                    "web",
                    md.readers.Text(f"s3://{prefix}/*.txt"),
                    transform=md.transforms.Bytes(),
                    lanes=2,
                )
            ],
            batching=md.Packed(seq_len=64, global_batch=2),
        )

    def _write(self, store: Any, prefix: str, name: str, count: int = 5) -> None:
        lines = "".join(f"{row['text']}\n" for row in texts(RECORDS[:count]))
        store.pipe(f"{prefix}/{name}.txt", lines.encode())

    def test_what_changed_is_an_error_that_names_the_source(self, store: Any, prefix: str) -> None:
        for name in "bc":
            self._write(store, prefix, name)
        saved = self._pipeline(prefix).components
        self._pipeline(prefix).check_resumable(saved)
        self._write(store, prefix, "d")
        self._pipeline(prefix).check_resumable(saved)  # behind the old ones
        self._write(store, prefix, "a")
        with pytest.raises(md.errors.StateError, match="source web"):
            self._pipeline(prefix).check_resumable(saved)
        store.rm(f"{prefix}/a.txt")
        self._pipeline(prefix).check_resumable(saved)
        self._write(store, prefix, "c", count=4)
        with pytest.raises(md.errors.StateError, match="source web"):
            self._pipeline(prefix).check_resumable(saved)
