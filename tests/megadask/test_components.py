"""What a state says of its pipeline: every difference is named, with both sides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megadask as md
from megadask.header import origin_of
from megadask.planner.state import PlannerState
from megadask.saved import VERSION, to_saved
from megadask.scheduling.point import Point

ROWS = [{"text": "to be or not to be"}] * 12


def cut(limit: int) -> Callable[[Mapping[str, Any]], Any]:
    """Return a transform whose limit is nowhere but in its closure."""

    def call(record: Mapping[str, Any]) -> Any:
        return {"tokens": np.arange(len(record["text"]))[:limit]}

    return call


class Cut:
    """A transform whose limit is nowhere but in its attribute."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, record: Mapping[str, Any]) -> Any:
        return {"tokens": np.arange(len(record["text"]))[: self.limit]}


def source(**changes: Any) -> md.Source:
    options = {"transform": cut(50), "lanes": 2, **changes}
    return md.Source("a", md.readers.InMemory(ROWS, shards=4), **options)


def declared(
    batching: Mapping[str, Any] | None = None,
    kind: Callable[..., Any] = md.Packed,
    sources: Mapping[str, Any] | None = None,
    **options: Any,
) -> md.Pipeline:
    made = kind(**{"seq_len": 256, "global_batch": 4, **(batching or {})})
    options = {"epochs": 2, **options}
    return md.Pipeline(sources=[source(**(sources or {}))], batching=made, **options)


def state_of(pipeline: md.Pipeline) -> dict[str, Any]:
    lanes = {one.name: one.num_lanes for one in pipeline.sources}
    state = to_saved(
        pipeline.components, Point(step=0, state=PlannerState.initial(lanes).to_json())
    )
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def defer(steps: int) -> Callable[[md.DGraph], Any]:
    return lambda graph: graph.defer(steps, 8)


def mix(weight: float) -> Callable[[md.DGraph], Any]:
    return lambda graph: graph.mix({"a": weight})


RAMP = md.Schedule.stages({0: 4, 10: 8})
#: A pipeline's options, and what the error says on either side.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seq_len": ({}, {"batching": {"seq_len": 128}}, "seq_len: 256 in the state, 128 in the"),
    "global_batch": ({}, {"batching": {"global_batch": 8}}, "global_batch: 4 in the state, 8 in"),
    "a ramp": ({}, {"batching": {"global_batch": RAMP}}, "global_batch: 4 in the state, {"),
    "micro_batch": ({}, {"batching": {"micro_batch": 2}}, "micro_batch: 1 in the state, 2 in"),
    "aligned": (
        {},
        {"batching": {"aligned": {"w": "float32"}}},
        "aligned: w: missing in the",
    ),
    "overflow": ({}, {"batching": {"overflow": "drop"}}, "overflow: split in the state, drop in"),
    "kind": ({}, {"kind": md.Padded}, "batching: Packed in the state, Padded in the pipeline"),
    "seed": ({}, {"seed": 7}, "seed: 0 in the state, 7 in the pipeline"),
    "epochs": ({}, {"epochs": None}, "epochs: 2 in the state, None in the pipeline"),
    "stop": ({}, {"stop": "first"}, "stop: all in the state, first in the pipeline"),
    "window": ({}, {"window": 9}, "window: 64 in the state, 9 in the pipeline"),
    "patience": ({}, {"patience": 9}, "patience: 4 in the state, 9 in the pipeline"),
    "mixture": ({"strategy": mix(0.5)}, {"strategy": mix(2.0)}, "a: 0.5 in the state, 2.0 in the"),
    "deferral": ({"strategy": defer(3)}, {"strategy": defer(4)}, "deferral: steps: 3 in the state"),
    "no deferral": ({}, {"strategy": defer(3)}, "deferral: None in the state"),
    "lanes": ({}, {"sources": {"lanes": 3}}, "source a: lanes: 2 in the state, 3 in the pipeline"),
    "on_error": ({}, {"sources": {"on_error": "skip"}}, "on_error: raise in the state, skip in"),
    "shuffle": ({}, {"sources": {"shuffle": 9}}, "shuffle: missing in the state, 9 in the"),
    "a closure": ({}, {"sources": {"transform": cut(57)}}, "call(limit=50)@"),
    "an attribute": (
        {"sources": {"transform": Cut(50)}},
        {"sources": {"transform": Cut(57)}},
        "Cut(limit=57)@",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_every_difference_is_an_error_that_names_both_sides(case: str) -> None:
    was, now, words = OTHERS[case]
    state = state_of(declared(**was))
    origin_of(declared(**was), state)  # the same, declared again
    with pytest.raises(md.errors.StateError) as caught:
        origin_of(declared(**now), state)
    assert words in str(caught.value)
    assert "Resume with the pipeline that saved it" in str(caught.value)


def test_a_state_of_another_version_names_both() -> None:
    pipeline = declared()
    for version in (1, VERSION + 1):
        state = {**state_of(pipeline), "version": version}
        with pytest.raises(md.errors.StateError, match=rf"version; got {version};.* {VERSION}"):
            origin_of(pipeline, state)


def test_a_state_stays_small() -> None:
    made = [replace(source(), name=f"source {n}") for n in range(200)]
    pipeline = md.Pipeline(sources=made, batching=md.Packed(seq_len=8, global_batch=4))
    assert len(json.dumps(state_of(pipeline))) < 500 * len(made)


def test_a_transform_counts_as_it_was_declared_however_often_pipelines_are_made() -> None:
    one = source(transform=Cut(50))
    first = md.Pipeline(sources=[one], batching=md.Packed(seq_len=8, global_batch=4))
    one.transform.count = 3  # type: ignore[union-attr]  # as use may do
    assert replace(first, topology=md.ClientPlaceTree(dp=2)).components == first.components


@pytest.mark.parametrize("made", [cut, Cut])
def test_an_index_of_another_transform_is_an_error(tmp_path: Path, made: Any) -> None:
    path = tmp_path / "a.arrow"
    md.index(source(transform=made(50)), path)
    declared(sources={"transform": made(50), "index": path})
    with pytest.raises(md.errors.ConfigError, match=r"another transform.*limit=50.*limit=57"):
        declared(sources={"transform": made(57), "index": path})


def test_an_index_of_other_samples_names_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    md.index(source(), path)
    with pytest.raises(md.errors.ConfigError, match=r"got extras: \[\]; expected extras: \["):
        declared(sources={"index": path, "extras": ["text"]})
