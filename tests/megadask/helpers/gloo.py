"""Ranks of a gloo job as processes, which run one job after the other: see `member`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.megadask.helpers.processes import Process, module
from tests.megadask.helpers.ranks import world

#: One thread a process: they share the machine with the cluster.
ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Members:
    """The processes of a job, in the order of ranks."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes

    def run(
        self,
        service: Any,
        body: str,
        groups: Sequence[Sequence[int]] = (),
        *,
        seconds: float = 120.0,
        **job: Any,
    ) -> list[Any]:
        """Run a function of `member` on the ranks of a service; return what each returned.

        groups: process groups, of which each rank gives its own to connect.
        """
        num_ranks = world(service)
        assert num_ranks <= len(self._processes)
        job |= {"address": service.address, "service": service.name, "body": body}
        job |= {"world": num_ranks, "groups": groups}
        for process in self._processes:
            process.say(json.dumps(job))
        lines = [process.wait_for("result", seconds=seconds) for process in self._processes]
        return [json.loads(line.removeprefix("result ")) for line in lines[:num_ranks]]


@contextmanager
def start_members(count: int, folder: Path) -> Iterator[Members]:
    """Start so many processes; they do not outlive the block."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                module("member", str(rank), str(count), str(folder / "store"), environ=ENVIRON)
            )
            for rank in range(count)
        ]
        for process in processes:
            process.wait_for("ready", seconds=180)  # importing torch takes long where many do
        yield Members(processes)
