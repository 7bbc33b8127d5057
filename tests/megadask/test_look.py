"""Looking at data: what is found is what a loader would read, and nothing bad stops it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import megadask as md
from megadask.cli import command as cli
from megadask.scheduling.reading import BadRecord, TruncatedShard
from tests.fakes import MemoryReader
from tests.megadask.helpers.data import records, unfold, write_jsonl


def text(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A document of some letters, with images; drops those without letters, fails at 'bad'."""
    words = record["text"]
    if words == "bad":
        raise ValueError("cannot parse this")
    if not words:
        return None
    image = [np.zeros((len(words), 4), np.uint8)] * (len(words) % 3)
    return {"tokens": np.frombuffer(words.encode(), np.uint8), "image": image, "quality": 0.5}


def source(shards: Sequence[Sequence[Any]], name: str = "a", **options: Any) -> md.Source:
    reader = MemoryReader(shards)
    return md.Source(name, reader, **{"transform": text, "lanes": 3, **options})


def rows(*texts: str) -> list[dict[str, str]]:
    return [{"text": one} for one in texts]


SHARDS = [
    rows("hello", "", "worlds"),
    [*rows("a"), BadRecord("line 2: invalid JSON"), *rows("bad", "four")],
    rows("abcdefgh"),
]


def test_everything_is_counted_and_bad_records_are_named() -> None:
    look = md.look(source(SHARDS))
    one = look["a"]
    assert dict(one.verdicts) == {"ok": 5, "filtered": 1, "skipped": 2, "tombstone": 0}
    assert sorted(one.lengths.tolist()) == [1, 4, 5, 6, 8]
    assert one.num_read == one.num_records == 8
    assert [shard.num_read for shard in one.shards] == [3, 4, 1]
    assert len(one.reasons) == one.num_bad == 2
    assert any("memory#1, row 1: line 2: invalid JSON" in reason for reason in one.reasons)
    assert any("row 2: ValueError: cannot parse this" in reason for reason in one.reasons)
    assert not look.ok
    assert one.record_bytes == one.lengths.sum()
    assert one.tokens_per_byte == 1.0
    assert one.items["image"].sum().tolist() == [n * (n % 3) for n in one.lengths.tolist()]
    assert set(one.scalars["quality"]) == {0.5}
    for words in ("5 ok", "1 filtered", "2 skipped", "invalid JSON", "image: "):
        assert words in repr(look)
        assert words.split()[-1] in look._repr_html_()


@given(
    st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=1, max_size=40).filter(
        lambda shards: any(shards)
    ),
    st.integers(1, 60),
    st.booleans(),
    st.integers(1, 5),
    st.booleans(),
)
def test_it_reads_so_many_records_or_all_there_are(
    lengths: list[list[int]], num: int, spread: bool, lanes: int, shuffle: bool
) -> None:
    counted = iter(range(10_000))
    shards = [[{"id": next(counted), "length": n} for n in shard] for shard in lengths]
    made = md.Source("a", MemoryReader(shards), transform=unfold, lanes=lanes, shuffle=shuffle)
    one = md.look(made, num, spread=spread, samples=3)["a"]
    total = sum(map(len, lengths))
    assert one.num_read == len(one.lengths) == min(num, total)
    assert sum(shard.num_read for shard in one.shards) == one.num_read
    if num >= total:
        assert sorted(one.lengths.tolist()) == sorted(n for shard in lengths for n in shard)
    assert len(one.samples) <= 3
    assert made.reader.num_open == 0
    for sample in one.samples:  # an id names the record that was read
        shard, row = map(int, re.findall(r"\d+", sample.where))
        record = shards[shard][row]
        assert sample.num_tokens == record["length"]
        assert sample.tokens[0] == record["id"] * 10_000
        if not shuffle:
            lane, position = sample.id.lane, sample.id.position
            mine = [r for k in range(lane, len(shards), made.num_lanes) for r in shards[k]]
            assert mine[position] == record


