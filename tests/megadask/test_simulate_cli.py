"""`megadask simulate`: what it reads, what it says, and how it refuses."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import megadask as md
from megadask.cli import command as cli
from megadask.cli import simulate as simulate_cli
from megadask.cli.sources import MIXES
from megadask.indexing.file_lengths import read_lengths

SMALL = ["--dp", "4", "--microbatches", "2", "--context", "512", "--hidden", "64", "--steps", "3"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with lengths of all kinds, and the process in it."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        for part in range(2):
            lengths = np.minimum(rng.lognormal(5, 1, 300).astype(int) + 1, 900)
            table = pa.table({"tokens": lengths, "text": ["ä" * n for n in range(300)]})
            pq.write_table(table, tmp_path / name / f"{part}.parquet", row_group_size=100)
    lines = [{"ids": [1] * n, "tokens": n, "score": n / 7} for n in range(1, 40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def lengths(paths: list[str], column: str, **options: Any) -> list[int]:
    given = {"is_text": False, "most": 10_000, **options}
    return read_lengths(paths, column, **given).lengths_N.tolist()


def fails(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a command with bad data ends with."""
    assert cli.main(["simulate", *words]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:7]) == ("", 1, "error: ")
    return err


# Options -----------------------------------------------------------------------------------------


def test_the_options_are_these_and_nothing_else() -> None:
    parser = cli.parsers()[1]["simulate"]
    options = {
        (action.option_strings or [action.dest])[-1]: action.default for action in parser._actions
    }
    del options["--help"]
    assert options == {
        "sources": None,
        "--length-column": None,
        "--text-column": None,
        "--lengths": None,
        "--dp": 8,
        "--microbatches": 8,
        "--context": 8192,
        "--batching": "packed",
        "--documents": None,
        "--overflow": None,
        "--hidden": 4096,
        "--layers": 32,
        "--balance": "assignment",
        "--defer": None,
        "--sync": "step",
        "--pp": 1,
        "--steps": 50,
        "--seed": 0,
        "--records": 200_000,
        "--json": None,
    }
    assert all(md.lengths.mix(name, 99) for name in MIXES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "files or --lengths"),
        ("a.jsonl --lengths web --length-column x", "files or --lengths"),
        ("a.jsonl", "--length-column or --text-column"),
        ("a.jsonl --length-column x --text-column y", "--length-column or --text-column"),
        ("--lengths web --dp 0", "--dp: got 0"),
        ("--lengths web --steps x", "--steps: got x"),
        ("--lengths web --seed -1", "--seed"),
        ("--lengths web --defer 0", "--defer: got 0"),
        ("--lengths web --sync never", "--sync"),
        ("--lengths web --batching rows", "--batching"),
        ("--lengths web --batching padded --documents 2", "--documents makes no sense"),
        ("--lengths web --batching fixed --overflow drop", "--overflow makes no sense"),
        ("--lengths web --batching fixed --defer 4", "--defer makes no sense"),
        ("--lengths web --balance none", "--balance"),
        ("--lengths web --no-such", "--no-such"),
    ],
)
def test_a_bad_option_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["simulate", *words.split()])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


# What is read ------------------------------------------------------------------------------------


def test_lengths_come_from_columns_of_numbers_lists_and_texts(data: Path) -> None:
    column = pq.read_table(data / "web" / "0.parquet")["tokens"].to_pylist()
    assert lengths(["web/0.parquet"], "tokens") == column
    assert lengths(["web/0.parquet"], "text", is_text=True) == [2 * n for n in range(1, 300)]
    assert lengths(["a.jsonl"], "ids") == lengths(["a.jsonl"], "tokens") == list(range(1, 40))
    with gzip.open("b.jsonl.gz", "wt") as file:
        file.write('{"tokens": 5}\n{"tokens": 0}\n{"tokens": null}\nbroken\n{"tokens": 6}\n')
    found = read_lengths(["b.jsonl.gz"], "tokens", is_text=False, most=99)
    assert (found.lengths_N.tolist(), found.num_skipped, found.num_records) == ([5, 6], 3, 5)
    pyarrow.feather.write_feather(pa.table({"n": [7, 8]}), "c.arrow")
    assert lengths(["c.arrow"], "n") == [7, 8]
    pq.write_table(pa.table({"raw": [b"abc", None]}), "d.parquet")
    assert lengths(["d.parquet"], "raw", is_text=True) == [3]


