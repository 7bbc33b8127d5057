"""What is compared: each system as a feed, which gives one rank its steps.

A feed is opened in the rank's process. It yields steps; a step is an iterable of microbatches:
dicts of tensors. `lengths_of` tells the lengths of the documents that attend to themselves alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from throughput.corpora import Corpus
from torch.utils.data import DataLoader, Dataset

import megadask as md

Ints = NDArray[np.int64]
Batch = Mapping[str, Any]
Steps = Iterable[Iterable[Batch]]
#: Longest wait for a batch, in seconds.
TIMEOUT_S = 120.0
#: What a rank gets that has no more, while others have.
NOTHING: Batch = {"lengths": torch.zeros(0, dtype=torch.int64)}


def lengths_of(batch: Batch) -> torch.Tensor:
    """Return the lengths of a batch's documents: its ``lengths``, or those of its ``spans``."""
    if "spans" not in batch:
        lengths: torch.Tensor = batch["lengths"]
        return lengths
    starts, stops = batch["spans"].unbind(1)
    return stops - starts


class Feed(Protocol):
    """One system; it is sent to the processes of the ranks."""

    def open(self, rank: int) -> AbstractContextManager[Steps]:
        """Return the steps of a rank, which end when the context does."""


@dataclass(frozen=True, kw_only=True)
class MegaDask:
    """A rank of a service.

    Attributes
    ----------
    keys
        The tensors that it asks for; None for all.
    """

    address: str
    keys: tuple[str, ...] | None = None

    @contextmanager
    def open(self, rank: int) -> Iterator[Steps]:
        with md.connect(self.address, rank=rank, keys=self.keys, timeout=TIMEOUT_S) as loader:
            yield loader.steps()


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A rank whose batches lie ready: of an earlier pass, by the lengths of all ranks' documents.

    What this takes longer than its bound, the ranks take that wait for nothing but each other.
    """

    lengths: list[list[list[list[int]]]]

    def open(self, rank: int) -> AbstractContextManager[Steps]:
        steps = self.lengths[rank]
        return nullcontext(
            [[{"lengths": torch.tensor(one)} for one in microbatches] for microbatches in steps]
        )


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A rank of a torch DataLoader.

    Attributes
    ----------
    items
        The items of the data set that each rank takes, in its order.
    microbatches
        Microbatches of a step; ranks that have no more give empty ones.
    num_steps
        Steps of every rank.
    stateful
        Whether it is torchdata's.
    """

    data: Dataset[Any]
    items: tuple[Ints, ...]
    microbatches: int = 1
    num_steps: int
    stateful: bool = False

    def open(self, rank: int) -> AbstractContextManager[Steps]:
        kind: Any = DataLoader
        if self.stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader as kind

            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # of torch, by itself
        sampler = self.items[rank].tolist()
        # Forked, as by default in a process that was not spawned itself; before the threads of the
        # ranks are there, which could hold a lock.
        options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}
        options["sampler"] = sampler
        return nullcontext(self._steps(iter(kind(self.data, **options))))

    def _steps(self, batches: Iterator[Any]) -> Iterator[Iterator[Batch]]:
        for _ in range(self.num_steps):
            yield self._step(batches)

    def _step(self, batches: Iterator[Any]) -> Iterator[Batch]:
        for _ in range(self.microbatches):
            yield next(batches, NOTHING)


class Documents(Dataset[Any]):
    """All documents of a corpus by their number, transformed; files are mapped into memory."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._tables: list[pa.Table] | None = None
        counts = [len(length_N) for length_N in corpus.lengths.values()]
        self.first_S = np.concatenate([[0], np.cumsum(counts)])
        self.length_N = np.concatenate(list(corpus.lengths.values()))

    def __len__(self) -> int:
        return len(self.length_N)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return the batch of one document."""
        return batch_of([self.sample(number)])

    def sample(self, number: int) -> dict[str, Any]:
        if self._tables is None:
            paths = self._corpus.files.values()
            self._tables = [pa.ipc.open_file(pa.memory_map(path)).read_all() for path in paths]
        source = int(np.searchsorted(self.first_S, number, "right")) - 1
        row = self._tables[source].slice(number - int(self.first_S[source]), 1).to_pylist()[0]
        sample: dict[str, Any] = self._corpus.transform(row)
        return sample


class Grouped(Dataset[Any]):
    """Batches of several documents, which a data set makes one batch of."""

    def __init__(self, documents: Documents, groups: list[Ints]) -> None:
        self._documents, self._groups = documents, groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return batch_of([self._documents.sample(n) for n in self._groups[number].tolist()])


class Concatenated(Dataset[Any]):
    """All documents one after the other, shuffled, and cut to packs of one length.

    Which pieces a pack consists of is worked out before, from the lengths. Nothing tells the
    documents of a pack apart: attention goes over all of it.
    """

    def __init__(self, documents: Documents, context: int, rng: np.random.Generator) -> None:
        self._documents, self._context = documents, context
        self._order_N = rng.permutation(len(documents))
        self._end_N = np.cumsum(documents.length_N[self._order_N])

    def __len__(self) -> int:
        return int(-(-self._end_N[-1] // self._context))

    def __getitem__(self, number: int) -> dict[str, Any]:
        start = number * self._context
        stop = min(start + self._context, int(self._end_N[-1]))
        at = int(np.searchsorted(self._end_N, start, "right"))
        tokens, items = np.zeros(self._context, np.int64), []
        while start < stop:
            sample = self._documents.sample(int(self._order_N[at]))
            end = int(self._end_N[at])
            began = end - len(sample["tokens"])
            piece = sample["tokens"][start - began : min(end, stop) - began]
            to = start - number * self._context
            tokens[to : to + len(piece)] = piece
            if start == began:
                items += sample.get("image", [])
            start, at = end, at + 1
        batch = _tensors(tokens, items)
        # The last pack is padded, and takes as long as any.
        return batch | {"lengths": torch.tensor([self._context])}


def batch_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors of some documents, one after the other."""
    tokens = np.concatenate([sample["tokens"] for sample in samples]).astype(np.int64)
    items = [item for sample in samples for item in sample.get("image", [])]
    lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
    return _tensors(tokens, items) | {"lengths": lengths}


def _tensors(tokens: Ints, items: list[Any]) -> dict[str, Any]:
    labels = np.roll(tokens, -1)
    batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
    if items:
        batch["image"] = torch.from_numpy(np.concatenate(items))
    return batch
