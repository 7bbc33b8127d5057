"""One contract that every reader keeps, and what only some have: paths, formats, options."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megadask.planner.errors import ConfigError
from megadask.readers import ArrowIpc, InMemory, Jsonl, Parquet
from megadask.readers.compression import decompress
from megadask.readers.paths import expand
from megadask.scheduling.reading import Reader, Shard, fingerprint_shards
from tests.megadask.helpers.opened import open_files
from tests.megadask.helpers.reader_cases import (
    CASES,
    IN_FILES,
    RECORDS,
    Case,
    Records,
    json_lines,
    plain,
    write_parquet,
)


def _id(case: Case) -> str:
    return case.name


def _reader(case: Case, folder: Path, records: Records = RECORDS) -> Reader:
    folder.mkdir(parents=True, exist_ok=True)
    case.write(folder, records)
    reader: Reader = case.make(str(folder), records)
    return reader


def _rows(reader: Reader, shard: int, start: int = 0) -> list[Any]:
    return [plain(record) for record in reader.read(shard, start)]


@pytest.mark.parametrize("case", CASES, ids=_id)
class TestContract:
    def test_same_records_in_same_records_out(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        shards = reader.shards()
        assert len(shards) > 1
        assert [row for i in range(len(shards)) for row in _rows(reader, i)] == case.expected(
            RECORDS
        )

    def test_it_is_a_reader(self, case: Case, tmp_path: Path) -> None:
        assert isinstance(_reader(case, tmp_path), Reader)

    def test_shards_have_unique_names_without_the_folder(self, case: Case, tmp_path: Path) -> None:
        names = [shard.name for shard in _reader(case, tmp_path).shards()]
        assert len(set(names)) == len(names)
        assert not any("/" in name for name in names)

    def test_known_row_counts_are_right(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        for i, shard in enumerate(reader.shards()):
            assert shard.rows in (None, len(_rows(reader, i)))
            assert shard.size_bytes is None or shard.size_bytes > 0

    def test_start_is_a_row_of_the_shard(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        for i in range(len(reader.shards())):
            rows = _rows(reader, i)
            for start in range(len(rows) + 3):
                assert _rows(reader, i, start) == rows[start:]

    def test_a_shard_or_row_that_cannot_be_is_an_error_at_once(
        self, case: Case, tmp_path: Path
    ) -> None:
        reader = _reader(case, tmp_path)
        for shard, start in ((-1, 0), (len(reader.shards()), 0), (0, -1)):
            with pytest.raises(IndexError):
                reader.read(shard, start)

    def test_the_shard_list_travels_in_the_pickle(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        shards = reader.shards()
        data = pickle.dumps(reader)
        for path in map(Path, case.data_files(tmp_path)):
            shutil.copy(path, path.with_stem(f"new-{path.stem}"))
        copy = pickle.loads(data)
        assert copy.shards() == shards
        assert copy.fingerprint() == reader.fingerprint()
        assert _rows(copy, 1) == _rows(reader, 1)

    def test_it_pickles_before_it_has_listed(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        assert pickle.loads(pickle.dumps(reader)).shards() == reader.shards()

    def test_closing_closes_the_file(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        reader.shards()
        before = len(open_files())
        for i in range(len(reader.shards())):
            rows = reader.read(i)
            next(rows)
            assert len(open_files()) == before + (case.in_files and case.holds_file)
            rows.close()  # type: ignore[attr-defined]
            assert len(open_files()) == before
            _rows(reader, i)
            assert len(open_files()) == before

    def test_two_reads_at_once_do_not_disturb_each_other(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        pairs = zip(reader.read(0), reader.read(0), strict=True)
        assert all(plain(a) == plain(b) for a, b in pairs)

    def test_records_are_the_callers_to_change(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        rows = _rows(reader, 0)
        for row in reader.read(0):
            row.clear()  # type: ignore[union-attr]
        assert _rows(reader, 0) == rows

    def test_fingerprint_is_the_same_elsewhere(self, case: Case, tmp_path: Path) -> None:
        here = _reader(case, tmp_path / "here")
        there = _reader(case, tmp_path / "mnt" / "there")
        assert here.fingerprint() == there.fingerprint() == here.fingerprint()

    def test_fingerprint_changes_with_the_data(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path / "a")
        longer = _reader(case, tmp_path / "b", [*RECORDS, RECORDS[0]])
        assert reader.fingerprint() != longer.fingerprint()

    def test_paths_are_the_files(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        assert list(reader.paths()) == case.data_files(tmp_path)


@pytest.mark.parametrize("case", IN_FILES, ids=_id)
class TestFiles:
    def test_a_relative_path_holds_in_another_folder(
        self, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "data").mkdir()
        case.write(tmp_path / "data", RECORDS)
        monkeypatch.chdir(tmp_path)
        reader = case.make("data", RECORDS)
        monkeypatch.chdir("/")
        assert _rows(pickle.loads(pickle.dumps(reader)), 0)

    def test_readers_compare_by_their_arguments(self, case: Case, tmp_path: Path) -> None:
        reader, same = _reader(case, tmp_path), _reader(case, tmp_path)
        reader.shards()
        assert reader == same
        assert hash(reader) == hash(same)
        assert reader != _reader(case, tmp_path / "b")
        assert str(tmp_path) in repr(reader)

    def test_a_url_reads_like_a_path(self, case: Case, tmp_path: Path) -> None:
        reader = _reader(case, tmp_path)
        memory = fsspec.filesystem("memory")
        memory.put(str(tmp_path), f"/{tmp_path.name}", recursive=True)
        try:
            remote = case.make(f"memory://{tmp_path.name}", RECORDS)
            assert remote.fingerprint() == reader.fingerprint()
            assert all(path.startswith(f"memory:///{tmp_path.name}/") for path in remote.paths())
            assert [_rows(remote, i) for i in range(len(remote.shards()))] == [
                _rows(reader, i) for i in range(len(reader.shards()))
            ]
        finally:
            memory.rm(f"/{tmp_path.name}", recursive=True)


class TestPaths:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("a/0.x", "a/1.x", "b/0.x", "b/10.x", "b/9.x", "c.x", "b/0.y"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        return tmp_path

    @pytest.mark.parametrize(
        ("patterns", "names"),
        [
            (["a/*.x"], ["0.x", "1.x"]),
            (["*/0.x", "a/*.x"], ["a/0.x", "a/1.x", "b/0.x"]),
            (["{b,a}/0.x"], ["a/0.x", "b/0.x"]),
            (["b/0.{x,y}"], ["0.x", "0.y"]),
            (["a/{0..1}.x"], ["0.x", "1.x"]),
            (["{c,{a,b}/0}.x"], ["a/0.x", "b/0.x", "c.x"]),
            (["c.x"], ["c.x"]),
            (["a/../c.x", "./c.x", "a/0.x"], ["a/0.x", "c.x"]),
            (["**/*.y"], ["0.y"]),
        ],
    )
    def test_patterns(self, folder: Path, patterns: list[str], names: list[str]) -> None:
        files = expand([f"{folder}/{pattern}" for pattern in patterns])
        assert [file.name for file in files] == names
        assert all(Path(file.url).stat().st_size == file.size_bytes for file in files)

    def test_the_order_of_patterns_does_not_matter(self, folder: Path) -> None:
        patterns = [f"{folder}/b/*.x", f"{folder}/a/*.x"]
        assert expand(patterns) == expand(patterns[::-1])

    def test_padded_ranges(self, folder: Path) -> None:
        for i in range(8, 12):
            (folder / f"p-{i:03d}").touch()
        assert [f.name for f in expand([f"{folder}/p-{{008..011}}"])] == [
            "p-008",
            "p-009",
            "p-010",
            "p-011",
        ]

    def test_a_name_with_glob_signs_is_found_as_it_is(self, folder: Path) -> None:
        (folder / "odd[1]*.x").write_text("odd")
        assert [file.name for file in expand([f"{folder}/odd[1]*.x"])] == ["odd[1]*.x"]

    def test_files_of_two_file_systems_have_unlike_names(self, folder: Path) -> None:
        memory = fsspec.filesystem("memory")
        memory.pipe(f"/{folder.name}/c.x", b"c")
        try:
            names = [f.name for f in expand([f"{folder}/c.x", f"memory://{folder.name}/c.x"])]
        finally:
            memory.rm(f"/{folder.name}", recursive=True)
        assert names == ["file://c.x", "memory://c.x"]

    @pytest.mark.parametrize("paths", [[], "", [""], 3, ["a", None]])
    def test_what_are_no_paths(self, paths: Any) -> None:
        with pytest.raises((ConfigError, TypeError)):
            Jsonl(paths)

    def test_an_unknown_protocol(self) -> None:
        with pytest.raises(ConfigError, match="nowhere"):
            Jsonl("nowhere://bucket/x.jsonl").shards()


class TestParquet:
    def test_only_the_columns_asked_for(self, tmp_path: Path) -> None:
        write_parquet(tmp_path, RECORDS)
        reader = Parquet(f"{tmp_path}/*.parquet", columns=["text"])
        assert _rows(reader, 0)[0] == {"text": RECORDS[0]["text"]}

    def test_a_column_that_is_missing(self, tmp_path: Path) -> None:
        write_parquet(tmp_path, RECORDS)
        with pytest.raises(ConfigError, match=r"'body'.*'text'"):
            Parquet(f"{tmp_path}/*.parquet", columns=["text", "body"]).shards()

    @pytest.mark.parametrize("options", [{"batch_rows": 0}, {"buffer_bytes": -1}, {"columns": "a"}])
    def test_bad_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            Parquet("x", **options)

    def test_lists_of_numbers_are_arrays_that_own_their_memory(self, tmp_path: Path) -> None:
        table = pa.table({"ids": pa.array([[1, 2], [], None, [3, None]], pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / "x.parquet")
        first, second, third, fourth = (r["ids"] for r in Parquet(tmp_path / "x.parquet").read(0))  # type: ignore[index]
        assert first.dtype == np.int32
        assert first.base is None
        assert second.tolist() == []
        assert third is None
        assert fourth == [3, None]

    def test_an_open_source_takes_little_memory(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        names = [f"n{i}" for i in range(30)]
        table = pa.table(
            {"image": [rng.bytes(25_000) for _ in range(400)]}
            | {name: rng.normal(size=400) for name in names}
        )
        options = {"data_page_size": 2**16, "write_batch_size": 16, "use_dictionary": False}
        pq.write_table(table, tmp_path / "x.parquet", **options)
        del table
        with closing(Parquet(tmp_path / "x.parquet").read(0)) as rows:
            before = pa.total_allocated_bytes()
            for _ in range(100):
                next(rows)
            assert pa.total_allocated_bytes() - before < 3e6


class TestJsonl:
    def _texts(self, path: Path, data: bytes, **options: Any) -> list[Any]:
        path.write_bytes(data)
        return list(Jsonl(path, **options).read(0))

    def test_blank_lines_and_line_ends(self, tmp_path: Path) -> None:
        data = b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": 2}\r\n\n{"a": 3}'
        assert self._texts(tmp_path / "x.jsonl", data) == [{"a": 1}, {"a": 2}, {"a": 3}]

    def test_lines_longer_than_any_buffer(self, tmp_path: Path) -> None:
        records = [{"text": "x" * 100_000}, {"text": "y"}, {"text": "é" * 50_000}]
        assert self._texts(tmp_path / "x.jsonl", json_lines(records)) == records

    @pytest.mark.parametrize("zeros", [0, 3, 100_000])
    def test_members_follow_one_another(self, tmp_path: Path, zeros: int) -> None:
        one, two = (gzip.compress(json_lines([record])) for record in ({"a": 1}, {"a": 2}))
        data = one + two + bytes(zeros)
        assert self._texts(tmp_path / "x.gz", data) == [{"a": 1}, {"a": 2}]

    def test_frames_follow_one_another(self, tmp_path: Path) -> None:
        one, two = (zstandard.compress(json_lines([record])) for record in ({"a": 1}, {"a": 2}))
        skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"1234"
        assert self._texts(tmp_path / "x.zst", one + skippable + two) == [{"a": 1}, {"a": 2}]

    @pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
    def test_an_empty_file_is_a_shard_without_rows(self, tmp_path: Path, suffix: str) -> None:
        (tmp_path / "y.jsonl").write_bytes(b'{"a": 1}')
        (tmp_path / f"x.jsonl{suffix}").touch()
        reader = Jsonl(tmp_path / "*")
        assert [list(reader.read(n)) for n in range(2)] == [[], [{"a": 1}]]

    @pytest.mark.parametrize(
        ("name", "encode"), [("x.gz", gzip.compress), ("x.zst", zstandard.compress)]
    )
    @pytest.mark.parametrize("size", [1, 2, 7, 10**6])
    def test_pieces_do_not_matter(
        self, name: str, encode: Callable[[bytes], bytes], size: int
    ) -> None:
        data = os.urandom(2000) + bytes(2000)
        packed = encode(data) + encode(data)
        pieces = (packed[i : i + size] for i in range(0, len(packed), size))
        assert b"".join(decompress(pieces, name)) == data * 2


class TestArrow:
    def test_batches_without_rows(self, tmp_path: Path) -> None:
        schema = pa.schema([("a", pa.int64())])
        path = tmp_path / "x.arrow"
        with pa.ipc.new_file(str(path), schema) as writer:
            for values in ([], [1, 2], []):
                writer.write_batch(pa.record_batch([pa.array(values, pa.int64())], schema))
        reader = ArrowIpc(path)
        assert [shard.rows for shard in reader.shards()] == [0, 2, 0]
        assert [_rows(reader, i) for i in range(3)] == [[], [{"a": 1}, {"a": 2}], []]

    @pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
    def test_compression_and_dictionaries(self, tmp_path: Path, compression: str | None) -> None:
        table = pa.table({"word": pa.array(["a", "b", "a", None]).dictionary_encode()})
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(str(tmp_path / "x"), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=3)
        reader = ArrowIpc(tmp_path / "x")
        assert [shard.rows for shard in reader.shards()] == [3, 1]
        assert [r["word"] for i in range(2) for r in _rows(reader, i)] == ["a", "b", "a", None]


class TestInMemory:
    def test_shards_are_neighbours_of_about_equal_length(self) -> None:
        shards = InMemory(RECORDS, shards=4).shards()
        assert [shard.rows for shard in shards] == [13, 13, 13, 14]

    @pytest.mark.parametrize("shards", [0, -1, 54])
    def test_numbers_of_shards_that_cannot_be(self, shards: int) -> None:
        with pytest.raises(ConfigError, match="1 to 53"):
            InMemory(RECORDS, shards=shards)

    def test_no_records(self) -> None:
        reader = InMemory([])
        assert reader.shards() == [Shard("memory#0", 0)]
        assert list(reader.read(0)) == []

    def test_fingerprint_sees_values_and_types(self) -> None:
        values = [1, "1", b"1", 1.0, True, None, [1], {"1": 1}, np.ones(1), np.ones(1, np.int8)]
        prints = {InMemory([{"a": value}]).fingerprint() for value in values}
        assert len(prints) == len(values)

    def test_fingerprint_does_not_see_the_order_of_columns(self) -> None:
        assert (
            InMemory([{"a": 1, "b": 2}]).fingerprint() == InMemory([{"b": 2, "a": 1}]).fingerprint()
        )


def test_fingerprint_sees_all_of_a_shard() -> None:
    shards = [Shard("a", 1, 2), Shard("b", 1, 2), Shard("a", 2, 2), Shard("a", 1, 3), Shard("a", 1)]
    prints = {fingerprint_shards(shard_list) for shard_list in [[], shards, *([s] for s in shards)]}
    assert len(prints) == 2 + len(shards)


def test_readers_load_neither_torch_nor_dask() -> None:
    code = (
        "import sys, megadask.readers as r, megadask.transforms\n"
        "assert 'pyarrow' not in sys.modules\n"
        "for name in r.__all__: getattr(r, name)\n"
        "print(sorted({'torch', 'dask', 'distributed'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_closing_works_with_the_standard_helper(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(json_lines(RECORDS))
    before = len(open_files())
    with closing(Jsonl(tmp_path / "x.jsonl").read(0)) as rows:
        next(rows)
    assert len(open_files()) == before
