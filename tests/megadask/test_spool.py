"""Batches by way of the disk: the same rows and errors, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megadask.planner.errors import ConfigError
from megadask.readers import Parquet, spool
from megadask.readers.spool import OpenShards, Spooled
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


def made_files(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    files: list[Any] = []
    made = tempfile.TemporaryFile
    monkeypatch.setattr(
        spool.tempfile,
        "TemporaryFile",
        lambda **k: files.append(k) or made(**k),  # type: ignore[func-returns-value]
    )
    return files


def test_what_holds_little_or_is_very_large_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file is made where a decoder holds much, and what it decodes is not too much for it."""
    files = made_files(monkeypatch)
    batch = pa.record_batch({"a": range(2**16)})

    def batches(held_bytes: int) -> Generator[pa.RecordBatch, None, None]:
        held = pa.allocate_buffer(held_bytes)
        for _ in range(9):
            yield batch
        del held

    def count(held_bytes: int, num_rows: int) -> int:
        with Spooled(batches(held_bytes), num_rows, OpenShards()) as some:
            return len(list(some))

    assert count(0, 9 * 2**16) == 9
    assert count(2 * spool.HELD_BYTES, 10**9) == 9
    assert count(2 * spool.HELD_BYTES, 10) == 9  # so little was not what it holds
    assert files == []
    assert count(2 * spool.HELD_BYTES, 9 * 2**16) == 9
    assert len(files) == 1
    with Spooled((b for b in ()), 0, OpenShards()) as none:
        assert list(none) == []


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Five row groups of 150 kB in pages of 1,000 rows, and one of a few bytes."""
    groups = [[f"{group} {row} " + "x" * 500 for row in range(300)] for group in range(5)]
    table = pa.table({"text": [text for group in groups for text in group] + ["last"]})
    pq.write_table(table, tmp_path / "texts.parquet", row_group_size=300)
    return tmp_path / "texts.parquet"


def test_of_many_small_shards_of_a_reader_none_keeps_its_decoder(texts: Path) -> None:
    reader, alone = Parquet(texts), Parquet(texts)
    expected = [list(alone.read(shard)) for shard in range(6)]
    before = len(open_files())
    with contextlib.ExitStack() as stack:
        shards = [stack.enter_context(closing(reader.read(shard))) for shard in range(6)]
        found = [[next(shards[0])]]
        assert sum("texts.parquet" in link for link in open_files()) == 1
        found += [[next(shard)] for shard in shards[1:]]
        # The last is too small for a file to be worth it.
        assert sum("texts.parquet" in link for link in open_files()) == 1
        for _ in range(300):
            for shard, records in zip(shards, found, strict=True):
                records.extend(itertools.islice(shard, 1))
        assert found == expected
    assert len(open_files()) == before


def test_a_single_shard_keeps_its_decoder(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = made_files(monkeypatch)
    reader = Parquet(texts)
    for shard in range(6):
        assert list(reader.read(shard))
    with closing(reader.read(0)) as one, closing(copy.deepcopy(reader).read(1)) as other:
        assert next(one) != next(other)
    assert files == []


def test_what_breaks_on_the_way_to_disk_is_told_to_whoever_reads_it() -> None:
    """Another shard that is opened meanwhile closes the decoder, and is not to blame."""
    shards = OpenShards()
    batch = pa.record_batch({"a": range(2**14)})

    def broken() -> Generator[pa.RecordBatch, None, None]:
        yield batch
        yield batch
        raise pa.ArrowNotImplementedError("an encoding")

    def whole() -> Generator[pa.RecordBatch, None, None]:
        yield batch
        yield batch

    with (
        Spooled(broken(), 2**16, shards) as one,
        Spooled(whole(), 2**15, shards) as other,
    ):
        assert next(one) == batch
        assert list(other) == [batch, batch]
        assert next(one) == batch
        with pytest.raises(pa.ArrowNotImplementedError, match="an encoding"):
            next(one)


def test_lanes_share_the_footer_of_their_file(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Parquet(texts)
    assert len(reader.shards()) == 6
    footers = []
    read = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda f: footers.append(read(f)) or footers[-1])
    with contextlib.ExitStack() as stack:
        for shard in range(6):
            next(stack.enter_context(closing(reader.read(shard))))
        assert len(footers) == 1
        # A file that was written anew meanwhile has a footer of its own.
        pq.write_table(pa.table({"text": ["new"]}), texts)
        with pytest.raises(ConfigError, match="changed since it was listed"):
            next(reader.read(1))
    assert len(footers) == 2


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
