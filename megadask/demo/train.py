"""One data-parallel trainer of the demo: ``python -m megadask.demo.train``.

A plain torch loop; ``megadask.connect`` is all that it uses of MegaDask. It is started once a rank
with RANK, WORLD_SIZE, MASTER_ADDR (this machine) and MASTER_PORT set. Every line that it writes to
standard output is a JSON object with an ``event``: "ready", "step" (the fields of `StepRecord`),
"error" or "end". It stops by itself when the data ends or after ``--steps``; on SIGTERM or Ctrl-C
it closes its loader, leaves the process group and exits with 128 + the signal's number.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import megadask as md
from megadask.demo.group import Placement, join_group
from megadask.demo.model import DocumentTransformer, ModelConfig, loss_sum
from megadask.demo.report import Ended, RankReport, StepRecord
from megadask.demo.signals import StopOnSignal
from megadask.planner.errors import PlanError

Batch = Mapping[str, Any]


class Step(Protocol):
    """What `Trainer` needs of a step: its number, its planned imbalance, and its microbatches."""

    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def imbalance(self) -> float: ...  # noqa: D102
    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one rank did in a step before the optimiser's turn.

    Parameters
    ----------
    num_microbatches
        Microbatches of this rank.
    tokens, loss_tokens
        Real tokens and targets in them.
    loss_tokens_step
        Targets of the step on all ranks.
    loss_sum
        Loss added up over this rank's targets.
    wait_s
        Seconds of waiting for the microbatches.
    compute_s, compute_cpu_s
        Seconds of their forward and backward passes, and those on a core.
    """

    num_microbatches: int
    tokens: int
    loss_tokens: int
    loss_tokens_step: int
    loss_sum: float
    wait_s: float
    compute_s: float
    compute_cpu_s: float


class Trainer:
    """A model, its optimiser, and the step that trains it on packed batches.

    In a process group the model is data parallel; without one it is trained by this process alone.

    Parameters
    ----------
    model
        Called with tokens, position_ids and cu_seqlens_padded; returns logits. Ranks must build it
        alike.
    learning_rate
        Of AdamW.

    Attributes
    ----------
    model, optimizer
        What is trained, and by what.
    """

    def __init__(self, model: nn.Module, *, learning_rate: float = 1e-3) -> None:
        self.model = model
        self.world_size = 1
        self._clock = _ComputeClock()
        self._replica: DistributedDataParallel | None = None
        if distributed.is_initialized():
            self.world_size = distributed.get_world_size()
            self._replica = DistributedDataParallel(model)
            # A lambda, as DistributedDataParallel rejects annotations that are strings.
            self._replica.register_comm_hook(None, lambda _, bucket: self._mean_of_ranks(bucket))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def train_step(self, step: Step, began_s: float | None = None) -> StepRecord:
        """Train on one step of all ranks.

        Parameters
        ----------
        step
            This rank's part of it.
        began_s
            ``time.perf_counter()`` when the step was asked for; now when None.
        """
        entered_s = time.perf_counter()
        began_s = entered_s if began_s is None else began_s
        work = self.accumulate(step)
        self.optimizer.step()
        loss = torch.tensor(work.loss_sum, dtype=torch.float64)
        if self._replica is not None:
            distributed.all_reduce(loss)
        return StepRecord(
            step=step.index,
            loss=float(loss) / max(work.loss_tokens_step, 1),
            tokens=work.tokens,
            loss_tokens=work.loss_tokens,
            num_microbatches=work.num_microbatches,
            planned_imbalance=step.imbalance,
            wait_s=entered_s - began_s + work.wait_s,
            compute_s=work.compute_s,
            compute_cpu_s=work.compute_cpu_s,
            step_s=time.perf_counter() - began_s,
        )

    def accumulate(self, batches: Iterable[Batch]) -> Work:
        """Leave the gradient of one step in the parameters, the same on every rank.

        It is the gradient of the mean loss of the step's targets, however they are spread over
        ranks and microbatches: every microbatch adds its sum over the targets of the whole step,
        times the ranks because the reduction takes their mean.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self._clock.reset()
        num_microbatches = tokens = loss_tokens = loss_tokens_step = 0
        total, wait_s, is_last = 0.0, 0.0, False
        iterator = iter(batches)
        while True:
            asked_s = time.perf_counter()
            batch = next(iterator, None)
            wait_s += time.perf_counter() - asked_s
            if batch is None:
                break
            num_microbatches += 1
            tokens += int(batch["cu_seqlens"][:, -1].sum())
            loss_tokens += int(batch["num_loss_tokens"])
            loss_tokens_step = int(batch["num_loss_tokens_step"])
            is_last = bool(batch["is_last"])
            total += self._backward(batch)
            del batch  # its memory can be reused while the next one is waited for
        if not is_last:
            raise PlanError("a step ended before its last microbatch", got=num_microbatches)
        return Work(
            num_microbatches=num_microbatches,
            tokens=tokens,
            loss_tokens=loss_tokens,
            loss_tokens_step=loss_tokens_step,
            loss_sum=total,
            wait_s=wait_s,
            compute_s=self._clock.wall_s,
            compute_cpu_s=self._clock.cpu_s,
        )

    def _backward(self, batch: Batch) -> float:
        """Add the gradient of one microbatch; return its loss, added up over its targets."""
        scale = self.world_size / max(int(batch["num_loss_tokens_step"]), 1)
        model = self.model if self._replica is None else self._replica
        with self._reduction(bool(batch["is_last"])):
            self._clock.start()
            logits: Tensor = model(
                batch["tokens"], batch["position_ids"], batch["cu_seqlens_padded"]
            )
            loss = loss_sum(logits, batch["labels"], batch["loss_mask"])
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            self._clock.stop()
        return float(loss.detach())

    def _mean_of_ranks(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce one bucket of gradients as DistributedDataParallel does, off the clock.

        The last bucket comes here, in the thread of the backward pass, when this rank has computed
        its last gradient: what is left of ``backward()`` is the wait for the other ranks.
        """
        if bucket.is_last():
            self._clock.stop()
        assert distributed.group.WORLD is not None
        return allreduce_hook(distributed.group.WORLD, bucket)

    def _reduction(self, is_last: bool) -> AbstractContextManager[None]:
        """Reduce gradients in the last microbatch of a step only."""
        if self._replica is None or is_last:
            return nullcontext()
        return self._replica.no_sync()


