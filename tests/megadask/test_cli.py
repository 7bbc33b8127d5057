"""The command line: its options, and one line for whatever is wrong with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megadask as md
from megadask.cli import main

OPTIONS = {"--help", "--steps", "--dp", "--seq-len", "--balance", "--workdir", "--keep"}


def end(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command that argparse ends."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_the_options_of_the_demo_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = end(capsys, "demo", "--help")
    assert (code, err) == (0, "")
    assert set(re.findall(r"^ +(?:-h, )?(--[a-z-]+)", out, re.MULTILINE)) == OPTIONS


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(capsys, "--version") == (0, f"megadask {md.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "command"),
        (["train"], "train"),
        (["demo", "--dp", "0"], "--dp"),
        (["demo", "--dp", "two"], "--dp"),
        (["demo", "--steps", "-1"], "--steps"),
        (["demo", "--seq-len", "0"], "--seq-len"),
        (["demo", "--seq-len", "1.5"], "--seq-len"),
        (["demo", "--balance", "best"], "--balance"),
        (["demo", "--fast"], "--fast"),
    ],
)
def test_a_bad_option_is_an_error_of_one_line(
    arguments: list[str],
    names: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = end(capsys, *arguments)
    assert (code, out) == (2, "")
    assert names in err
    assert "error: " in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_workdir_that_is_a_file_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Also root, for whom every folder is one to write in, cannot write in a file's.
    (tmp_path / "file").touch()
    code, out, err = end(capsys, "demo", "--workdir", str(tmp_path / "file" / "data"))
    assert (code, out) == (2, "")
    assert "--workdir" in err
    assert err.count("\n") == 1
