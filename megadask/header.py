"""What the supervisor is told of a pipeline when it starts, and of its loaders later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from megadask.pipeline import Pipeline
from megadask.planner.checks import is_integer
from megadask.planner.errors import ConfigError
from megadask.planner.state import PlannerState, check_lanes
from megadask.saved import read_saved
from megadask.scheduling.point import Point
from megadask.scheduling.spec import Limits


def header_of(
    pipeline: Pipeline, state: Mapping[str, Any] | None, limits: Limits, constructors: int | None
) -> dict[str, Any]:
    """Return a run's header: plain values, and pickles that only workers open."""
    sources = {source.name: source for source in pipeline.sources}
    return {
        **of_topology(pipeline, limits, constructors),
        "components": pipeline.components,
        "lanes": {name: source.num_lanes for name, source in sources.items()},
        "loaders": {name: source.first_loaders for name, source in sources.items()},
        "auto": [name for name, source in sources.items() if source.loaders == "auto"],
        "shadows": {name: source.shadows for name, source in sources.items()},
        "source_bytes": {name: source.size_bytes for name, source in sources.items()},
        "source_blobs": {
            name: cloudpickle.dumps(one) for name, one in pipeline.source_specs().items()
        },
        "loader_bytes": limits.loader_bytes,
        "lead_steps": limits.lead_steps,
        "lease_s": limits.lease_s,
        "silent_s": limits.silent_s,
        "recovery_s": limits.recovery_s,
        "journal_s": limits.journal_s,
        "restart": pipeline.restart,
        "origin": origin_of(pipeline, state).to_json(),
        "resumed": state is not None,
    }


def of_topology(pipeline: Pipeline, limits: Limits, constructors: int | None) -> dict[str, Any]:
    """Return the fields of a run's header that depend on the topology."""
    spec = pipeline.run_spec(limits)
    return {
        "topology": pipeline.topology.to_dict(),
        "axis": spec.strategy.axis,
        "broadcast_axes": list(spec.strategy.broadcast_axes),
        "keys": spec.array_keys,
        "collates": spec.collate is not None,
        "blob": cloudpickle.dumps(spec),
        "constructors": constructors or -(-spec.num_buckets // 8),
    }


def check_counts(pipeline: Pipeline, loaders: Mapping[str, int]) -> dict[str, int]:
    """Return numbers of loaders by source. Raises ConfigError for one that cannot be."""
    if not isinstance(loaders, Mapping) or not loaders:
        raise ConfigError("scale(loaders)", got=repr(loaders), limit="a dict of source to number")
    lanes = {source.name: source.num_lanes for source in pipeline.sources}
    for name, count in loaders.items():
        if name not in lanes:
            raise ConfigError("scale(loaders)", got=repr(name), limit=f"one of {sorted(lanes)}")
        if not is_integer(count, 1) or count > lanes[name]:
            raise ConfigError(
                f"scale(loaders): {name!r}",
                got=repr(count),
                limit=f"an integer from 1 to {lanes[name]}, its number of lanes",
            )
    return dict(loaders)


def origin_of(pipeline: Pipeline, state: Mapping[str, Any] | None) -> Point:
    """Return where a pipeline begins: at its beginning, or at a saved state that fits it."""
    lanes = {source.name: source.num_lanes for source in pipeline.sources}
    if state is None:
        return Point(step=0, state=PlannerState.initial(lanes).to_json())
    components, point = read_saved(state)
    pipeline.check_resumable(components)
    return replace(point, state=check_lanes(PlannerState.from_json(point.state), lanes).to_json())
