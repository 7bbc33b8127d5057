"""Laws of schedules: pure functions of the step, exact shares, forms that survive the trip."""

from __future__ import annotations

import json
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.errors import ConfigError
from megadask.planner.schedule import Schedule, StepSchedule
from megadask.planner.weights import TOTAL_SHARE, quantise

NAMES = ["code", "pairs", "web"]
weight = st.floats(0, 1e12) | st.sampled_from([0.0, 5e-324, 1e-300, 1e300])
weights = st.lists(weight, min_size=1, max_size=40).filter(any)


def half_and_half(step: int) -> dict[str, float]:
    return {"web": 0.5, "code": 0.5 + step}


SCHEDULES = {
    "constant": Schedule.constant({"web": 3, "code": 1}),
    "number": Schedule.constant(64),
    "stages": Schedule.stages({0: {"web": 1}, 10: {"web": 0.5, "pairs": 0.5}}),
    "batches": Schedule.stages({0: 64, 100: 128}),
    "linear": Schedule.linear({"web": 1}, {"code": 1}, 10, 20),
    "ramp": Schedule.linear(64, 256, 0, 1000),
    "cosine": Schedule.cosine({"web": 1}, {"code": 1}, 10, 20),
    "temperature": Schedule.temperature({"web": 1e9, "code": 1e3, "pairs": 0}, 1.0, 5.0, 0, 100),
    "function": Schedule.function(half_and_half),
}


@given(weights)
def test_shares_are_exact(values: list[float]) -> None:
    shares = quantise(values)
    assert shares.dtype == np.int64
    assert shares.sum() == TOTAL_SHARE
    assert [share > 0 for share in shares] == [value > 0 for value in values]
    total = sum(map(Fraction, values))
    raised = sum(1 for v in values if v and Fraction(v) * TOTAL_SHARE < total)
    for share, value in zip(shares.tolist(), values, strict=True):
        assert abs(share - Fraction(value) * TOTAL_SHARE / total) <= 1 + raised


@given(weights)
def test_shares_do_not_depend_on_scale(values: list[float]) -> None:
    if max(values) < 1e300 and min(v for v in values if v) > 1e-290:
        np.testing.assert_array_equal(quantise(values), quantise([v * 1024 for v in values]))


def test_ties_go_to_the_first() -> None:
    assert quantise([1, 1, 1]).tolist() == [
        TOTAL_SHARE // 3 + 1,
        TOTAL_SHARE // 3,
        TOTAL_SHARE // 3,
    ]
    assert quantise([1e300, 5e-324]).tolist() == [TOTAL_SHARE - 1, 1]


