"""What a training loop sees: an iterator of batches, with state. Needs torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from distributed import Client, Security

from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.saved import another_pipeline, differences, read_saved, to_saved
from megadask.scheduling.delivery import StepFacts
from megadask.scheduling.errors import DeadlineError, ServiceError
from megadask.scheduling.point import Point
from megadask.scheduling.process import Process
from megadask.scheduling.trainer_link import TrainerLink
from megadask.scheduling.wire import run_name
from megadask.tls import check_security
from megadask.trainer.arguments import check_connect, names_of
from megadask.trainer.client import open_client
from megadask.trainer.confirmed import Confirmed
from megadask.trainer.groups import Share, process_group
from megadask.trainer.presets import Batch, Form, Preset, known_keys
from megadask.trainer.ranks import Rank
from megadask.trainer.steps import Step
from megadask.trainer.tee import Tee
from megadask.trainer.tensors import Maker

T = TypeVar("T")


def connect(
    address: str | os.PathLike[str],
    service: str = "megadask",
    pipeline: str | None = None,
    rank: int | None = None,
    keys: tuple[str, ...] | list[str] | None = None,
    *,
    prefetch: int | None = None,
    timeout: float = 120.0,
    force: bool = False,
    security: Security | None = None,
    preset: Preset | None = None,
    names: Mapping[str, str] | None = None,
    pin_memory: bool = False,
    group: Any = None,
    confirm: bool = False,
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
        environment (RANK or SLURM_PROCID), else 0; the number of ranks there must be the mesh's.
    keys
        The tensors to receive, by the names of docs/batches.md; when None all, or those that the
        rank's pipeline stage reads.
    prefetch
        Microbatches that are kept on their way while the trainer computes; None for a number that
        begins small, and grows where the trainer waits for what the service had ready.
    timeout
        Longest wait for a connection or a batch, in seconds.
    force
        Take the rank even if another trainer process has it.
    security
        TLS certificates of the cluster.
    preset
        ``"hf"`` for batches as Hugging Face's transformers take them, see `presets.to_hf`.
    names
        Other names for keys of the batch, such as ``{"tokens": "input_ids"}``.
    pin_memory
        Whether tensors lie in page-locked memory; ignored without CUDA.
    group
        A ``torch.distributed`` process group (or mesh of one dimension) of the ranks along the axes
        of ``broadcast_at``: the first of them fetches, and each batch is broadcast over the group.
        All its ranks connect at a time, and take every microbatch. Without it the others get facts.
    confirm
        Whether a batch counts as used by `Loader.done` only, not once the next one is asked for:
        for frameworks that ask one ahead, as Lightning does.

    Raises
    ------
    ConfigError
        The rank is not in the mesh, the job has another size, or an option cannot work.
    ClaimError
        Another trainer has the rank.
    DeadlineError
        The scheduler does not answer.
    """
    check_connect(
        service,
        pipeline,
        prefetch=prefetch,
        timeout=timeout,
        force=force,
        security=security,
        confirm=confirm,
    )
    arrays = names_of(keys)
    own = Rank.of(rank)
    check_security(str(address), security)
    form = Form(preset=preset, names={} if names is None else names, pin_memory=pin_memory)
    group = None if group is None else process_group(group)
    client = open_client(str(address), timeout_s=timeout, security=security)
    link = None
    try:
        link = TrainerLink(
            client,
            run_name(service, pipeline),
            own.number,
            timeout_s=timeout,
            prefetch=prefetch,
            keys=arrays,
            force=force,
        )
        own.check_world(link.place["world_size"])
        known = known_keys(arrays, form.names, link.place)
        form.check(known, is_sliced=link.place["num_slices"] > 1)
        share = None
        if group is not None:
            share = Share.of(group, link, timeout_s=timeout, keys=arrays)
        return Loader(client, link, form, share, Confirmed(link) if confirm else None)
    except BaseException:
        if link is not None:
            link.close()
        client.close()
        raise


