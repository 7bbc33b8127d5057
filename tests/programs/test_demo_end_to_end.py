"""The demo as users run it, in small: real processes, real text, real signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DEADLINE_S = 120.0
GONE_S = 10.0

#: The command with a corpus that takes a second.
COMMAND = """
import sys
from megadask.cli import main
from megadask.demo import corpus
corpus.DEFAULT_MAX_BYTES = 1_000_000
sys.exit(main(["demo", *sys.argv[1:]]))
"""


class Run:
    """One run of the demo, in a session of its own: what it started can be told from all else."""

    def __init__(self, workdir: Path, *words: str) -> None:
        self.stdout, self.stderr = workdir / "stdout", workdir / "stderr"
        self.shared: set[Path] = set()
        with self.stdout.open("w") as out, self.stderr.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "--workdir", str(workdir / "data"), *words],
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_for(self, words: str) -> None:
        """Wait until it says so, and note the shared memory that it has then."""
        wait_until(lambda: words in self.stderr.read_text() or self.process.poll() is not None)
        assert words in self.stderr.read_text()
        for folder in self._processes():
            with suppress(OSError):
                maps = (folder / "maps").read_text()
                self.shared |= {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}
        assert self.shared, "the queues of the Dask workers have semaphores"

    def left_behind(self) -> list[str]:
        """Return the processes and the shared memory of it that are still there."""
        left = [str(path) for path in self.shared if path.exists()]
        for folder in self._processes():
            with suppress(OSError):
                left.append((folder / "cmdline").read_text().replace("\0", " "))
        return left

    def _processes(self) -> Iterator[Path]:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state not in "ZX":
                    yield folder


def wait_until(is_so: Callable[[], object], seconds: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def started(workdir: Path, *words: str) -> Iterator[Run]:
    run = Run(workdir, *words)
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_demo_trains_and_accounts_for_every_sample(tmp_path: Path) -> None:
    with started(tmp_path, "--steps", "4", "--seq-len", "256", "--keep") as run:
        run.wait_for("assignment: step 1/")
        code = run.process.wait(DEADLINE_S)
        wait_until(lambda: not run.left_behind(), GONE_S)
        assert run.left_behind() == []
    err, lines = run.stderr.read_text(), run.stdout.read_text().splitlines()
    assert code == 0, err
    assert "Traceback" not in err
    named = re.findall(r"workers (\d+), (\d+) .*? trainers (\d+), (\d+)", " ".join(err.split()))
    assert len(named) == 2
    assert all(len(set(pids)) == 4 for pids in named)
    assert lines[0].split() == ["arrival", "order", "assignment"]
    table = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines[2 : lines.index("")])
    figures = {label: line.split() for label, line in table.items()}
    assert figures["steps"] == ["4", "4"]
    assert figures["samples repeated"] == figures["samples lost"] == ["0", "0"]
    planned, delivered, pending = (
        [int(figure) for figure in figures[f"samples {label}"]]
        for label in ("planned", "delivered", "not due when it stopped")
    )
    assert delivered[0] == delivered[1] > 0
    assert [d + p for d, p in zip(delivered, pending, strict=True)] == planned
    for label in ("loss, first step", "loss, last step"):
        assert figures[label][0] == pytest.approx(figures[label][1], abs=1e-2)
    assert float(figures["loss, last step"][0]) < float(figures["loss, first step"][0])
    assert min(map(float, figures["imbalance planned, max/mean"])) >= 1
    assert min(map(float, figures["imbalance measured, max/mean"])) >= 1
    assert all(0.5 < float(figure) <= 1 for figure in figures["packing, real/all tokens"])
    assert "the same samples in the same 4 steps" in "\n".join(lines)
    [kept] = (tmp_path / "data").glob("run-*")
    assert {path.name for path in kept.rglob("rank*.json")} == {"rank0.json", "rank1.json"}


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("send", "signum", "code"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)],
    ids=["ctrl-c", "terminate"],
)
def test_a_signal_leaves_nothing_behind(
    send: Callable[[int, int], None], signum: int, code: int, tmp_path: Path
) -> None:
    with started(tmp_path, "--steps", "100000", "--seq-len", "256") as run:
        run.wait_for("arrival order: step 1/")
        send(run.process.pid, signum)
        assert run.process.wait(GONE_S) == code
        wait_until(lambda: not run.left_behind(), GONE_S)
        assert run.left_behind() == []
    assert "Traceback" not in run.stderr.read_text()
    assert "stopped by" in run.stderr.read_text()
    assert not run.stdout.read_text()
    assert (tmp_path / "data" / "corpus-v1" / "manifest.json").exists()
    assert not list((tmp_path / "data").glob("run-*"))
