"""The trainer processes of one phase: started, listened to, and never left behind."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from megadask.demo.report import RankReport
from megadask.scheduling.errors import DeadlineError, ServiceError

PROGRAM = (sys.executable, "-m", "megadask.demo.train")
#: How long all trainers together may say nothing; the first imports torch, on cold disks.
SILENCE_S = 180.0
#: How long a trainer has to end by itself: after another one failed, and after SIGTERM.
_LAST_WORDS_S = 5.0
_TERM_S = 3.0

Event = Mapping[str, Any]


class TrainerError(ServiceError):
    """A trainer failed.

    Attributes
    ----------
    output
        What it wrote to standard error, its traceback at the end.
    """

    output: str = ""


@dataclass
class _Trainer:
    rank: int
    process: subprocess.Popen[str]
    report: Path
    stderr: Path
    has_ended: bool = False
    error: Event | None = None

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()


@dataclass
class Trainers:
    """One process a rank, while entered.

    On success they end by themselves; on an error or a signal they get SIGTERM, and SIGKILL if they
    outlive that by 3 seconds.

    Parameters
    ----------
    num_ranks
        How many.
    arguments
        What all of them get on their command line; see `megadask.demo.train`.
    folder
        Where their reports and what they write to standard error go.
    silence_s
        How long they may say nothing.
    program
        What they run.
    """

    num_ranks: int
    arguments: Sequence[str]
    folder: Path
    silence_s: float = SILENCE_S
    program: Sequence[str] = PROGRAM
    _trainers: list[_Trainer] = field(default_factory=list, init=False)
    _lines: queue.SimpleQueue[tuple[int, str | None]] = field(
        default_factory=queue.SimpleQueue, init=False
    )

    def __enter__(self) -> Trainers:
        port = free_port()
        try:
            for rank in range(self.num_ranks):
                self._trainers.append(self._start(rank, port))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes, by rank."""
        return [trainer.process.pid for trainer in self._trainers]

    def events(self) -> Iterator[Event]:
        """Yield what the trainers say until all have ended.

        Raises
        ------
        TrainerError
            One of them failed; its output is that of the one that failed first.
        DeadlineError
            None of them said anything for too long.
        """
        while any(not trainer.has_ended for trainer in self._trainers):
            try:
                rank, line = self._lines.get(timeout=self.silence_s)
            except queue.Empty:
                silent = [trainer.rank for trainer in self._trainers if not trainer.has_ended]
                raise DeadlineError(
                    "the trainers say nothing",
                    got=f"silence of ranks {silent}",
                    limit=f"a word within {self.silence_s:g} s",
                ) from None
            if line is None:
                if self._end(self._trainers[rank]):
                    raise self._failure()
            elif (event := self._event(rank, line)) is not None:
                yield event

    def reports(self) -> tuple[RankReport, ...]:
        """Return what the ranks that have ended reported."""
        return tuple(RankReport.from_json(t.report.read_text("utf-8")) for t in self._trainers)

    def stop(self) -> None:
        """End the processes that still run."""
        for trainer in self._trainers:
            if trainer.exit_code is None:
                trainer.process.terminate()
        deadline = time.monotonic() + _TERM_S
        for trainer in self._trainers:
            try:
                trainer.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                trainer.process.kill()
                trainer.process.wait()
            assert trainer.process.stdin is not None
            trainer.process.stdin.close()

    def kill(self) -> None:
        """End the processes that still run at once."""
        for trainer in self._trainers:
            trainer.process.kill()

    def _start(self, rank: int, port: int) -> _Trainer:
        report, stderr = self.folder / f"rank{rank}.json", self.folder / f"rank{rank}.err"
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [*self.program, *self.arguments, "--stop-at-eof"]
        with stderr.open("w") as errors:
            process = subprocess.Popen(
                [*command, "--report", str(report)],
                env=os.environ | env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        name = f"megadask-demo-rank{rank}"
        threading.Thread(target=self._listen, args=(rank, process), name=name, daemon=True).start()
        return _Trainer(rank, process, report, stderr)

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._lines.put((rank, line))
        self._lines.put((rank, None))

    def _event(self, rank: int, line: str) -> Event | None:
        try:
            event = json.loads(line)
        except ValueError:  # something else in that process prints
            return None
        if not isinstance(event, dict) or "event" not in event:
            return None
        if event["event"] == "error":
            self._trainers[rank].error = event
        return event

    def _end(self, trainer: _Trainer) -> int:
        """Return the exit code of a trainer that has said its last word."""
        trainer.has_ended = True
        try:
            return trainer.process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            trainer.process.kill()
            return trainer.process.wait()

    def _failure(self) -> TrainerError:
        """Return the error of the trainer that failed first; the others fail because of it."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while any(not trainer.has_ended for trainer in self._trainers):
            try:
                rank, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if line is None:
                self._end(self._trainers[rank])
            else:
                self._event(rank, line)
        failed = [trainer for trainer in self._trainers if trainer.exit_code]
        # Who died without a word was killed, and did not fail because of another one.
        first = min(failed, key=lambda t: t.error["time_s"] if t.error else 0.0)
        error = TrainerError(
            f"the trainer of rank {first.rank} failed",
            got=f"{_how(first.exit_code)}{': ' + first.error['what'] if first.error else ''}",
        )
        error.output = first.stderr.read_text("utf-8", errors="replace")
        return error


def _how(exit_code: int | None) -> str:
    assert exit_code is not None
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number in signal.valid_signals():
        return signal.Signals(number).name
    return f"exit status {exit_code}"


def free_port() -> int:
    """Return a port of the loopback interface that nobody listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
