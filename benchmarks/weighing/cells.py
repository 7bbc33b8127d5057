"""A cell: what the processes of one variant take, for some sources and ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from weighing.processes import MB, Process, processes, pss_bytes

WORKERS = 2
PACKS_A_STEP = 16
#: The allocators of MegaDask's workers, for the same readers elsewhere, too: Arrow's is chosen by
#: MegaDask, the threshold by Dask.
ALLOCATOR = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one variant takes, in MB at each time that it was weighed.

    ranks_mb: ranks with what they started; server_mb: the cluster of a MegaDask service.
    """

    ranks_mb: list[float]
    server_mb: list[float]

    @property
    def total_mb(self) -> list[float]:
        return [sum(both) for both in zip(self.ranks_mb, self.server_mb, strict=True)]


def weigh(ranks: list[Process], server: Process | None, first_steps: int, times: int) -> Cell:
    """Make steps on all ranks, and weigh everything after each from the first few on."""
    seen: list[tuple[float, float]] = []
    for steps in [first_steps] + [1] * (times - 1):
        for rank in ranks:
            rank.say(steps)
        for rank in ranks:
            assert rank.hear() == "done"
        served = 0 if server is None else pss_bytes(server)
        seen.append((sum(map(pss_bytes, ranks)) / MB, served / MB))
    ranks_mb, server_mb = zip(*seen, strict=True)
    return Cell(ranks_mb=list(ranks_mb), server_mb=list(server_mb))


class Bench:
    """Measures cells over links to one file.

    times: a cell is weighed so often, after one more step each time.
    """

    def __init__(self, folder: Path, file: Path, times: int) -> None:
        self._folder = folder
        self._file = file
        self._times = times

    def ranks(self, role: str, sources: int, ranks: int, way: str = "") -> Cell:
        """Weigh ranks alone: bare ones or such with DataLoaders."""
        job = {**self._job(sources, ranks), "way": way}
        environ = ALLOCATOR if way == "lean" else {}
        with processes(role, [{**job, "rank": rank} for rank in range(ranks)], environ) as started:
            for process in started:
                assert process.hear() == "ready"
            # Sources take turns: a worker has read all of them after so many of its packs, as
            # documents of 800 bytes on average are.
            packs_a_worker = 2 + sources * 800 / 4096
            steps = int(-(-packs_a_worker * WORKERS // job["packs_a_rank"]))
            return weigh(started, None, steps, self._times)

    def reader(self, sources: int) -> list[float]:
        """Weigh a process that has opened each source once, less one that has opened none."""
        found = []
        for count in (0, sources):
            with processes("reader", [self._job(count, 8)], ALLOCATOR) as started:
                assert started[0].hear() == "ready"
                first_steps = 2 + sources // PACKS_A_STEP
                found.append(weigh(started, None, first_steps, self._times).ranks_mb)
        return [with_them - float(np.median(found[0])) for with_them in found[1]]

    def megadask(self, sources: int, ranks: int, lanes: int) -> Cell:
        """Weigh a service and its ranks. Its loaders read a window of every source at once."""
        return self._served(self._job(sources, ranks), lanes)

    def engine(self, ranks: int) -> Cell:
        """Weigh a service that reads next to nothing: a tiny source on each of its workers."""
        paths = []
        for number in range(WORKERS):
            paths.append(str(self._folder / f"tiny{number}.parquet"))
            pq.write_table(pa.table({"text": ["x" * 800] * 64}), paths[-1])
        return self._served({**self._job(0, ranks), "paths": paths}, 1)

    def _served(self, job: dict[str, Any], lanes: int) -> Cell:
        job["lanes"] = lanes
        with processes("serve", [job]) as (server,):
            address = json.loads(server.hear())["address"]
            numbers = range(job["ranks"])
            jobs = [{**job, "paths": [], "rank": n, "address": address} for n in numbers]
            with processes("megadask", jobs) as started:
                for process in started:
                    assert process.hear() == "ready"
                return weigh(started, server, 12, self._times)

    def _job(self, sources: int, ranks: int) -> dict[str, Any]:
        paths = []
        for number in range(sources):
            path = self._folder / f"source{number}.parquet"
            if not path.exists():
                path.hardlink_to(self._file)
            paths.append(str(path))
        packs_a_rank = max(1, PACKS_A_STEP // ranks)
        return {"paths": paths, "ranks": ranks, "workers": WORKERS, "packs_a_rank": packs_a_rank}