def test_the_first_records_are_those_of_a_run() -> None:
    shards = [[{"id": 10 * s + r, "length": 2} for r in range(4)] for s in range(4)]
    made = md.Source("a", MemoryReader(shards), transform=unfold, lanes=2)
    look = md.look(made, 5, spread=False, samples=5)
    first = [int(sample.tokens[0]) // 10_000 for sample in look.samples]
    assert first == [0, 10, 1, 11, 2]
    spread = md.look(made, 4, samples=4)
    assert [int(sample.tokens[0]) // 10_000 for sample in spread.samples] == [0, 10, 20, 30]


def test_random_transforms_get_the_generators_of_a_run() -> None:
    def draw(record: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"tokens": rng.integers(0, 1000, int(record["length"]))}

    shards = [[{"length": 3}] * 3, [{"length": 3}] * 3]
    made = md.Source("a", MemoryReader(shards), transform=draw, lanes=1)
    pipeline = md.Pipeline(sources=[made], batching=md.Packed(seq_len=8, global_batch=1), seed=7)
    spec = pipeline.source_specs()["a"]
    for sample in md.look(pipeline, samples=6).samples:
        rng = spec.generator(0, sample.id.lane, sample.id.position)
        assert sample.tokens.tolist() == rng.integers(0, 1000, 3).tolist()


def test_storage_that_fails_and_shards_that_end_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadask.scheduling.lanes.RETRY_DELAYS_S", ())
    content = [rows("one", "two"), rows("three"), rows("four")]
    faults: dict[Any, list[Exception]] = {
        (0, 1): [OSError("no route to host")],
        (2, 0): [TruncatedShard("the file ends")],
    }
    made = md.Source("a", MemoryReader(content, faults), transform=text, max_consecutive_errors=1)
    look = md.look(made)
    one = look["a"]
    assert sorted(one.lengths.tolist()) == [3, 5]
    assert one.verdicts["tombstone"] == 1
    assert "the file ends" in one.reasons[0]
    assert "no route to host" in one.failures[0]
    assert "memory#0, row 1" in one.failures[0]
    assert "failed: " in repr(look)
    assert "failed: " in look._repr_html_()


def test_a_source_of_which_nothing_can_be_read() -> None:
    made = source([rows(*["bad"] * 30)])
    look = md.look(made)
    assert look["a"].num_bad == 30
    assert len(look.reasons) == 10
    assert "and 20 more were skipped" in repr(look)
    assert look.plot() is not None
    assert look.table()[0]["tokens"] == 0
    with pytest.raises(md.errors.ConfigError, match="cannot parse"):
        look.to_metadata()


def test_a_pipeline_is_looked_at_by_source() -> None:
    other = md.Source("b", md.readers.InMemory(records([5] * 20)), transform=unfold)
    made = md.Pipeline(
        sources=[source(SHARDS), other], batching=md.Packed(seq_len=8, global_batch=2)
    )
    look = md.look(made, 10)
    assert list(look) == ["a", "b"]
    assert len(look["b"].lengths) == 10
    assert len(look.lengths) == 15
    assert [row["source"] for row in look.table()] == ["a", "b"]
    with pytest.raises(KeyError, match=r"there are \['a', 'b'\]"):
        look["c"]
    table = look.to_metadata(context=4)
    assert table["tokens"].max() == 4
    for number, name in enumerate(look):
        mine = table.take(table["source"] == number)
        assert mine["tokens"].sum() == look[name].lengths.sum()
        total = look[name].items["image"].lengths_I.sum() if name == "a" else 0
        assert mine.ragged["image"].lengths_I.sum() == total
    assert np.isnan(table["quality"]).sum() == len(table.take(table["source"] == 1)["tokens"])
    graph = md.DGraph.from_metadata(table, topology=md.ClientPlaceTree(dp=2))
    plan = graph.distribute("dp").balance("assignment").plan()
    assert plan.imbalance < 1.2
    assert len(plan.assignment) == table.num_rows


def test_samples_are_shown_as_text() -> None:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    content = md.readers.InMemory(rows("hello world"))
    letters = md.transforms.Bytes()
    assert letters.decode(np.array([104, 0xFF, 256])) == "h\N{REPLACEMENT CHARACTER}"
    for transform in (
        letters,
        md.transforms.Tokenizer(made),
        md.transforms.Chain(dict, letters),
    ):
        (sample,) = md.look(md.Source("a", content, transform=transform)).samples
        assert sample.text == "hello world"
        assert "'hello world'" in str(sample)
    (sample,) = md.look(md.Source("a", content, transform=text)).samples
    assert sample.text is None
    assert "[104, 101, 108" in str(sample)
    assert sample.fields["quality"] == "0.5"
    assert "from text: 'hello world'" in str(sample)


def test_figures() -> None:
    plain = md.Source("b", md.readers.InMemory(records([5, 5])), transform=unfold)
    for made, panels in ((source(SHARDS), 3), (plain, 2)):
        figure = md.look(made).plot()
        assert len(figure.axes) == panels
        figure.canvas.draw()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"what": "data/*.parquet"}, "a Source or a Pipeline"),
        ({"num": 0}, "num"),
        ({"num": 2.5}, "num"),
        ({"samples": -1}, "samples"),
    ],
)
def test_what_makes_no_sense_is_named(words: dict[str, Any], what: str) -> None:
    with pytest.raises(md.errors.ConfigError, match=what):
        md.look(**{"what": source(SHARDS), **words})


