"""What `serve` and a running service may be given; what cannot work is refused at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from distributed import Client

from megadask.pipeline import Pipeline
from megadask.planner.checks import (
    LARGEST,
    check_bool,
    check_integer,
    check_name,
    check_seconds,
    is_integer,
    is_name,
)
from megadask.planner.errors import ConfigError, StateError
from megadask.planner.schedule import Schedule
from megadask.planner.weights import check_names
from megadask.scheduling.spec import Limits
from megadask.scheduling.wire import MAIN


def check_serve(
    pipelines: Mapping[str, Any],
    client: Any,
    *,
    name: Any,
    constructors: Any,
    limits: Any,
    detached: Any,
    timeout: Any,
) -> None:
    """Raise ConfigError for what `serve` cannot work with."""
    check_pipelines(pipelines)
    check_name("serve(name=)", name)
    if "/" in name:
        raise ConfigError("serve(name=)", got=repr(name), limit="a name without '/'")
    if constructors is not None:
        check_integer("serve(constructors=)", constructors, 1, LARGEST)
    if limits is not None and not isinstance(limits, Limits):
        raise ConfigError("serve(limits=)", got=repr(limits), limit="a megadask.Limits, or None")
    check_bool("serve(detached=)", detached)
    check_seconds("serve(timeout=)", timeout)
    if not isinstance(client, Client) or client.asynchronous or client.status != "running":
        raise ConfigError(
            "serve(client)",
            got=repr(client),
            limit="a connected, synchronous dask.distributed.Client",
            remedy="For example Client(LocalCluster(n_workers=2)).",
        )


def check_pipelines(pipelines: Mapping[str, Any]) -> None:
    """Raise ConfigError unless these are pipelines, by names that can be told apart."""
    if not pipelines:
        raise ConfigError("serve(pipeline)", got="an empty dict", limit="at least one pipeline")
    for key, one in pipelines.items():
        if not is_name(key) or "/" in key:
            raise ConfigError("the name of a pipeline", got=repr(key), limit="a name without '/'")
        if not isinstance(one, Pipeline):
            raise ConfigError(
                f"serve(pipeline): {key!r}", got=type(one).__name__, limit="a Pipeline"
            )


def checkpoint_url(checkpoint: Any) -> str | None:
    """Return the folder of ``serve(checkpoint=)`` as text. Raises ConfigError if it is none."""
    if checkpoint is None:
        return None
    url = os.fspath(checkpoint) if isinstance(checkpoint, os.PathLike) else checkpoint
    if not is_name(url):
        limit = "a path or URL of a folder, or None"
        raise ConfigError("serve(checkpoint=)", got=repr(checkpoint), limit=limit)
    return url


def states_to_resume(resume: Any, pipelines: Mapping[str, Any], *, several: bool) -> dict[str, Any]:
    """Return the state to begin at by pipeline. Raises ConfigError or StateError if it is none."""
    if resume is None:
        return {}
    if not isinstance(resume, Mapping):
        raise ConfigError(
            "serve(resume=)",
            got=repr(resume),
            limit="what loader.state_dict() returned; with several pipelines a dict of that",
        )
    if not several:
        return {MAIN: resume}
    if "point" in resume:
        raise StateError(
            "serve(resume=) with several pipelines",
            got="one state",
            limit='states by name, such as {"train": state}',
        )
    unknown = [key for key in resume if key not in pipelines]
    if unknown:
        raise ConfigError("serve(resume=)", got=unknown, limit=f"some of {sorted(pipelines)}")
    return dict(resume)


def checked_weights(weights: Any, at_step: Any, pipeline: Pipeline) -> dict[str, float]:
    """Return the weights of ``set_mixture`` as plain numbers. Raises ConfigError."""
    if not isinstance(weights, Mapping):
        raise ConfigError(
            "set_mixture(weights)", got=repr(weights), limit="a dict of source to weight"
        )
    Schedule.constant(dict(weights))
    check_names(weights, [source.name for source in pipeline.sources])
    if at_step is not None:
        check_integer("set_mixture(at_step=)", at_step, 0, LARGEST)
    return {name: float(weight) for name, weight in weights.items()}


def check_worker(worker: Any) -> None:
    """Raise ConfigError unless it may be the address or the name of a worker."""
    if not is_name(worker) and not is_integer(worker, -LARGEST, LARGEST):
        raise ConfigError(
            "retire(worker)", got=repr(worker), limit="the address of a worker, or its name in Dask"
        )
