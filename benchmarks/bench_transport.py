"""How long is one batch on its way from a constructor to a trainer of the same host?

One process gives, another one takes and reads a byte of every page: ``python
benchmarks/bench_transport.py``. Batches are made before; what is measured is the way alone, one
batch at a time, as a trainer waits for it that asks for nothing ahead. MegaDask's own parts are
used, on a Dask worker: by shared memory and by the message, as between hosts. Beside them the same
bytes through a plain TCP connection into memory that is reused, through a DataLoader of torch with
one worker, and copied once in memory. All kinds take turns within a round.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import reporting
import torch
from distributed import Client, LocalCluster
from numpy.typing import NDArray

from megadask.scheduling.courier import Courier
from megadask.scheduling.delivery import Reply, reply
from megadask.scheduling.line import Line
from megadask.scheduling.receiver import Receiver
from megadask.scheduling.ring import Ring
from megadask.scheduling.share import Share
from megadask.scheduling.slots import Report

MIB = 2**20
#: Batches of a kind in a round; the first ones are not counted.
BATCHES, WARM = 12, 3
WAIT_S = 120.0
PAGE = 4096

Take = Callable[[], NDArray[np.uint8]]


class Giver:
    """Gives batches as a constructor does; an actor on a Dask worker."""

    def __init__(self, num_bytes: int) -> None:
        self._array = np.full(num_bytes, 7, np.uint8)
        self._ring = Ring(8 * num_bytes, 1)
        self._number = 0
        self._share = self._make()

    async def fetch(self, use: list[Any], is_written: bool) -> Reply:
        """Answer as `Handing.batch` does; is_written: whether with writing the batch first."""
        self._number += 1
        host, held = use
        report = Report(generation=0, mark=(self._number, 0), held=frozenset(held))
        self._ring.hear("taker", report)
        if not self._ring.reaches(host):
            return reply("batch", {"data": self._array})
        if is_written:
            self._ring.drop(self._share)
            self._share = self._make()
        told = self._ring.give(self._share, 0, ("data",), "taker", 0, (self._number, 0))
        return reply("batch", shared=told)

    def _make(self) -> Share:
        share = Share({0: {"data": self._array}}, {0: 0}, {0: ()})
        assert self._ring.place(share)
        return share


def touch(array: NDArray[np.uint8]) -> None:
    """Read a byte of every page."""
    assert int(array[::PAGE].max()) == 7


@contextmanager
def by_megadask(num_bytes: int, client: Client, *, shared: bool, written: bool) -> Iterator[Take]:
    """Take batches of a `Giver`."""
    future = client.submit(Giver, num_bytes, actor=True, pure=False)
    line = Line(client, future.key, future.result(timeout=WAIT_S), future)
    with closing(Courier()) as courier:
        receiver = Receiver(0, courier)

        def take() -> NDArray[np.uint8]:
            use = receiver.use() if shared else [None, []]
            call = line.call("fetch", use, written, then=receiver.take)
            data: NDArray[np.uint8] = call.result(timeout=WAIT_S)[1]["data"]
            return data

        yield take


def send_all(port: int, num_bytes: int) -> None:
    """Send a batch for every byte that comes, until none does."""
    data = memoryview(bytes([7]) * num_bytes)
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while line.recv(1):
            line.sendall(data)


@contextmanager
def by_tcp(num_bytes: int) -> Iterator[Take]:
    """Take batches of a plain TCP connection, into memory that is reused."""
    buffer = np.zeros(num_bytes, np.uint8)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(WAIT_S)
        giver = multiprocessing.get_context("spawn").Process(
            target=send_all, args=(server.getsockname()[1], num_bytes), daemon=True
        )
        giver.start()
        line, _ = server.accept()
    line.settimeout(WAIT_S)

    def take() -> NDArray[np.uint8]:
        line.sendall(b"n")
        view, got = memoryview(buffer), 0
        while got < num_bytes:
            got += line.recv_into(view[got:])
        return buffer

    try:
        yield take
    finally:
        line.close()
        giver.join(10)
        giver.kill()


class Endless(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same batch again and again."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.full((self._num_bytes,), 7, dtype=torch.uint8)
        while True:
            yield batch


def copied(batch: torch.Tensor) -> torch.Tensor:
    """Return a batch in memory of its own, as a collate function makes it.

    One that was sent before would be in shared memory already.
    """
    return batch.clone()


@contextmanager
def by_data_loader(num_bytes: int) -> Iterator[Take]:
    """Take batches of a torch DataLoader with one worker, as fast as they come."""
    loader = torch.utils.data.DataLoader(
        Endless(num_bytes), batch_size=None, num_workers=1, collate_fn=copied, timeout=WAIT_S
    )
    batches = iter(loader)
    yield lambda: next(batches).numpy()
    batches._shutdown_workers()  # type: ignore[attr-defined]


@contextmanager
def by_copying(num_bytes: int) -> Iterator[Take]:
    """Copy a batch within memory that is there."""
    source, target = np.full(num_bytes, 7, np.uint8), np.zeros(num_bytes, np.uint8)

    def take() -> NDArray[np.uint8]:
        np.copyto(target, source)
        return target

    yield take


def measured(take: Take) -> float:
    """Return the median of milliseconds of a batch."""
    times = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        touch(take())
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[WARM:])


def main() -> None:
    """Measure, print, and write the report."""
    parser = reporting.arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="of a batch, in MiB")
    parser.add_argument("--rounds", type=int, default=None)
    options = parser.parse_args()
    sizes = options.sizes or ([1, 16] if options.quick else [1, 16, 64])
    rounds = options.rounds or (3 if options.quick else 9)
    report = reporting.Report("transport", "A batch on its way", options)
    report.note(f"median, least and largest of the medians of {rounds} rounds of {BATCHES} batches")
    cluster = LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        dashboard_address="127.0.0.1:0",
        host="127.0.0.1",
        memory_limit=None,
    )
    with cluster, Client(cluster, set_as_default=False, direct_to_workers=True) as client:
        for size in sizes:
            num_bytes = size * MIB
            with ExitStack() as stack:
                kinds = {
                    "copy in memory": by_copying(num_bytes),
                    "plain TCP": by_tcp(num_bytes),
                    "torch DataLoader": by_data_loader(num_bytes),
                    "MegaDask, shared memory": by_megadask(
                        num_bytes, client, shared=True, written=False
                    ),
                    "MegaDask, shared memory, written first": by_megadask(
                        num_bytes, client, shared=True, written=True
                    ),
                    "MegaDask, message": by_megadask(
                        num_bytes, client, shared=False, written=False
                    ),
                }
                takes = {kind: stack.enter_context(one) for kind, one in kinds.items()}
                times: dict[str, list[float]] = {kind: [] for kind in takes}
                for _ in range(rounds):
                    for kind, take in takes.items():
                        times[kind].append(measured(take))
            report.figures[f"{size} MiB"] = times
            rows = [
                (
                    kind,
                    reporting.spread(one),
                    f"{num_bytes / statistics.median(one) / 1e6:,.2f}",
                    f"{faster(times['plain TCP'], one):.2f}",
                    f"{faster(times['torch DataLoader'], one):.2f}",
                )
                for kind, one in times.items()
            ]
            ways = {"shared memory": "MegaDask, shared memory", "message": "MegaDask, message"}
            for way, other, least in (
                ("shared memory", "plain TCP", 2.0),
                ("shared memory", "torch DataLoader", 1.5),
                ("message", "plain TCP", 0.9),
            ):
                seen = faster(times[other], times[ways[way]])
                report.goal(f"{size} MiB: speed by {way} / {other}", seen, least=least)
            head = ("way", "ms a batch", "GB/s", "x TCP", "x DataLoader")
            report.table(f"One batch of {size} MiB", head, rows)
            reporting.progress(f"{size} MiB: load {os.getloadavg()[0]:.1f}")
    report.write()


def faster(slow: list[float], fast: list[float]) -> float:
    """Return the median over the rounds of how many times as fast one way is as another."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


if __name__ == "__main__":
    main()
