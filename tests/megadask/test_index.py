"""Indexes: what they hold, what they are refused for, and the command that writes them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megadask as md
from megadask.cli import command as cli
from megadask.indexing import index as indexing
from megadask.indexing import sidecar
from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata
from megadask.planner.state import LaneCursor
from megadask.scheduling.reading import BadRecord, TruncatedShard
from megadask.scheduling.source_loader import SourceLoader
from tests.fakes import MemoryReader

BATCHING = md.Packed(seq_len=8, global_batch=1)
TEXTS = ["ä" * n for n in range(12)]


def documents(*lengths: int) -> list[Any]:
    return [{"tokens": np.arange(n)} for n in lengths]


def declare(source: md.Source, **options: Any) -> md.Pipeline:
    return md.Pipeline(sources=[source], batching=BATCHING, **options)


def described(pipeline: md.Pipeline, name: str = "a") -> Metadata:
    loader = SourceLoader(pipeline.source_specs()[name], 2**20)
    cursors = dict.fromkeys(range(loader.spec.lanes), LaneCursor())
    table = loader.describe(0, cursors, 10**6).table
    loader.close()
    return table


def same(one: Metadata, other: Metadata) -> bool:
    assert list(one) == list(other)
    assert {n: r.lengths_I.tolist() for n, r in one.ragged.items()} == {
        n: r.lengths_I.tolist() for n, r in other.ragged.items()
    }
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


class Broken(MemoryReader):
    """Its last shard is cut off."""

    def read(self, shard: int, start: int = 0) -> Any:
        yield from super().read(shard, start)
        if shard == len(self.content) - 1:
            raise TruncatedShard("cut off")


# What an index holds ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_an_index_tells_all_that_reading_does(tmp_path: Path, workers: int) -> None:
    shards = [documents(3, 0, 20), [], [*documents(5), BadRecord("bad"), *documents(7)]]
    shards[0][2]["loss_mask"] = np.arange(20) % 4 > 1
    shards[2].append({"tokens": np.arange(4), "image": [np.zeros((3, 2)), np.zeros((1, 2))]})
    shards[2].append({"tokens": np.arange(4), "quality": 0.5})
    source = md.Source(
        "a", Broken(shards), on_error="skip", modalities=["image"], metadata=["quality"]
    )
    calls: list[tuple[int, int]] = []
    done = md.index(
        source, tmp_path / "a.arrow", workers=workers, progress=lambda *c: calls.append(c)
    )
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert (done.num_shards, done.num_samples, done.num_filtered) == (3, 6, 1)
    assert (done.num_skipped, done.num_truncated, done.num_tokens) == (1, 1, 43)
    assert done.first_reason == "bad"
    plain = described(declare(source))
    known = declare(replace(source, index=tmp_path / "a.arrow"))
    assert same(described(known), plain)
    assert set(plain["verdict"].tolist()) == set(Verdict)
    for shuffle in (1, 2):
        shuffled = [replace(one.sources[0], shuffle=shuffle) for one in (declare(source), known)]
        assert same(*(described(declare(one)) for one in shuffled))


def test_a_shard_of_many_rows_is_several_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which a loader holds one."""
    for module in (indexing, sidecar):
        monkeypatch.setattr(module, "BATCH_ROWS", 3)
    shards = [documents(*range(1, 9)), [], documents(*range(1, 7)), documents(4)]
    source = md.Source("a", MemoryReader(shards))
    md.index(source, tmp_path / "a.arrow")
    known = declare(replace(source, index=tmp_path / "a.arrow")).source_specs()["a"].known
    assert isinstance(known, sidecar.IndexReader)
    assert known.first_batches == (0, 3, 3, 5, 6)
    for shard, records in enumerate(shards):
        lengths = [len(record["tokens"]) for record in records]
        for start in range(len(lengths) + 2):
            assert [entry.tokens for entry in known.read(shard, start)] == lengths[start:]


def test_under_raise_what_is_bad_is_an_error_as_without_an_index(tmp_path: Path) -> None:
    source = md.Source("a", MemoryReader([[*documents(2), BadRecord("no way")]]))
    md.index(source, tmp_path / "a.arrow")
    for one in (source, replace(source, index=tmp_path / "a.arrow")):
        with pytest.raises(md.errors.MegaDaskError, match=r"bad record in .*#0, row 1; got no way"):
            described(declare(one))