def test_source_that_a_stage_does_not_name_has_weight_zero() -> None:
    schedule = SCHEDULES["stages"]
    assert schedule.weights_at(9, NAMES).tolist() == [0, 0, TOTAL_SHARE]
    assert schedule.weights_at(10, NAMES).tolist() == [0, TOTAL_SHARE // 2, TOTAL_SHARE // 2]
    assert set(schedule.source_names) == {"pairs", "web"}


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_ramps_meet_their_ends_exactly(shape: str) -> None:
    schedule = getattr(Schedule, shape)({"web": 0.1}, {"code": 0.7}, 3, 8)
    assert schedule.at(0) == schedule.at(3) == {"web": 0.1}
    assert schedule.at(8) == schedule.at(99) == {"code": 0.7}
    steps = [schedule.at(step).get("code", 0.0) for step in range(12)]
    assert steps == sorted(steps)


def test_numbers_for_batches() -> None:
    assert [SCHEDULES["batches"].integer(step) for step in (0, 99, 100)] == [64, 64, 128]
    assert [SCHEDULES["ramp"].integer(step) for step in (0, 500, 1000, 5000)] == [64, 160, 256, 256]
    for bad in (SCHEDULES["constant"], Schedule.constant(0.2), Schedule.constant(-3)):
        with pytest.raises(ConfigError, match="expected a number >= 1"):
            bad.integer(0)


def test_temperature_flattens() -> None:
    schedule = SCHEDULES["temperature"]
    assert schedule.weights_at(0, NAMES)[1] == 0
    first, last = (schedule.weights_at(step, NAMES) for step in (0, 100))
    assert first[0] / first[2] == pytest.approx(1e-6, rel=1e-2)
    assert last[0] / last[2] == pytest.approx(10 ** (-6 / 5), rel=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_forms_survive_the_trip(name: str) -> None:
    schedule = SCHEDULES[name]
    by_pickle = pickle.loads(pickle.dumps(schedule))
    by_json = StepSchedule.from_dict(json.loads(json.dumps(schedule.to_dict())))
    for other in (by_pickle, by_json):
        assert other == schedule
        assert hash(other) == hash(schedule)
        assert fingerprint(other) == fingerprint(schedule)
        assert [other.at(step) for step in range(30)] == [schedule.at(step) for step in range(30)]


def test_fingerprints_tell_schedules_apart() -> None:
    prints = {fingerprint(schedule) for schedule in SCHEDULES.values()}
    assert len(prints) == len(SCHEDULES)
    same = Schedule.constant({"code": 1.0, "web": 3.0})
    assert fingerprint(same) == fingerprint(SCHEDULES["constant"])


def test_functions_without_a_path() -> None:
    def made(top: float) -> StepSchedule:
        return Schedule.function(lambda step: {"web": top})

    assert fingerprint(made(1.0)) == fingerprint(made(1.0)) != fingerprint(made(2.0))
    with pytest.raises(ConfigError, match="has no JSON form"):
        made(1.0).to_dict()


def test_what_is_returned_is_a_copy() -> None:
    schedule = Schedule.constant({"web": 1})
    value = schedule.at(0)
    assert isinstance(value, dict)
    value["web"] = 7
    assert schedule.at(0) == {"web": 1}


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), True, "1", None])
def test_bad_weights_are_named(bad: object) -> None:
    for make in (
        lambda: Schedule.constant({"web": 1, "code": bad}),
        lambda: Schedule.stages({0: {"web": 1}, 5: {"code": bad}}),
        lambda: Schedule.linear({"web": 1}, {"code": bad}, 0, 1),
        lambda: Schedule.function(lambda step: {"code": bad}),
    ):
        with pytest.raises(ConfigError, match="'code'"):
            make()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Schedule.constant({}), "weights; got {}; expected one above 0"),
        (lambda: Schedule.constant({"web": 0.0}), "one above 0"),
        (lambda: Schedule.constant({3: 1.0}), "name of a source"),
        (lambda: Schedule.constant("web"), "a number, or a dict"),
        (lambda: Schedule.stages({}), "no stages"),
        (lambda: Schedule.stages({5: 1}), "first stage at 5; expected step 0"),
        (lambda: Schedule.stages({-5: 1, 0: 1}), "an integer >= 0"),
        (lambda: Schedule.stages({0: 1, 5: {"web": 1}}), "numbers and dicts"),
        (lambda: Schedule.linear(1, {"web": 1}, 0, 1), "linear: values; got numbers and dicts"),
        (lambda: Schedule.linear(1, 2, 5, 5), "start < stop"),
        (lambda: Schedule.temperature({"web": 1}, 0, 1, 0, 1), "t0"),
        (lambda: Schedule.temperature(3, 1, 1, 0, 1), "a dict of sizes"),
        (lambda: Schedule.function(3), "a function of the step"),
        (lambda: StepSchedule.from_dict({"kind": "wave"}), "'wave'; expected one of"),
        (lambda: StepSchedule.from_dict({"kind": "constant"}), "fields of a constant"),
        (lambda: StepSchedule.from_dict({"kind": "function", "function": "no.such:f"}), "no.such"),
        (lambda: Schedule.constant({"web": 1, "wbe": 1}).weights_at(0, NAMES), "wbe.*pairs"),
        (lambda: Schedule.constant(3).weights_at(0, NAMES), "weights, a dict"),
        (lambda: Schedule.constant(3).at(-1), "step of a schedule"),
    ],
)
def test_bad_declarations_are_named(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        make()  # type: ignore[operator]
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
