"""What a training loop sees: an iterator of batches, with state. Needs torch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from distributed import Client, Security
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.ids import SampleId
from megadask.saved import another_pipeline, differences, read_saved, to_saved
from megadask.scheduling.assemble import ARRAY_KEYS
from megadask.scheduling.delivery import Microbatch, StepFacts
from megadask.scheduling.errors import DeadlineError, ServiceError
from megadask.scheduling.record import Watermark
from megadask.scheduling.trainer_link import TrainerLink
from megadask.service import run_name

#: A microbatch as tensors and facts; see docs/batches.md.
Batch = dict[str, Any]


def connect(
    address: str | os.PathLike[str],
    service: str = "megadask",
    pipeline: str | None = None,
    rank: int | None = None,
    keys: tuple[str, ...] | list[str] | None = None,
    *,
    prefetch: int = 4,
    timeout: float = 120.0,
    force: bool = False,
    security: Security | None = None,
) -> Loader:
    """Connect a trainer process to a service.

    Parameters
    ----------
    address
        Of the Dask scheduler (``tcp://...``), or the path of a scheduler file.
    service
        Name that was given to `megadask.serve`.
    pipeline
        Which pipeline, where the service has several; the training pipeline when None.
    rank
        Of this trainer in the mesh; when None that of ``torch.distributed``, else of the
        environment (RANK or SLURM_PROCID), else 0.
    keys
        The tensors to receive; all when None.
    prefetch
        Microbatches that are kept on their way while the trainer computes.
    timeout
        Longest wait for a connection or a batch, in seconds.
    force
        Take the rank even if another trainer process has it.
    security
        TLS certificates of the cluster.

    Raises
    ------
    ConfigError
        The rank is not in the mesh.
    ClaimError
        Another trainer has the rank.
    DeadlineError
        The scheduler does not answer.
    """
    for name, value in (("prefetch", prefetch), ("timeout", timeout)):
        if value <= 0:
            raise ConfigError(f"connect({name}=)", got=value, limit="> 0")
    unknown = [keys] if isinstance(keys, str) else sorted(set(keys or ()) - set(ARRAY_KEYS))
    if unknown:
        raise ConfigError("connect(keys=)", got=unknown, limit=f"a list of some of {ARRAY_KEYS}")
    target: dict[str, Any] = {"address": str(address)}
    if Path(address).is_file():
        target = {"scheduler_file": str(address)}
    elif "://" not in str(address) and ":" not in str(address):
        raise ConfigError(
            "connect(address)",
            got=repr(str(address)),
            limit="an address such as tcp://host:port, or the path of a scheduler file",
        )
    try:
        client = Client(
            **target,
            timeout=timeout,
            direct_to_workers=True,
            set_as_default=False,
            security=security,
            name="megadask-trainer",
        )
    except (OSError, TimeoutError) as error:
        raise DeadlineError(
            "the Dask scheduler does not answer",
            got=f"{address}: {type(error).__name__}: {error}",
            limit=f"a connection within {timeout:g} s",
            remedy="Check the address, and that the scheduler is running.",
        ) from error
    try:
        link = TrainerLink(
            client,
            run_name(service, pipeline),
            own_rank() if rank is None else _integer("connect(rank=)", rank),
            timeout_s=timeout,
            prefetch=prefetch,
            keys=None if keys is None else tuple(keys),
            force=force,
        )
        return Loader(client, link)
    except BaseException:
        client.close()
        raise


def own_rank() -> int:
    """Return the rank of this process: of torch.distributed, RANK or SLURM_PROCID, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    for name in ("RANK", "SLURM_PROCID"):
        if value := os.environ.get(name):
            return _integer(
                f"the environment's {name}", value if not value.isdigit() else int(value)
            )
    return 0


def _integer(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(what, got=repr(value), limit="an integer")
    return value


class Loader:
    """The batches of one rank. Iterate over it, or over its `steps`; made by `connect`.

    Iterating again goes on where the last iteration stopped; over a pipeline with ``restart=True``
    it begins at the beginning. A batch is acknowledged when the next one is asked for, or at
    `close`. Not for use by several threads at once.
    """

    def __init__(self, client: Client, link: TrainerLink) -> None:
        self._client = client
        self._link = link
        self._tee: _Tee | None = None
        self._num_batches = 0
        self._open_pass: object | None = None
        self._closed = False

    @property
    def rank(self) -> int:
        """The rank that this loader serves."""
        return self._link.rank

    def __iter__(self) -> Iterator[Batch]:
        """Yield microbatch after microbatch, over all steps."""
        opened = self._begin_pass()
        try:
            while (batch := self._next()) is not None:
                yield batch
        finally:
            self._end_pass(opened)

    def steps(self) -> Iterator[Step]:
        """Yield steps, each an iterable of its microbatches."""
        opened = self._begin_pass()
        try:
            while (facts := self._peek()) is not None:
                step = Step(self, facts, facts.num_microbatches - self._link.position[1])
                yield step
                if step.left:
                    raise ServiceError(
                        f"step {step.index} was left before its end",
                        got=f"{step.left} of {step.num_microbatches} microbatches not used",
                        remedy="Iterate over all batches of a step, on every rank.",
                    )
        finally:
            self._end_pass(opened)

    def iterators(self, count: int) -> tuple[Iterator[Batch], ...]:
        """Return independent iterators over the same microbatches, for a virtual pipeline.

        A microbatch is acknowledged, and counts in `state_dict`, when all of them have passed it;
        one may run ahead of the others by ``Limits(lead_steps=)`` steps. What it has passed and the
        others have not is kept in this process.
        """
        if count < 1:
            raise ConfigError("iterators(count)", got=count, limit=">= 1")
        self._tee = _Tee(self, count, self._begin_pass())
        return tuple(self._tee.iterator(cursor) for cursor in range(count))

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands: behind the last batch that it gave out.

        Small, free of topology, equal on all ranks at the same point; makes no call.
        """
        point = self._link.point if self._tee is None else self._tee.point
        return to_saved(self._link.components, point)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state. All ranks must; the next batch waits until they have.

        Of several loads without a batch in between the last one holds. Where ranks wait for unlike
        points, the next batch raises a StateError that names them.

        Raises
        ------
        StateError
            The state belongs to another pipeline.
        """
        self._check_open()
        components, point = read_saved(state)
        if found := differences(components, self._link.components):
            remedy = "Serve the pipeline that saved it; to add sources, use serve(resume=state)."
            raise another_pipeline(found, remedy)
        self._tee = None
        self._link.rewind(point)

    def stats(self) -> dict[str, Any]:
        """Return counts of this loader: batches given out, and seconds spent waiting for them."""
        return {"rank": self.rank, "batches": self._num_batches, "wait_s": self._link.wait_s}

    def close(self) -> None:
        """Acknowledge the last batch, give the rank back and disconnect. Safe to call again."""
        if not self._closed:
            self._closed = True
            if self._tee is None:
                self._link.consume(self._link.position)
            self._link.close()
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        step, microbatch = self._link.position
        return f"<Loader of rank {self.rank}, at step {step}, microbatch {microbatch}>"

    def _begin_pass(self) -> object:
        """Begin a pass, where passes begin anew; return what `_end_pass` knows it by."""
        self._check_open()
        self._end_pass(self._open_pass)  # one that was left without a word
        self._tee = None
        opened = object()
        if self._link.restarts:
            self._open_pass = opened
            self._link.begin_pass()
        return opened

    def _end_pass(self, opened: object | None) -> None:
        """End a pass, unless another one has begun since."""
        if self._open_pass is opened and opened is not None and not self._closed:
            self._open_pass = None
            self._link.consume(self._link.position)
            self._link.end_pass()

    def _peek(self) -> StepFacts | None:
        self._check_open()
        self._link.consume(self._link.position)
        return self._link.facts()

    def _next(self) -> Batch | None:
        self._check_open()
        self._link.consume(self._link.position)
        return self._read()

    def _read(self) -> Batch | None:
        microbatch = self._link.read()
        if microbatch is None:
            return None
        self._num_batches += 1
        return to_batch(microbatch, self._link.sources)

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError(f"this loader of rank {self.rank} is closed")


class Step:
    """One optimizer step: iterate over it for its microbatches.

    Attributes
    ----------
    index
        Number of the step.
    num_microbatches
        How many it yields; the same on every rank. Fewer where it was begun before.
    num_loss_tokens
        Targets of the whole step over all ranks: what to divide the sum of the loss by.
    imbalance
        Planned max / mean cost over the buckets.
    """

    def __init__(self, loader: Loader, facts: StepFacts, num_microbatches: int) -> None:
        self._loader = loader
        self.index = facts.index
        self.num_microbatches = num_microbatches
        self.num_loss_tokens = facts.num_loss_tokens
        self.imbalance = facts.imbalance
        self.left = num_microbatches

    def __len__(self) -> int:
        return self.num_microbatches

    def __iter__(self) -> Iterator[Batch]:
        while self.left:
            batch = self._loader._next()
            assert batch is not None
            assert batch["step"] == self.index
            self.left -= 1
            yield batch


class _Tee:
    """Several cursors over the microbatches of one loader; the slowest one acknowledges."""

    def __init__(self, loader: Loader, count: int, opened: object) -> None:
        self._loader = loader
        self._opened = opened
        self._first = 0  # number of the oldest batch that is kept
        self._kept: deque[tuple[Batch | None, Watermark, Any]] = deque()
        self._at = [0] * count
        self._point = loader._link.point

    @property
    def point(self) -> Any:
        """The point behind the slowest cursor."""
        return self._point

    def iterator(self, cursor: int) -> Iterator[Batch]:
        """Yield what one cursor sees."""
        while True:
            self._forget()
            at = self._at[cursor]
            if at == self._first + len(self._kept):
                batch = self._loader._read()
                link = self._loader._link
                if batch is None:
                    self._loader._end_pass(self._opened)
                self._kept.append((batch, link.position, link.point))
            batch, _, _ = self._kept[at - self._first]
            if batch is None:
                return
            self._at[cursor] = at + 1
            self._update_point()
            yield dict(batch)

    def _update_point(self) -> None:
        slowest = min(self._at) - self._first
        if slowest:
            self._point = self._kept[slowest - 1][2]

    def _forget(self) -> None:
        """Let go of what every cursor has passed, and acknowledge it."""
        while self._first < min(self._at):
            _, mark, _ = self._kept.popleft()
            self._first += 1
            self._loader._link.consume(mark)


def to_batch(microbatch: Microbatch, sources: list[str]) -> Batch:
    """Return a microbatch as a dict of tensors and facts; ids in pack order."""
    batch: Batch = {}
    for name, array in microbatch.arrays.items():
        batch[name] = int(array) if array.ndim == 0 else _tensor(array)
    source, epoch, lane, position, start, stop = microbatch.ids
    columns = (column.tolist() for column in (source, epoch, lane, position))
    batch["sample_ids"] = [
        SampleId(sources[s], e, k, p) for s, e, k, p in zip(*columns, strict=True)
    ]
    batch["spans"] = _tensor(np.stack([start, stop], axis=1))
    batch["step"] = microbatch.step
    batch["microbatch"] = microbatch.microbatch
    batch["is_last"] = microbatch.is_last
    batch["num_loss_tokens"] = microbatch.num_loss_tokens
    batch["num_loss_tokens_step"] = microbatch.num_loss_tokens_step
    batch["cp_layout"] = microbatch.cp_layout
    return batch


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that owns its memory alone."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