def test_what_an_index_says_is_checked_when_payload_is_read(tmp_path: Path) -> None:
    """Rule 4: a sample that reads otherwise than it was indexed is fatal."""
    reader = MemoryReader([documents(3, 5)])
    source = md.Source("a", reader, on_error="skip")
    md.index(source, tmp_path / "a.arrow")
    made = declare(replace(source, index=tmp_path / "a.arrow"))
    table = described(made)
    reader.content[0][1]["tokens"] = np.arange(1, 6)
    loader = SourceLoader(made.source_specs()["a"], 0)
    loader.serve(table.take(np.array([0])))
    with pytest.raises(md.errors.MegaDaskError, match=r"reads differently.*checksum"):
        loader.serve(table)
    loader.close()


def test_an_index_lies_anywhere(tmp_path: Path) -> None:
    source = md.Source("a", MemoryReader([documents(3, 5)]))
    done = md.index(source, "memory://indexes/deep/a.arrow")
    assert done.url == "memory://indexes/deep/a.arrow"
    assert described(declare(replace(source, index=done.url))).num_rows == 2
    md.index(source, tmp_path / "new" / "folder" / "a.arrow")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["a.arrow"]


def test_an_index_that_cannot_be_finished_is_not_there(tmp_path: Path) -> None:
    class Failing(MemoryReader):
        def read(self, shard: int, start: int = 0) -> Any:
            if shard:
                raise RuntimeError("no more")
            return super().read(shard, start)

    source = md.Source("a", Failing([documents(1), documents(2)]))
    for url in (str(tmp_path / "a.arrow"), "memory://broken/a.arrow"):
        with pytest.raises(RuntimeError, match="no more"):
            md.index(source, url)
    assert list(tmp_path.iterdir()) == []
    assert not fsspec.filesystem("memory").exists("memory://broken/a.arrow")
    hopeless = md.Source(
        "a", MemoryReader([documents(1) * 9]), transform=_fail, max_consecutive_errors=5
    )
    with pytest.raises(md.errors.MegaDaskError, match=r"in a row.*ValueError: never"):
        md.index(hopeless, tmp_path / "a.arrow")
    assert list(tmp_path.iterdir()) == []


def _fail(record: Mapping[str, Any]) -> Any:
    raise ValueError("never")


# What it is refused for ---------------------------------------------------------------------------


def _random(record: Mapping[str, Any], rng: np.random.Generator) -> Any:
    return {"tokens": rng.integers(0, 9, 5)}


def test_an_index_of_something_else_is_an_error_when_the_pipeline_is_declared(
    tmp_path: Path,
) -> None:
    text = md.transforms.Bytes("text")
    records = [{"text": text} for text in TEXTS]
    source = md.Source("a", md.readers.InMemory(records, shards=3), transform=text)
    path = tmp_path / "a.arrow"
    md.index(source, path)
    known = replace(source, index=path)
    declare(known)
    declare(replace(known, name="b", lanes=2, shuffle=True, on_error="skip", loaders=2))
    others: dict[str, tuple[md.Source, dict[str, Any]]] = {
        "other data": (
            replace(known, reader=md.readers.InMemory(records[:-1], shards=3)),
            {},
        ),
        "another transform": (replace(known, transform=md.transforms.Bytes("text", eos=False)), {}),
        "hold something else": (replace(known, modalities=("image",)), {}),
        "lacks scalars": (replace(known, metadata=("quality",)), {}),
        "no index": (replace(known, index=tmp_path / "none.arrow"), {}),
    }
    for words, (other, options) in others.items():
        with pytest.raises(md.errors.ConfigError, match=words) as caught:
            declare(other, **options)
        assert str(tmp_path) in str(caught.value)
    table = pa.table({"text": TEXTS})
    pq.write_table(table, tmp_path / "text.parquet")
    with pa.ipc.new_file(tmp_path / "plain.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("text.parquet", "plain.arrow"):
        with pytest.raises(md.errors.ConfigError, match="is not an index"):
            declare(replace(known, index=tmp_path / name))
    with pytest.raises(md.errors.ConfigError, match="random transform"):
        declare(replace(known, transform=_random))
    with pytest.raises(md.errors.ConfigError, match="random transform"):
        md.index(replace(source, transform=_random), path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length_column": "n", "index": "x"}, "one of them"),
        ({"length_column": ""}, "length_column="),
        ({"length_column": 3}, "length_column="),
        ({"loss_column": "m"}, "no length_column"),
        ({"index": 3}, "index="),
        ({"length_column": "n", "modalities": ["image"]}, "use an index"),
    ],
)
def test_ways_to_know_lengths_that_clash(options: Any, words: str) -> None:
    with pytest.raises(md.errors.ConfigError, match=words):
        md.Source("a", MemoryReader([documents(1)]), **options)


