"""Tar files of samples: how members make records, and what is wrong with a bad one."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from megadask.planner.errors import ConfigError
from megadask.readers import Tar
from megadask.scheduling.reading import BadRecord, TruncatedShard
from tests.megadask.helpers.reader_cases import tar_of


def _read(path: Path, data: bytes, **options: Any) -> list[Any]:
    path.write_bytes(data)
    return list(Tar(path, **options).read(0))


def _keys(path: Path, *names: str) -> list[tuple[str, ...]]:
    """Return key and extensions of the records that members of these names make."""
    return [tuple(record) for record in _read(path, tar_of((name, b"x") for name in names))]


class TestNames:
    @pytest.mark.parametrize(
        ("name", "key", "extension"),
        [
            ("a.jpg", "a", "jpg"),
            ("a.seg.PNG", "a", "seg.png"),
            ("d.x/a.b/c.txt", "d.x/a.b/c", "txt"),
            ("./a.txt", "./a", "txt"),
            ("/a.txt", "/a", "txt"),
        ],
    )
    def test_key_and_extension(self, tmp_path: Path, name: str, key: str, extension: str) -> None:
        assert _read(tmp_path / "x.tar", tar_of([(name, b"x")])) == [
            {"__key__": key, extension: b"x"}
        ]

    @pytest.mark.parametrize(
        "name", ["README", "d.x/README", ".hidden", "d/._a.jpg", "__meta__", "__meta__/a.txt"]
    )
    def test_what_is_passed_over(self, tmp_path: Path, name: str) -> None:
        found = _keys(tmp_path / "x.tar", "a.txt", name, "a.json", "b.txt")
        assert found == [("__key__", "txt", "json"), ("__key__", "txt")]

    def test_only_neighbours_make_a_record(self, tmp_path: Path) -> None:
        found = _keys(tmp_path / "x.tar", "a.x", "b.x", "a.y", "c/a.x", "c/a.y")
        assert found == [
            ("__key__", "x"),
            ("__key__", "x"),
            ("__key__", "y"),
            ("__key__", "x", "y"),
        ]

    @pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_long_and_foreign_names(self, tmp_path: Path, kind: int) -> None:
        names = [f"{'grün/' * 60}{i}.txt" for i in range(3)]
        data = tar_of([(name, b"x") for name in names], format=kind)
        found = _read(tmp_path / "x.tar", data)
        assert [record["__key__"] for record in found] == [name[:-4] for name in names]


class TestMembers:
    def test_folders_and_links_are_no_members(self, tmp_path: Path) -> None:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name, kind in (("d.x", tarfile.DIRTYPE), ("l.x", tarfile.SYMTYPE)):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "elsewhere"
                tar.addfile(info)
            info = tarfile.TarInfo("a.txt")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        assert _read(tmp_path / "x.tar", archive.getvalue()) == [{"__key__": "a", "txt": b"abc"}]

    def test_sizes_from_pax_headers(self, tmp_path: Path) -> None:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
            info = tarfile.TarInfo("a.txt")
            info.size = 3
            info.pax_headers = {"size": "3", "comment": "x" * 600}
            tar.addfile(info, io.BytesIO(b"abc"))
        assert _read(tmp_path / "x.tar", archive.getvalue()) == [{"__key__": "a", "txt": b"abc"}]

    def test_an_archive_without_members_has_no_rows(self, tmp_path: Path) -> None:
        assert _read(tmp_path / "x.tar", tar_of([])) == []

    def test_an_archive_without_an_end_marker(self, tmp_path: Path) -> None:
        assert len(_read(tmp_path / "x.tar", tar_of([("a.x", b"1"), ("b.x", b"2")])[:2048])) == 2


class TestBadRecords:
    def test_an_extension_twice(self, tmp_path: Path) -> None:
        members = [("a.x", b"1"), ("b.x", b"2"), ("b.y", b"3"), ("b.X", b"4"), ("c.x", b"5")]
        first, bad, last = _read(tmp_path / "x.tar", tar_of(members))
        assert (first, last) == ({"__key__": "a", "x": b"1"}, {"__key__": "c", "x": b"5"})
        assert bad == BadRecord("row 1: sample 'b': two members have the extension 'x'")
        assert list(Tar(tmp_path / "x.tar").read(0, 2)) == [last]

    def test_parts_that_are_too_long_together(self, tmp_path: Path) -> None:
        members = [("a.x", b"1"), ("b.x", b"2" * 60), ("b.y", b"3" * 60), ("c.x", b"5")]
        first, bad, last = _read(tmp_path / "x.tar", tar_of(members), max_record_bytes=100)
        assert bad == BadRecord("row 1: sample 'b': longer than max_record_bytes")
        assert (first["__key__"], last["__key__"]) == ("a", "c")

    def test_a_name_that_is_not_utf8(self, tmp_path: Path) -> None:
        data = tar_of([("a.x", b"1"), ("b\udcff.x", b"2")], format=tarfile.GNU_FORMAT)
        _, bad = _read(tmp_path / "x.tar", data)
        assert isinstance(bad, BadRecord)
        assert "not UTF-8" in bad.reason


class TestBrokenArchives:
    def test_a_broken_header_ends_the_shard_at_its_sample(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tar"
        data = bytearray(tar_of([(f"{i}.{kind}", b"x") for i in range(9) for kind in "ab"]))
        data[9 * 1024] ^= 0xFF  # the second member of sample 4
        path.write_bytes(data)
        for start in (0, 2, 4):
            rows = []
            with pytest.raises(TruncatedShard, match=r"x\.tar cannot be read from row 4 on"):
                rows.extend(Tar(path).read(0, start))
            assert [row["__key__"] for row in rows] == [str(i) for i in range(start, 4)]

    def test_a_size_beyond_the_end(self, tmp_path: Path) -> None:
        info = tarfile.TarInfo("b.x")
        info.size = 10**15
        data = tar_of([("a.x", b"1")])[:1024] + info.tobuf()
        (tmp_path / "x.tar").write_bytes(data + bytes(1024))
        for limit in (10**4, 10**16):
            with pytest.raises(TruncatedShard, match="from row 1 on"):
                list(Tar(tmp_path / "x.tar", max_record_bytes=limit).read(0))

    def test_sparse_members_are_named(self, tmp_path: Path) -> None:
        info = tarfile.TarInfo("b.x")
        info.type = tarfile.GNUTYPE_SPARSE
        (tmp_path / "x.tar").write_bytes(tar_of([("a.x", b"1")])[:1024] + info.tobuf())
        with pytest.raises(TruncatedShard, match="sparse"):
            list(Tar(tmp_path / "x.tar").read(0))

    @pytest.mark.parametrize("data", [b"", b"no tar", b"no tar at all" * 100])
    def test_a_file_of_another_kind(self, tmp_path: Path, data: bytes) -> None:
        for name in ("x.tar", "x.tar.gz", "x.tar.zst"):
            (tmp_path / name).write_bytes(data)
            with pytest.raises(ConfigError, match=rf"{name} is not a tar file"):
                Tar(tmp_path / name).shards()

    @pytest.mark.parametrize("data", [b"5 x\n", b"99 a=b\n", b"x a=b\n", b"0 a=b\n", b" "])
    def test_pax_headers_that_are_none(self, tmp_path: Path, data: bytes) -> None:
        info = tarfile.TarInfo("pax")
        info.type, info.size = tarfile.XHDTYPE, len(data)
        path = tmp_path / "x.tar"
        path.write_bytes(info.tobuf() + data.ljust(512, b"\0") + tar_of([("a.x", b"1")]))
        with pytest.raises(TruncatedShard, match="pax"):
            list(Tar(path).read(0))
