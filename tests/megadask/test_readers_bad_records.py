"""Every reader names a bad record by source, shard and row, and reads what comes after it."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import megadask as md
from megadask.planner.ids import Verdict
from megadask.planner.state import LaneCursor
from megadask.scheduling.errors import SourceError
from megadask.scheduling.lanes import Read, read_lane
from megadask.scheduling.reading import NamedReader
from tests.megadask.helpers.reader_cases import IN_FILES, RECORDS, Case, tar_of

_UNPACK: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (gzip.decompress, gzip.compress),
    ".zst": (lambda data: zstandard.decompress(data, max_output_size=10**7), zstandard.compress),
    ".zstd": (lambda data: zstandard.decompress(data, max_output_size=10**7), zstandard.compress),
}
_BAD = 3  # the record that is broken


def _break_text(data: bytes) -> bytes:
    """Make the text of one record invalid UTF-8, at the same length."""
    start = b"document %d" % _BAD
    assert start in data
    return data.replace(start, b"\xff" + start[1:])


def _double_member(data: bytes) -> bytes:
    """Give one sample a part twice."""
    members = []
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            part = tar.extractfile(info)
            assert part is not None
            count = 2 if info.name == f"folder/{_BAD}.JSON" else 1
            members += [(info.name, part.read())] * count
    return tar_of(members)


def _spoil(case: Case, folder: Path) -> tuple[int, int]:
    """Break one record of the files in a folder; return its shard and row."""
    if case.name == "images":
        (folder / "ant" / "deep" / f"{_BAD:03d}.PNG").write_bytes(b"")
        return 0, _BAD
    by_file = case.name == "text files"
    path = Path(case.data_files(folder)[_BAD if by_file else 0])
    unpack, pack = _UNPACK.get(path.suffix, (bytes, bytes))
    change = _double_member if case.name.startswith("tar") else _break_text
    path.write_bytes(pack(change(unpack(path.read_bytes()))))
    return (_BAD, 0) if by_file else (0, _BAD)


def tokens(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"tokens": np.arange(len(record))}


def _reads(case: Case, folder: Path, **source: Any) -> list[Read]:
    """Read all of a source the way a loader does."""
    declared = md.Source(
        "web", case.make(str(folder), RECORDS), **({"transform": tokens, "lanes": 1} | source)
    )
    pipeline = md.Pipeline(sources=[declared], batching=md.Packed(seq_len=64, global_batch=2))
    start = LaneCursor(position=0, shard=0, row=0)
    return list(read_lane(pipeline.source_specs()["web"], 0, 0, start))


@pytest.mark.parametrize("case", IN_FILES, ids=lambda case: case.name)
class TestBadRecords:
    def test_it_is_skipped_alone(self, case: Case, tmp_path: Path) -> None:
        case.write(tmp_path, RECORDS)
        shard, row = _spoil(case, tmp_path)
        name = case.make(str(tmp_path), RECORDS).shards()[shard].name
        reads = _reads(case, tmp_path, on_error="skip")
        assert len(reads) == len(case.expected(RECORDS))
        bad = [read for read in reads if read.verdict is not Verdict.OK]
        assert [(read.position, read.shard, read.row) for read in bad] == [(_BAD, shard, row)]
        assert bad[0].verdict is Verdict.SKIPPED
        assert bad[0].reason is not None
        assert bad[0].reason.startswith(f"shard {name}, row {row}: ")

    def test_it_is_named_by_source_shard_and_row(self, case: Case, tmp_path: Path) -> None:
        case.write(tmp_path, RECORDS)
        shard, row = _spoil(case, tmp_path)
        name = case.make(str(tmp_path), RECORDS).shards()[shard].name
        with pytest.raises(SourceError) as caught:
            _reads(case, tmp_path)
        assert f"source 'web': bad record in shard {name}, row {row}" in str(caught.value)

    def test_a_column_that_is_missing_is_named_alike(self, case: Case, tmp_path: Path) -> None:
        case.write(tmp_path, RECORDS)
        transform = md.transforms.Bytes("body of it")
        if isinstance(case.make(str(tmp_path), RECORDS), NamedReader):  # it is known beforehand
            with pytest.raises(
                md.errors.ConfigError, match=r"'web'.*lacks columns; got \['body of"
            ):
                _reads(case, tmp_path, transform=transform)
            return
        with pytest.raises(md.errors.TransformError, match="no column 'body of it'") as caught:
            _reads(case, tmp_path, transform=transform)
        (note,) = caught.value.__notes__
        assert note.startswith("MegaDask: source 'web', shard ")
        assert ", row 0, epoch 0" in note

    def test_a_broken_shard_leaves_one_tombstone(self, case: Case, tmp_path: Path) -> None:
        if case.name == "images":
            pytest.skip("every image is a file of its own")
        case.write(tmp_path, RECORDS)
        reader = case.make(str(tmp_path), RECORDS)
        path = Path(reader.paths()[0])
        num_shards = len(reader.shards())
        made = {"reader": reader, "on_error": "skip"}
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        source = md.Source("web", transform=tokens, lanes=1, **made)
        pipeline = md.Pipeline(sources=[source], batching=md.Packed(seq_len=64, global_batch=2))
        start = LaneCursor(position=0, shard=0, row=0)
        reads = list(read_lane(pipeline.source_specs()["web"], 0, 0, start))
        stones = [read for read in reads if read.verdict is Verdict.TOMBSTONE]
        names = [reader.shards()[read.shard].name for read in stones]
        assert names
        assert all(reader.shards()[read.shard].name in str(read.reason) for read in stones)
        assert len(set(names)) == len(stones)
        assert {read.shard for read in reads} == set(range(num_shards))
