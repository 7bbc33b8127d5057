"""Readers of folders: images by class, saved Hugging Face data sets, MDS shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megadask.planner.errors import ConfigError
from megadask.readers import HuggingFace, ImageFolder, Mds
from megadask.readers.mds_columns import decoder
from megadask.scheduling.reading import BadRecord
from tests.megadask.helpers.reader_cases import (
    CASES,
    RECORDS,
    mds_array,
    mds_entry,
    mds_shard,
    plain,
)

WRITE = {case.name: case.write for case in CASES}


def _images(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())


class TestImageFolder:
    def test_shards_keep_to_one_class(self, tmp_path: Path) -> None:
        _images(tmp_path, *(f"{label}/{i}.jpg" for label in "ab" for i in range(5)))
        shards = ImageFolder(tmp_path, shard_images=3).shards()
        assert [(s.name.partition("-")[0], s.rows, s.size_bytes) for s in shards] == [
            ("a#0", 3, 21),
            ("a#1", 2, 14),
            ("b#0", 3, 21),
            ("b#1", 2, 14),
        ]

    def test_a_class_that_sorts_behind_leaves_the_old_shards(self, tmp_path: Path) -> None:
        _images(tmp_path, "a/0.png", "b/0.png")
        before = ImageFolder(tmp_path).shards()
        _images(tmp_path, "c/0.png")
        assert ImageFolder(tmp_path).shards()[:2] == before
        _images(tmp_path, "b/1.png")
        assert ImageFolder(tmp_path).shards()[1] != before[1]

    def test_a_renamed_image_changes_the_fingerprint(self, tmp_path: Path) -> None:
        _images(tmp_path, "a/0.png", "a/1.png")
        before = ImageFolder(tmp_path).fingerprint()
        (tmp_path / "a" / "1.png").rename(tmp_path / "a" / "2.png")
        assert ImageFolder(tmp_path).fingerprint() != before

    def test_what_is_passed_over(self, tmp_path: Path) -> None:
        _images(tmp_path, "a/0.JPEG", "a/._0.jpg", "a/notes.txt", "readme.md", "a/x/y/1.webp")
        found = list(ImageFolder(tmp_path).read(0))
        assert [row["path"] for row in found] == ["a/0.JPEG", "a/x/y/1.webp"]  # type: ignore[index]

    def test_bad_images_stand_for_themselves_only(self, tmp_path: Path) -> None:
        _images(tmp_path, *(f"a/{i}.png" for i in range(5)))
        (tmp_path / "a" / "1.png").write_bytes(b"")
        reader = ImageFolder(tmp_path, max_record_bytes=100)
        reader.shards()
        (tmp_path / "a" / "2.png").write_bytes(b"x" * 100)
        (tmp_path / "a" / "3.png").write_bytes(b"x" * 101)
        found = list(reader.read(0))
        assert [i for i, row in enumerate(found) if isinstance(row, BadRecord)] == [1, 2, 3]
        assert found[1:4] == [
            BadRecord("row 1: a/1.png: an empty file"),
            BadRecord("row 2: a/2.png: 100 bytes, it had 7 when it was listed"),
            BadRecord("row 3: a/3.png: longer than max_record_bytes"),
        ]
        assert list(reader.read(0, 3)) == found[3:]

    @pytest.mark.parametrize(
        ("names", "match"),
        [
            ([], "there are no files"),
            (["a/x.txt"], "there are no images"),
            (["a/0.png", "stray.png"], r"has no class.*stray\.png"),
        ],
    )
    def test_folders_that_cannot_be(self, tmp_path: Path, names: list[str], match: str) -> None:
        _images(tmp_path, *names)
        with pytest.raises(ConfigError, match=match):
            ImageFolder(tmp_path).shards()

    def test_one_folder_only(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="one folder"):
            ImageFolder([tmp_path, tmp_path / "b"])


class TestHuggingFace:
    def _write(self, folder: Path, state: Any) -> None:
        WRITE["hugging face"](folder, RECORDS)
        if state is not None:
            (folder / "train" / "state.json").write_text(json.dumps(state))

    def test_one_split_as_a_folder_and_several_folders(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
            self._write(tmp_path / name, None)
        reader = HuggingFace(f"{tmp_path}/*/train")
        names = [f"{folder}/train/{i}.arrow" for folder in "ab" for i in range(3)]
        assert [shard.name for shard in reader.shards()] == names
        assert reader.fingerprint() == HuggingFace(f"{tmp_path}/{{a,b}}", "train").fingerprint()

    def test_columns(self, tmp_path: Path) -> None:
        self._write(tmp_path, None)
        reader = HuggingFace(tmp_path, "train", ["number"])
        assert next(reader.read(0, 2)) == {"number": 2}
        with pytest.raises(ConfigError, match=r"'body'.*'text'"):
            HuggingFace(tmp_path, "train", ["body"]).shards()

    def test_the_order_is_that_of_the_state(self, tmp_path: Path) -> None:
        self._write(tmp_path, {"_data_files": [{"filename": f"{i}.arrow"} for i in (2, 0, 1)]})
        reader = HuggingFace(tmp_path / "train")
        assert [shard.name for shard in reader.shards()] == ["2.arrow", "0.arrow", "1.arrow"]

    def test_a_split_has_to_be_chosen(self, tmp_path: Path) -> None:
        self._write(tmp_path, None)
        with pytest.raises(ConfigError, match=r"splits.*one of \['train'\]"):
            HuggingFace(tmp_path).shards()
        with pytest.raises(ConfigError, match=r"no file .*dev/state\.json"):
            HuggingFace(tmp_path, "dev").shards()

    @pytest.mark.parametrize(
        ("state", "match"),
        [
            ([], "an object"),
            ({}, "field '_data_files'"),
            ({"_data_files": []}, "names no files"),
            ({"_data_files": [3]}, "field 'filename'"),
            ({"_data_files": [{"filename": "9.arrow"}]}, r"no file '9\.arrow'"),
            ({"_data_files": [{"filename": "../x"}]}, r"no file '\.\./x'"),
            ({"_data_files": [], "_indices_data_files": [{}]}, "table of indices"),
        ],
    )
    def test_states_that_cannot_be(self, tmp_path: Path, state: Any, match: str) -> None:
        self._write(tmp_path, state)
        with pytest.raises(ConfigError, match=match):
            HuggingFace(tmp_path, "train").shards()

    def test_a_state_that_is_not_json(self, tmp_path: Path) -> None:
        self._write(tmp_path, None)
        (tmp_path / "train" / "state.json").write_text("{")
        with pytest.raises(ConfigError, match=r"state\.json is not JSON"):
            HuggingFace(tmp_path, "train").shards()

    def test_a_stream_of_another_schema_is_still_read_by_name(self, tmp_path: Path) -> None:
        self._write(tmp_path, None)
        table = pa.table({"number": [7], "other": ["x"]})
        with pa.ipc.new_stream(str(tmp_path / "train" / "1.arrow"), table.schema) as writer:
            writer.write_table(table)
        reader = HuggingFace(tmp_path, "train", ["number"])
        assert list(reader.read(1)) == [{"number": 7}]


class TestMds:
    def _write(self, folder: Path, data: bytes, **changes: Any) -> Mds:
        (folder / "0.mds").write_bytes(data)
        index = {"version": 2, "shards": [mds_entry("0.mds", data, 5, **changes)]}
        (folder / "index.json").write_text(json.dumps(index))
        return Mds(folder)

    def test_columns_and_merged_indices(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
            WRITE["mds"](tmp_path / name, RECORDS)
        shards = [
            {**shard, "raw_data": {**shard["raw_data"], "basename": f"{name}/{base}"}}
            for name in "ab"
            for shard in json.loads((tmp_path / name / "index.json").read_text())["shards"]
            for base in [shard["raw_data"]["basename"]]
        ]
        (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
        merged, several = Mds(tmp_path, ["number"]), Mds(f"{tmp_path}/?", ["number"])
        assert merged.shards() == several.shards()
        assert merged.shards()[3].name == "b/shard.00000.mds"
        assert next(merged.read(3, 2)) == {"number": 2}

    def test_a_file_that_was_decompressed_is_taken_first(self, tmp_path: Path) -> None:
        WRITE["mds zstd"](tmp_path, RECORDS)
        whole = [plain(row) for row in Mds(tmp_path).read(0)]
        (tmp_path / "shard.00000.mds").write_bytes(mds_shard(RECORDS[:17]))
        (tmp_path / "shard.00000.mds.zstd").write_bytes(b"")
        assert [plain(row) for row in Mds(tmp_path).read(0)] == whole

    def test_one_bad_record_among_others(self, tmp_path: Path) -> None:
        data = bytearray(mds_shard(RECORDS[:5]))
        bounds = np.frombuffer(bytes(data[4:28]), "<u4")
        data[bounds[2] - 1] = 0xFF  # the last byte of the text of row 1
        data[bounds[3]] ^= 0xFF  # a size in row 3
        rows = list(self._write(tmp_path, bytes(data)).read(0))
        assert [i for i, row in enumerate(rows) if isinstance(row, BadRecord)] == [1, 3]
        assert "row 1: column 'text': 'utf-8'" in rows[1].reason  # type: ignore[union-attr]
        assert "row 3: " in rows[3].reason  # type: ignore[union-attr]
        assert "its columns take" in rows[3].reason  # type: ignore[union-attr]

    def test_bounds_that_run_backwards(self, tmp_path: Path) -> None:
        data = bytearray(mds_shard(RECORDS[:5]))
        data[12:16] = bytes(4)  # where row 1 ends and row 2 begins
        reader = self._write(tmp_path, bytes(data))
        rows = list(reader.read(0))
        assert [i for i, row in enumerate(rows) if isinstance(row, BadRecord)] == [1, 2]
        for start in range(6):
            assert [plain(row) for row in reader.read(0, start)] == [
                plain(row) for row in rows[start:]
            ]

    def test_a_record_that_is_too_long(self, tmp_path: Path) -> None:
        records = [*RECORDS[:4], {**RECORDS[4], "text": "x" * 1000}]
        self._write(tmp_path, mds_shard(records))
        rows = list(Mds(tmp_path, max_record_bytes=500).read(0))
        assert rows[4] == BadRecord("row 4: longer than max_record_bytes")
        assert not any(isinstance(row, BadRecord) for row in rows[:4])

    def test_another_shard_in_its_place(self, tmp_path: Path) -> None:
        reader = self._write(tmp_path, mds_shard(RECORDS[:6]))
        with pytest.raises(ConfigError, match=r"0\.mds changed since it was listed.*6 rows"):
            next(reader.read(0))

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"format": "xsv"}, "format 'xsv'"),
            ({"version": 1}, "version 1"),
            ({"column_names": None}, "field 'column_names'"),
            ({"column_sizes": []}, "columns do not fit"),
            ({"column_encodings": ["pkl"] * 4}, "runs code"),
            ({"column_encodings": ["tensor"] * 4}, r"unknown encoding.*'tensor'"),
            ({"samples": "5"}, "field 'samples'"),
            ({"raw_data": {"basename": "1.mds", "bytes": 5}}, r"no file '1\.mds'"),
        ],
    )
    def test_indices_that_cannot_be(
        self, tmp_path: Path, changes: dict[str, Any], match: str
    ) -> None:
        with pytest.raises(ConfigError, match=match):
            self._write(tmp_path, mds_shard(RECORDS[:5]), **changes).shards()

    def test_a_compression_that_is_not_supported(self, tmp_path: Path) -> None:
        changes = {
            "raw_data": {"basename": "1.mds", "bytes": 5},
            "zip_data": {"basename": "0.mds", "bytes": 5},
        }
        with pytest.raises(ConfigError, match="compression that is not supported"):
            self._write(tmp_path, mds_shard(RECORDS[:5]), **changes).shards()

    def test_pickles_may_stand_beside_the_columns_that_are_read(self, tmp_path: Path) -> None:
        encodings = ["pkl", "int", "json", "str"]
        self._write(tmp_path, mds_shard(RECORDS[:5]), column_encodings=encodings)
        assert next(Mds(tmp_path, ["number"]).read(0, 3)) == {"number": 3}


class TestMdsColumns:
    def test_arrays_own_their_memory_and_keep_their_type(self) -> None:
        array = decoder("ndarray")(mds_array(np.arange(6).reshape(2, 3)))
        assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert array.flags.owndata
        assert decoder("ndarray:int8:2,2")(b"abcd").shape == (2, 2)

    @pytest.mark.parametrize(("mode", "shape"), [("L", (2, 3)), ("RGB", (2, 3, 3))])
    def test_raw_images(self, mode: str, shape: tuple[int, ...]) -> None:
        pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
        size = np.array([3, 2, len(mode)], np.uint32).tobytes()
        found = decoder("pil")(size + mode.encode() + pixels.tobytes())
        np.testing.assert_array_equal(found, pixels)

    @pytest.mark.parametrize(
        ("encoding", "data"),
        [
            ("int", b"123"),
            ("uint16", b""),
            ("ndarray", b""),
            ("ndarray", b"\x07\x04\x01"),
            ("ndarray", b"\x08"),
            ("ndarray", b"\x08\x08\x01"),
            ("ndarray:int16", b"\x04\x02abc"),
            ("ndarray:int16:2", b"abc"),
            ("json", b"{"),
            ("str", b"\xff"),
            ("str_int", b"one"),
            ("str_float", b"one"),
            ("str_decimal", b"one"),
            ("pil", b"123"),
            ("pil", np.array([1, 1, 1], np.uint32).tobytes() + b"1x"),
            ("pil", np.array([9, 9, 1], np.uint32).tobytes() + b"Lx"),
        ],
    )
    def test_what_cannot_be_decoded_is_a_value_error(self, encoding: str, data: bytes) -> None:
        with pytest.raises(ValueError, match=r"."):
            decoder(encoding)(data)

    @pytest.mark.parametrize("encoding", ["ndarray:complex64", "ndarray:int8:0", "ndarray:int8:a"])
    def test_arrays_that_cannot_be(self, encoding: str) -> None:
        with pytest.raises(ConfigError, match="ndarray"):
            decoder(encoding)
