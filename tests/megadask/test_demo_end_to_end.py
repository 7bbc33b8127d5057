"""The demo as a user runs it, on a small corpus: to its end, to Ctrl-C, and past a dead worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_until

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

DEADLINE_S = 120.0
MAX_BYTES = 1_000_000
#: The command, with a corpus that takes a moment to build.
SCRIPT = f"""
import sys
from megadask.demo import corpus
corpus.DEFAULT_MAX_BYTES = {MAX_BYTES}
from megadask.cli import main
sys.exit(main(sys.argv[1:]))
"""
SHARED_MEMORY = Path("/dev/shm")


class Running:
    """The demo in a session of its own, by which its processes are known."""

    def __init__(self, workdir: Path, logs: Path, *options: str) -> None:
        self._out, self._err = logs / "out", logs / "err"
        command = [sys.executable, "-c", SCRIPT, "demo", "--workdir", str(workdir), *options]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for_a_step(self) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None, self.err
            return re.search(r": step [1-9]", self.err) is not None

        assert wait_until(is_there, DEADLINE_S), self.err

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def left(self) -> list[int]:
        """Return the processes of the session, also those that lost their parent."""
        found = []
        for pid in psutil.pids():
            try:
                if os.getsid(pid) == self.process.pid:
                    found.append(pid)
            except (ProcessLookupError, PermissionError):
                continue
        return found


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def unmapped(names: set[str]) -> set[str]:
    """Return the names that nobody maps: those of other programs are no business of the demo."""
    mapped: set[str] = set()
    for process in psutil.process_iter():
        try:
            mapped |= {Path(region.path).name for region in process.memory_maps()}
        except psutil.Error:
            continue
    return names - mapped


@contextmanager
def leaves_nothing(running: Running, before: set[str]) -> Iterator[None]:
    """Check, after the block, that neither processes nor shared memory stay; end them if so."""
    try:
        yield
        assert wait_until(lambda: not running.left()), running.left()
        assert wait_until(lambda: not unmapped(shared_memory() - before))
    finally:
        for pid in running.left():
            os.kill(pid, signal.SIGKILL)
        running.process.wait()


def figures(out: str) -> dict[str, list[str]]:
    """Return the table: label and figures of every line."""
    lines = out.partition("---\n")[2].partition("\n\n")[0].splitlines()
    table = [re.split(r" {2,}", line) for line in lines]
    return {label: values for label, *values in table}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


def test_the_demo_ends_with_a_table_and_leaves_its_corpus_alone(
    workdir: Path, tmp_path: Path
) -> None:
    before = shared_memory()
    running = Running(workdir, tmp_path, "--steps", "3", "--seq-len", "512")
    with leaves_nothing(running, before):
        assert running.process.wait(DEADLINE_S) == 0, running.err
    table = figures(running.out)
    # The exit status is 0 only if both audits are ok.
    assert table["steps"] == ["3", "3"]
    assert table["samples lost"] == table["samples repeated"] == ["0", "0"]
    assert all(int(count.replace(",", "")) > 0 for count in table["samples delivered"])
    assert table["loss, first step"][0] == table["loss, first step"][1]
    assert {
        "loss, last step",
        "tokens/s",
        "step time, median",
        "imbalance planned, max/mean",
        "imbalance measured, max/mean",
        "waiting for data",
        "loader memory",
        "samples planned",
        "samples skipped",
        "samples not due when it stopped",
    } < set(table)
    assert "error" not in running.err
    assert sorted(path.name for path in workdir.iterdir()) == ["corpus-v1", "corpus-v1.lock"]


def test_ctrl_c_ends_the_demo_and_all_its_processes(workdir: Path, tmp_path: Path) -> None:
    before = shared_memory()
    options = ("--steps", "24", "--seq-len", "512", "--balance", "none")
    running = Running(workdir, tmp_path, *options)
    with leaves_nothing(running, before):
        running.wait_for_a_step()
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.process.wait(10.0) == 130, running.err
    assert "Traceback" not in running.err
    assert not list(workdir.glob("run-*"))


def test_a_worker_that_is_killed_costs_no_sample(workdir: Path, tmp_path: Path) -> None:
    before = shared_memory()
    options = ("--steps", "12", "--seq-len", "512", "--balance", "none")
    running = Running(workdir, tmp_path, *options)
    with leaves_nothing(running, before):
        running.wait_for_a_step()
        running.workers()[0].kill()
        assert running.process.wait(DEADLINE_S) == 0, running.err
    table = figures(running.out)
    assert table["steps"] == ["12"]
    assert table["samples lost"] == table["samples repeated"] == ["0"]
