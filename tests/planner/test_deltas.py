"""Laws of deltas: a step is replayed to the byte, on the state it was made for and on no other."""

from __future__ import annotations

import copy
import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.deltas import Replayed, difference
from megadask.planner.errors import StateError
from megadask.planner.metadata import Metadata
from megadask.planner.state import MixtureEvent, PlannerState, with_waits
from tests.strategies import World, chunks, few_laws, fixed_batchings, laws, span_tables, worlds


def applied(before: str, *deltas: Any) -> str:
    replayed = Replayed(before)
    for delta in deltas:
        replayed.apply(delta)
    return replayed.to_json()


def through_json(before: str, after: str) -> str:
    return applied(before, json.loads(json.dumps(difference(before, after))))


@laws
@given(worlds() | worlds(batching=fixed_batchings()), chunks, st.integers(1, 8))
def test_steps_are_replayed_one_after_the_other(world: World, chunk: object, steps: int) -> None:
    """Also where nobody looks at what is between."""
    driver = world.driver(chunk=chunk)
    first = driver.state.to_json()
    replayed, deltas = Replayed(first), []
    for _ in range(steps):
        before = driver.state.to_json()
        driver.draw()
        deltas.append(json.loads(json.dumps(difference(before, driver.state.to_json()))))
        replayed.apply(copy.deepcopy(deltas[-1]))
        assert replayed.to_json() == driver.state.to_json()
    assert applied(first, *deltas) == driver.state.to_json()


@few_laws
@given(span_tables(), span_tables(), worlds())
def test_any_outstanding_spans_are_replayed(one: Metadata, two: Metadata, world: World) -> None:
    """With scalars and items, and of steps that have nothing in common."""
    states = []
    for table in (one, two):
        state = world.driver().state
        name, source = next(iter(state.sources.items()))
        changed = replace(source, outstanding=with_waits(table, 3), lengths=(7,))
        states.append(replace(state, sources={**state.sources, name: changed}).to_json())
    states.append(world.driver().state.to_json())
    for before in states:
        for after in states:
            assert through_json(before, after) == after


def test_events_and_new_sources_are_replayed() -> None:
    small = PlannerState.initial({"a": 2})
    large = PlannerState.initial({"new": 1, "a": 2})
    other = large.with_event(MixtureEvent(step=4, weights={"a": 0.5, "new": 1.0}))
    texts = [state.to_json() for state in (small, large, other)]
    for before in texts:
        for after in texts:
            assert through_json(before, after) == after


def test_equal_numbers_of_unlike_types_are_replayed() -> None:
    before, after = (json.dumps({"events": [[3, {"a": one}]]}) for one in (1, 1.0))
    before, after = (text.replace(" ", "") for text in (before, after))
    assert through_json(before, after) == after
    assert through_json(after, before) == before


@few_laws
@given(worlds())
def test_a_step_of_another_state_is_refused(world: World) -> None:
    driver = world.driver()
    before = driver.state.to_json()
    driver.draw()
    middle = driver.state.to_json()
    driver.draw()
    delta = difference(middle, driver.state.to_json())
    if middle == before:
        return
    with pytest.raises(StateError, match="replayed"):
        applied(before, delta)


@pytest.mark.parametrize("delta", [[], [None], [{"?": 1}, 3], [{"k": {"step": {"+": [9, 1]}}}, 3]])
def test_what_is_no_delta_is_refused(delta: list[object]) -> None:
    with pytest.raises(StateError, match="replayed"):
        applied(PlannerState.initial({"a": 1}).to_json(), delta)


def test_a_step_is_small() -> None:
    """Of many lanes few move: the delta does not grow with the state."""
    state = PlannerState.initial(dict.fromkeys(map(str, range(300)), 16))
    moved = json.loads(state.to_json())
    moved["step"] += 1
    for name in map(str, range(8)):
        moved["sources"][name]["cursor"][1] += 1
        moved["sources"][name]["lanes"][3] = [1, 0, 1]
    after = json.dumps(moved, separators=(",", ":"))
    delta = json.dumps(difference(state.to_json(), after)).encode()
    assert len(zlib.compress(delta)) < 300
    assert len(after) > 20_000
