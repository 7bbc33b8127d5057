"""Plans from lengths alone: the same as from the records, and what becomes of samples that fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megadask as md
from megadask.planner.metadata import Metadata
from megadask.planner.state import LaneCursor
from megadask.scheduling.source_loader import SourceLoader
from tests.megadask.helpers.data import STRIDE, corpus, unfold

pytestmark = pytest.mark.timeout(120)

ROWS = corpus({"a": 120}, longest=300)["a"]
PLENTY = 2**24


def mask_of(tokens: Any) -> Any:
    return tokens % 3 > 0


def unfold_all(record: Mapping[str, Any]) -> Any:
    """Tokens by number, of which some do not count; records without a length are dropped."""
    sample = unfold(record)
    return {**sample, "loss_mask": mask_of(sample["tokens"]), "quality": record["quality"]}


def unfold_badly(record: Mapping[str, Any]) -> Any:
    """Fails for some records, each in another way."""
    match record["id"] % 20:
        case 3:
            raise ValueError(f"cannot decode {record['id']}")
        case 7:
            return None
        case 11:
            return {"tokens": unfold(record)["tokens"][:-1]}
    return unfold(record)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files of ids and lengths, and a payload that planning has no use for."""
    made = tmp_path_factory.mktemp("data")
    for number in range(3):
        rows = [
            {
                **row,
                "targets": int(mask_of(row["id"] * STRIDE + np.arange(1, row["length"])).sum()),
                "quality": row["id"] / 8,
                "payload": bytes(2000),
            }
            for row in ROWS[40 * number : 40 * number + 40]
        ]
        pq.write_table(pa.Table.from_pylist(rows), made / f"{number}.parquet", row_group_size=16)
    return made


def declare(
    reader: md.readers.Parquet | Any, transform: Any = unfold, **options: Any
) -> md.Pipeline:
    """Return a pipeline of one source; ``options`` are the source's."""
    packed = options.pop("packed", {})
    source = md.Source("a", reader, **{"transform": transform, "lanes": 3, **options})
    return md.Pipeline(
        sources=[source],
        batching=md.Packed(seq_len=128, global_batch=8, **packed),
        topology=md.ClientPlaceTree(dp=2),
        epochs=2,
    )


def parquet(folder: Path, **options: Any) -> md.readers.Parquet:
    return md.readers.Parquet(f"{folder}/*.parquet", **options)


def loader_of(pipeline: md.Pipeline) -> SourceLoader:
    return SourceLoader(pipeline.source_specs()["a"], PLENTY)


def described(loader: SourceLoader, epoch: int = 0) -> Metadata:
    """Return the metadata of an epoch."""
    cursors = dict.fromkeys(range(loader.spec.lanes), LaneCursor())
    done = loader.describe(epoch, cursors, 10**6)
    assert done.ended == set(cursors)
    return done.table


def columns(table: Metadata, *without: str) -> dict[str, list[Any]]:
    return {
        name: np.nan_to_num(table[name], nan=-1).tolist() for name in table if name not in without
    }


def ways(folder: Path, index: Path, transform: Any, **options: Any) -> dict[str, md.Pipeline]:
    """Return the same pipeline, planned from the records, from a column and from an index."""
    lengths = {"length_column": "length"}
    if transform is unfold_all:
        lengths["loss_column"] = "targets"
    made = {
        "records": declare(parquet(folder), transform, **options),
        "column": declare(parquet(folder), transform, **lengths, **options),
    }
    md.index(made["records"].sources[0], index, pipeline=made["records"])
    made["index"] = declare(parquet(folder), transform, index=index, **options)
    return made


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@pytest.mark.parametrize("shuffle", [False, 5])
@pytest.mark.parametrize("transform", [unfold, unfold_all])
def test_all_ways_tell_the_same_of_every_record(
    folder: Path, tmp_path: Path, transform: Any, shuffle: Any, overflow: Any
) -> None:
    options = {"shuffle": shuffle, "metadata": ["quality"] if transform is unfold_all else []}
    made = ways(folder, tmp_path / "a.arrow", transform, packed={"overflow": overflow}, **options)
    tables = {way: described(loader_of(pipeline), epoch=1) for way, pipeline in made.items()}
    assert columns(tables["index"]) == columns(tables["records"])
    unknown = ["bytes", "checksum"]
    if transform is unfold_all and overflow != "drop":
        # Of a document that is cut, the column says what counts in all, not where.
        unknown.append("loss_tokens")
        whole = tables["records"]["length"] == tables["records"]["tokens"]
        if overflow == "truncate":
            whole &= tables["records"]["length"] < 128
        for name in ("records", "column"):
            tables[f"{name} whole"] = tables[name].take(whole)
        assert columns(tables["column whole"], *unknown[:2]) == columns(
            tables["records whole"], *unknown[:2]
        )
        if overflow == "split":
            sums = [tables[name]["loss_tokens"].sum() for name in ("records", "column")]
            assert sums[0] == sums[1]
    assert columns(tables["column"], *unknown) == columns(tables["records"], *unknown)
    assert set(tables["column"]["checksum"].tolist()) == {0}


def test_describing_reads_no_payload(folder: Path, tmp_path: Path) -> None:
    calls = []

    def transform(record: Mapping[str, Any]) -> Any:
        calls.append(record["id"])
        return unfold(record)

    made = ways(folder, tmp_path / "a.arrow", transform)
    calls.clear()
    for way in ("column", "index"):
        one = loader_of(made[way])
        assert described(one).num_rows > len(ROWS)
        assert (calls, one.cache.bytes) == ([], 0)
    known: Any = loader_of(made["column"]).spec.known
    assert set(next(known.reader.read(0))) == {"length"}


@pytest.mark.parametrize("shuffle", [False, 5])
@pytest.mark.parametrize("way", ["column", "index"])
def test_what_is_served_is_what_was_planned(
    folder: Path, tmp_path: Path, way: str, shuffle: Any
) -> None:
    made = ways(folder, tmp_path / "a.arrow", unfold, shuffle=shuffle)
    one, plain = loader_of(made[way]), loader_of(made["records"])
    table = described(one, epoch=1)
    described(plain, epoch=1)
    # As microbatches ask: neighbours of a lane in turns, lanes in turns.
    order = np.lexsort((table["position"] % 3, table["position"] // 24))
    wanted = table.take(order)
    for first in range(0, wanted.num_rows, 8):
        part = wanted.take(np.arange(first, min(first + 8, wanted.num_rows)))
        got, expected = one.serve(part), plain.serve(part.with_columns(checksum=_sums(plain, part)))
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])
        assert "filled" not in got
    forward: Any = one._forward
    # Rows read for each that is served: once, but for rows of blocks.
    assert forward.num_read <= 1.1 * len(ROWS)
    one.close()
    plain.close()


def _sums(plain: SourceLoader, part: Metadata) -> Any:
    table = described(plain, epoch=1)
    keys = zip(table["lane"].tolist(), table["position"].tolist(), strict=True)
    sums = dict(zip(keys, table["checksum"].tolist(), strict=True))
    wanted = zip(part["lane"].tolist(), part["position"].tolist(), strict=True)
    return np.array([sums[key] for key in wanted], np.uint32)
