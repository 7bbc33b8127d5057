"""Two ranks that train a small model for real, on the loaders that the emulated ones have."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from distributed import Client
from reporting import Report, progress
from throughput import comparison
from throughput.cells import FIXED, MEGADASK, SINGLE, Cell, Pass, Prepared, run_megadask, run_pass
from throughput.measure import seconds
from throughput.ranks import Meeting, Slot
from throughput.steptimes import StepTimes
from throughput.systems import Batch, lengths_of
from torch import Tensor, distributed

from megadask.demo.cluster import local_cluster
from megadask.demo.model import DocumentTransformer, ModelConfig, loss_sum

CONFIG = ModelConfig()
CELL = Cell(data="bytes", context=8192, ranks=2, steps=24)
QUICK = Cell(data="bytes", context=2048, ranks=2, steps=6)
#: Lengths at which the model is timed for the planner's cost, and repetitions of each.
LENGTHS, REPEATS = (1, 64, 256, 1024, 2048, 4096, 8192), 3


class Training:
    """A replica of the model, and its optimiser."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # holds for the thread that calls it
        torch.manual_seed(0)
        self._model = DocumentTransformer(CONFIG)
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters)

    def compute(self, batch: Batch) -> float:
        """Add the gradient of a microbatch; return the seconds it took."""
        began = time.perf_counter()
        if len(lengths_of(batch)):
            tokens, *rest, labels, mask = _inputs(batch)
            loss_sum(self._model(tokens, *rest), labels, mask).backward()
        return time.perf_counter() - began

    def meet(self, meeting: Meeting) -> None:
        """Add up the gradients of all ranks, and go a step."""
        gradient = torch.cat([_gradient(one).flatten() for one in self._parameters])
        distributed.all_reduce(gradient)
        parts = torch.split(gradient, [one.numel() for one in self._parameters])
        for one, part in zip(self._parameters, parts, strict=True):
            one.grad = part.view_as(one).clone()
        self._optimizer.step()
        self._optimizer.zero_grad()


def run(report: Report, folder: Path, passes: int | None, *, quick: bool) -> None:
    """Train on every system, and print the table."""
    cell = QUICK if quick else CELL
    times = _measured(cell.context)
    number = passes or (1 if quick else comparison.PASSES)
    with (
        local_cluster(comparison.WORKERS, folder) as cluster,
        Client(cluster, set_as_default=False) as client,
        Slot() as own,
        Slot() as other,
    ):
        prepared = Prepared(cell, folder, times)
        feeds = {name: feed for name, feed in prepared.baselines() if name in (FIXED, SINGLE)}
        found: dict[str, list[Pass]] = {name: [] for name in (MEGADASK, *feeds)}
        for n in range(number):
            progress(f"pass {n + 1} of {number}")
            found[MEGADASK].append(run_megadask(own, client, prepared, make=Training))
            for name, feed in feeds.items():
                found[name].append(run_pass(other, feed, prepared, Training))
    report.note(
        f"two gloo ranks of one thread train the demo's model, {CONFIG!r}; on "
        "these cores loaders and ranks take each other's time. of its bound: the time of the "
        "slowest rank's passes, over the time taken, optimiser and all-reduce included"
    )
    comparison.tell(report, cell, found, prepared)


def _gradient(one: Tensor) -> Tensor:
    return torch.zeros_like(one) if one.grad is None else one.grad


def _inputs(batch: Batch) -> tuple[Tensor, ...]:
    """Return tokens, positions, bounds of documents, labels and mask, each of one pack."""
    if "cu_seqlens_padded" in batch:
        keys = ("tokens", "position_ids", "cu_seqlens_padded", "labels", "loss_mask")
        return tuple(batch[key] for key in keys)
    lengths = batch["lengths"]
    ends = lengths.cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    mask = torch.ones(len(positions))
    mask[ends - 1] = 0.0
    bounds = torch.cat([torch.zeros(1, dtype=ends.dtype), ends])
    row = (batch["tokens"], positions, bounds, batch["labels"], mask)
    return tuple(one[None] for one in row)


def _measured(context: int) -> StepTimes:
    """Return what the model takes here, as docs/costs.md tells users to find out."""
    torch.set_num_threads(1)
    model = DocumentTransformer(CONFIG)
    seconds(model, 256)
    lengths = tuple(length for length in LENGTHS if length <= context)
    taken = tuple(
        statistics.median(seconds(model, length) for _ in range(REPEATS)) for length in lengths
    )
    return StepTimes(tokens=lengths, seconds=taken)
