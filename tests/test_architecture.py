"""Dependencies run one way, planner <- scheduling <- megadask; imports load no more than that."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400

#: What would give the planner a clock, hidden randomness, IO or concurrency.
# fmt: off
PLANNER_MAY_NOT = {
    "asyncio", "concurrent", "ctypes", "datetime", "glob", "http", "io", "mmap",
    "multiprocessing", "os", "pathlib", "pickle", "queue", "random", "sched", "secrets", "select",
    "selectors", "shelve", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess",
    "tempfile", "threading", "time", "urllib", "uuid", "pyarrow.csv", "pyarrow.dataset",
    "pyarrow.fs", "pyarrow.parquet",
}
# fmt: on
#: Where the environment of the job is read: the one effect that the planner has.
PLANNER_READS_ENVIRONMENT = "planner/topology.py"
#: What figures are made of; imported when one is drawn, and for the type checker.
FIGURES = ("matplotlib.axes.Axes", "matplotlib.figure.Figure")
PLANNER_MAY = {"megadask.planner", "numpy", "pyarrow", "scipy", *sys.stdlib_module_names}
SCHEDULING_MAY_NOT = {"torch", "pandas", "matplotlib", "rich", "tokenizers"}
#: Where a trainer runs; everything else of megadask also runs where torch is not installed.
MAY_IMPORT_TORCH = ("megadask/trainer/", "megadask/demo/")
MAY_PRINT = ("megadask/cli/", "megadask/demo/")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def megadask_sources() -> list[Path]:
    layers = (ROOT / "megadask/planner", ROOT / "megadask/scheduling")
    return [p for p in sources("megadask") if not any(p.is_relative_to(layer) for layer in layers)]


def imports(path: Path) -> Iterator[str]:
    """Yield every dotted name that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offences(paths: list[Path], allowed: set[str], banned: set[str]) -> list[str]:
    """Return the imports of megadask outside ``allowed`` and of any package in ``banned``."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in imports(path)
        if within(name, banned) or (within(name, {"megadask"}) and not within(name, allowed))
    ]


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process that stands in the checkout."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def loaded_by(code: str) -> set[str]:
    """Return the top-level names of all modules that a new process has after running ``code``."""
    done = run(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def import_all(package: str) -> str:
    """Return code that imports a package and all of its modules."""
    return (
        f"import importlib, pkgutil, {package} as p\n"
        "for module in pkgutil.walk_packages(p.__path__, p.__name__ + '.'):\n"
        "    importlib.import_module(module.name)"
    )


def test_planner_is_pure() -> None:
    strangers = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources("planner")
        for name in imports(path)
        if (within(name, PLANNER_MAY_NOT) or not within(name, PLANNER_MAY)) and name not in FIGURES
    ]
    assert strangers == [f"{PLANNER_READS_ENVIRONMENT} imports os"]


def test_planner_opens_nothing_and_draws_from_no_hidden_generator() -> None:
    # numpy's Generators are passed in; the functions of numpy.random itself share a global state.
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}"
        for path in sources("planner")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and re.fullmatch(
            r"open|input|(np|numpy)\.random\.(?!default_rng)[a-z]\w*", ast.unparse(node.func)
        )
    ]
    assert calls == []


def test_scheduling_stands_below_megadask() -> None:
    allowed = {"megadask.planner", "megadask.scheduling"}
    assert offences(sources("scheduling"), allowed, SCHEDULING_MAY_NOT) == []


def test_torch_is_imported_only_where_a_trainer_runs() -> None:
    paths = [
        path
        for path in megadask_sources()
        if not path.relative_to(ROOT).as_posix().startswith(MAY_IMPORT_TORCH)
    ]
    assert offences(paths, {"megadask"}, {"torch"}) == []


def test_no_module_is_imported_by_its_folder_name() -> None:
    paths = [*sources("planner", "scheduling"), *megadask_sources()]
    assert offences(paths, {"megadask"}, {"planner", "scheduling"}) == []


def test_only_the_command_line_prints() -> None:
    prints = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*sources("planner", "scheduling"), *megadask_sources()]
        if not path.relative_to(ROOT).as_posix().startswith(MAY_PRINT)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert prints == []


def test_files_are_small() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in [*sources("planner", "scheduling"), *megadask_sources()]
    }
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("name", ["planner", "scheduling"])
def test_links_are_relative(name: str) -> None:
    link = ROOT / "megadask" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["planner", "scheduling"])
def test_a_layer_refuses_to_be_imported_by_its_folder_name(name: str) -> None:
    done = run(f"import {name}")
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert f"import megadask.{name}" in done.stderr


@pytest.mark.parametrize(
    "package",
    [
        *("planner", "scheduling", "megadask/cli", "megadask/indexing", "megadask/looking"),
        *("megadask/readers", "megadask/resuming", "megadask/trainer", "megadask/transforms"),
    ],
)
def test_a_package_says_what_is_in_each_of_its_files(package: str) -> None:
    said = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    named = re.findall(r"\w+\.py", said)
    there = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
    assert set(named) == there


def test_importing_megadask_and_planner_loads_nothing_heavy() -> None:
    loaded = loaded_by("import megadask, megadask.planner")
    assert loaded & {"dask", "distributed", "torch", "pyarrow", "pandas", "scipy"} == set()


@pytest.mark.parametrize("method", ["assignment", "greedy", "karmarkar_karp", "none"])
def test_nothing_is_left_to_load_once_a_strategy_has_prepared(method: str) -> None:
    """A step that loads a library makes the trainers wait."""
    place = f"""
