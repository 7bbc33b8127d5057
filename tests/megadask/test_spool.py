"""Batches by way of the disk: the same rows and errors, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megadask.readers import Parquet, spool
from megadask.readers.spool import spooled
from megadask.scheduling.reading import BadRecord, TruncatedShard
from tests.megadask.helpers.opened import open_files

ROWS = 200


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes by way of the disk."""
    monkeypatch.setattr(spool, "HELD_BYTES", -(2**60))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "id": range(ROWS),
            "image": [rng.bytes(2000) for _ in range(ROWS)],
            "tags": [[f"tag {i}"] * (i % 3) for i in range(ROWS)],
            "kind": pa.array([f"kind {i % 5}" for i in range(ROWS)]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=130)
    return tmp_path / "a.parquet"


def rows(path: Path, start: int = 0) -> list[Any]:
    reader = Parquet(path)
    return [list(reader.read(shard, start)) for shard in range(2)]


def test_rows_are_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = (0, 1, 16, 33, 70, 129)
    plain = [rows(path, start) for start in starts]
    before = len(open_files())
    monkeypatch.setattr(spool, "HELD_BYTES", -(2**60))
    assert [rows(path, start) for start in starts] == plain
    with closing(Parquet(path).read(0)) as some:
        for _ in range(20):
            next(some)
        assert len(open_files()) == before + 1  # a file without a name, and the data is closed
        assert all("(deleted)" in link or "a.parquet" not in link for link in open_files())
    assert len(open_files()) == before


def test_a_broken_shard_ends_at_the_same_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pq.read_table(path)
    options: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
    pq.write_table(table, path, data_page_size=4096, write_batch_size=4, **options)
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(1)
    data = bytearray(path.read_bytes())
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[middle : middle + 9000] = b"\xff" * 9000
    reader = Parquet(path)
    assert len(reader.shards()) == 1
    path.write_bytes(data)

    def outcome() -> tuple[int, str]:
        found: list[Any] = []
        with pytest.raises(TruncatedShard) as caught:
            found.extend(reader.read(0))
        return len(found), str(caught.value)

    plain = outcome()
    monkeypatch.setattr(spool, "HELD_BYTES", -(2**60))
    assert outcome() == plain
    assert 0 < plain[0] < ROWS


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("room", [0, 1, 5])
def test_where_the_disk_is_full_memory_holds_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain = rows(path)
    made = pa.ipc.new_stream

    class Full:
        def __init__(self, *options: Any) -> None:
            self._stream, self._left = made(*options), room

        def write_batch(self, batch: pa.RecordBatch) -> None:
            if not self._left:
                raise OSError(28, "No space left on device")
            self._left -= 1
            self._stream.write_batch(batch)

    monkeypatch.setattr(pa.ipc, "new_stream", Full)
    assert rows(path) == plain
    assert "no room on disk" in caplog.text


@pytest.mark.usefixtures("always")
def test_a_folder_for_temporary_files_that_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = rows(path)
    monkeypatch.setattr(tempfile, "tempdir", str(path.parent / "none"))
    assert rows(path) == plain


def test_what_is_small_or_very_large_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is made where a decoder holds much, and what it decodes is not too much for it."""
    files: list[Any] = []
    made = tempfile.TemporaryFile
    monkeypatch.setattr(
        spool.tempfile,
        "TemporaryFile",
        lambda **k: files.append(k) or made(**k),  # type: ignore[func-returns-value]
    )
    batch = pa.record_batch({"a": range(10)})

    def batches(held_bytes: int) -> Iterator[pa.RecordBatch]:
        held = pa.allocate_buffer(held_bytes)
        for _ in range(5):
            yield batch
        del held

    assert len(list(spooled(batches(0), 50))) == 5
    assert len(list(spooled(batches(2 * spool.HELD_BYTES), 10**9))) == 5
    assert files == []
    assert len(list(spooled(batches(2 * spool.HELD_BYTES), 50))) == 5
    assert len(files) == 1
    assert list(spooled((b for b in ()), 0)) == []


def test_files_of_large_pages_take_little_memory(tmp_path: Path) -> None:
    """Images of 25 kB as pyarrow writes by default: one page of 25 MB in each row group."""
    rng = np.random.default_rng(0)
    table = pa.table({"image": [rng.bytes(25_000) for _ in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet")
    code = (
        "import pyarrow as pa\n"
        "from megadask.readers import Parquet\n"
        f"reader = Parquet({str(tmp_path / 'a.parquet')!r})\n"
        "held = [reader.read(0) for _ in range(4)]\n"
        "for rows in held:\n"
        "    for _ in range(100):\n"
        "        next(rows)\n"
        "print(pa.total_allocated_bytes() / len(held))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 5e6


def test_bad_records_are_bad_all_the_same(tmp_path: Path, always: None) -> None:
    data = pa.array([b"good", b"\xff\xfe", b"good"])
    text = pa.StringArray.from_buffers(3, *data.buffers()[1:])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    found = list(Parquet(tmp_path / "a.parquet").read(0))
    assert [isinstance(record, BadRecord) for record in found] == [False, True, False]
