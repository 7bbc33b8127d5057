"""Processes that a test starts, and ends by their id whatever happens."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class Process:
    """A Python process whose lines of output can be waited for."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for(self, *beginnings: str, seconds: float = 60.0) -> str:
        """Return the next line of output that begins with one of these words."""
        while True:
            try:
                line = self._lines.get(timeout=seconds)
            except queue.Empty:
                line = None
            if line is None:
                shown = "\n".join(self.output[-20:])
                raise AssertionError(f"no line begins with {beginnings}:\n{shown}")
            self.output.append(line)
            if line.startswith(beginnings):
                return line

    def say(self, line: str = "") -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        """End the process at once, as ``kill -9`` does."""
        self.popen.kill()
        self.popen.wait(10)

    def end(self) -> None:
        """End the process at once, and everything of it here."""
        self.kill()
        self._reader.join(5)
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                stream.close()


def dask_worker(address: str, name: str, *, nanny: bool) -> Process:
    """Start a worker of a Dask cluster, with a nanny that starts it again, or without."""
    return Process(
        *("-m", "distributed.cli.dask_worker", address, "--name", name),
        *("--nanny" if nanny else "--no-nanny", "--no-dashboard", "--nthreads", "1"),
        *("--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", "--memory-limit", "0"),
    )


@contextmanager
def module(name: str, *arguments: str, environ: dict[str, str] | None = None) -> Iterator[Process]:
    """Run a module of this folder as a process; it does not outlive the block."""
    process = Process("-m", f"tests.megadask.helpers.{name}", *arguments, environ=environ)
    try:
        yield process
    finally:
        process.end()
