"""The command line: its options are frozen, and what is wrong with them is said in one line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest

import megadask as md
from megadask.cli import command as cli
from megadask.demo import run as demo
from megadask.demo.model import ModelConfig
from megadask.planner.balance import Method


def test_the_options_are_these_and_nothing_else() -> None:
    parser = cli.parsers()[1]["demo"]
    options = {action.option_strings[-1]: action.default for action in parser._actions}
    del options["--help"]
    assert options == {
        "--steps": 20,
        "--dp": 2,
        "--seq-len": 8192,
        "--balance": "assignment",
        "--workdir": Path("demo-data"),
        "--keep": False,
    }
    defaults = {f"--{name.replace('_', '-')}": v for name, v in asdict(demo.Demo()).items()}
    assert options == defaults
    assert get_args(Method) == cli._METHODS


def test_help_says_what_is_kept_and_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "--help"])
    assert caught.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "corpus, which is built once and stays there" in words
    assert "exit status" in words


def test_version_and_help_come_without_dask() -> None:
    code = (
        "import sys\nfrom megadask.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    assert not {'distributed', 'torch', 'numpy'} & sys.modules.keys()\n"
    )
    helps = [[command, "--help"] for command in ("demo", "index", "look", "simulate")]
    for words in (["--version"], ["--help"], *helps):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "megadask", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"megadask {md.__version__}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "command"),
        (["no-such"], "no-such"),
        (["demo", "--dp", "0"], "--dp; got 0; expected an integer >= 1"),
        (["demo", "--dp", "two"], "--dp"),
        (["demo", "--steps", "-1"], "--steps; got -1"),
        (["demo", "--seq-len", "0"], "--seq-len; got 0"),
        (["demo", "--balance", "best"], "'best'"),
        (["demo", "--workdir", "/proc/self/no"], "--workdir; got /proc/self/no"),
        (["demo", "--no-such"], "--no-such"),
    ],
)
def test_a_bad_option_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], no_run: list[demo.Demo]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert no_run == []


def test_options_reach_the_demo(tmp_path: Path, no_run: list[demo.Demo]) -> None:
    words = "--steps 3 --dp 4 --seq-len 64 --balance greedy --keep --workdir"
    assert cli.main(["demo", *words.split(), str(tmp_path / "new")]) == 7
    assert no_run == [
        demo.Demo(steps=3, dp=4, seq_len=64, balance="greedy", keep=True, workdir=tmp_path / "new")
    ]
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (md.errors.ServiceError("it broke", got="x"), 1, "error: it broke; got x\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_of_ours_is_one_line(
    error: BaseException,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: demo.Demo) -> int:
        raise error

    monkeypatch.setattr(demo, "run", fail)
    assert cli.main(["demo", "--workdir", str(tmp_path)]) == code
    assert capsys.readouterr().err == said


def test_the_demo_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(md.errors.ConfigError, match=r"pip install 'megadask\[torch\]'"):
        demo.run(demo.Demo())


def test_the_cost_is_that_of_the_model() -> None:
    model = ModelConfig(hidden=demo.COST.hidden, layers=demo.COST.layers, heads=demo.HEADS)
    assert model.vocabulary == demo.COST.vocab >= md.transforms.Bytes().vocab_size


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Do not run the demo; return the list of what it would have been run with."""
    seen: list[Any] = []

    def run(what: demo.Demo) -> int:
        seen.append(what)
        return 7

    monkeypatch.setattr(demo, "run", run)
    return seen
