"""What the draw of a pipeline depends on, as texts that a state keeps: what a resume compares."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.errors import ConfigError
from megadask.planner.schedule import StepSchedule
from megadask.scheduling.reading import fingerprint_shards

if TYPE_CHECKING:
    from megadask.pipeline import Pipeline
    from megadask.planner.batching import Batching
    from megadask.source import Source

#: Most characters of a schedule in a state; a longer one is told by its hash.
_MOST_SCHEDULE = 10_000


def components_of(pipeline: Pipeline) -> dict[str, str]:
    """Return everything that the draw depends on, by name, each as JSON.

    Parts are given as they were declared, where that is short, so that errors can tell what
    differs; transforms, functions and data by their fingerprint.
    """
    rules = pipeline.rules
    by = pipeline.frozen_strategy.mix_by
    parts: dict[str, Any] = {
        "batching": _batching(pipeline.batching),
        "mixture": {"by": by, "weights": _schedule(pipeline.mixture)},
        "reading": {
            "epochs": pipeline.epochs,
            "stop": pipeline.stop,
            "window": pipeline.window,
            "patience": pipeline.patience,
        },
        "seed": pipeline.seed,
        "deferral": None,
    }
    if rules.deferral is not None:
        parts["deferral"] = {
            "steps": rules.deferral.steps,
            "ways": rules.deferral.ways,
            "cost": fingerprint(rules.deferral.cost),
        }
    for source in pipeline.sources:
        parts[f"source {source.name}"] = _source(source)
    return {name: json.dumps(part, default=fingerprint) for name, part in parts.items()}


def has_grown(source: Source, was: str, now: str) -> bool:
    """Whether a source is what it was, with more shards behind the old ones.

    Parameters
    ----------
    source
        The source.
    was, now
        Its component in a state, and in the pipeline.
    """
    old, new = json.loads(was), json.loads(now)
    shards = source.reader.shards()
    kept = (old.keys() | new.keys()) - {"num_shards", "shards"}
    return (
        all(old.get(key) == new.get(key) for key in kept)
        and not source.shuffle
        and old["num_shards"] <= len(shards)
        and old["shards"] == fingerprint_shards(shards[: old["num_shards"]])
    )


def _batching(batching: Batching) -> dict[str, Any]:
    fields = {one.name: getattr(batching, one.name) for one in dataclasses.fields(batching)}
    if isinstance(batching.global_batch, StepSchedule):
        fields["global_batch"] = _schedule(batching.global_batch)
    fields["aligned"] = dict(batching.aligned)
    return {"batching": type(batching).__name__, **fields}


def _schedule(schedule: StepSchedule) -> Any:
    """Return a schedule as plain values; its hash where it is a function, or long."""
    try:
        declared = schedule.to_dict()
    except ConfigError:
        return fingerprint(schedule)
    is_short = len(json.dumps(declared)) <= _MOST_SCHEDULE
    return declared if is_short else fingerprint(schedule)


def _source(source: Source) -> dict[str, Any]:
    shards = source.reader.shards()
    on_error = source.on_error
    declared = {
        "transform": source.transform_text,
        "lanes": source.num_lanes,
        "on_error": on_error if isinstance(on_error, str) else fingerprint(on_error),
        "payload": [source.extras, source.modalities, source.size],
        "num_shards": len(shards),
        "shards": fingerprint_shards(shards),
    }
    if source.shuffle:
        declared["shuffle"] = source.block_rows
    if source.length_column:
        declared["lengths"] = [source.length_column, source.loss_column]
    return declared
