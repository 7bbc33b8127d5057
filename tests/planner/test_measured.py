"""Laws of fitted costs: what made the times is found again; what cannot be found is refused."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner import DGraph, costs
from megadask.planner.errors import ConfigError, CostError
from megadask.planner.metadata import Metadata, Ragged
from megadask.planner.topology import ClientPlaceTree
from tests.strategies import laws

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)

#: Launch, document, token and squares, in seconds; 0 or of the order of real ones.
coefficients = st.tuples(
    *(st.just(0.0) | st.floats(low, 1e3 * low) for low in (1e-4, 1e-5, 1e-8, 1e-11))
).filter(any)


def seconds(law: tuple[float, ...], lengths: list[int]) -> float:
    c, c0, a, b = law
    return c + sum(c0 + a * length + b * length**2 for length in lengths)


def times(launches: list[list[int]], law: tuple[float, ...]) -> list[tuple[list[int], float]]:
    return [(lengths, seconds(law, lengths)) for lengths in launches]


def fitted(**options: Any) -> costs.Measured:
    noise = np.random.default_rng(0).normal(1, 0.02, len(LENGTHS))
    taken = [seconds((0, 1e-3, 2e-6, 3e-9), [n]) * f for n, f in zip(LENGTHS, noise, strict=True)]
    return costs.Measured(list(zip(LENGTHS, taken, strict=True)), **options)


@laws
@given(coefficients, st.data())
def test_the_law_behind_the_times_is_found(law: tuple[float, ...], data: st.DataObject) -> None:
    # One document each of many lengths, and many documents at once.
    extra = st.lists(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=9), max_size=5)
    launches = [[n] for n in LENGTHS] + [[64] * 20, [512, 64, 1024]] + data.draw(extra)
    cost = costs.Measured(times(launches, law), per_launch=True)
    found = (cost.per_launch_s, cost.per_document_s, cost.per_token_s, cost.per_token2_s)
    assert cost.fit is not None
    np.testing.assert_allclose(cost.fit.fitted_s, cost.fit.seconds, rtol=1e-3)
    if len(set(cost.fit.seconds)) > 1:
        assert cost.r2 > 0.999
    scale = max(seconds(law, lengths) for lengths in launches)
    weights = (1, 20, 4096, 4096**2)
    for value, true, weight in zip(found, law, weights, strict=True):
        assert abs(value - true) * weight <= 1e-3 * scale


@laws
@given(coefficients, st.data())
def test_a_fit_does_not_depend_on_the_order_of_launches(
    law: tuple[float, ...], data: st.DataObject
) -> None:
    samples = times([[n, *[64] * (n % 5)] for n in LENGTHS], law)
    noise = data.draw(st.lists(st.floats(0.9, 1.1), min_size=len(samples), max_size=len(samples)))
    noisy = [(lengths, taken * f) for (lengths, taken), f in zip(samples, noise, strict=True)]
    cost = costs.Measured(noisy)
    shuffled = costs.Measured(data.draw(st.permutations(noisy)))
    table = Metadata({"tokens": np.array(LENGTHS, np.int64)})
    np.testing.assert_allclose(cost(table), shuffled(table), rtol=1e-3, atol=1e-9)
    assert all(value >= 0 for value in (cost.per_document_s, cost.per_token_s, cost.per_token2_s))
    assert cost.fit is not None
    assert cost.r2 >= cost.fit.linear_r2 - 1e-5


def test_a_span_costs_what_a_launch_of_it_takes() -> None:
    cost = fitted()
    table = Metadata({"tokens": np.array(LENGTHS, np.int64)})
    assert cost.fit is not None
    np.testing.assert_allclose(cost(table), cost.fit.fitted_s)
    cost_N = costs.evaluate(cost, table)[:, 0]
    np.testing.assert_allclose(cost_N * cost.unit, cost(table), rtol=1e-6)


def test_constants_of_launches_are_not_charged_to_spans() -> None:
    law = (5e-3, 1e-4, 2e-6, 3e-9)
    launches = [[64], [500], [1000] + [64] * 5, [3000] + [64] * 20, [8000] + [64] * 3]
    cost = costs.Measured(times(launches, law), per_launch=True)
    assert cost.per_launch_s == pytest.approx(5e-3)
    one = np.asarray(cost(Metadata({"tokens": np.array([1000], np.int64)})))
    assert one[0] == pytest.approx(seconds((0, *law[1:]), [1000]))


def test_terms_of_very_different_size_are_all_found() -> None:
    law = (0, 2e-3, 1e-6, 1e-12)
    lengths = [[int(length)] for length in np.geomspace(100, 4_000_000, 12)]
    cost = costs.Measured(times(lengths, law))
    found = (0, cost.per_document_s, cost.per_token_s, cost.per_token2_s)
    assert found == pytest.approx(law, rel=1e-3)


def test_items_of_a_modality_cost_one_by_one() -> None:
    cost = costs.Measured.from_coefficients(1e-3, 1e-6, 1e-9, modality="image")
    images = Ragged(np.array([100, 100, 300], np.int64), np.array([0, 2, 2, 3]))
    table = Metadata({"tokens": np.array([9, 9, 9], np.int64)}, {"image": images})
    expected = [seconds((0, 1e-3, 1e-6, 1e-9), items) for items in ([100, 100], [], [300])]
    np.testing.assert_allclose(cost(table), expected)
    with pytest.raises(CostError, match=r"per 'image'\): modality; got 'image'"):
        cost(Metadata({"tokens": np.array([9], np.int64)}))
    parts = costs.Parts(cost, fitted())
    assert costs.evaluate(parts, table).shape == (3, 2)


def test_only_coefficients_count() -> None:
    cost = fitted()
    given = costs.Measured.from_coefficients(
        cost.per_document_s, cost.per_token_s, cost.per_token2_s
    )
    assert cost == given
    assert fingerprint(cost) == fingerprint(given)
    again = pickle.loads(pickle.dumps(cost))
    assert again == cost
    assert again.fit == cost.fit
    assert fingerprint(again) == fingerprint(cost)
    other = costs.Measured.from_coefficients(cost.per_document_s, cost.per_token_s, 1e-9)
    assert other != cost
    assert fingerprint(other) != fingerprint(cost)
    assert fingerprint(fitted(modality="image")) != fingerprint(cost)


def test_a_graph_balances_by_it() -> None:
    tokens = np.random.default_rng(0).integers(64, 4096, 64)
    graph = DGraph.from_metadata({"tokens": tokens}, topology=ClientPlaceTree(dp=8))
    plan = graph.distribute("dp").cost(fitted()).balance("assignment").plan()
    np.testing.assert_allclose(plan.loads.sum(), np.asarray(fitted()(graph.table)).sum())
    assert plan.imbalance < 1.05


def test_a_report_says_how_well_it_fits() -> None:
    cost = fitted()
    report = cost.report()
    assert re.search(r"per token\^2 +3\.\d+e-09 s", report)
    assert re.search(r"R\^2 (0\.99|1\.00)\d+ over 7 launches; without squares 0\.9[0-8]", report)
    assert len(cost.residuals) == len(LENGTHS)
    worst = int(np.abs(cost.residuals).argmax())
    assert report.splitlines()[-len(LENGTHS)].split()[0] == str(worst)
    html = cost._repr_html_()
    assert html.count("<circle") == 2 * len(LENGTHS) + 2
    assert "Seconds of every launch" in html
    given = costs.Measured.from_coefficients(1e-3, 0, 1e-9)
    assert "given, not fitted" in given.report()
    assert "<svg" not in given._repr_html_()
    with pytest.raises(ConfigError, match="was not fitted"):
        _ = given.r2


GOOD = [(64, 0.1), (128, 0.2), (256, 0.4)]


@pytest.mark.parametrize(
    ("samples", "options", "match"),
    [
        ([], {}, "0 launches; expected 3 or more"),
        (GOOD[:2], {}, "2 launches; expected 3 or more"),
        (GOOD, {"per_launch": True}, "3 launches; expected 4 or more"),
        ([*GOOD, (512, float("nan"))], {}, "sample 3: seconds; got nan"),
        ([*GOOD, (512, float("inf"))], {}, "sample 3: seconds; got inf"),
        ([*GOOD, (512, -0.5)], {}, "sample 3: seconds; got -0.5; expected a finite number > 0"),
        ([*GOOD, (512, 0.0)], {}, "sample 3: seconds; got 0.0"),
        ([*GOOD, (512, [0.1, 0.2])], {}, "sample 3: seconds"),
        ([*GOOD, (512, "soon")], {}, r"sample 3; got \(512, 'soon'\)"),
        ([*GOOD, 512], {}, "sample 3; got 512; expected a pair"),
        ([*GOOD, (512, 0.1, 0.2)], {}, "sample 3; .*expected a pair"),
        ([(0.5, 0.1), *GOOD], {}, r"sample 0: lengths; got float64 \(1,\)"),
        ([(True, 0.1), *GOOD], {}, r"sample 0: lengths; got bool"),
        ([([], 0.1), *GOOD], {}, r"sample 0: lengths; got float64 \(0,\)"),
        ([([[64, 64]], 0.1), *GOOD], {}, r"sample 0: lengths; got int64 \(1, 2\)"),
        ([([64, 0], 0.1), *GOOD], {}, "sample 0: lengths; got 0; expected >= 1"),
        ([(64, 0.1)] * 5, {}, r"\[64\] only; expected three different ones"),
        ([(64, 0.1), (128, 0.2)] * 3, {}, r"\[64, 128\] only"),
        ([([64, 128, 256], 0.1)] * 4, {}, "launches that more than one law fits"),
        (
            [(64, 0.1), (128, 0.2), (256, 0.4), (512, 0.9)],
            {"per_launch": True},
            "per_launch=True.*different numbers of documents",
        ),
    ],
)
def test_samples_that_determine_nothing_are_named(
    samples: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        costs.Measured(samples, **options)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("given", [(-1, 0, 1), (0, 0, 0), (0, float("nan"), 1)])
def test_bad_coefficients_are_named(given: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="from_coefficients"):
        costs.Measured.from_coefficients(*given)
