"""The processes that `bench_memory` weighs: ranks, the server of a MegaDask service, one reader.

``python benchmarks/memory_processes.py ROLE JSON``. Each says "ready" when it has begun, makes as
many steps as it is told to by a line of its input, says "done", and ends with its input.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN = 4096


def say(line: str) -> None:
    print(line, flush=True)


def rows(path: str, way: str, worker: int, num_workers: int) -> Iterator[Mapping[str, Any]]:
    """Yield the records of the row groups of one worker for ever, from a file that stays open.

    way: "default", as most people read Parquet, or "lean", the reader that MegaDask reads with.
    """
    if way == "lean":
        from megadask.readers import Parquet

        reader = Parquet(path, columns=["text"])
        while True:
            for shard in range(worker, len(reader.shards()), num_workers):
                yield from reader.read(shard)
    else:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            groups = [n for n in range(file.num_row_groups) if n % num_workers == worker]
            while True:
                for batch in file.iter_batches(64, row_groups=groups):
                    yield from batch.to_pylist()


def packs(paths: list[str], way: str, worker: int, num_workers: int) -> Iterator[Any]:
    """Yield packs of the bytes of the texts of all sources, which take turns."""
    sources = [rows(path, way, worker, num_workers) for path in paths]
    held = np.zeros(0, np.uint8)
    for source in cycle(sources):
        text = next(source)["text"].encode()
        held = np.concatenate([held, np.frombuffer(text, np.uint8)])
        while len(held) > SEQ_LEN:
            yield held[: SEQ_LEN + 1].astype(np.int64)
            held = held[SEQ_LEN:]


def bare_rank(job: dict[str, Any]) -> Callable[[int], None]:
    """Return steps of a rank that loads nothing: torch, and tensors of the size of a batch."""
    import torch

    def step(count: int) -> None:
        for _ in range(count):
            torch.zeros(SEQ_LEN, dtype=torch.int64).float().sum().item()

    return step


def torch_rank(job: dict[str, Any]) -> Callable[[int], None]:
    """Return steps of a rank with a DataLoader each of whose workers opens every source."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Packs(IterableDataset[Any]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            info = get_worker_info()
            assert info is not None
            worker = job["rank"] * info.num_workers + info.id
            num_workers = job["ranks"] * info.num_workers
            for pack in packs(job["paths"], job["way"], worker, num_workers):
                tokens = torch.from_numpy(pack)
                yield {"tokens": tokens[:-1], "labels": tokens[1:]}

    loader = iter(DataLoader(Packs(), batch_size=1, num_workers=job["workers"]))

    def step(count: int) -> None:
        for _ in range(count * job["packs_a_rank"]):
            batch = next(loader)
            batch["tokens"].float().sum().item()

    return step


def megadask_rank(job: dict[str, Any]) -> Callable[[int], None]:
    """Return steps of a rank of a MegaDask service."""
    import megadask as md

    loader = md.connect(job["address"], rank=job["rank"], timeout=600.0)
    atexit.register(loader.close)
    steps = iter(loader.steps())

    def step(count: int) -> None:
        for _ in range(count):
            for batch in next(steps):
                batch["tokens"].float().sum().item()

    return step


def one_reader(job: dict[str, Any]) -> Callable[[int], None]:
    """Return steps of a process that has opened every source once, and reads them in turns."""
    import megadask.readers.parquet  # noqa: F401  its import is no part of what a source takes

    turn = packs(job["paths"], "lean", 0, 1) if job["paths"] else repeat(None)

    def step(count: int) -> None:
        for _ in range(count * job["packs_a_rank"] * job["ranks"]):
            next(turn)

    return step


def serve(job: dict[str, Any]) -> None:
    """Serve a pipeline from a local cluster until the input ends."""
    from distributed import Client

    import megadask as md
    from megadask.demo.cluster import local_cluster

    text = md.transforms.Bytes("text")
    sources = [
        md.Source(f"source{n}", md.readers.Parquet(path), transform=text, lanes=job["lanes"])
        for n, path in enumerate(job["paths"])
    ]
    pipeline = md.Pipeline(
        sources=sources,
        topology=md.ClientPlaceTree(dp=job["ranks"]),
        batching=md.Packed(SEQ_LEN, global_batch=job["packs_a_rank"] * job["ranks"]),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(job["workers"], Path(folder)) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(pipeline, client, timeout=600.0) as service,
    ):
        say(json.dumps({"address": service.address}))
        sys.stdin.read()


ROLES = {
    "bare": bare_rank,
    "torch": torch_rank,
    "megadask": megadask_rank,
    "reader": one_reader,
}


def main() -> None:
    role, job = sys.argv[1], json.loads(sys.argv[2])
    if role == "serve":
        serve(job)
        return
    step = ROLES[role](job)
    say("ready")
    for line in sys.stdin:
        step(int(line))
        gc.collect()
        say("done")


if __name__ == "__main__":
    main()