def test_it_needs_neither_torch_nor_a_cluster() -> None:
    code = (
        "import sys, megadask as md\n"
        "md.look(md.Source('a', md.readers.InMemory([{'tokens': [1, 2]}])))\n"
        "assert not {'torch', 'pandas', 'matplotlib'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The command -------------------------------------------------------------------------------------


def command(*words: str) -> int:
    return cli.main(["look", *words])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "hello world"}\n{"text": 7}\nnonsense\n')
    assert command(str(lines), "--samples", "1") == 0
    out = capsys.readouterr().out
    for words in ("data: 3 of", "1 ok", "2 skipped", "lines.jsonl, row 1", "'hello world'"):
        assert words in out
    few = write_jsonl(tmp_path / "few", records([3] * 40))
    words = (f"few={few}", f"more={lines}", "--records", "12", "--samples", "0")
    assert command(*words) == 1
    shown = capsys.readouterr()
    assert "few: 12 of an unknown number" in shown.out
    assert "more: 3 of" in shown.out
    assert "['few']" in shown.err


def test_the_command_looks_at_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [1, 2, 3]}) + "\n")
    figure = tmp_path / "look.png"
    words = (str(tmp_path / "*.jsonl"), "--column", "ids", "--tokens", "--plot", str(figure))
    assert command(*words) == 0
    assert "longest 3" in capsys.readouterr().out
    assert figure.stat().st_size > 1000


def test_the_command_takes_a_transform_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"one": [1, 2], "other": [3, 4, 5]}) + "\n")
    (tmp_path / "joins_for_look.py").write_text(
        "def join(record):\n    return {'tokens': record['one'] + record['other']}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert command("a.jsonl", "--transform", "joins_for_look:join") == 0
    assert "longest 5" in capsys.readouterr().out


def test_the_command_takes_what_a_module_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "declares_for_look.py").write_text(
        "import megadask as md\n"
        "def source(name, length, **options):\n"
        "    data = md.readers.InMemory([{'tokens': [1] * length}] * 20)\n"
        "    return md.Source(name, data, **options)\n"
        "def pipeline():\n"
        "    sources = [source('a', 3), source('b', 5, index='b.arrow')]\n"
        "    batching = md.Packed(seq_len=8, global_batch=1)\n"
        "    return md.Pipeline(sources=sources, batching=batching)\n"
        "some = {'x': source('c', 7)}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert command("declares_for_look:pipeline", "--records", "10", "--plot", "look.png") == 0
    out = capsys.readouterr().out
    assert all(words in out for words in ("a: 10 of 20", "b: 10 of 20", "longest 5"))
    assert (tmp_path / "look.png").exists()
    assert command("declares_for_look:some") == 0
    assert "c: 20 of 20" in capsys.readouterr().out
    assert command("declares_for_look:md") == 1
    assert "declares_for_look:md is nothing to look at; got module" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        command("declares_for_look:some", "--tokens")
    assert caught.value.code == 2
    assert "of files" in capsys.readouterr().err


def test_what_is_empty_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content, said in (("none", "\n", "there is no record"), ("bad", "x\n", "no sample")):
        (tmp_path / f"{name}.jsonl").write_text(content)
        assert command(str(tmp_path / f"{name}.jsonl")) == 1
        shown = capsys.readouterr()
        assert said in shown.out
        assert "nan" not in shown.out
        assert "no sample could be made" in shown.err
    look = md.look(md.Source("a", md.readers.Jsonl(str(tmp_path / "none.jsonl"))))
    assert "nan" not in look._repr_html_()


def test_the_options_are_these_and_nothing_else() -> None:
    options = {a.dest: a.default for a in cli.parsers()[1]["look"]._actions if a.dest != "help"}
    assert options == {
        "sources": None,
        "column": "text",
        "tokens": False,
        "transform": "bytes",
        "records": 1000,
        "first": False,
        "samples": 3,
        "plot": None,
    }


@pytest.mark.parametrize(
    "words",
    [["a.jsonl", "--records", "0"], [], ["a.jsonl", "--tokens", "--transform", "t.json"]],
)
def test_options_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(*words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(tmp_path / "*.jsonl")) == 1
    assert "error: " in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"words": "x"}\n')
    assert command(str(tmp_path / "a.jsonl")) == 1  # nothing could be read
    shown = capsys.readouterr()
    assert "no column 'text'" in shown.out
    assert "error: " in shown.err
