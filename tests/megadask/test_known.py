"""Plans from lengths alone: the same as from the records, and what becomes of samples that fail."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client

import megadask as md
from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata
from megadask.planner.state import LaneCursor
from megadask.scheduling.source_loader import SourceLoader
from tests.megadask.helpers.data import STRIDE, corpus, unfold
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import drain, every_token, tokens_delivered

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


# Samples that fail when their payload is read -----------------------------------------------------


def bad(rows: Any, *remainders: int) -> list[int]:
    return [row["id"] for row in rows if row["id"] % 20 in remainders]


@pytest.mark.parametrize("shuffle", [False, 5])
def test_a_sample_that_fails_becomes_a_filler_of_its_length(folder: Path, shuffle: Any) -> None:
    options = {"length_column": "length", "shuffle": shuffle}
    one = loader_of(declare(parquet(folder), unfold_badly, on_error="skip", **options))
    table = described(one)
    assert set(table["verdict"].tolist()) == {Verdict.OK}  # nobody knows yet
    good = loader_of(declare(parquet(folder), unfold, **options))
    for _ in range(2):  # also when it is asked for again
        payload, expected = one.serve(table), good.serve(table)
        filled = payload["filled"]
        ids = expected["tokens"][expected["offsets"][:-1]] // STRIDE
        assert sorted(set(ids[filled].tolist())) == bad(ROWS, 3, 7, 11)
        assert set(ids[~filled].tolist()).isdisjoint(bad(ROWS, 3, 7, 11))
        np.testing.assert_array_equal(payload["offsets"], expected["offsets"])
        token_filled = np.repeat(filled, np.diff(payload["offsets"]))
        assert not payload["tokens"][token_filled].any()
        np.testing.assert_array_equal(payload["mask"], ~token_filled)
        np.testing.assert_array_equal(
            payload["tokens"][~token_filled], expected["tokens"][~token_filled]
        )
        assert len(one.filled) == len(bad(ROWS, 3, 7, 11))
    reasons = " | ".join(one.filled.values())
    assert "ValueError: cannot decode 3" in reasons
    assert "the transform dropped it" in reasons
    assert "tokens, planned with" in reasons
    assert all("shard " in reason and ".parquet#rg" in reason for reason in one.filled.values())
    one.close()
    good.close()


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (unfold_badly, "cannot decode 3"),
        (lambda record: None, "dropped it"),
        (lambda record: {"tokens": np.arange(5000)}, "5000 tokens, planned with"),
        (unfold_all, "targets count, planned with"),
    ],
)
def test_under_raise_its_own_error_comes_through(
    folder: Path, transform: Any, message: str
) -> None:
    one = loader_of(declare(parquet(folder), transform, length_column="length"))
    with pytest.raises((ValueError, md.errors.MegaDaskError), match=message) as caught:
        one.serve(described(one))
    notes = getattr(caught.value, "__notes__", [])
    assert "parquet#rg" in f"{caught.value}{notes}"
    one.close()


def test_too_many_that_fail_in_a_row_are_fatal(folder: Path) -> None:
    options = {"length_column": "length", "on_error": "skip", "max_consecutive_errors": 10}
    one = loader_of(declare(parquet(folder), lambda record: None, **options))
    with pytest.raises(md.errors.MegaDaskError, match="in a row"):
        one.serve(described(one))
    one.close()


@pytest.mark.parametrize("value", [None, -1, 2.5, True, "many", 2**40])
def test_a_length_that_is_none_is_a_bad_record(value: Any) -> None:
    rows: list[dict[str, Any]] = [{**row} for row in ROWS[:30]]
    rows[7]["length"] = value
    reader = md.readers.InMemory(rows)
    table = described(loader_of(declare(reader, on_error="skip", length_column="length")))
    assert table["position"][table["verdict"] == Verdict.SKIPPED].tolist() == [7]
    with pytest.raises(md.errors.MegaDaskError, match=r"row 7.*column 'length'"):
        described(loader_of(declare(reader, length_column="length")))
    with pytest.raises(md.errors.MegaDaskError, match="no column 'size'"):
        described(loader_of(declare(reader, length_column="size")))


def test_a_length_of_zero_is_dropped_and_more_targets_than_tokens_are_bad() -> None:
    rows: list[dict[str, Any]] = [{**row, "targets": 0} for row in ROWS[:30]]
    rows[3]["length"] = 0
    rows[5]["targets"] = rows[5]["length"]
    reader = md.readers.InMemory(rows)
    options = {"length_column": "length", "loss_column": "targets", "on_error": "skip"}
    table = described(loader_of(declare(reader, **options)))
    verdicts = dict(zip(table["position"].tolist(), table["verdict"].tolist(), strict=True))
    assert {k: v for k, v in verdicts.items() if v} == {3: Verdict.FILTERED, 5: Verdict.SKIPPED}


@pytest.mark.parametrize("shuffle", [False, 5])
def test_payload_that_ends_before_its_lengths_do(tmp_path: Path, shuffle: Any) -> None:
    """Rows keep their numbers: what can be read is what was planned, the rest is filled."""
    table = pa.table({"id": [row["id"] for row in ROWS], "length": [r["length"] for r in ROWS]})
    payload = pa.table({"text": [f"{row['id']:06d}" * 300 for row in ROWS]})
    path = tmp_path / "a.parquet"
    both = table.append_column("text", payload["text"])
    options: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
    pq.write_table(both, path, data_page_size=4096, write_batch_size=2, **options)
    made = declare(
        md.readers.Parquet(path),
        UnfoldText(),
        length_column="length",
        on_error="skip",
        shuffle=shuffle,
    )
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(2)
    data = bytearray(path.read_bytes())
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[middle : middle + 6000] = b"\xff" * 6000  # in the text alone
    path.write_bytes(data)
    one = loader_of(made)
    spans = described(one)
    got = one.serve(spans)
    one.close()
    filled = got["filled"]
    assert 10 < len({*spans["position"][filled].tolist()}) < len(ROWS) - 10
    whole = spans["start"] == 0
    first = got["tokens"][got["offsets"][:-1]]
    lengths = {row["id"]: row["length"] for row in ROWS}
    for row in np.flatnonzero(whole & ~filled):
        assert lengths[int(first[row]) // STRIDE] == spans["length"][row]
    ids = [int(first[row]) // STRIDE for row in np.flatnonzero(whole & ~filled)]
    assert len(ids) == len(set(ids))
    if not shuffle:
        assert ids == list(range(len(ids)))


class UnfoldText:
    """Makes the tokens from the text, and says what it reads."""

    columns = ("text", "length")

    def __call__(self, record: Mapping[str, Any]) -> Any:
        return unfold({"id": int(record["text"][:6]), "length": record["length"]})


# Over real workers --------------------------------------------------------------------------------


def outcome(pipeline: md.Pipeline, client: Client, name: str) -> dict[str, Any]:
    with md.serve(pipeline, client, name=name) as service:
        ranks = run(service, drain)
        stats, audit = service.stats(), service.audit()
    steps = [{k: one[k] for k in ("assignment_digest", "num_spans")} for one in stats["steps"]]
    return {
        "steps": steps,
        "spans": [[batch.spans for batch in seen] for seen in ranks],
        "draws": [one["draw_digest"] for one in stats["steps"]],
        "tokens": tokens_delivered(ranks),
        "loss": {batch.step: batch.num_loss_tokens_step for seen in ranks for batch in seen},
        "audit": audit,
    }


@pytest.mark.parametrize("shuffle", [False, 5])
def test_all_ways_make_the_same_steps(
    client: Client, name: str, folder: Path, tmp_path: Path, shuffle: Any
) -> None:
    made = ways(folder, tmp_path / "a.arrow", unfold, shuffle=shuffle, loaders=2)
    got = {way: outcome(pipeline, client, f"{name}-{way}") for way, pipeline in made.items()}
    for way in ("column", "index"):
        for what in ("steps", "spans", "tokens", "loss", "audit"):
            assert got[way][what] == got["records"][what], (way, what)
    assert got["records"]["tokens"] == every_token(ROWS, times=2)
    # A draw digest covers checksums, which a column of lengths cannot know.
    assert got["index"]["draws"] == got["records"]["draws"]
    assert got["column"]["draws"] != got["records"]["draws"]


def documents(loader: md.Loader) -> list[tuple[int, int, int, bool]]:
    """Return (first token, length, targets that count, whether all are zero) of every span."""
    found = []
    for batch in loader:
        for pack, bounds in enumerate(batch["cu_seqlens_padded"].tolist()):
            for first, stop in pairwise(bounds):
                if stop > first:
                    keys = ("tokens", "loss_mask")
                    tokens, mask = (batch[key].numpy()[pack, first:stop] for key in keys)
                    zero = not tokens.any() and not mask.any()
                    found.append((int(tokens[0]), stop - first, int(mask.sum()), zero))
    return found


def test_fillers_are_counted_as_skipped(client: Client, name: str, folder: Path) -> None:
    options = {"length_column": "length", "on_error": "skip", "loaders": 2}
    with md.serve(declare(parquet(folder), unfold_badly, **options), client, name=name) as service:
        got = [span for spans in run(service, documents) for span in spans]
        stats, audit = service.stats(), service.audit()
    failed = bad(ROWS, 3, 7, 11)
    samples = audit["sources"]["a"]["samples"]
    assert samples["planned"] == samples["delivered"] == 2 * len(ROWS)
    assert samples["skipped"] == 2 * len(failed)
    assert audit["ok"]
    assert any("cannot decode" in r for one in stats["loaders"] for r in one["skip_reasons"])
    lengths = {row["id"]: row["length"] for row in ROWS}
    assert sum(length for _, length, _, zero in got if zero) == 2 * sum(lengths[k] for k in failed)
    whole = [first // STRIDE for first, _, _, zero in got if not zero and first % STRIDE == 0]
    assert sorted(whole) == sorted([k for k in lengths if k not in failed] * 2)


def test_an_error_of_a_planned_record_reaches_the_trainers(
    client: Client, name: str, folder: Path
) -> None:
    made = declare(parquet(folder), unfold_badly, length_column="length")
    with (
        md.serve(made, client, name=name) as service,
        pytest.raises(ValueError, match="cannot decode"),
    ):
        run(service, drain)


class UnfoldMany:
    """Takes several records at once, and notes how many."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, record: Mapping[str, Any]) -> Any:
        return unfold(record)

    def batch(self, records: list[Mapping[str, Any]]) -> list[Any]:
        self.sizes.append(len(records))
        return [unfold(record) for record in records]


@pytest.mark.parametrize("way", ["column", "index"])
def test_planned_records_are_transformed_together(folder: Path, tmp_path: Path, way: str) -> None:
    transform = UnfoldMany()
    made = ways(folder, tmp_path / "a.arrow", transform)
    assert max(transform.sizes) == 16  # the rows of a shard, when it was indexed
    transform.sizes.clear()
    one, plain = loader_of(made[way]), loader_of(declare(parquet(folder)))
    table = described(one)
    assert transform.sizes == []
    got, expected = one.serve(table), plain.serve(described(plain))
    np.testing.assert_array_equal(got["tokens"], expected["tokens"])
    assert sum(transform.sizes) == len(ROWS)
    assert max(transform.sizes) == 16
    one.close()
    plain.close()