def test_samples_with_several_sequences_need_an_index(tmp_path: Path) -> None:
    pair = [{"tokens": np.arange(3)}, {"tokens": np.arange(2)}]
    rows = [{"sequences": pair, "n": 6}, {"tokens": np.arange(4), "n": 4}]
    source = md.Source("a", md.readers.InMemory(rows))
    batching = md.Packed(seq_len=8, global_batch=1, sequences=2, pad_to_multiple=4)
    plain = md.Pipeline(sources=[source], batching=batching)
    with pytest.raises(md.errors.ConfigError, match="use an index"):
        md.Pipeline(sources=[replace(source, length_column="n")], batching=batching)
    md.index(source, tmp_path / "a.arrow", pipeline=plain)
    known = md.Pipeline(sources=[replace(source, index=tmp_path / "a.arrow")], batching=batching)
    assert same(described(known), described(plain))
    with pytest.raises(md.errors.ConfigError, match="hold something else"):
        declare(replace(source, index=tmp_path / "a.arrow"))


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files and a module that declares sources of them, and the process in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        for part in range(2):
            table = pa.table({"text": [f"{name} {text}" for text in TEXTS], "n": range(12)})
            pq.write_table(table, tmp_path / name / f"{part}.parquet", row_group_size=5)
    (tmp_path / "declared.py").write_text(
        "import megadask as md\n"
        "text = md.transforms.Bytes('text')\n"
        "def source(name):\n"
        "    reader = md.readers.Parquet(f'{name}/*.parquet')\n"
        "    return md.Source(name, reader, transform=text, index=f'out/{name}.arrow')\n"
        "def pipeline():\n"
        "    sources = [source('web'), source('code')]\n"
        "    return md.Pipeline(sources=sources, batching=md.Packed(seq_len=8, global_batch=1))\n"
        "def one():\n"
        "    return source('web')\n"
        "nothing = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "declared", raising=False)
    return tmp_path


def test_the_options_are_these_and_nothing_else() -> None:
    parser = cli.parsers()[1]["index"]
    options = {
        (action.option_strings or [action.dest])[-1]: action.default for action in parser._actions
    }
    del options["--help"]
    assert options == {
        "sources": None,
        "--out": None,
        "--column": None,
        "--transform": "bytes",
        "--workers": 1,
    }


def test_a_declared_pipeline_is_indexed_before_its_indexes_are_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["index", "declared:pipeline", "--out", "out", "--workers", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in out] == ["web", "code"]
    assert "24 samples" in out[0]
    import declared  # type: ignore[import-not-found]

    made = declared.pipeline()
    plain = replace(made, sources=[replace(source, index=None) for source in made.sources])
    for name in ("web", "code"):
        assert same(described(made, name), described(plain, name))
    # Again, though what is there is of another source.
    (folder / "out" / "web.arrow").write_bytes((folder / "out" / "code.arrow").read_bytes())
    with pytest.raises(md.errors.ConfigError, match="other data"):
        declared.pipeline()
    assert cli.main(["index", "declared:one", "--out", "out/web.arrow"]) == 0
    assert declared.pipeline().digest == made.digest


def test_files_are_indexed_as_a_source_of_them_reads_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["index", "web/*.parquet", "--column", "text", "--out", "x.arrow"]
    assert cli.main(words) == 0
    assert "data: 24 samples" in capsys.readouterr().out
    reader = md.readers.Parquet("web/*.parquet")
    source = md.Source("a", reader, transform=md.transforms.Bytes("text"))
    known = declare(replace(source, index="x.arrow"))
    assert same(described(known), described(declare(source)))
    # The planner's simulator takes it as lengths.
    small = ["--dp", "2", "--microbatches", "1", "--context", "64", "--steps", "2"]
    assert cli.main(["simulate", "x.arrow", "--length-column", "tokens", *small]) == 0
    assert "24 lengths" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["declared:nothing", "--out", "out"], "nothing to index"),
        (["declared:missing", "--out", "out"], "nothing to import"),
        (["nowhere:pipeline", "--out", "out"], "nothing to import"),
        (["declared:pipeline", "--out", "out.arrow"], "a folder, for 2 sources"),
        (["none/*.parquet", "--column", "text", "--out", "out"], "no file matches"),
        (["web/*.parquet", "--column", "body", "--out", "out"], "body"),
        (["web/*.parquet", "--column", "text", "--transform", "no.json", "--out", "o"], "no.json"),
    ],
)
def test_bad_data_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["index", *words]) == 1
    out, err = capsys.readouterr()
    assert (out, err.strip().count("\n")) == ("", 0)
    assert err.startswith("error: ")
    assert said in err


@pytest.mark.parametrize(
    "words",
    [
        ["web/*.parquet", "--out", "out"],
        ["web/*.parquet", "--column", "text"],
        ["web/*.parquet", "--column", "text", "--out", "out", "--workers", "0"],
    ],
)
def test_bad_options_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["index", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
