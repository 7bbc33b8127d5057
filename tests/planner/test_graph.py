"""A strategy is recorded word by word, frozen, told apart from others, and tried on a table."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner import costs
from megadask.planner.errors import ConfigError, CostError, PlanError
from megadask.planner.graph import DGraph
from megadask.planner.metadata import Metadata, Ragged
from megadask.planner.schedule import Schedule
from megadask.planner.simulating import simulate
from megadask.planner.strategy import Strategy
from megadask.planner.tableplan import TablePlan
from megadask.planner.topology import ClientPlaceTree


def lengths(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.minimum(rng.lognormal(6.5, 1.3, count).astype(np.int64) + 1, 8192)


def a_graph() -> DGraph:
    return DGraph(["web", "code"], ClientPlaceTree(dp=4, tp=2))


def test_primitives_record() -> None:
    schedule = Schedule.stages({0: {"web": 1}, 100: {"code": 1}})
    cost = costs.Transformer(hidden=64)
    graph = a_graph().mix(schedule, by="tokens").distribute("dp").cost(cost)
    strategy = graph.balance("greedy", equal_counts=True).broadcast_at("tp").freeze()
    assert strategy == Strategy(
        mix=schedule,
        mix_by="tokens",
        cost=cost,
        method="greedy",
        equal_counts=True,
        broadcast_axes=("tp",),
    )
    assert graph.balance("assignment", rounds=3).freeze().options == {"rounds": 3}


def test_defaults() -> None:
    strategy = a_graph().freeze()
    assert (strategy.mix, strategy.axis, strategy.method) == (None, "dp", "assignment")
    assert strategy.cost == costs.Tokens()
    assert strategy.options == {}
    assert a_graph().mix({"web": 1}).freeze().mix == Schedule.constant({"web": 1})


def test_strategies_survive_the_trip_and_are_told_apart() -> None:
    graphs = [
        a_graph(),
        a_graph().mix({"web": 1}),
        a_graph().mix({"web": 1}, by="tokens"),
        a_graph().distribute("world"),
        a_graph().distribute(("dp", "tp")),
        a_graph().distribute("dp", microbatches=2),
        a_graph().balance(max_tokens=2),
        a_graph().cost(costs.Transformer(hidden=64)),
        a_graph().cost(lambda table: table["tokens"] ** 2),
        a_graph().cost(lambda table: table["tokens"] ** 3),
        a_graph().balance("greedy"),
        a_graph().balance("assignment", rounds=7),
        a_graph().broadcast_at("tp"),
        a_graph().context(),
        a_graph().context(tile=64),
    ]
    strategies = [graph.freeze() for graph in graphs]
    assert len(set(map(fingerprint, strategies))) == len(strategies)
    for strategy in strategies[:8]:
        again = pickle.loads(pickle.dumps(strategy))
        assert again == strategy
        assert fingerprint(again) == fingerprint(strategy)


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "from megadask.planner.graph import DGraph;"
        "from megadask.fingerprints.fingerprint import fingerprint;"
        "g = DGraph(['b', 'a']).mix({'b': 1, 'a': 2}).cost(lambda t: t['tokens'] in {'x', 'y'});"
        "print(fingerprint(g.freeze()))"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (lambda graph: graph.mix({"wbe": 1}), "wbe.*'code', 'web'"),
        (lambda graph: graph.mix(3), "mix.*3"),
        (lambda graph: graph.mix(Schedule.constant(3)), "numbers"),
        (lambda graph: graph.mix({"web": 1}, by="bytes"), "'bytes'"),
        (lambda graph: graph.distribute("ddp"), "'ddp'"),
        (lambda graph: graph.distribute(("dp", "ep")), "'ep'"),
        (lambda graph: graph.distribute("dp", microbatches=0), "microbatches"),
        (lambda graph: graph.balance(max_tokens=0.5), "max_tokens.*0.5"),
        (lambda graph: graph.cost(3), r"cost\(fn\)"),
        (lambda graph: graph.cost(costs.Tokens), "Tokens"),
        (lambda graph: graph.balance("karmarkar"), "'karmarkar'"),
        (lambda graph: graph.balance("greedy", rounds=1), "'rounds'"),
        (lambda graph: graph.balance("greedy", equal_counts="no"), "equal_counts"),
        (lambda graph: graph.balance(sync="never"), "'never'"),  # type: ignore[arg-type]
        (lambda graph: graph.balance(max_tokens=0), "max_tokens"),
        (lambda graph: graph.balance(speeds={8: 0.5}), "rank.*8.*0 to 7"),
        (lambda graph: graph.balance(speeds={0: 0}), "speed of rank 0"),
        (lambda graph: graph.balance(transfer=3), "transfer"),  # type: ignore[arg-type]
        (lambda graph: graph.distribute("dp", group_size=3), "divisor of the 4"),
        (lambda graph: graph.distribute("dp", group_size=0), "group_size"),
        (lambda graph: graph.broadcast_at("tpp"), "'tpp'"),
        (lambda graph: graph.broadcast_at("world"), "'world'"),
        (lambda graph: graph.distribute("world").broadcast_at("tp"), r"broadcast_at\('tp'\)"),
        (lambda graph: graph.broadcast_at("tp").distribute("tp"), r"distribute\('tp'\)"),
        (lambda graph: graph.plan(), "from_metadata"),
        (lambda graph: DGraph.from_metadata({"source": [1]}), "'source'"),
        (lambda graph: DGraph.from_metadata({"tokens": [1.5]}), "float64"),
        (lambda graph: DGraph.from_metadata({"tokens": [1, -1]}), "got -1"),
        (lambda graph: DGraph.from_metadata({"tokens": [1], "source": [1, 2]}), "length"),
    ],
    ids=range(29),
)
def test_bad_words_are_named_at_once(record: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        record(a_graph())  # type: ignore[operator]


@given(
    st.lists(st.integers(0, 9000), max_size=60),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["assignment", "greedy", "karmarkar_karp", "none"]),
)
def test_plan_of_a_table(
    tokens: list[int], buckets: int, microbatches: int, equal_counts: bool, method: str
) -> None:
    graph = DGraph.from_metadata({"tokens": tokens}, topology=ClientPlaceTree(dp=buckets))
    graph.distribute("dp", microbatches=microbatches).balance(method, equal_counts=equal_counts)  # type: ignore[arg-type]
    plan = graph.plan()
    assert plan.assignment.shape == plan.microbatch.shape == (len(tokens),)
    assert plan.cp_degree.tolist() == [1] * len(tokens)
    assert plan.loads.shape == (buckets, microbatches, 1)
    expected = np.zeros((buckets, microbatches))
    np.add.at(expected, (plan.assignment, plan.microbatch), tokens)
    np.testing.assert_array_equal(plan.loads[:, :, 0], expected)
    if sum(tokens):
        mean = sum(tokens) / buckets
        assert plan.imbalance == pytest.approx(expected.sum(axis=1).max() / mean)
        assert plan.bound == pytest.approx(max(1, max(tokens) / mean))
        assert plan.bound <= plan.imbalance * (1 + 1e-12)
    if equal_counts:
        assert np.ptp(np.bincount(plan.assignment, minlength=buckets)) <= 1


def test_methods_compared_on_one_table() -> None:
    graph = DGraph.from_metadata(
        {"source": ["web"] * 512, "tokens": lengths(512)}, topology=ClientPlaceTree(dp=64)
    )
    graph.distribute("dp").cost(costs.Transformer(hidden=5120, layers=40))
    found = {method: graph.balance(method).plan() for method in ("none", "greedy", "assignment")}
    assert found["none"].imbalance > 2
    assert found["greedy"].imbalance < 1.1
    assert found["assignment"].imbalance < 1.001
    flops = np.asarray(costs.Transformer(hidden=5120, layers=40)(graph.table)).sum()
    assert found["none"].loads.sum() == pytest.approx(flops, rel=1e-6)
    html = found["assignment"]._repr_html_()
    assert html.count("<rect") == 64
    assert "max/mean 1.000" in html


def test_a_straggler_gets_less() -> None:
    tree = ClientPlaceTree(dp=8, tp=2)
    graph = DGraph.from_metadata({"tokens": lengths(512)}, tree).distribute("dp")
    plan = graph.balance(equal_counts=False, speeds={4: 2.0, 6: 0.5}).plan()  # of dp 2 and 3
    load_B = plan.loads.sum(axis=(1, 2))
    # A bucket is as fast as its slowest rank: the other rank of dp 2 runs at 1.
    np.testing.assert_allclose(load_B[3] / load_B[:3], 0.5, rtol=0.01)
    np.testing.assert_allclose(load_B[2] / load_B[0], 1, rtol=0.01)


def test_a_cap_on_the_tokens_of_a_microbatch() -> None:
    """Eight documents of 1,000 tokens and eight of 100 on two ranks, at most 2,048 at once."""
    graph = DGraph.from_metadata({"tokens": [1000, 100] * 8}, ClientPlaceTree(dp=2))
    plan = graph.distribute("dp", microbatches=4).balance(max_tokens=2048).plan()
    assert plan.loads.max() <= 2048
    assert sorted(np.bincount(plan.assignment).tolist()) == [8, 8]
    with pytest.raises(PlanError, match="too many tokens"):
        graph.balance(max_tokens=1000).plan()
    with pytest.raises(PlanError, match="fits into no"):
        graph.balance(max_tokens=999).plan()


def test_what_is_dear_to_move_stays_home() -> None:
    home_N = np.arange(64) % 4

    def transfer(table: Metadata, num_buckets: int) -> np.ndarray:
        away_NB = np.arange(num_buckets)[None] != table["home"][:, None]
        return away_NB * 1e6

    columns = {"tokens": lengths(64), "home": home_N}
    graph = DGraph.from_metadata(columns, ClientPlaceTree(dp=4))
    plan = graph.balance(transfer=transfer).plan()
    np.testing.assert_array_equal(plan.assignment, home_N)
    # What all have to move is no imbalance, and the bound does not take it for one.
    plan = graph.balance(transfer=lambda _, num_buckets: np.full((64, num_buckets), 1e6)).plan()
    assert 1 <= plan.bound <= plan.imbalance * (1 + 1e-12) < 1.001
    with pytest.raises(CostError, match=r"transfer.*\(64, 4\)"):
        graph.balance(transfer=lambda table, _: table["tokens"]).plan()


def test_groups_are_balanced_first() -> None:
    graph = DGraph.from_metadata({"tokens": lengths(1024)}, ClientPlaceTree(dp=32))
    plan = graph.distribute("dp", group_size=8).plan()
    load_G = plan.loads.sum(axis=(1, 2)).reshape(4, 8).sum(axis=1)
    assert load_G.max() / load_G.mean() < 1.01
    assert plan.imbalance < 1.05


def test_parts_that_meet_once_are_balanced_by_their_sum() -> None:
    tokens = lengths(256)
    image = [[int(n)] if n % 2 else [] for n in lengths(256, seed=1)]
    graph = DGraph.from_metadata({"tokens": tokens, "image": image}, ClientPlaceTree(dp=16))
    graph.cost(costs.Parts(costs.VisionEncoder("image", 1024, 24), costs.Transformer(2048, 24)))
    plans = [graph.balance(sync=sync).plan() for sync in ("part", "step")]
    apart, once = (plan.loads.sum(axis=1) for plan in plans)
    assert once.sum(axis=1).max() <= apart.sum(axis=1).max() * (1 + 1e-9)
    assert apart.max(axis=0).sum() <= once.max(axis=0).sum() * (1 + 1e-9)
    # What a plan says of itself, and what a trainer makes of it, is by who waits for whom.
    for plan, slowest in zip(plans, (apart.max(axis=0).sum(), once.sum(axis=1).max()), strict=True):
        assert simulate(TablePlan.from_arrow(plan.to_arrow())).step_time == pytest.approx(slowest)
    assert plans[1].imbalance == pytest.approx(once.sum(axis=1).max() / once.sum(axis=1).mean())


def test_parts_and_modalities() -> None:
    image = [[500, 200]] * 20 + [[]] * 20
    graph = DGraph.from_metadata({"tokens": lengths(40), "image": image}, ClientPlaceTree(dp=4))
    encoder = costs.VisionEncoder("image", hidden=1024, layers=24)
    plan = graph.cost(costs.Parts(encoder, costs.Transformer(2048, 24))).plan()
    assert plan.loads.shape == (4, 1, 2)
    assert plan.loads[:, 0, 0].tolist() == [plan.loads[0, 0, 0]] * 4
    again = DGraph.from_metadata(graph.table, ClientPlaceTree(dp=4)).table
    assert again is not None
    assert isinstance(again.ragged["image"], Ragged)


def test_from_metadata_takes_a_table_and_checks_the_names() -> None:
    table = Metadata({"tokens": np.array([3, 4]), "source": np.array(["web", "code"])})
    graph = DGraph.from_metadata(table, ClientPlaceTree(dp=2))
    assert sorted(graph.mix({"web": 1}).plan().assignment.tolist()) == [0, 1]
    with pytest.raises(ConfigError, match="unknown source"):
        graph.mix({"books": 1})


def test_axis_decides_the_number_of_buckets() -> None:
    graph = DGraph.from_metadata({"tokens": lengths(64)}, ClientPlaceTree(dp=4, cp=2, tp=2))
    assert graph.plan().num_buckets == 4
    assert graph.distribute(("dp", "cp")).plan().num_buckets == 8
    assert graph.distribute("world").plan().num_buckets == 16


def test_long_documents_are_spread_over_context_parallel_ranks() -> None:
    tokens = np.array([8000, 1000, 1000, 1000, 500, 500, 2000, 2000])
    graph = DGraph.from_metadata({"tokens": tokens}, ClientPlaceTree(dp=2, cp=4))
    whole = graph.distribute(("dp", "cp")).balance("greedy").plan()
    assert (whole.imbalance, whole.bound) == pytest.approx((4, 4))
    plan = graph.balance("assignment").plan()
    assert plan.cp_degree.tolist() == [4, 1, 1, 1, 1, 1, 1, 1]
    assert plan.assignment[0] in (0, 4)
    assert plan.loads.sum() == tokens.sum()
    assert (plan.bound, plan.imbalance) == (1, 1)
    with pytest.raises(PlanError, match=r"span 0.*8000.*4 ranks x 1999"):
        graph.distribute(("dp", "cp")).balance(max_tokens=1999).plan()


@pytest.mark.parametrize(
    ("order", "words", "match"),
    [
        (("pp", "cp", "dp", "tp"), {}, "cp inside of dp"),
        (("pp", "dp", "cp", "tp"), {"equal_counts": True}, "equal_counts"),
        (("pp", "dp", "cp", "tp"), {"rounds": 8}, "rounds"),
        (("pp", "dp", "cp", "tp"), {"parts": True}, "2 parts"),
    ],
)
def test_what_cannot_be_spread_is_a_named_error(
    order: tuple[str, ...], words: dict[str, int], match: str
) -> None:
    tree = ClientPlaceTree(dp=2, cp=2, order=order)
    graph = DGraph.from_metadata({"tokens": [4, 3, 2, 1]}, tree).distribute(("dp", "cp"))
    if words.pop("parts", False):
        graph.cost(costs.Parts(costs.Tokens(), costs.Tokens()))
    with pytest.raises(ConfigError, match=match):
        graph.balance("assignment", **words).plan()
    assert graph.balance("greedy").plan().cp_degree.tolist() == [1] * 4
