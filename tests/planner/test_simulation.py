"""Laws of the idealised trainer: who waits for whom, and how long a step takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megadask.planner.errors import ConfigError
from megadask.planner.pipelining import one_forward_one_backward, passes
from megadask.planner.simulation import Simulation, Trainer
from tests.strategies import laws

Loads = np.ndarray[Any, Any]


def all_loads(max_parts: int = 3) -> st.SearchStrategy[Loads]:
    shapes = st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, max_parts))
    return shapes.flatmap(lambda shape: hnp.arrays(np.int64, shape, elements=st.integers(0, 99)))


trainers = st.builds(
    Trainer,
    sync=st.sampled_from(["step", "microbatch"]),
    pp=st.integers(1, 5),
    backward=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
)


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


@laws
@given(all_loads(), trainers)
def test_a_step_takes_its_ideal_or_longer_and_no_less_than_its_slowest_bucket(
    loads: Loads, trainer: Trainer
) -> None:
    done = trainer.run(loads)
    slack = 1 + 1e-12
    assert done.step_time * slack >= done.ideal
    assert done.step_time * slack >= done.alone.max()
    assert done.alone.argmax() == done.slowest
    assert 0 < done.efficiency <= slack or not loads.any()
    assert ((done.idle >= -1e-12) & (done.idle <= 1)).all()


@laws
@given(all_loads(), trainers)
def test_the_step_time_is_its_parts_and_idle_ranks_are_what_is_lost(
    loads: Loads, trainer: Trainer
) -> None:
    done = trainer.run(loads)
    assert done.ideal + done.imbalance + done.bubble == close(done.step_time)
    assert done.ideal == close(loads.sum() / len(loads) / trainer.pp)
    if done.step_time:
        assert 1 - done.idle.mean() == close(done.efficiency)


@laws
@given(all_loads(), trainers)
def test_meeting_more_often_takes_no_less_time(loads: Loads, trainer: Trainer) -> None:
    by_step = replace(trainer, sync="step").run(loads).step_time
    by_micro = replace(trainer, sync="microbatch").run(loads).step_time
    assert by_micro * (1 + 1e-12) >= by_step


@laws
@given(all_loads())
def test_without_a_pipeline_times_are_plain_sums(loads: Loads) -> None:
    by_step = Trainer(sync="step").run(loads)
    assert by_step.step_time == loads.sum(axis=1).max(axis=0).sum()
    by_micro = Trainer(sync="microbatch").run(loads)
    assert by_micro.step_time == loads.max(axis=0).sum()
    assert by_step.bubble == by_micro.bubble == 0
    assert (by_step.alone == loads.sum(axis=(1, 2))).all()


@laws
@given(all_loads(), st.floats(0.1, 5))
def test_a_pipeline_of_one_stage_is_a_plain_sum(loads: Loads, backward: float) -> None:
    load_BM = loads.sum(axis=2).astype(float)
    end_B = one_forward_one_backward(load_BM, 1, backward).end_B
    np.testing.assert_allclose(end_B, load_BM.sum(axis=1))


@laws
@given(all_loads(), trainers, st.randoms(use_true_random=False))
def test_the_order_of_the_buckets_changes_nothing(loads: Loads, trainer: Trainer, rng: Any) -> None:
    order = list(range(len(loads)))
    rng.shuffle(order)
    one, other = trainer.run(loads), trainer.run(loads[order])
    assert one.step_time == other.step_time
    assert one.bubble == other.bubble
    assert one.ideal == close(other.ideal)
    assert (one.alone[order] == other.alone).all()
    assert (one.idle[order] == other.idle).all()


@laws
@given(all_loads(), trainers, st.integers(2, 9))
def test_work_that_takes_longer_everywhere_is_the_same_picture(
    loads: Loads, trainer: Trainer, factor: int
) -> None:
    one, other = trainer.run(loads), trainer.run(loads * factor)
    assert other.step_time == close(factor * one.step_time)
    assert other.bubble == close(factor * one.bubble)
    assert other.efficiency == close(one.efficiency)


@laws
@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 6), st.integers(1, 50), st.floats(0.2, 4)
)
def test_equal_microbatches_make_the_bubble_of_the_textbook(
    buckets: int, micros: int, pp: int, load: int, backward: float
) -> None:
    done = Trainer(pp=pp, backward=backward).run(np.full((buckets, micros, 1), load))
    assert done.step_time == close(load * (micros + pp - 1) / pp)
    assert done.step_time / done.ideal == close((micros + pp - 1) / micros)
    assert done.imbalance == close(0)


@laws
@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 9), trainers)
def test_uneven_buckets_and_bubbles_are_told_apart(
    load_B: list[int], micros: int, trainer: Trainer
) -> None:
    done = trainer.run(np.tile(np.array(load_B)[:, None, None], (1, micros, 1)))
    slowest, mean, pp = max(load_B), float(np.mean(load_B)), trainer.pp
    assert done.bubble == close(slowest * (pp - 1) / pp)
    assert done.imbalance == close((slowest - mean) * micros / pp)


# The 1F1B schedule against a simulation that knows nothing but its rules -------------------------


def by_events(load_M: list[float], num_stages: int, backward: float) -> float:
    """Let every stage begin its next pass as soon as it may, one moment after the other."""
    num_micros, end_time = len(load_M), {}
    ahead = [min(num_stages - 1 - s, num_micros) for s in range(num_stages)]
    count = [{"F": 0, "B": 0} for _ in range(num_stages)]
    free = [0.0] * num_stages
    moment = 0.0
    while any(c["B"] < num_micros for c in count):
        begun = False
        for stage in range(num_stages):
            seen = count[stage]
            if free[stage] > moment or seen["B"] == num_micros:
                continue
            # A stage holds the activations of ahead + 1 microbatches at most.
            in_flight = seen["F"] - seen["B"]
            kind = "F" if seen["F"] < num_micros and in_flight <= ahead[stage] else "B"
            micro = seen[kind]
            if kind == "F":
                needs = ("F", stage - 1, micro) if stage else None
            else:
                needs = ("B", stage + 1, micro) if stage < num_stages - 1 else ("F", stage, micro)
            if needs is not None and end_time.get(needs, np.inf) > moment:
                continue
            unit = load_M[micro] / num_stages / (1 + backward)
            free[stage] = moment + unit * (1 if kind == "F" else backward)
            end_time[kind, stage, micro] = free[stage]
            seen[kind] += 1
            begun = True
        if not begun:
            moment = min(t for t in end_time.values() if t > moment)
    return max(free)


@laws
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 5), st.integers(1, 3))
def test_1f1b_is_what_greedy_stages_do(load_M: list[int], num_stages: int, backward: int) -> None:
    scaled = [load * num_stages * (1 + backward) for load in load_M]  # all times are integers
    done = one_forward_one_backward(np.array([scaled], float), num_stages, backward)
    assert done.end_B[0] == close(by_events(scaled, num_stages, backward))


@given(st.integers(1, 6), st.integers(0, 9))
def test_every_pass_comes_once_and_a_stage_holds_few_microbatches(stages: int, micros: int) -> None:
    order = passes(stages, micros)
    assert sorted(order) == sorted(
        (s, b, m) for s in range(stages) for b in (False, True) for m in range(micros)
    )
    for stage in range(stages):
        held = np.cumsum([-1 if b else 1 for s, b, _ in order if s == stage])
        assert held.max(initial=0) <= stages - stage


def test_a_heavy_microbatch_stalls_the_stages_behind_it() -> None:
    # Two stages, forward 1 and backward 2 a unit; the second microbatch is 3 times as heavy.
    done = one_forward_one_backward(np.array([[6.0, 18.0]]), 2, 2.0)
    assert done.forward_SMB[:, :, 0].tolist() == [[1, 4], [2, 7]]
    assert done.backward_SMB[:, :, 0].tolist() == [[6, 19], [4, 13]]


# What is refused, and how it prints -------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync": "epoch"}, "sync="),
        ({"pp": 0}, "pp="),
        ({"pp": True}, "pp="),
        ({"pp": 1.5}, "pp="),
        ({"backward": 0}, "backward="),
        ({"backward": float("inf")}, "backward="),
    ],
)
def test_a_trainer_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(**options)


@pytest.mark.parametrize("shape", [(3,), (0, 1, 1), (2, 2)])
def test_loads_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="loads"):
        Trainer().run(np.zeros(shape))


def test_a_step_without_work_takes_no_time() -> None:
    done = Trainer(pp=2).run(np.zeros((3, 0, 1)))
    assert (done.step_time, done.efficiency, done.imbalance) == (0, 1, 0)
    assert done.idle.tolist() == [0, 0, 0]
    assert "nan" not in done._repr_html_()


def test_it_prints_what_the_time_is_made_of() -> None:
    done: Simulation = Trainer().run(np.array([[[1]], [[3]]]))
    assert repr(done) == (
        "Simulation(sync='step', pp=1: step time 3 = ideal 2 + imbalance 1 + bubble 0; "
        "efficiency 66.7%; slowest bucket 1 of 2)"
    )
    html = done._repr_html_()
    assert "work 66.7%" in html
    assert html.count("<rect") == 3