def test_a_part_is_read_evenly_from_all_shards(data: Path) -> None:
    found = read_lengths(["web/*.parquet"], "tokens", is_text=False, most=60)
    assert (found.num_read, found.num_records) == (60, 600)
    whole = [pq.read_table(data / "web" / f"{part}.parquet")["tokens"] for part in range(2)]
    expected = [group[at : at + 10].to_pylist() for group in whole for at in (0, 100, 200)]
    assert found.lengths_N.tolist() == [n for group in expected for n in group]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["web/*.parquet", "--length-column", "nope"], "lacks columns; got ['nope']"),
        (["a.jsonl", "--length-column", "nope"], "a.jsonl, row 0 lacks a column; got 'nope'"),
        (["no/*.parquet", "--length-column", "tokens"], "no file matches"),
        (["none.parquet", "--length-column", "tokens"], "there is no file"),
        (["web", "--length-column", "tokens"], "is a directory"),
        (["a.jsonl", "--length-column", "score"], "row 0; got 0.14"),
        (["web/0.parquet", "--length-column", "text"], "row 0; got ''; expected an integer"),
        (["a.jsonl", "--text-column", "tokens"], "expected a text"),
        (["a.jsonl", "web/*.parquet", "--length-column", "tokens"], "all of one kind"),
        (["x=a.jsonl", "x=web/*.parquet", "--length-column", "tokens"], "one name; got 'x'"),
        (["data=a.jsonl", "web/*.parquet", "--length-column", "tokens"], "one name; got 'data'"),
        (["a.jsonl:0.5", "--length-column", "tokens"], "a weight without a name"),
        (["x=a.jsonl:1", "y=web/*.parquet", "--length-column", "tokens"], "none for ['y']"),
        (["x=a.jsonl:0", "--length-column", "tokens"], "weights; got {'x': 0.0}"),
        (["--lengths", "normal:5,1"], "lognormal:MEDIAN,SIGMA"),
        (["--lengths", "web", "--lengths", "mixed"], "alone"),
        (["--lengths", "lognormal:9,1", "--lengths", "lognormal:8,1"], "one name; got 'lengths'"),
        (["--lengths", "lognormal:0,1"], "median="),
    ],
    ids=range(18),
)
def test_what_cannot_be_read_is_named(
    words: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in fails(words, capsys)


def test_a_folder_for_the_figures_is_missed_before_anything_is_planned(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["simulate", "--lengths", "web", "--json", "no/such/place.json", *SMALL])
    assert caught.value.code == 2
    assert "--json: there is no folder" in capsys.readouterr().err


def test_lengths_beyond_all_reason_are_named(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "bad.jsonl").write_text('{"n": 99999999999999999999}\n')
    said = fails(["bad.jsonl", "--length-column", "n"], capsys)
    assert "bad.jsonl, row 0: length in column 'n'; got 99999999999999999999" in said


def test_negative_lengths_and_files_of_nothing_are_named(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "bad.jsonl").write_text('{"n": 3}\n{"n": -1}\n')
    assert "bad.jsonl, row 1; got -1" in fails(["bad.jsonl", "--length-column", "n"], capsys)
    (data / "bad.jsonl").write_text('{"n": true}\n')
    assert "row 0; got True" in fails(["bad.jsonl", "--length-column", "n"], capsys)
    (data / "bad.jsonl").write_text('{"n": 0}\n{"n": null}\n')
    assert "2 records that are empty" in fails(["bad.jsonl", "--length-column", "n"], capsys)
    (data / "bad.csv").write_text("n\n1\n")
    assert "got ['.csv']" in fails(["bad.csv", "--length-column", "n"], capsys)
    (data / "README").write_text("n\n1\n")
    assert "kind of the files README" in fails(["README", "--length-column", "n"], capsys)


# What is said ------------------------------------------------------------------------------------


def test_sources_and_weights_reach_the_stream(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["web=web/*.parquet:3", "code=code/{0,1}.parquet:1", "--length-column", "tokens"]
    assert cli.main(["simulate", *words, *SMALL, "--pp", "2", "--json", "out.json"]) == 0
    out = capsys.readouterr().out
    figures = json.loads((data / "out.json").read_text())
    assert out.startswith("web: 600 lengths, median ")
    assert "arrival order" in out
    assert out.endswith(figures["verdict"] + "\n")
    assert figures["sources"]["web"]["weight"] == 3
    assert figures["steps"] == 3
    assert (figures["buckets"], figures["pp"], figures["sync"]) == (4, 2, "step")
    assert list(figures["placed"]) == ["none", "greedy", "assignment"]
    assert figures["placed"]["none"]["speedup"] == 1
    expected = md.simulate(
        md.Stream(
            {
                name: np.concatenate(
                    [pq.read_table(f"{name}/{part}.parquet")["tokens"] for part in range(2)]
                )
                for name in ("web", "code")
            },
            topology=md.ClientPlaceTree(dp=4, pp=2),
            strategy=lambda g: g.mix({"web": 3, "code": 1}).cost(md.costs.Transformer(64, 32)),
            batching=md.Packed(512, 8),
            steps=3,
        )
    )
    assert figures["placed"]["assignment"]["step_times"] == pytest.approx(
        expected.placed["assignment"].step_time_T
    )


def test_paths_that_a_shell_expanded_are_one_source(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["web/0.parquet", "web/1.parquet", "--text-column", "text", "--records", "300"]
    assert cli.main(["simulate", *words, *SMALL]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "data: 298 lengths, median 250, longest 498, weight 596, "
        "2 records without a length, 300 of 600 records read"
    )


def test_sources_weigh_what_they_hold_also_where_only_a_part_was_read(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"tokens": [5] * 3000}), data / "big.parquet", row_group_size=1000)
    words = ["big=big.parquet", "web=web/*.parquet", "--length-column", "tokens"]
    assert cli.main(["simulate", *words, *SMALL, "--records", "60", "--json", "out.json"]) == 0
    sources = json.loads((data / "out.json").read_text())["sources"]
    assert {name: facts["weight"] for name, facts in sources.items()} == {"big": 3000, "web": 600}
    capsys.readouterr()
    # Nobody knows how many lines there are.
    words = ["a=a.jsonl", "web=web/*.parquet", "--length-column", "tokens", "--records", "10"]
    assert "size of source 'a'; got only its first 10 records" in fails(words, capsys)
    assert cli.main(["simulate", "a.jsonl", *words[2:], *SMALL]) == 0
    assert "10 of more records read" in capsys.readouterr().out


def report(lengths_N: Any, dp: int = 4, **packed: Any) -> Any:
    stream = md.Stream(
        {"a": lengths_N},
        topology=md.ClientPlaceTree(dp=dp),
        strategy=lambda graph: graph.cost(md.costs.Tokens()),
        batching=md.Packed(100, 2 * dp, max_documents=1, **packed),
        steps=2,
    )
    return md.simulate(stream)


def test_the_verdict_says_when_there_is_nothing_to_gain() -> None:
    said = simulate_cli.verdict(report([50]))
    assert said == (
        "There is little to gain by placing: assignment makes steps 1.00 x as fast; no placement "
        "of whole documents makes them more than 1.00 x as fast."
    )


def test_the_verdict_says_what_is_gained_and_what_single_documents_cost() -> None:
    # Two ranks of two documents: 10 + 30 and 10 + 30 in arrival order, at best 40 each.
    said = simulate_cli.verdict(report([30, 30, 10, 10], dp=2))
    assert said.startswith("There is little to gain")
    said = simulate_cli.verdict(report([30, 10, 30, 10], dp=2))
    assert said.startswith("Balanced by assignment, steps are 1.50 x as fast as in arrival order")
    assert "deferral" not in said
    said = simulate_cli.verdict(report([100, 10, 10, 10], dp=2))
    assert "an even spread, which takes deferral (--defer) or splitting" in said


def test_deferral_is_compared_with_arrival_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    words = ["--lengths", "mixed", "--context", "4096", "--documents", "1", "--dp", "8"]
    words += ["--microbatches", "8", "--hidden", "128", "--steps", "8", "--defer", "4"]
    assert cli.main(["simulate", *words, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    figures = json.loads(path.read_text())
    plain, deferred = figures["placed"], figures["deferred"]["placed"]
    assert list(deferred) == ["assignment"]
    assert deferred["assignment"]["step_time_over_ideal"] < 1.02
    gain = plain["none"]["step_time_over_ideal"] / deferred["assignment"]["step_time_over_ideal"]
    assert f"With documents that wait for others as long, steps are {gain:.2f} x" in out
    assert "assignment, deferred" in out
    assert "of the spans come later" in out


@pytest.mark.parametrize(
    ("kind", "batching"),
    [("packed", md.Packed(512, 8)), ("padded", md.Padded(512, 8)), ("fixed", md.Fixed(512, 8))],
)
def test_batches_are_made_as_asked(
    kind: str, batching: Any, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["web/*.parquet", "--length-column", "tokens", *SMALL, "--batching", kind]
    assert cli.main(["simulate", *words, "--json", "out.json"]) == 0
    capsys.readouterr()
    figures = json.loads((data / "out.json").read_text())
    tokens = np.concatenate([pq.read_table(f"web/{n}.parquet")["tokens"] for n in range(2)])
    topology = md.ClientPlaceTree(dp=4)
    expected = md.simulate(md.Stream({"a": tokens}, topology=topology, batching=batching, steps=3))
    assert figures["tokens_per_step"] == expected.tokens_T.mean()
    assert figures["packing_efficiency"] == expected.packing
    assert (figures["packing_efficiency"] == 1) == (kind == "fixed")
    if kind == "padded":
        assert figures["spans_per_step"] == figures["packs_per_step"] == 8


def test_it_runs_as_a_process(tmp_path: Path) -> None:
    laws = ["--lengths", "a=lognormal:60,1.1:2", "--lengths", "b=lognormal:90,0.5:1"]
    done = subprocess.run(
        [sys.executable, "-m", "megadask", "simulate", *laws, *SMALL],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("a: Lognormal(median=60.0, sigma=1.1, clip=None); weight 2\n")
    assert "3 steps over 4 ranks" in done.stdout
    assert "as fast" in done.stdout.splitlines()[-1]