class _ComputeClock:
    """Seconds between `start` and the first `stop` after it, added up until `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self._since: tuple[float, float] | None = None

    def start(self) -> None:
        self._since = (time.perf_counter(), time.thread_time())

    def stop(self) -> None:
        if self._since is not None:
            self.wall_s += time.perf_counter() - self._since[0]
            self.cpu_s += time.thread_time() - self._since[1]
            self._since = None


def train(trainer: Trainer, steps: Iterable[Step], *, limit: int) -> Iterator[StepRecord]:
    """Train until ``steps`` end, or ``limit`` of them are made; yield the record of each."""
    iterator = iter(steps)
    for _ in range(limit):
        began_s = time.perf_counter()
        step = next(iterator, None)
        if step is None:
            return
        yield trainer.train_step(step, began_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one trainer; return the exit code of its process."""
    options = _parser().parse_args(argv)
    placement = Placement.from_env(os.environ)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    records: list[StepRecord] = []
    ended: Ended = "end"
    loader_stats: Mapping[str, Any] = {}
    if options.stop_at_eof:
        threading.Thread(target=_stop_at_eof, daemon=True).start()
    with StopOnSignal() as stop:
        try:
            join_group(placement, timeout_s=options.timeout)
            trainer = Trainer(
                DocumentTransformer(
                    ModelConfig(hidden=options.hidden, layers=options.layers, heads=options.heads)
                ),
                learning_rate=options.learning_rate,
            )
            with md.connect(
                options.address, service=options.service, rank=placement.rank
            ) as loader:
                _tell("ready", rank=placement.rank)
                try:
                    for record in train(trainer, loader.steps(), limit=options.steps):
                        records.append(record)
                        _tell("step", rank=placement.rank, **asdict(record))
                finally:
                    loader_stats = loader.stats()
            if len(records) == options.steps:
                ended = "steps"
        except BaseException as error:
            # Not only Stopped: stopped ranks break the reductions of the others, and what is
            # raised within torch's callbacks does not come out as it went in.
            if stop.signum is None:
                # Said before the group is left, which makes the other ranks fail in their turn.
                what = f"{type(error).__name__}: {error}"
                with suppress(BrokenPipeError):
                    _tell("error", rank=placement.rank, time_s=time.time(), what=what)
                raise
            ended = "signal"
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
        report = RankReport(
            rank=placement.rank,
            world_size=placement.world_size,
            ended=ended,
            steps=tuple(records),
            loader=loader_stats,
        )
        _write_atomically(Path(options.report), report.to_json())
        with suppress(BrokenPipeError):
            _tell("end", rank=placement.rank, ended=ended, steps=len(records))
    return stop.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megadask.demo.train", description="One data-parallel trainer of the demo."
    )
    parser.add_argument("--address", required=True, help="address of the Dask scheduler")
    parser.add_argument("--service", default="megadask", help="name of the service")
    parser.add_argument("--steps", type=int, required=True, help="most steps to make")
    parser.add_argument("--report", required=True, help="JSON file to write, one for every rank")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--heads", type=int, default=4, help="attention heads of a layer")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds that ranks wait for each other"
    )
    parser.add_argument(
        "--stop-at-eof", action="store_true", help="stop when whoever holds standard input is gone"
    )
    return parser


def _stop_at_eof() -> None:
    # Not sys.stdin, whose lock a thread that still reads would hold when the interpreter ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(text + "\n")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
