"""Processes of `memory_processes`, what they take, and what is free."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

#: Longest wait for a process to begin or to make its steps.
WAIT_S = 900.0
#: What leaves less than this to others is broken off.
SPARED_MB = 4300.0
MB = 1e6


class TooLargeError(RuntimeError):
    """A cell does not fit into the memory that is free."""


class Process:
    """One process of `memory_processes`, talked to by lines."""

    def __init__(self, role: str, job: dict[str, Any], environ: dict[str, str]) -> None:
        script = Path(__file__).parents[1] / "memory_processes.py"
        self.popen = subprocess.Popen(
            [sys.executable, str(script), role, json.dumps(job)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def say(self, line: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def hear(self) -> str:
        """Return its next line; raise if it ends, is silent, or memory runs out meanwhile."""
        deadline = time.monotonic() + WAIT_S
        while True:
            if free_mb() < SPARED_MB:
                raise TooLargeError
            try:
                line = self._lines.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                raise
            break
        if not line:
            raise RuntimeError(f"{self.popen.args} ended with {self.popen.wait()}")
        return line

    def close(self) -> None:
        """End it and what it started."""
        assert self.popen.stdin is not None
        started = []
        if self.popen.poll() is None:
            started = psutil.Process(self.popen.pid).children(recursive=True)
        self.popen.stdin.close()
        try:
            self.popen.wait(60)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(10)
        for child in started:
            if child.is_running():
                child.kill()


def free_mb() -> float:
    """Return the memory that may be taken without swapping."""
    return psutil.virtual_memory().available / MB


@contextmanager
def processes(
    role: str, jobs: Sequence[dict[str, Any]], environ: dict[str, str] | None = None
) -> Iterator[list[Process]]:
    """Start processes that end with the block."""
    with ExitStack() as stack:
        started = []
        for job in jobs:
            started.append(Process(role, job, environ or {}))
            stack.callback(started[-1].close)
        yield started


def pss_bytes(process: Process) -> int:
    """Return what a process and all that it started take."""
    root = psutil.Process(process.popen.pid)
    total = 0
    for one in [root, *root.children(recursive=True)]:
        text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
        total += next(int(x.split()[1]) for x in text.splitlines() if x.startswith("Pss:")) * 1024
    return total
