"""Benchmarks report one way: what they print, what they write, and the options they have."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("bench_*.py"))


@pytest.fixture
def reporting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reporting", ROOT / "benchmarks/reporting.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_report_prints_and_writes_the_same_table(
    reporting: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = ROOT / "benchmarks" / "bench_thing.py"
    words = ["--quick", "--output", str(tmp_path), "--size", "3"]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    parser = reporting.arguments("What is it?")
    parser.add_argument("--size", type=int)
    report = reporting.Report("thing", "Things", parser.parse_args())
    report.note("made up")
    report.table("How many", ["what", "count"], [("apples", 3), ("pears", "1.5 MB")])
    report.figures["apples"] = [3]
    page = report.write()

    assert page.parent == tmp_path
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-thing.md", page.name)
    printed, written = capsys.readouterr().out, page.read_text()
    record = json.loads(page.with_suffix(".json").read_text())
    for cell in ("what", "apples", "3", "pears", "1.5 MB"):
        assert cell in printed
        assert re.search(rf"\| {re.escape(cell)} \|", written)
    assert record["tables"] == [
        {
            "title": "How many",
            "columns": ["what", "count"],
            "rows": [["apples", "3"], ["pears", "1.5 MB"]],
        }
    ]
    assert record["figures"] == {"apples": [3]}
    assert record["command"] == "python benchmarks/bench_thing.py --quick --size 3"
    assert record["hardware"]["cores"] >= 1
    assert record["versions"]["python"] == sys.version.split()[0]
    assert set(record["load"]) == {"before", "after"}
    assert str(tmp_path) not in written + json.dumps(record)


def test_small_sizes_do_not_replace_a_report(
    reporting: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {}
    for words in ([], ["--quick"]):
        options = reporting.arguments(None).parse_args(words)
        folders[bool(words)] = reporting.Report("thing", "Things", options)._folder
    assert folders == {False: reporting.REPORTS, True: reporting.QUICK_REPORTS}


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_has_the_common_options_and_report(path: Path) -> None:
    calls = {
        ast.unparse(node.func).removeprefix("reporting.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert {"arguments", "Report"} <= calls
    assert "platform.python_version" not in calls