class Loader:
    """The batches of one rank. Iterate over it, or over its `steps`; made by `connect`.

    Iterating again goes on where the last iteration stopped; over a pipeline with ``restart=True``
    it begins at the beginning. A batch is acknowledged when the next one is asked for, or at
    `close`. Not for use by several threads at once, nor in a fork of the process that connected.
    """

    def __init__(
        self,
        client: Client,
        link: TrainerLink,
        form: Form,
        share: Share | None,
        confirmed: Confirmed | None,
    ) -> None:
        self._client = client
        self._link = link
        self._form = form
        is_inproc = str(getattr(client.scheduler, "address", "")).startswith("inproc")
        self._maker = Maker(link.sources, copies=is_inproc)
        link.receiver.make = self._maker.tensors
        self._is_sliced = link.place["num_slices"] > 1
        self._share = share
        self._confirmed = confirmed
        self._tee: Tee | None = None
        self._num_batches = 0
        self._num_bytes = 0
        self._pass_batches = 0
        self._pass_length: int | None = None
        self._open_pass: object | None = None
        self._closed = False
        self._process = Process()

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
        others have not is kept in this process. They give the same tensors, not copies.
        """
        check_integer("iterators(count)", count, 1)
        if self._confirmed is not None:
            raise ConfigError("iterators(count) of a loader with confirm=True", got=count)
        self._tee = Tee(self, count, self._begin_pass())
        return tuple(self._tee.iterator(cursor) for cursor in range(count))

    def done(self) -> None:
        """Say that the oldest batch that is not yet done was used; see ``connect(confirm=True)``.

        `state_dict` is behind the last one that is done, and so are acknowledgements.
        """
        if self._confirmed is None:
            raise ConfigError("loader.done()", got="confirm=False", limit="connect(confirm=True)")
        self._confirmed.done()

    def __len__(self) -> int:
        """Return how many microbatches a pass has, where that is known: after a whole one.

        That is over a pipeline with ``restart=True``, whose passes are alike (unless its mixture
        was set since).

        Raises
        ------
        TypeError
            It is not known: what a step holds is decided as it is planned.
        """
        if self._pass_length is None:
            raise TypeError(
                "the length of this loader is not known: how many microbatches there are depends "
                "on the lengths of all documents and on what is filtered; only a pipeline with "
                "restart=True has one, once a pass has ended"
            )
        return self._pass_length

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: epochs advance, and are shuffled anew, by themselves.

        Here for loops that call it, as they do for ``DistributedSampler``. The epoch of a sample is
        in its `SampleId`; to begin elsewhere use `load_state_dict`.
        """
        check_integer("set_epoch(epoch)", epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands: behind the last batch that it gave out.

        Small, free of topology, equal on all ranks at the same point; makes no call.
        """
        source = self._confirmed or self._tee or self._link
        return to_saved(self._link.components, source.point)

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
        self._rewind(point)

    def stats(self) -> dict[str, Any]:
        """Return counts of this loader: batches given out, bytes fetched, seconds waited."""
        counts = {"batches": self._num_batches, "fetched_bytes": self._num_bytes}
        return {"rank": self.rank, **counts, **self._link.stats()}

    def close(self) -> None:
        """Acknowledge the last batch, give the rank back and disconnect. Safe to call again.

        Does nothing in a fork of the process that connected.
        """
        if not self._closed and self._process.is_this:
            self._closed = True
            self._use_up()
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
        self._pass_batches = 0
        opened = object()
        if self._link.restarts:
            self._open_pass = opened
            self._link.begin_pass()
            if self._confirmed is not None:
                self._confirmed.reset()
        return opened

    def _end_pass(self, opened: object | None) -> None:
        """End a pass, unless another one has begun since."""
        is_open = not self._closed and self._process.is_this
        if is_open and opened is not None and self._open_pass is opened:
            self._open_pass = None
            self._link.consume(self._link.position)
            self._link.end_pass()

    def _rewind(self, point: Point) -> None:
        self._link.rewind(point)
        if self._confirmed is not None:
            self._confirmed.reset()

    def _use_up(self) -> None:
        """Note that what was given out was used, unless somebody else says so."""
        if self._tee is None and self._confirmed is None:
            self._link.consume(self._link.position)

    def _peek(self) -> StepFacts | None:
        self._check_open()
        self._use_up()
        facts = self._wait(self._link.facts)
        if facts is None:
            self._note_end()
        return facts

    def _next(self) -> Batch | None:
        self._use_up()
        return self._read()

    def _read(self) -> Batch | None:
        self._check_open()
        try:
            microbatch = self._wait(self._link.read)
        except Exception as error:
            if self._share is not None:
                self._share.fail(error)
            if self._confirmed is not None and isinstance(error, DeadlineError):
                self._confirmed.explain(error)
            raise
        if microbatch is None:
            self._note_end()
            return None
        if self._confirmed is not None:
            self._confirmed.give()
        self._num_batches += 1
        self._pass_batches += 1
        self._num_bytes += sum(array.nbytes for array in microbatch.arrays.values())
        if self._share is not None:
            microbatch = self._share.complete(microbatch)
        batch = self._maker.batch(microbatch)
        formed = self._form.apply(batch, is_sliced=self._is_sliced)
        self._link.ask_ahead()
        return formed

    def _note_end(self) -> None:
        if self._link.restarts:
            self._pass_length = self._pass_batches

    def _wait(self, read: Callable[[], T]) -> T:
        """Return what the link reads; where another thread closes it meanwhile, say so."""
        try:
            return read()
        except Exception:
            self._check_open()
            raise

    def _check_open(self) -> None:
        self._process.check(
            f"this loader of rank {self.rank}", "Call megadask.connect() in this process."
        )
        if self._closed:
            raise ServiceError(f"this loader of rank {self.rank} is closed")
