"""What users install is whole: the wheel and the editable install, from anywhere they may stand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_INPUTS = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")

#: Balances 64 documents over 4 ranks, and says where the code came from.
PLAN_SOMETHING = """
import json
import numpy as np
import megadask as md
import megadask.scheduling
tokens = np.arange(1, 65)
graph = md.DGraph.from_metadata(
    {"source": np.zeros(64, np.int32), "tokens": tokens}, topology=md.ClientPlaceTree(dp=4)
)
plan = graph.distribute("dp").cost(lambda table: table["tokens"]).balance("assignment").plan()
loads = np.bincount(plan.assignment, weights=tokens)
files = [md.__file__, md.planner.__file__, md.scheduling.__file__]
print(json.dumps({"loads": loads.tolist(), "files": files, "version": md.__version__}))
"""

#: Has a worker process import every layer and send something of ours back.
RUN_ON_A_WORKER = """
from distributed import Client, LocalCluster
def use():
    import megadask.scheduling
    from megadask.planner.ids import SampleId
    return SampleId("web", 0, 1, 2)
options = {"n_workers": 1, "threads_per_worker": 1, "host": "127.0.0.1"}
made = LocalCluster(processes=True, dashboard_address="127.0.0.1:0", **options)
with made as cluster, Client(cluster) as client:
    print(client.submit(use).result(timeout=60))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def call(*words: str | Path, cwd: Path) -> str:
    """Run a command and return what it printed; fail with all of its output."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def pip(*words: str | Path, python: Path | None = None, cwd: Path) -> str:
    target = [] if python is None else ["--python", python]
    # Nothing is resolved or downloaded: the requirements are those of the running environment.
    return call(sys.executable, "-m", "pip", *target, *words, "--no-deps", cwd=cwd)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout, so that building leaves nothing behind in the real one."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in BUILD_INPUTS:
        shutil.copy(ROOT / name, copy)
    for name in ("megadask", "planner", "scheduling"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, checkout, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def environment(folder: Path) -> Path:
    """Make an environment that sees our requirements but not our own install; return its Python.

    The site-packages of the running environment is put on its path, whose .pth files (such as that
    of an editable megadask) are not read then.
    """
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    requirements = folder / "lib" / version / "site-packages" / "requirements.pth"
    requirements.write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def wheel_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel_environment")
    python = environment(folder)
    pip("install", "--ignore-installed", wheel, python=python, cwd=folder)
    return python


@pytest.fixture(scope="module")
def editable_python(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("editable_environment")
    python = environment(folder)
    options = ("--ignore-installed", "--no-build-isolation", "--editable")
    pip("install", *options, checkout, python=python, cwd=folder)
    return python


def assert_works(python: Path, *, cwd: Path, home: Path) -> None:
    """Check that ``python``, standing in ``cwd``, plans with the megadask that lies in ``home``."""
    report = json.loads(call(python, "-c", PLAN_SOMETHING, cwd=cwd).splitlines()[-1])
    assert sum(report["loads"]) == 64 * 65 / 2
    assert max(report["loads"]) <= 1.01 * 64 * 65 / 2 / 4
    assert all(Path(file).is_relative_to(home) for file in report["files"]), report
    assert report["version"] != "0+unknown"
    assert "usage" in call(python, "-m", "megadask", "--help", cwd=cwd).lower()
    assert "usage" in call(python.with_name("megadask"), "--help", cwd=cwd).lower()


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in [
            ("megadask", "megadask"),
            ("megadask/planner", "planner"),
            ("megadask/scheduling", "scheduling"),
        ]
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    meta = {name for name in names if ".dist-info/" in name}
    assert names - meta == expected | {"megadask/py.typed"}
    assert any(name.endswith("/licenses/LICENSE") for name in meta)
    assert {name.partition("/")[0] for name in names - meta} == {"megadask"}


def test_wheel_is_the_same_without_the_links(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    # A clone on a file system without symbolic links still builds a whole wheel.
    bare = tmp_path / "bare"
    shutil.copytree(checkout, bare, symlinks=True, ignore=shutil.ignore_patterns("build", "*.egg*"))
    for name in ("planner", "scheduling"):
        (bare / "megadask" / name).unlink()
    pip("wheel", "--no-build-isolation", "--wheel-dir", tmp_path, bare, cwd=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_wheel_works_outside_the_checkout(wheel_python: Path, tmp_path: Path) -> None:
    assert_works(wheel_python, cwd=tmp_path, home=wheel_python.parents[1])


def test_wheel_works_beside_modules_with_our_folder_names(
    wheel_python: Path, tmp_path: Path
) -> None:
    (tmp_path / "planner.py").write_text("raise RuntimeError('the trainer has its own planner')")
    (tmp_path / "scheduling").mkdir()
    assert_works(wheel_python, cwd=tmp_path, home=wheel_python.parents[1])


def test_wheel_user_may_stand_in_the_checkout(wheel_python: Path, checkout: Path) -> None:
    # `python -c` and `python -m` put the working directory first, so this runs the checkout's code.
    assert_works(wheel_python, cwd=checkout, home=checkout)


@pytest.mark.parametrize("place", ["checkout", "elsewhere"])
def test_wheel_works_on_dask_workers(
    wheel_python: Path, checkout: Path, tmp_path: Path, place: str
) -> None:
    cwd = checkout if place == "checkout" else tmp_path
    assert "web/0/1/2" in call(wheel_python, "-c", RUN_ON_A_WORKER, cwd=cwd)


def test_editable_install_works_anywhere(
    editable_python: Path, checkout: Path, tmp_path: Path
) -> None:
    assert_works(editable_python, cwd=tmp_path, home=checkout)
    assert_works(editable_python, cwd=checkout, home=checkout)


def test_strict_editable_install_works(checkout: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    options = (
        "--ignore-installed",
        "--no-build-isolation",
        "--config-settings=editable_mode=strict",
    )
    pip("install", *options, "--editable", checkout, python=python, cwd=tmp_path)
    report = json.loads(call(python, "-c", PLAN_SOMETHING, cwd=tmp_path).splitlines()[-1])
    assert sum(report["loads"]) == 64 * 65 / 2
