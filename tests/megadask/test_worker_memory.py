"""What processes do not load, and where their memory comes from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client

import megadask as md
from megadask.scheduling import loader_host
from tests.megadask.helpers.data import records, unfold, write_parquet
from tests.megadask.helpers.ranks import run


def loaded_here() -> list[str]:
    return sorted({name.partition(".")[0] for name in sys.modules})


def allocator_here() -> str:
    import pyarrow as pa

    return str(pa.default_memory_pool().backend_name)


@pytest.mark.skipif(
    "ARROW_DEFAULT_MEMORY_POOL" in os.environ, reason="the environment has chosen an allocator"
)
def test_workers_that_read_parquet_load_neither_torch_nor_pandas(
    client: Client, tmp_path: Path, name: str
) -> None:
    paths = write_parquet(tmp_path, records(range(5, 45)))
    source = md.Source("numbers", md.readers.Parquet(paths), transform=unfold, lanes=3)
    pipeline = md.Pipeline(
        sources=[source],
        batching=md.Packed(seq_len=64, global_batch=4),
        topology=md.ClientPlaceTree(dp=2),
        epochs=1,
    )
    with md.serve(pipeline, client, name=name) as service:
        counts = run(service, lambda loader: sum(1 for _ in loader))
        assert min(counts) > 0
        loaded = client.run(loaded_here)
        allocators = client.run(allocator_here)
    for address, names in loaded.items():
        assert "pyarrow" in names, f"{address} has read nothing"
        assert not {"torch", "pandas", "matplotlib"} & set(names), address
    # One for all threads: those of Arrow keep memory for every thread, and each loader is one.
    assert set(allocators.values()) == {"system"}


ARENAS = """
import ctypes, sys, threading
from megadask.scheduling import loader_host

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
loader_host._share_memory()
barrier = threading.Barrier(16)

def work():
    barrier.wait(60)
    assert libc.malloc(50_000)
    barrier.wait(60)

threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_share_few_arenas(tmp_path: Path) -> None:
    """Each keeps what was once taken from it, and a worker has a thread for every source."""

    def count(**environ: str) -> int:
        kept = {name: text for name, text in os.environ.items() if name != "MALLOC_ARENA_MAX"}
        path = tmp_path / "arenas.xml"
        command = [sys.executable, "-c", ARENAS, str(path)]
        subprocess.run(command, env=kept | environ, check=True)
        return path.read_text().count("<heap nr=")

    assert count() <= loader_host.NUM_ARENAS
    assert count(MALLOC_ARENA_MAX="9") > loader_host.NUM_ARENAS  # whoever has chosen keeps it


def test_a_trainer_loads_neither_arrow_nor_scipy_nor_pipelines() -> None:
    code = "import sys, megadask; megadask.connect; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "megadask.trainer.loader" in loaded
    assert not {"pyarrow", "scipy", "pandas", "megadask.service", "megadask.readers"} & loaded