import numpy as np
from megadask.planner.balance import Problem, balance
from megadask.planner.strategy import Strategy
problem = Problem(cost_NP=np.arange(1, 100).reshape(-1, 1) ** 2, num_buckets=8)
Strategy(method={method!r}).prepare()
"""
    prepared = loaded_by(place)
    assert loaded_by(place + f"balance(problem, {method!r})") == prepared
    assert ("scipy" in prepared) == (method == "assignment")


def test_importing_all_of_planner_does_not_load_dask() -> None:
    loaded = loaded_by(import_all("megadask.planner"))
    assert loaded & {"dask", "distributed", "torch", "pandas"} == set()


def test_importing_all_of_scheduling_does_not_load_torch() -> None:
    loaded = loaded_by(import_all("megadask.scheduling"))
    assert "distributed" in loaded
    assert "torch" not in loaded


def test_importing_what_is_not_for_trainers_does_not_load_torch() -> None:
    names = ("pipeline", "pipeline_file", "service", "source")
    code = [f"import megadask.{name}" for name in names]
    packages = ("cli", "indexing", "looking", "readers", "transforms")
    code += [import_all(f"megadask.{package}") for package in packages]
    assert "torch" not in loaded_by("\n".join(code))


@pytest.mark.parametrize("package", ["megadask", "megadask.planner"])
def test_every_export_resolves_and_is_listed(package: str) -> None:
    code = (
        f"import {package} as p\n"
        "assert dir(p) == sorted(p.__all__), dir(p)\n"
        "assert all(getattr(p, name) is not None for name in p.__all__)\n"
        "assert not hasattr(p, 'no_such_name')\n"
    )
    assert package.partition(".")[0] in loaded_by(code)


def test_no_dask_cluster_of_ours_listens_beyond_this_machine() -> None:
    """Dask's own default is a dashboard on port 8787 of every interface."""
    calls = [
        (path, node)
        for path in sources("megadask", "tests", "benchmarks")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "LocalCluster"
    ]
    assert calls
    for path, node in calls:
        named = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        assert named.get("dashboard_address") in ("'127.0.0.1:0'", "loopback"), where
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = path.read_text()
        assert text.count("LocalCluster(") == text.count('dashboard_address=\\"127.0.0.1:0\\"')
