"""Other engines, where they are installed: packs that were tokenised and cut before, each its way.

``pip install -r benchmarks/requirements.txt`` says how to install them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from throughput.ranks import Slot
from throughput.systems import Batch, Ints, Loaded, Steps
from torch.utils.data import DataLoader

TORCHDATA = "torchdata StatefulDataLoader"
RAY = "Ray Data streaming_split"
MOSAIC = "mosaicml-streaming"
#: Name of each to what is imported of it.
MODULES = {MOSAIC: "streaming", RAY: "ray", TORCHDATA: "torchdata"}
_ROWS_PER_FILE = 16
_PREFETCH = 4


def installed(name: str) -> bool:
    """Whether an engine can be imported."""
    return importlib.util.find_spec(MODULES[name]) is not None


@contextmanager
def opened(fixed: Loaded, folder: Path, ranks: int) -> Iterator[dict[str, tuple[Any, Slot | None]]]:
    """Yield, for each engine that is installed, its feed and a slot of its own if it needs one."""
    found: dict[str, tuple[Any, Slot | None]] = {}
    with ExitStack() as stack:
        if installed(MOSAIC):
            feed = Mosaic(folder=_mds(fixed, folder), shape=_shape(fixed))
            # It takes its rank from the environment, so every rank is a process.
            found[MOSAIC] = feed, stack.enter_context(Slot(ranks))
        if installed(RAY):
            splits = stack.enter_context(_ray(_parquet(fixed, folder), ranks))
            # Its threads stay in the processes of the ranks, which no other system should fork.
            found[RAY] = Ray(splits=splits, shape=_shape(fixed)), stack.enter_context(Slot())
        if installed(TORCHDATA):
            found[TORCHDATA] = replace(fixed, stateful=True), None
        yield found


@dataclass(frozen=True)
class Shape:
    """Steps of a rank, and packs of each."""

    num_steps: int
    microbatches: int
    context: int

    def steps(self, packs: Iterator[Any]) -> Iterator[Iterator[Batch]]:
        """Yield steps of packs, which have a key ``tokens``."""
        for _ in range(self.num_steps):
            yield self._step(packs)

    def _step(self, packs: Iterator[Any]) -> Iterator[Batch]:
        for _ in range(self.microbatches):
            tokens = next(packs)["tokens"]
            yield {"tokens": tokens, "lengths": torch.tensor([self.context])}


@dataclass(frozen=True, kw_only=True)
class Mosaic:
    """A rank of mosaicml-streaming."""

    folder: str
    shape: Shape

    def open(self, rank: int) -> AbstractContextManager[Steps]:
        streaming = _streaming()
        streaming.base.util.clean_stale_shared_memory()
        data = streaming.StreamingDataset(local=self.folder, batch_size=1, shuffle=True)
        options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}
        loader: DataLoader[Any] = DataLoader(data, collate_fn=_writable, **options)
        return nullcontext(self.shape.steps(iter(loader)))


@dataclass(frozen=True, kw_only=True)
class Ray:
    """A rank of Ray Data; its iterators are pickled, as they want a connection to be there."""

    splits: tuple[bytes, ...]
    shape: Shape

    def open(self, rank: int) -> AbstractContextManager[Steps]:
        import ray

        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=False)
        split = ray.cloudpickle.loads(self.splits[rank])
        batches = split.iter_batches(batch_size=1, prefetch_batches=_PREFETCH)
        return nullcontext(self.shape.steps(iter(batches)))


def _streaming() -> Any:
    """Import mosaicml-streaming, which imports torchvision for data sets that are not used here."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        # That of PyPI is built for CUDA. Beside a torch for CPUs it lacks its own operators.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    import streaming

    return streaming


def _writable(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": torch.from_numpy(sample["tokens"].copy())}


def _shape(fixed: Loaded) -> Shape:
    return Shape(fixed.num_steps, fixed.microbatches, fixed.data[0]["tokens"].numel())


def _packs(fixed: Loaded) -> Iterator[Ints]:
    """Yield all packs in their shuffled order, and empty ones where the last step has too few."""
    order = [item for step in zip(*map(_padded(fixed), fixed.items), strict=True) for item in step]
    for item in order:
        tokens = fixed.data[max(item, 0)]["tokens"].numpy()
        yield (tokens if item >= 0 else np.zeros_like(tokens)).astype(np.int32)


def _padded(fixed: Loaded) -> Any:
    count = fixed.num_steps * fixed.microbatches
    return lambda items: [*items.tolist(), *[-1] * (count - len(items))]


def _mds(fixed: Loaded, folder: Path) -> str:
    path = str(folder / "mds")
    context = _shape(fixed).context
    columns = {"tokens": f"ndarray:int32:{context}"}
    with _streaming().MDSWriter(out=path, columns=columns, size_limit=2**24) as writer:
        for tokens in _packs(fixed):
            writer.write({"tokens": tokens})
    return path


def _parquet(fixed: Loaded, folder: Path) -> str:
    path = folder / "parquet"
    path.mkdir()
    packs = list(_packs(fixed))
    for at in range(0, len(packs), _ROWS_PER_FILE):
        rows = pa.FixedSizeListArray.from_arrays(
            np.concatenate(packs[at : at + _ROWS_PER_FILE]), len(packs[0])
        )
        pq.write_table(pa.table({"tokens": rows}), path / f"{at:06d}.parquet")
    return str(path)


@contextmanager
def _ray(folder: str, ranks: int) -> Iterator[tuple[bytes, ...]]:
    # Before it is imported, here and in the ranks' processes: else Ray listens to all interfaces,
    # as a cluster of several hosts needs, and keeps a token in the home folder.
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, object_store_memory=2**30)
    try:
        splits = ray.data.read_parquet(folder).streaming_split(ranks, equal=True)
        yield tuple(ray.cloudpickle.dumps(split) for split in splits)
    finally:
        ray.shutdown()
