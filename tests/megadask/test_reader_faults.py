"""What readers do when data is broken, missing or of another kind, or when storage fails."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from megadask.planner.errors import ConfigError
from megadask.planner.state import LaneCursor
from megadask.readers import ArrowIpc, Csv, Jsonl, Parquet, Tar, Text
from megadask.scheduling.errors import SourceError
from megadask.scheduling.lanes import read_lane
from megadask.scheduling.reading import BadRecord, Reader, TruncatedShard
from tests.fakes import source_spec
from tests.megadask.helpers.opened import open_files
from tests.megadask.helpers.reader_cases import IN_FILES, Case, plain
from tests.megadask.helpers.reader_cases import RECORDS as CASE_RECORDS

# Texts that do not compress, so that a cut anywhere cuts records.
_RNG = np.random.default_rng(0)
RECORDS: list[dict[str, Any]] = [{"number": i, "text": _RNG.bytes(300).hex()} for i in range(200)]
TABLE = pa.Table.from_pylist(RECORDS)
LINES = [json.dumps(record).encode() + b"\n" for record in RECORDS]


def _write_parquet(path: Path, **options: Any) -> None:
    options = {"compression": "none", "data_page_size": 4096, "use_dictionary": False, **options}
    pq.write_table(
        TABLE, path, write_batch_size=8, write_page_checksum=True, write_statistics=False, **options
    )


def _write_arrow(
    path: Path, new: Callable[..., Any] = pa.ipc.new_file, rows: int = 50, table: pa.Table = TABLE
) -> None:
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def _read_until_it_breaks(reader: Reader, start: int = 0, shard: int = 0) -> tuple[list[Any], str]:
    """Return the rows before TruncatedShard, and its message."""
    rows: list[Any] = []
    records = reader.read(shard, start)
    with pytest.raises(TruncatedShard) as caught:
        rows.extend(records)
    assert next(records, None) is None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return rows, str(caught.value)


def _cut(path: Path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def _flip(path: Path, offset: int, length: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for i in range(offset, offset + length):
        data[i] ^= 0xFF
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Iterator[None]:
    before = sorted(open_files())
    yield
    assert sorted(open_files()) == before


class TestParquet:
    def test_a_file_cut_after_it_was_listed(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        _write_parquet(path)
        reader = Parquet(path)
        reader.shards()
        _cut(path, 0.6)
        rows, message = _read_until_it_breaks(reader, start=7)
        assert rows == []
        assert "x.parquet#rg0" in message
        assert "row 7" in message

    @pytest.mark.parametrize("batch_rows", [1, 7, 64, 1000])
    def test_the_row_where_it_breaks_hangs_on_the_data_alone(
        self, tmp_path: Path, batch_rows: int
    ) -> None:
        path = tmp_path / "x.parquet"
        _write_parquet(path)
        reader = Parquet(path, batch_rows=batch_rows)
        _flip(path, path.read_bytes().index(RECORDS[100]["text"].encode()))
        rows, message = _read_until_it_breaks(reader)
        assert rows == RECORDS[: len(rows)]
        assert 90 <= len(rows) <= 100  # the first row of its page
        assert f"row {len(rows)} on" in message
        for start in (0, 3, len(rows) - 1, len(rows)):
            later, _ = _read_until_it_breaks(reader, start)
            assert later == rows[start:]

    def test_the_other_row_groups_are_still_read(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        _write_parquet(path, row_group_size=50)
        reader = Parquet(path)
        _flip(path, path.read_bytes().index(RECORDS[60]["text"].encode()))
        _read_until_it_breaks(reader, shard=1)
        assert list(reader.read(0)) == RECORDS[:50]
        assert list(reader.read(2)) == RECORDS[100:150]

    @pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip"])
    def test_noise_in_compressed_pages(self, tmp_path: Path, compression: str) -> None:
        path = tmp_path / "x.parquet"
        _write_parquet(path, compression=compression)
        reader = Parquet(path)
        reader.shards()
        _flip(path, path.stat().st_size // 2, 2000)
        rows, _ = _read_until_it_breaks(reader)
        assert rows == RECORDS[: len(rows)]

    def test_invalid_utf8_is_one_bad_record(self, tmp_path: Path) -> None:
        texts = pa.array([b"fine", b"\xff\xfe", b"fine too"]).view(pa.string())
        pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet")
        first, bad, last = Parquet(tmp_path / "x.parquet").read(0)
        assert (first, last) == ({"text": "fine"}, {"text": "fine too"})
        assert isinstance(bad, BadRecord)
        assert "row 1" in bad.reason
        assert "'text'" in bad.reason

    def test_another_file_in_its_place(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        _write_parquet(path, row_group_size=50)
        reader = Parquet(path)
        reader.shards()
        _write_parquet(path, row_group_size=100)
        for shard in (0, 3):
            with pytest.raises(ConfigError, match="changed since it was listed"):
                next(reader.read(shard))

    @pytest.mark.parametrize(
        "data", [b"", b"no Parquet at all" * 10, b"PAR1" + bytes(20) + b"PAR1"]
    )
    def test_a_file_of_another_kind(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "x.parquet").write_bytes(data)
        with pytest.raises(ConfigError, match=r"x\.parquet is not a Parquet file"):
            Parquet(tmp_path / "x.parquet").shards()

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        pq.write_table(TABLE.slice(0, 0), tmp_path / "x.parquet")
        with pytest.raises(ConfigError, match="no records"):
            Parquet(tmp_path / "x.parquet").shards()


LINE_READERS: dict[str, Callable[[Any], Reader]] = {
    "jsonl": Jsonl,
    "csv": Csv,
    "csv of names": lambda paths: Csv(paths, names=["a", "b"]),
    "lines": Text,
    "blocks": lambda paths: Text(paths, "block"),
}


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("make", LINE_READERS.values(), ids=LINE_READERS)
def test_files_of_no_bytes_are_an_error_where_they_are_listed(
    make: Callable[[Any], Reader], suffix: str, tmp_path: Path
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.x{suffix}").touch()
    with pytest.raises(ConfigError, match="has no records; got 2 empty files"):
        make(tmp_path / "*").shards()
    (tmp_path / "c.x").write_text("[]\n")
    assert len(make(tmp_path / "*").shards()) == 3


def test_a_text_that_is_empty_is_one_where_files_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert list(Text(tmp_path / "a.txt", "file").read(0)) == [{"text": ""}]


def _other_file(kind: str) -> bytes:
    if kind in ("parquet", "arrow"):
        sink = pa.BufferOutputStream()
        if kind == "parquet":
            pq.write_table(TABLE, sink)
        else:
            with pa.ipc.new_file(sink, TABLE.schema) as writer:
                writer.write_table(TABLE)
        return bytes(sink.getvalue())
    return {
        "csv": b"number,text\n1,a\n",
        "text": b"Once upon a time\nthere was\n",
        "one document": json.dumps(RECORDS, indent=1).encode(),
        "a list": json.dumps(RECORDS).encode(),
        "zeros": bytes(1000),
        "one long line": b"x" * 200_000,
    }[kind]


OTHER_FILES = [
    "parquet",
    "arrow",
    "csv",
    "text",
    "one document",
    "a list",
    "zeros",
    "one long line",
]


class TestJsonl:
    @pytest.mark.parametrize("kind", OTHER_FILES)
    def test_a_file_of_another_kind_does_not_look_like_json_lines(
        self, kind: str, tmp_path: Path
    ) -> None:
        said = "the file does not look like JSON lines"
        (tmp_path / "x.jsonl").write_bytes(b"\n" + _other_file(kind))
        reader = Jsonl(tmp_path / "x.jsonl", max_line_bytes=100_000)
        first, *others = reader.read(0)
        assert isinstance(first, BadRecord)
        assert said in first.reason
        assert not any(said in str(other) for other in others)
        assert list(reader.read(0, 1)) == others
        with pytest.raises(SourceError, match=said):
            next(read_lane(source_spec(reader, on_error="raise"), 0, 0, LaneCursor()))

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b'{"a": 1', "line 3: invalid JSON"),
            (b'{"a": "\xff"}', "line 3: invalid UTF-8 at byte 7"),
            (b"[1, 2]", "line 3: a JSON list, expected an object"),
            (b'"text"', "line 3: a JSON str"),
            (b"null", "line 3: a JSON NoneType"),
            (b"[" * 100_000, "line 3: invalid JSON"),
            (b'{"a": ' + b"9" * 5000 + b"}", "line 3: invalid JSON"),
            (b'{"a": "' + b"x" * 100_000 + b'"}', "line 3: longer than max_line_bytes"),
        ],
    )
    @pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
    def test_a_bad_line_stands_for_itself_only(
        self, tmp_path: Path, line: bytes, reason: str, suffix: str
    ) -> None:
        encode: Any = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
        path = tmp_path / f"x.jsonl{suffix}"
        path.write_bytes(encode(b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n'))
        limit = 50_000 if "longer" in reason else 10**6
        reader = Jsonl(path, max_line_bytes=limit)
        first, bad, last = reader.read(0)
        assert (first, last) == ({"a": 1}, {"a": 2})
        assert isinstance(bad, BadRecord)
        assert bad.reason.startswith(reason)
        assert list(reader.read(0, 1)) == [bad, last]
        assert list(reader.read(0, 2)) == [last]

    def test_a_last_line_that_is_too_long(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n' + b"x" * 100_000)
        first, bad = Jsonl(tmp_path / "x.jsonl", max_line_bytes=1000).read(0)
        assert first == {"a": 1}
        assert bad == BadRecord("line 2: longer than max_line_bytes")

    @pytest.mark.parametrize(
        ("suffix", "encode"), [(".gz", gzip.compress), (".zst", zstandard.compress)]
    )
    def test_a_huge_document_in_a_small_file_is_never_held(
        self, tmp_path: Path, suffix: str, encode: Callable[[bytes], bytes]
    ) -> None:
        path = tmp_path / f"x.jsonl{suffix}"
        path.write_bytes(encode(b'{"a": 1}\n' + bytes(2**28) + b'\n{"a": 2}\n'))
        reader = Jsonl(path, max_line_bytes=2**20)
        tracemalloc.start()
        try:
            first, bad, last = reader.read(0)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (first, last) == ({"a": 1}, {"a": 2})
        assert bad == BadRecord("line 2: longer than max_line_bytes")
        assert peak_bytes < 2**27

    @pytest.mark.parametrize(
        ("suffix", "encode"),
        [("", bytes), (".gz", gzip.compress), (".zst", zstandard.compress)],
    )
    @pytest.mark.parametrize("part", [0.5, 0.999])
    def test_a_cut_file(
        self, tmp_path: Path, suffix: str, encode: Callable[[bytes], bytes], part: float
    ) -> None:
        path = tmp_path / f"x.jsonl{suffix}"
        path.write_bytes(encode(b"".join(LINES)))
        reader = Jsonl(path)
        reader.shards()
        _cut(path, part)
        rows, message = _read_until_it_breaks(reader)
        assert rows == RECORDS[: len(rows)]
        assert len(rows) < len(RECORDS)
        # Zstandard gives out whole blocks of 128 KiB.
        assert len(rows) > len(RECORDS) * (part - 0.05) or suffix == ".zst"
        assert f"row {len(rows)} on" in message
        assert _read_until_it_breaks(reader, start=5)[0] == rows[5:]
        assert _read_until_it_breaks(reader, start=len(rows))[0] == []

    @pytest.mark.parametrize(
        ("suffix", "encode"), [(".gz", gzip.compress), (".zst", zstandard.compress)]
    )
    def test_a_compressed_file_that_was_cut_before_it_was_listed(
        self, tmp_path: Path, suffix: str, encode: Callable[[bytes], bytes]
    ) -> None:
        path = tmp_path / f"x.jsonl{suffix}"
        path.write_bytes(encode(b"".join(LINES[:100])) + encode(b"".join(LINES[100:]))[:-50])
        rows, _ = _read_until_it_breaks(Jsonl(path))
        assert rows == RECORDS[: len(rows)]
        assert len(rows) >= 100

    @pytest.mark.parametrize("suffix", [".gz", ".zst"])
    def test_noise_in_place_of_a_compressed_stream(self, tmp_path: Path, suffix: str) -> None:
        (tmp_path / f"x{suffix}").write_bytes(b"".join(LINES[:3]))
        assert _read_until_it_breaks(Jsonl(tmp_path / f"x{suffix}"))[0] == []

    def test_gzip_notices_a_flipped_bit(self, tmp_path: Path) -> None:
        path = tmp_path / "x.gz"
        path.write_bytes(gzip.compress(b"".join(LINES)))
        _flip(path, path.stat().st_size - 6)  # in the checksum
        _read_until_it_breaks(Jsonl(path))

    def test_a_compression_that_is_not_supported(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl.bz2").write_bytes(b"BZh")
        with pytest.raises(ConfigError, match="zstd"):
            Jsonl(tmp_path / "x.jsonl.bz2").shards()


class TestArrow:
    def test_a_file_cut_after_it_was_listed(self, tmp_path: Path) -> None:
        path = tmp_path / "x.arrow"
        _write_arrow(path)
        reader = ArrowIpc(path)
        reader.shards()
        _cut(path, 0.6)
        rows, message = _read_until_it_breaks(reader, start=3, shard=1)
        assert rows == []
        assert "row 3" in message

    @pytest.mark.parametrize("part", [0.3, 0.6, 0.999])
    def test_a_stream_cut_in_a_batch(self, tmp_path: Path, part: float) -> None:
        path = tmp_path / "x.arrows"
        _write_arrow(path, pa.ipc.new_stream)
        reader = ArrowIpc(path)
        reader.shards()
        _cut(path, part)
        rows, _ = _read_until_it_breaks(reader)
        assert rows == RECORDS[: len(rows)]
        assert len(rows) % 50 == 0
        assert _read_until_it_breaks(reader, start=20)[0] == rows[20:]

    def test_a_stream_cut_between_batches(self, tmp_path: Path) -> None:
        path, shorter = tmp_path / "x.arrows", tmp_path / "shorter"
        _write_arrow(path, pa.ipc.new_stream)
        _write_arrow(shorter, pa.ipc.new_stream, table=TABLE.slice(0, 100))
        reader = ArrowIpc(path)
        reader.shards()
        os.truncate(path, shorter.stat().st_size - 8)  # less the end marker
        assert _read_until_it_breaks(reader)[0] == RECORDS[:100]

    def test_broken_offsets_are_bad_records_not_a_crash(self, tmp_path: Path) -> None:
        path = tmp_path / "x.arrow"
        offsets = np.arange(0, 11 * 4, 4, dtype=np.int32)
        marked = offsets.copy()
        marked[5] = 0x7ABBCCDD
        table = pa.table(
            {
                "text": pa.Array.from_buffers(
                    pa.string(), 10, [None, *map(pa.py_buffer, (marked, b"word" * 10))]
                )
            }
        )
        _write_arrow(path, table=table)
        rows = list(ArrowIpc(path).read(0))
        assert [i for i, row in enumerate(rows) if isinstance(row, BadRecord)] == [4, 5]
        assert all(row == {"text": "word"} for i, row in enumerate(rows) if i not in (4, 5))
        assert list(ArrowIpc(path).read(0, 4)) == rows[4:]

    def test_another_file_in_its_place(self, tmp_path: Path) -> None:
        path = tmp_path / "x.arrow"
        _write_arrow(path, rows=50)
        reader = ArrowIpc(path)
        reader.shards()
        _write_arrow(path, rows=100)
        for shard in (0, 3):
            with pytest.raises(ConfigError, match="changed since it was listed"):
                next(reader.read(shard))

    @pytest.mark.parametrize("data", [b"", b"no Arrow" * 10, b"ARROW1", b"ARROW1" + bytes(50)])
    def test_a_file_of_another_kind(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "x.arrow").write_bytes(data)
        with pytest.raises(ConfigError, match="neither an Arrow file nor a stream"):
            ArrowIpc(tmp_path / "x.arrow").shards()

    def test_noise_in_the_footer(self, tmp_path: Path) -> None:
        path = tmp_path / "x.arrow"
        _write_arrow(path)
        intact = path.read_bytes()
        (footer_bytes,) = np.frombuffer(intact[-10:-6], "<i4")
        rng = np.random.default_rng(1)
        for _ in range(200):
            path.write_bytes(intact)
            _flip(path, int(rng.integers(len(intact) - 10 - footer_bytes, len(intact) - 6)), 2)
            # It is found, or it does no harm; any other error is a defect.
            with suppress(ConfigError):
                ArrowIpc(path).shards()


READERS = [Parquet, Jsonl, ArrowIpc, Text, Csv, Tar]
#: Cases of which a cut leaves nothing: the end of the file says where its data are, it is one block
#: of the compressor, or it is one record.
ALL_OR_NOTHING = {
    "parquet", "arrow file", "zst", "text zst", "tar.zst", "mds zstd", "text files", "images",
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
class TestMissing:
    def test_a_missing_path(self, kind: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no file '.*gone\.x'"):
            kind(tmp_path / "gone.x").shards()

    def test_an_empty_glob(self, kind: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no file matches '.*\*\.x'"):
            kind(f"{tmp_path}/*.x").shards()

    def test_one_of_a_brace_list(self, kind: Any, tmp_path: Path) -> None:
        (tmp_path / "a.x").touch()
        with pytest.raises(ConfigError, match=r"no file '.*b\.x' \(from '.*\{a,b\}\.x'\)"):
            kind(f"{tmp_path}/{{a,b}}.x").shards()

    def test_a_directory(self, kind: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"is a directory.*Name the files in it"):
            kind(tmp_path).shards()

    def test_a_glob_that_finds_directories_only(self, kind: Any, tmp_path: Path) -> None:
        (tmp_path / "folder.x").mkdir()
        with pytest.raises(ConfigError, match="no file matches"):
            kind(f"{tmp_path}/*.x").shards()

    def test_a_chained_url(self, kind: Any) -> None:
        with pytest.raises(ConfigError, match="::"):
            kind("zip://x.jsonl::memory://x.zip")


@pytest.mark.parametrize("case", IN_FILES, ids=lambda case: case.name)
class TestAnyReader:
    """What every reader of files does when its storage or its data fails."""

    def _listed(self, case: Case, folder: Path) -> tuple[Reader, Path]:
        """Return a reader that has listed its shards, and the file of the first one."""
        folder.mkdir(exist_ok=True)
        case.write(folder, CASE_RECORDS)
        reader: Reader = case.make(str(folder), CASE_RECORDS)
        reader.shards()
        return reader, Path(reader.paths()[0])

    def test_a_file_that_is_gone(self, case: Case, tmp_path: Path) -> None:
        reader, path = self._listed(case, tmp_path)
        path.unlink()
        with pytest.raises(FileNotFoundError):
            next(reader.read(0))

    def test_a_cut_file_is_read_up_to_the_cut(self, case: Case, tmp_path: Path) -> None:
        reader, path = self._listed(case, tmp_path)
        whole, data = _rows(reader), path.read_bytes()
        longest = 0
        for size in sorted({*range(0, len(data), max(len(data) // 40, 1)), len(data) - 1}):
            path.write_bytes(data[:size])
            rows, message = _until_it_breaks(reader)
            bad = next((i for i, row in enumerate(rows) if isinstance(row, BadRecord)), len(rows))
            assert rows[:bad] == whole[:bad]
            if message is None:  # a file is a record of its own, or what is cut off is padding
                assert (bad == 0) if case.name == "images" else rows == whole
                continue
            assert len(rows) == bad
            assert reader.shards()[0].name in message
            assert f"row {len(rows)} on" in message
            longest = max(longest, len(rows))
            for start in (0, len(rows) // 2, len(rows)):
                assert _until_it_breaks(reader, start)[0] == rows[start:]
        assert (longest == 0) == (case.name in ALL_OR_NOTHING)

    def test_noise_is_found_or_harmless(self, case: Case, tmp_path: Path) -> None:
        if case.name in ("parquet", "arrow file", "arrow stream", "hugging face"):
            pytest.skip("pyarrow's own decoders: tested above, format by format")
        reader, path = self._listed(case, tmp_path)
        data = path.read_bytes()
        rng = np.random.default_rng(0)
        for _ in range(60):
            noisy = bytearray(data)
            for place in rng.integers(len(data), size=int(rng.integers(1, 4))):
                noisy[place] = int(rng.integers(256))
            path.write_bytes(noisy)
            with suppress(ConfigError):  # it looks like another file in its place
                rows, _ = _until_it_breaks(reader)
                assert _until_it_breaks(reader, 2)[0] == rows[2:]

    @pytest.mark.parametrize(
        "error",
        [TimeoutError(), RuntimeError("reset by peer"), OSError("no errno"), OSError(5, "io")],
    )
    @pytest.mark.parametrize("part", [0, 0.2])
    def test_storage_that_fails_may_be_tried_again(
        self,
        case: Case,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: Exception,
        part: float,
    ) -> None:
        _, path = self._listed(case, tmp_path)
        memory = fsspec.filesystem("memory")
        memory.put(str(tmp_path), f"/{tmp_path.name}", recursive=True)
        reader = case.make(f"memory://{tmp_path.name}", CASE_RECORDS)
        whole = _rows(reader)
        after_bytes = int(path.stat().st_size * part)
        with monkeypatch.context() as patch:
            open_file = MemoryFileSystem._open
            patch.setattr(
                MemoryFileSystem,
                "_open",
                lambda *args, **kw: _FlakyFile(open_file(*args, **kw), error, after_bytes),
            )
            with pytest.raises(OSError, match=r"Errno") as caught:
                list(reader.read(0))
        assert not isinstance(caught.value, TruncatedShard)
        assert _rows(reader) == whole
        memory.rm(f"/{tmp_path.name}", recursive=True)


def _rows(reader: Reader) -> list[Any]:
    return [plain(row) for row in reader.read(0)]


def _until_it_breaks(reader: Reader, start: int = 0) -> tuple[list[Any], str | None]:
    """Return the rows, and what TruncatedShard says if it comes."""
    rows: list[Any] = []
    try:
        rows.extend(map(plain, reader.read(0, start)))
    except TruncatedShard as error:
        return rows, str(error)
    return rows, None


class _FlakyFile:
    """A file that fails once some bytes have been read."""

    def __init__(self, file: Any, error: Exception, after_bytes: int) -> None:
        self._file, self._error, self._left_bytes = file, error, after_bytes

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise self._error
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
