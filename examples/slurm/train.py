"""Train with a training and a validation pipeline, and survive preemption.

Under torchrun this is one rank, which finds the service by the scheduler file in ``--folder``.
Started alone, ``python examples/slurm/train.py``, it runs everything on this machine: a Dask
cluster, the service, and two ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import megadask as md


class Net(torch.nn.Module):
    """Predicts a byte from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(257, 64)
        self.out = torch.nn.Linear(64, 257)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss, summed over the targets of a batch."""
        logits = self.out(self.embed(batch["tokens"])).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
        return (loss * batch["loss_mask"].flatten()).sum()


class Trainer:
    """One rank: model, optimizer and data, saved together."""

    def __init__(self, loader: md.Loader, validation: md.Loader, run: Path) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Net())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.loader, self.validation = loader, validation
        self.path = run / "checkpoint.pt"
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True)
            self.model.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["data"])  # on every rank

    def save(self) -> None:
        """Save everything at one point; the state of the data is the same on all ranks."""
        if dist.get_rank() == 0:
            saved = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "data": self.loader.state_dict(),
            }
            written = self.path.with_suffix(".new")
            torch.save(saved, written)
            os.replace(written, self.path)

    def train(self, num_steps: int, every: int) -> None:
        """Train up to a step; validate and save every so many, and save when told to end."""
        told = Told()
        for step in self.loader.steps():
            loss = self.step(step)
            told_to_end = told.by_anybody()
            last = step.index + 1 >= num_steps or told_to_end
            if last or (step.index + 1) % every == 0:
                text = f"step {step.index + 1}: loss {loss:.3f}"
                say(text if told_to_end else f"{text}, validation {self.validate():.3f}")
                self.save()
            if last:
                say("told to end" if told_to_end else "done")
                return

    def step(self, step: Any) -> float:
        """Take one step; return its loss a token."""
        total = torch.zeros(1)
        for batch in step:
            with nullcontext() if batch["is_last"] else self.model.no_sync():
                loss = self.model(batch)
                # A sum over the targets of all ranks, of which DDP takes the mean over ranks.
                (loss / step.num_loss_tokens * dist.get_world_size()).backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / step.num_loss_tokens

    @torch.no_grad()
    def validate(self) -> float:
        """Return the loss a token of one pass over the validation data."""
        sums = torch.zeros(2)
        for batch in self.validation:
            sums += torch.tensor([float(self.model.module(batch)), batch["num_loss_tokens"]])
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])


class Told:
    """Whether SLURM has told a rank to end: by SIGTERM, some time before it kills."""

    def __init__(self) -> None:
        self._told = False
        signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, *_: Any) -> None:
        self._told = True

    def by_anybody(self) -> bool:
        """Return it for all ranks alike, so that they end at the same step."""
        told = torch.tensor([float(self._told)])
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told)


def say(text: str) -> None:
    """Print, on one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def one_rank(options: argparse.Namespace) -> None:
    """Train as the rank that torchrun gave this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    scheduler = options.folder / "scheduler.json"
    with (
        md.connect(scheduler, pipeline="train") as loader,
        md.connect(scheduler, pipeline="val") as validation,
    ):
        Trainer(loader, validation, options.folder).train(options.steps, options.every)
    dist.destroy_process_group()


def on_this_machine(options: argparse.Namespace) -> int:
    """Run the service and two ranks here; return the exit code of the ranks."""
    from announce import announce
    from distributed import Client
    from pipelines import pipelines

    from megadask.demo.cluster import local_cluster

    with tempfile.TemporaryDirectory(prefix="megadask-slurm-") as scratch:
        run = options.folder or Path(scratch)
        run.mkdir(parents=True, exist_ok=True)
        with (
            local_cluster(2, Path(scratch)) as cluster,
            Client(cluster, set_as_default=False) as client,
            md.serve(pipelines(dp=2), client) as service,
        ):
            announce(service.address, run)
            torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
            mine = ["--folder", str(run)]
            mine += ["--steps", str(options.steps), "--every", str(options.every)]
            done = subprocess.run(
                [sys.executable, *torchrun, "--local-addr=127.0.0.1", __file__, *mine], check=False
            )
            total = service.audit()["total"]["samples"]
            print(*(f"{word} {total[word]}" for word in ("delivered", "repeated", "lost")))
            return done.returncode


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of this run, that all nodes see")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return on_this_machine(options)
    one_rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
