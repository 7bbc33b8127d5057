"""The recipe of docs/slurm.md: its job scripts, and its life under stand-ins for SLURM.

``sbatch`` runs a script in a session of its own, ``scancel`` ends that, ``srun`` is its command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import wait_until

pytest.importorskip("dask_jobqueue")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "slurm"
if not EXAMPLE.is_dir():
    pytest.skip("examples are not part of the wheel", allow_module_level=True)

WAIT_S = 90.0

COMMANDS = {
    "sbatch": 'cp "$1" "$SLURM_FAKE/$$.sh"\n'
    'setsid bash "$SLURM_FAKE/$$.sh" </dev/null >>"$SLURM_FAKE/loaders.log" 2>&1 &\n'
    'echo $! >>"$SLURM_FAKE/jobs"\necho "Submitted batch job $!"',
    "scancel": 'kill -TERM -- "-$1" 2>/dev/null || true',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import serve.py as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import serve

    yield serve
    for name in ("serve", "pipelines", "announce"):
        sys.modules.pop(name, None)


def test_what_a_loader_job_is_asked_for(serve: Any, tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--ranks", "2", "--interface", "lo"]
    options: argparse.Namespace = serve.parser().parse_args([*arguments, "--partition", "cpu"])
    with serve.make_cluster(options) as cluster:
        script = cluster.job_script()
        address = cluster.scheduler_address
        assert address.startswith("tcp://127.0.0.1:")  # the interface that was named, no other
        assert cluster.scheduler.http_server is None or "127.0.0.1" in cluster.dashboard_link
    lines = script.splitlines()
    for directive in (
        "-p cpu",
        "-n 1",
        "--cpus-per-task=1",
        "--mem=9GB",
        "-t 24:00:00",
        "--no-requeue",
    ):
        assert f"#SBATCH {directive}" in lines
    [worker] = [line for line in lines if "distributed.cli.dask_worker" in line]
    for option in ("--nthreads 1", "--nanny", "--interface lo", address):
        assert option in worker
    [limit] = re.findall(r"--memory-limit ([\d.]+)GiB", worker)
    assert float(limit) < 9e9 / 2**30  # the nanny acts before SLURM does
    assert "export DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED=False" in lines


class Slurm:
    """Stands in for SLURM; ends everything that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        commands = folder / "bin"
        commands.mkdir()
        for name, text in COMMANDS.items():
            (commands / name).write_text(f"#!/bin/sh\n{text}\n")
            (commands / name).chmod(0o755)
        self.environ = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "SLURM_FAKE": str(folder),
            "SLURM_JOB_ID": "17",
            "SLURM_NNODES": "1",
            "RANKS_PER_NODE": "2",
            "LOADERS": "2",
            "INTERFACE": "lo",
            "EXAMPLE": str(EXAMPLE),
            "HEAD": "127.0.0.1",
            "PORT": "0",
            "RUN": str(folder / "run"),
            "RUN_ARGS": "--standalone --local-addr 127.0.0.1",
            "SERVE_ARGS": "--look-s 0.5",
            "DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT": "1s",
        }
        self._begun: list[subprocess.Popen[bytes]] = []

    @property
    def jobs(self) -> list[int]:
        """The loader jobs, in the order that they were submitted."""
        path = self.folder / "jobs"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def submit(self, **environ: str) -> subprocess.Popen[bytes]:
        """Run the job script, as sbatch does in the end."""
        with (self.folder / "output").open("wb") as output:
            job = subprocess.Popen(
                ["bash", str(EXAMPLE / "job.sh")],
                cwd=self.folder,
                env={**self.environ, **environ},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._begun.append(job)
        return job

    def expect(self, what: Callable[[], object]) -> None:
        assert wait_until(what, WAIT_S), self.output[-4000:]

    def end(self) -> None:
        for leader in [*self.jobs, *(job.pid for job in self._begun)]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        for job in self._begun:
            job.wait(10)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    made = Slurm(tmp_path)
    try:
        yield made
    finally:
        made.end()


def ranks_of(job: subprocess.Popen[bytes]) -> list[int]:
    """Return the trainers of a job."""
    import psutil

    return [
        child.pid
        for child in psutil.Process(job.pid).children(recursive=True)
        if any("train.py" in word for word in child.cmdline()) and child.environ().get("RANK")
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_is_preempted_twice(slurm: Slurm) -> None:
    """First a loader job is, then the job itself, which is requeued and goes on where it was."""
    job = slurm.submit(TRAIN_ARGS="--steps 100000 --every 5")
    slurm.expect(lambda: "step 5:" in slurm.output)
    first, _ = slurm.jobs
    os.killpg(first, signal.SIGKILL)
    slurm.expect(lambda: len(slurm.jobs) == 3)  # submitted again
    seen = len(re.findall(r"^step ", slurm.output, re.MULTILINE))
    slurm.expect(lambda: len(re.findall(r"^step ", slurm.output, re.MULTILINE)) >= seen + 2)
    for rank in ranks_of(job):
        os.kill(rank, signal.SIGTERM)
    job.wait(WAIT_S)
    assert job.returncode == 0, slurm.output
    assert "told to end" in slurm.output
    assert re.search(r"delivered \d+ repeated 0 lost 0", slurm.output)
    saved = torch.load(slurm.folder / "run" / "checkpoint.pt", weights_only=True)
    step = saved["data"]["step"]
    [last] = re.findall(r"^step (\d+):.*\ntold to end", slurm.output, re.MULTILINE)
    assert int(last) == step

    job = slurm.submit(TRAIN_ARGS=f"--steps {step + 5} --every 5")
    job.wait(WAIT_S)
    assert job.returncode == 0, slurm.output
    [begun, *_] = re.findall(r"^step (\d+):", slurm.output, re.MULTILINE)
    assert step < int(begun) <= step + 5
    assert "done" in slurm.output


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_example_runs_on_one_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), "--steps", "12", "--every", "6"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=140,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step (\d+): .*, validation ([\d.]+)", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == [6, 12]
    assert float(found[1][1]) < float(found[0][1])  # it learns
    assert re.search(r"^delivered \d+ repeated 0 lost 0$", done.stdout, re.MULTILINE)
