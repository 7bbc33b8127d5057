"""Start pipelines on a Dask cluster, and talk to them from the driver."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from distributed import Client

from megadask.arguments import (
    check_serve,
    check_worker,
    checked_weights,
    checkpoint_url,
    states_to_resume,
)
from megadask.header import check_counts, header_of, of_topology
from megadask.pipeline import Pipeline
from megadask.planner.checks import check_seconds
from megadask.planner.errors import ConfigError
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.errors import ClosedError, DeadlineError, ServiceError
from megadask.scheduling.loader_host import LoaderHost
from megadask.scheduling.process import Process
from megadask.scheduling.spec import Limits
from megadask.scheduling.supervisor import Supervisor
from megadask.scheduling.wire import MAIN, SUPERVISOR, run_name
from megadask.worker_check import check_workers

logger = logging.getLogger(__name__)


def serve(
    pipeline: Pipeline | Mapping[str, Pipeline],
    client: Client,
    *,
    name: str = "megadask",
    checkpoint: str | os.PathLike[str] | None = None,
    resume: Mapping[str, Any] | None = None,
    constructors: int | None = None,
    limits: Limits | None = None,
    detached: bool = False,
    timeout: float = 60.0,
) -> Service:
    """Start pipelines on the workers of a Dask cluster.

    Parameters
    ----------
    pipeline
        One pipeline, or several by name (``{"train": p, "val": q}``).
    client
        A connected, synchronous Dask client.
    name
        Of the service; trainers connect by it. An older service of the same client and name ends.
    checkpoint
        Folder for the journal of commits, any path or fsspec URL.
    resume
        A trainer's ``state_dict()`` to begin at; with several pipelines, one by name.
    constructors
        Data Constructors of each pipeline; one for up to eight buckets when None.
    limits
        Bounds of buffers and waits.
    detached
        Whether the service outlives this client.
    timeout
        Longest wait for the workers to be ready, in seconds.

    Returns
    -------
    Service
        A context manager that closes the service.

    Raises
    ------
    WorkerError
        A worker cannot import the same MegaDask version; it is named.
    ConfigError
        An argument cannot work; nothing was started.
    ServiceError
        Another client's service of this name is running.
    StateError
        The state to resume from belongs to another pipeline.
    """
    several = isinstance(pipeline, Mapping)
    pipelines = dict(pipeline) if isinstance(pipeline, Mapping) else {MAIN: pipeline}
    check_serve(
        pipelines,
        client,
        name=name,
        constructors=constructors,
        limits=limits,
        detached=detached,
        timeout=timeout,
    )
    limits = limits or Limits()
    url = checkpoint_url(checkpoint)
    states = states_to_resume(resume, pipelines, several=several)
    check_workers(client, timeout)
    client.register_plugin(Supervisor())
    client.register_plugin(LoaderHost())
    service = Service(client, name, timeout, detached=detached)
    try:
        for key, one in pipelines.items():
            service._start(key, one, url, states.get(key), constructors, limits, several)
    except BaseException:
        service.close()
        raise
    return service


class Service:
    """Pipelines that run on a cluster. Closes them on exit from a ``with`` block.

    Made by `serve`.
    """

    def __init__(self, client: Client, name: str, timeout: float, *, detached: bool) -> None:
        assert client.scheduler is not None
        self.name = name
        self.address = str(client.scheduler.address)  # of the Dask scheduler, for `connect`
        self.pipelines: dict[str, Pipeline] = {}
        self._hosting: dict[str, tuple[Limits, int | None]] = {}  # limits, constructors asked for
        self._idents: dict[str, str] = {}  # a service of the same name may take the place of this
        self._client = client
        self._timeout_s = timeout
        self._detached = detached
        self._process = Process()

    def set_mixture(
        self, weights: Mapping[str, float], at_step: int | None = None, pipeline: str | None = None
    ) -> int:
        """Set the weights of the sources from a step on, for good.

        They are in the trainers' states from the inside of the first step on that is planned after
        this. Resuming from an earlier state takes them from the journal
        (``serve(checkpoint=)``); without one, set them again.

        Parameters
        ----------
        weights
            By source; those that are not named get none.
        at_step
            The first step with these weights; None for the first that is not yet committed.

        Returns
        -------
        int
            The step from which they hold. It is committed when this returns.
        """
        declared = self._pipeline(pipeline)
        plain = checked_weights(weights, at_step, declared)
        return int(self._ask(pipeline, "event", weights=plain, at_step=at_step))

    def reshard(
        self,
        topology: ClientPlaceTree,
        pipeline: str | None = None,
        *,
        timeout: float = 120.0,
    ) -> int:
        """Give a running pipeline another topology.

        The ranks finish the steps that they have begun to receive. Then every loader raises
        ReshardedError at the same step, where its `state_dict` stands; connect again, with the
        ranks of the new topology. What the steps consist of does not change.

        Parameters
        ----------
        topology
            The new mesh.
        timeout
            How long the ranks may take for that, in seconds.

        Returns
        -------
        int
            The first step that is placed on the new topology. It is committed when this returns.

        Raises
        ------
        ConfigError
            The pipeline cannot run on that mesh.
        DeadlineError
            Some ranks did not finish in time; they are named, and nothing has changed.
        """
        check_seconds("reshard(timeout=)", timeout)
        if not isinstance(topology, ClientPlaceTree):
            raise ConfigError("reshard(topology)", got=repr(topology), limit="a ClientPlaceTree")
        declared = replace(self._pipeline(pipeline), topology=topology)
        key = pipeline or MAIN
        changes = of_topology(declared, *self._hosting[key])
        step = self._ask(pipeline, "reshard", may_take_s=timeout, changes=changes, wait_s=timeout)
        self.pipelines[key] = declared
        return int(step)

    def retire(self, worker: str | int, *, timeout: float = 60.0) -> str:
        """Move everything that a worker does for any service of the cluster to other workers.

        It gets nothing new from then on, and can be closed: ``client.retire_workers([address])``.
        Nothing is interrupted, and nothing changes in what trainers get.

        Parameters
        ----------
        worker
            Its address, or its name in Dask.
        timeout
            How long that may take, in seconds.

        Returns
        -------
        str
            Its address.

        Raises
        ------
        ServiceError
            There is no such worker, or no other one to take over from it.
        """
        check_worker(worker)
        check_seconds("retire(timeout=)", timeout)
        key = next(iter(self.pipelines), None)
        return str(self._ask(key, "retire", may_take_s=timeout, worker=worker))

    def scale(
        self, loaders: Mapping[str, int], pipeline: str | None = None, *, timeout: float = 60.0
    ) -> None:
        """Give running sources other numbers of loaders.

        Nothing is interrupted, and nothing changes in what trainers get. As few lanes change hands
        as that takes; what a loader has read of a lane that it loses is read again.

        Parameters
        ----------
        loaders
            Number of loaders by source, at most one for each lane; sources that are not named keep
            theirs.
        timeout
            How long that may take, in seconds.

        Raises
        ------
        ConfigError
            There is no such source, or not so many lanes.
        LostError
            The workers that should open new loaders were lost; nothing has changed.
        """
        check_seconds("scale(timeout=)", timeout)
        counts = check_counts(self._pipeline(pipeline), loaders)
        self._ask(pipeline, "scale", may_take_s=timeout, counts=counts)

    def spread(self, pipeline: str | None = None, *, timeout: float = 60.0) -> None:
        """Spread the roles of a pipeline evenly over the workers that there are by now.

        For workers that came later: they get no role by themselves before one has to move. As few
        roles move as it takes that no worker bears two more than another; loaders move before
        constructors and the planner do. Nothing is interrupted, and nothing changes in what
        trainers get.

        Parameters
        ----------
        timeout
            How long that may take, in seconds.
        """
        check_seconds("spread(timeout=)", timeout)
        self._ask(pipeline, "level", may_take_s=timeout)

    def audit(self, pipeline: str | None = None) -> dict[str, Any]:
        """Return what was planned, delivered, repeated, lost, skipped, filtered and unread.

        Committed plans times the trainers' acknowledgements, by source in samples, spans and
        tokens, since the generation began; ``"ok"`` says whether nothing was lost or repeated.
        A planned sample that failed when its payload was read (see ``Source(length_column=)``) was
        delivered as a filler, and counts as skipped, too.
        Unread samples are counted once the data has ended; -1 where only reading them would tell.
        """
        audit: dict[str, Any] = self._ask(pipeline, "audit")
        return audit

    def stats(self, pipeline: str | None = None) -> dict[str, Any]:
        """Return what the pipeline is doing: steps planned, buffers, memory, who is connected.

        ``["packing"]["efficiency"]`` says how much of the sequences is real tokens, over all plans
        since the generation began; pads are the rest.
        """
        stats: dict[str, Any] = self._ask(pipeline, "stats")
        return stats

    def close(self) -> None:
        """End the pipelines: trainers are told, buffers freed, files closed. Safe to call again.

        Does nothing in a fork of the process that served.
        """
        if not self._process.is_this:
            return
        for key in list(self.pipelines):
            try:
                self._ask(key, "close", reason="the driver closed it")
            except (OSError, DeadlineError, ServiceError) as error:
                logger.info("closing %s: %s", self.name, error)
            del self.pipelines[key]

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
        running = ", ".join(self.pipelines) or "closed"
        return f"<Service {self.name!r} at {self.address}: {running}>"

    def _start(
        self,
        key: str,
        pipeline: Pipeline,
        checkpoint: str | None,
        state: Mapping[str, Any] | None,
        constructors: int | None,
        limits: Limits,
        several: bool,
    ) -> None:
        self._idents[key] = uuid.uuid4().hex
        self._hosting[key] = (limits, constructors)
        header = {
            **header_of(pipeline, state, limits, constructors),
            "ident": self._idents[key],
            "detached": self._detached,
            "checkpoint": f"{checkpoint}/{key}" if checkpoint and several else checkpoint,
        }
        self.pipelines[key] = pipeline
        if self._ask(key, "start", header=header, client=self._client.id):
            logger.warning(
                "megadask.serve replaced service %r, which was running: its trainers get a "
                "ClosedError, and have to connect again",
                run_name(self.name, key),
            )

    def _pipeline(self, key: str | None) -> Pipeline:
        what = f"service {self.name!r}"
        self._process.check(what, "Call the service in the process that served it.")
        if not self.pipelines:
            raise ClosedError(f"{what} is closed", remedy="Serve its pipelines again.")
        wanted = MAIN if key is None else key
        if not isinstance(wanted, str) or wanted not in self.pipelines:
            limit = f"one of {sorted(self.pipelines)}"
            raise ConfigError(f"{what} has no such pipeline", got=repr(wanted), limit=limit)
        return self.pipelines[wanted]

    def _ask(self, key: str | None, call: str, *, may_take_s: float = 0.0, **arguments: Any) -> Any:
        self._pipeline(key)
        if self._client.scheduler is None:
            raise ClosedError(
                f"the Dask client of service {self.name!r} is closed",
                remedy="Close the service before its client; a service that is not detached has "
                "ended with it.",
            )
        handler = getattr(self._client.scheduler, SUPERVISOR)
        arguments |= {"run": run_name(self.name, key), "ident": self._idents[key or MAIN]}
        limit_s = self._timeout_s + may_take_s
        try:
            return self._client.sync(handler, call=call, **arguments, callback_timeout=limit_s)
        except DeadlineError:
            raise  # the supervisor's own
        except TimeoutError as error:
            raise DeadlineError(
                f"the supervisor does not answer {call!r}",
                limit=f"{limit_s:g} s",
                remedy="See whether the Dask scheduler is alive, or raise serve(timeout=).",
            ) from error
