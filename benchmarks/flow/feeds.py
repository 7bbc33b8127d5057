"""What bench_cpu.py and bench_wait.py give their ranks beside MegaDask, and what those do with it.

See `throughput.ranks`: every rank is a process here.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from flow.corpus import RANKS, Web
from throughput.ranks import Meeting
from throughput.systems import Batch, Feed, Steps, lengths_of
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

#: Records that are transformed together, as MegaDask's loaders do.
TOGETHER = 64


@dataclass(frozen=True, kw_only=True)
class Limited:
    """Another feed that ends after some steps."""

    feed: Feed
    num_steps: int

    @contextmanager
    def open(self, rank: int) -> Iterator[Steps]:
        with self.feed.open(rank) as steps:
            yield itertools.islice(steps, self.num_steps)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A rank of a torch DataLoader that packs documents one after the other, for ever.

    Attributes
    ----------
    workers
        Processes of the DataLoader of each rank.
    microbatches
        Microbatches of a step.
    """

    web: Web
    seq_len: int
    micro_batch: int
    microbatches: int
    workers: int

    def open(self, rank: int) -> AbstractContextManager[Steps]:
        loader: DataLoader[Any] = DataLoader(
            Packs(self.web, self.seq_len, rank),
            batch_size=self.micro_batch,
            num_workers=self.workers,
            multiprocessing_context="fork",
        )
        return nullcontext(self._steps(iter(loader)))

    def _steps(self, batches: Iterator[Any]) -> Iterator[Iterator[Batch]]:
        lengths = torch.tensor([self.micro_batch * self.seq_len])
        while True:
            some = itertools.islice(batches, self.microbatches)
            yield ({**batch, "lengths": lengths} for batch in some)


class Packs(IterableDataset[Any]):
    """Packs of the documents of one process: every row group belongs to one."""

    def __init__(self, web: Web, seq_len: int, rank: int) -> None:
        self._web, self._seq_len, self._rank = web, seq_len, rank

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        assert info is not None
        mine, processes = self._rank * info.num_workers + info.id, RANKS * info.num_workers
        size = self._seq_len + 1
        held: list[Any] = []
        count = 0
        for tokens in self._documents(mine, processes):
            held.append(tokens)
            count += len(tokens)
            if count < size:
                continue
            flat = np.concatenate(held)
            begin = 0
            while count - begin >= size:
                pack = torch.from_numpy(flat[begin : begin + size].astype(np.int64))
                yield {"tokens": pack[:-1], "labels": pack[1:]}
                begin += self._seq_len
            held, count = [flat[begin:]], count - begin

    def _documents(self, mine: int, processes: int) -> Iterator[Any]:
        reader, transform = self._web.reader(), self._web.transform
        batch = getattr(transform, "batch", lambda records: [transform(one) for one in records])
        shards = range(mine, len(reader.shards()), processes)
        for shard in itertools.cycle(shards):
            records = reader.read(shard)
            while some := list(itertools.islice(records, TOGETHER)):
                for sample in batch(some):
                    yield sample["tokens"]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Batches that are there already: what a rank waits then is what the machine makes it wait."""

    num_microbatches: int

    def open(self, rank: int) -> AbstractContextManager[Steps]:
        batch = {"lengths": torch.tensor([1])}
        return nullcontext(iter([batch] * self.num_microbatches) for _ in itertools.count())


@dataclass(frozen=True, kw_only=True)
class Sleeping:
    """An accelerator that takes the same time for every microbatch."""

    microbatch_s: float

    def compute(self, batch: Batch) -> float:
        time.sleep(self.microbatch_s)
        return self.microbatch_s

    def meet(self, meeting: Meeting) -> None:
        meeting.wait()


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Where the CPU time of a pass is read.

    Attributes
    ----------
    warm, steps
        Steps that are left out at the beginning, and those that count.
    settle_s, idle_s
        So long after them, and for so long, the time of idle processes is read.
    parties
        Processes by what they do.
    trainers
        Those of the ranks; what they started counts as "loader processes".
    folder
        Where each rank writes what it read.
    """

    warm: int
    steps: int
    settle_s: float
    idle_s: float
    parties: Mapping[str, tuple[int, ...]]
    trainers: tuple[int, ...]
    folder: Path

    def read(self) -> dict[str, float]:
        """Return CPU seconds by what processes do, and the time in seconds."""
        started = [
            child.pid for pid in self.trainers for child in psutil.Process(pid).children(True)
        ]
        all_of = {**self.parties, "trainers": self.trainers, "loader processes": tuple(started)}
        return {"time": time.monotonic(), **{name: _cpu_s(pids) for name, pids in all_of.items()}}


@dataclass(kw_only=True)
class Metered:
    """An accelerator that takes no time; the first rank reads how much CPU time everything took."""

    stretch: Stretch
    step: int = 0
    tokens: int = 0
    marks: list[dict[str, float]] = field(default_factory=list)

    def compute(self, batch: Batch) -> float:
        if self.step >= self.stretch.warm:
            self.tokens += int(lengths_of(batch).sum())
        return 0.0

    def meet(self, meeting: Meeting) -> None:
        meeting.wait()
        self.step += 1
        stretch, rank = self.stretch, int(os.environ["RANK"])
        is_first, is_over = rank == 0, self.step == stretch.warm + stretch.steps
        if is_first and (self.step == stretch.warm or is_over):
            self.marks.append(stretch.read())
        if is_over:
            for pause_s in (stretch.settle_s, stretch.idle_s) if is_first else ():
                time.sleep(pause_s)
                self.marks.append(stretch.read())
            found = {"tokens": self.tokens, "marks": self.marks}
            (stretch.folder / f"{rank}.json").write_text(json.dumps(found))
            meeting.wait()  # until then the others are idle, too


def _cpu_s(pids: tuple[int, ...]) -> float:
    total_s = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total_s += times.user + times.system
    return total_s
