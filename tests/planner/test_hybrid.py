"""Laws of spreading documents: shares add up, groups are aligned, ranks meet, nothing is slower."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megadask.planner.balance import Problem, balance, bucket_loads
from megadask.planner.errors import PlanError
from megadask.planner.hybrid import Hybrid, spread
from tests.strategies import few_laws, laws


@st.composite
def steps(draw: st.DrawFn, max_dp: int = 4) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """Lengths of documents with a heavy tail, and ranks; sometimes a cap that has room to spare."""
    dp, cp = draw(st.integers(1, max_dp)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    microbatches = draw(st.integers(1, 4))
    lengths = st.integers(0, 20) | st.integers(0, 200) | st.integers(0, 2000)
    tokens_N = np.array(draw(st.lists(lengths, max_size=60)), np.int64)
    where: dict[str, Any] = {"dp": dp, "cp": cp, "microbatches": microbatches}
    if draw(st.booleans()):
        even = int(tokens_N.sum()) // (dp * cp * microbatches)
        where["max_tokens"] = 2 * even + int(tokens_N.max(initial=0)) + 1
    return tokens_N, where


def cost_of(tokens_N: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(tokens_N * 100 + tokens_N**2)


def shares_of(hybrid: Hybrid, value_N: np.ndarray[Any, Any]) -> list[tuple[int, int, int, int]]:
    """Return (span, rank, microbatch, share) of all shares: equal, the first ones rounded up."""
    shares = []
    for span, (degree, group, micro) in enumerate(
        zip(hybrid.cp_degree, hybrid.group, hybrid.microbatch, strict=True)
    ):
        even, more = divmod(int(value_N[span]), int(degree))
        shares += [
            (span, int(group) + within, int(micro), even + (within < more))
            for within in range(degree)
        ]
    return shares


@laws
@given(steps())
def test_the_shares_of_a_span_are_its_cost_and_the_loads_are_the_shares(step: Any) -> None:
    tokens_N, where = step
    cost_N = cost_of(tokens_N)
    hybrid = spread(cost_N, tokens_N, **where)
    expected = np.zeros((where["dp"] * where["cp"], where["microbatches"]), np.int64)
    for _, rank, micro, share in shares_of(hybrid, cost_N):
        expected[rank, micro] += share
    np.testing.assert_array_equal(hybrid.loads, expected)
    assert hybrid.loads.sum() == cost_N.sum()
    mean = cost_N.sum() / len(expected)
    assert hybrid.bound >= 1
    assert hybrid.bound * mean <= hybrid.slowest * (1 + 1e-12)


@laws
@given(steps())
def test_every_span_has_an_aligned_group_within_one_replica(step: Any) -> None:
    tokens_N, where = step
    hybrid = spread(cost_of(tokens_N), tokens_N, **where)
    cp, degree, group = where["cp"], hybrid.cp_degree, hybrid.group
    assert (degree >= 1).all()
    assert (degree & (degree - 1) == 0).all()
    assert (cp % degree == 0).all()
    assert (group % degree == 0).all()
    assert (group // cp == (group + degree - 1) // cp).all()
    assert ((group >= 0) & (group + degree <= where["dp"] * cp)).all()
    assert ((hybrid.microbatch >= 0) & (hybrid.microbatch < where["microbatches"])).all()


@laws
@given(steps(), st.integers(1, 8))
def test_a_microbatch_of_a_rank_keeps_the_cap(step: Any, room: int) -> None:
    tokens_N, where = step
    bins = where["dp"] * where["cp"] * where["microbatches"]
    widest = max(degree for degree in (1, 2, 4, 8) if where["cp"] % degree == 0)
    least = max(-(-int(tokens_N.max(initial=0)) // widest), -(-int(tokens_N.sum()) // bins))
    where["max_tokens"] = least + least * room // 8 + 1
    try:
        hybrid = spread(cost_of(tokens_N), tokens_N, **where)
    except PlanError:  # the tighter, the harder to find a placement
        assume(False)
    used = np.zeros((where["dp"] * where["cp"], where["microbatches"]), np.int64)
    padded_N = -(-tokens_N // hybrid.cp_degree) * hybrid.cp_degree  # every share rounded up
    for _, rank, micro, share in shares_of(hybrid, padded_N):
        used[rank, micro] += share
    assert used.max() <= where["max_tokens"]


@laws
@given(steps())
def test_never_slower_than_whole_documents_only(step: Any) -> None:
    tokens_N, where = step
    cost_N = cost_of(tokens_N)
    hybrid = spread(cost_N, tokens_N, **where)
    problem = Problem(
        cost_NP=cost_N[:, None],
        num_buckets=where["dp"] * where["cp"],
        num_microbatches=where.get("microbatches", 1),
        size_N=tokens_N,
        capacity=where.get("max_tokens"),
    )
    whole = bucket_loads(problem, balance(problem)).sum(axis=(1, 2)).max()
    assert hybrid.slowest <= whole
    if where["cp"] == 1:
        assert (hybrid.cp_degree == 1).all()


def run_together(hybrid: Hybrid, ranks: int, microbatches: int) -> int:
    """Run all ranks, each in its own order; return how many documents get done.

    A document needs all of its ranks at once. Within a microbatch, those of a spread document must
    come to it from the same other ones.
    """
    queues = [
        [(micro, span) for micro in range(microbatches) for span in hybrid.order_of(rank, micro)]
        for rank in range(ranks)
    ]
    done = 0
    while any(queues):
        heads = [queue[0] if queue else None for queue in queues]
        ready = []
        for micro, span in {head for head in heads if head is not None}:
            group = int(hybrid.group[span])
            mine = range(group, group + int(hybrid.cp_degree[span]))
            if all(heads[rank] == (micro, span) for rank in mine):
                orders = [hybrid.order_of(rank, micro).tolist() for rank in mine]
                assert len({tuple(order[: order.index(span)]) for order in orders}) == 1
                ready.append(mine)
        assert ready, "all ranks wait for each other"
        for mine in ready:
            done += 1
            for rank in mine:
                queues[rank].pop(0)
    return done


@laws
@given(steps())
def test_the_ranks_of_a_group_meet(step: Any) -> None:
    tokens_N, where = step
    hybrid = spread(cost_of(tokens_N), tokens_N, **where)
    done = run_together(hybrid, where["dp"] * where["cp"], where["microbatches"])
    assert done == len(tokens_N)


@laws
@given(steps())
def test_no_microbatch_is_empty_if_there_are_enough_whole_spans(step: Any) -> None:
    tokens_N, where = step
    hybrid = spread(cost_of(tokens_N), tokens_N, **where)
    used = np.zeros((where["dp"] * where["cp"], where["microbatches"]), bool)
    for span, rank, micro, _ in shares_of(hybrid, tokens_N):
        if hybrid.cp_degree[span] > 1:
            used[rank, micro] = True
    enough = (hybrid.cp_degree == 1).sum() >= (~used).sum()
    for _, rank, micro, _ in shares_of(hybrid, tokens_N):
        used[rank, micro] = True
    assert used.all() or not enough


@few_laws
@given(steps())
def test_a_placement_is_a_function_of_its_arguments(step: Any) -> None:
    tokens_N, where = step
    cost_N = cost_of(tokens_N)
    one, other = (spread(cost_N, tokens_N, **where) for _ in range(2))
    for name in ("cp_degree", "group", "microbatch", "loads"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(cost_N, cost_of(tokens_N))  # not modified


def mixed(count: int, seed: int, context: int = 32768) -> np.ndarray[Any, Any]:
    """Return lengths of chat, web, long documents and image-text, 30 / 40 / 10 / 20 of 100."""
    rng = np.random.default_rng(seed)
    texts = [(250, 1.0), (600, 1.1), (6000, 1.3), (150, 0.8)]
    kind_N = rng.choice(4, count, p=[0.3, 0.4, 0.1, 0.2])
    median_N, sigma_N = np.array(texts)[kind_N].T
    tokens_N = median_N * np.exp(sigma_N * rng.standard_normal(count))
    images_N = np.where(kind_N == 3, np.minimum(rng.geometric(0.5, count), 8), 0)
    for number in range(8):
        image_N = np.minimum(rng.lognormal(np.log(500), 1.0, count), 4096)
        tokens_N += np.where(images_N > number, image_N, 0)
    return np.clip(tokens_N, 1, context).astype(np.int64)


@pytest.mark.parametrize("dp", [8, 36])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_mixed_step_comes_near_the_limit_of_its_mean(dp: int, microbatches: int) -> None:
    for seed in range(3):
        tokens_N = mixed(16 * 8 * dp, seed)
        cost_N = tokens_N * 6 * 5120 + tokens_N**2
        mean = cost_N.sum() / (8 * dp)
        hybrid = spread(cost_N, tokens_N, dp=dp, cp=8, microbatches=microbatches)
        assert cost_N.max() / mean > 1.3  # what whole documents cannot come below
        assert hybrid.slowest / mean < 1.005
        assert hybrid.slowest_microbatches / mean < 1.1
        assert (hybrid.cp_degree == 1).mean() > 0.95


def test_a_document_that_is_a_step_of_its_own_takes_the_whole_group() -> None:
    hybrid = spread(np.array([1000, 1]), np.array([1000, 1]), dp=2, cp=4)
    assert hybrid.cp_degree.tolist() == [4, 1]
    assert hybrid.bound == 250 / (1001 / 8)
    assert hybrid.order_of(int(hybrid.group[0]), 0).tolist() == [0]


def test_whole_documents_stay_where_that_is_better() -> None:
    tokens_N = np.array([7, 8, 2])
    hybrid = spread(np.array([70, 88, 10]), tokens_N, dp=1, cp=2)
    assert hybrid.slowest == 88
    assert hybrid.cp_degree.tolist() == [1, 1, 1]


def test_what_does_not_fit_by_cost_may_fit_by_tokens() -> None:
    tokens_N, cost_N = np.array([11, 10, 5, 3]), np.array([2, 2, 7, 9])
    hybrid = spread(cost_N, tokens_N, dp=1, cp=2, microbatches=2, max_tokens=8)
    assert hybrid.cp_degree.tolist()[:2] == [2, 2]


def test_the_cap_goes_before_the_cost() -> None:
    cost_N, tokens_N = np.array([10, 1, 1, 1]), np.full(4, 5)
    hybrid = spread(cost_N, tokens_N, dp=2, cp=1, max_tokens=10)
    assert np.bincount(hybrid.group).tolist() == [2, 2]
    cost_N, tokens_N = np.array([1, 5, 5, 5]), np.array([8, 1, 1, 1])
    hybrid = spread(cost_N, tokens_N, dp=1, cp=2, microbatches=2, max_tokens=4)
    assert hybrid.cp_degree[0] == 2


def test_wide_documents_come_first_and_together() -> None:
    tokens_N = np.array([1, 40, 1, 20, 20, 1, 1])
    hybrid = spread(tokens_N, tokens_N, dp=1, cp=4, microbatches=2)
    assert hybrid.cp_degree.tolist() == [1, 2, 1, 1, 1, 1, 1]
    assert hybrid.microbatch[[1, 3, 4]].tolist() == [0, 0, 0]
    rank = int(hybrid.group[1])
    assert hybrid.order_of(rank, 0)[0] == hybrid.order_of(rank + 1, 0)[0] == 1


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"dp": 0}, r"dp=.*got 0"),
        ({"max_tokens": 0}, r"max_tokens=.*got 0"),
        ({"max_tokens": 4}, r"span 1 is too long.*got 9 tokens.*2 ranks x 4"),
        ({"max_tokens": 5, "dp": 1}, r"no placement.*got 15 tokens.*2 ranks x 1 microbatches of 5"),
        ({"tokens_N": np.array([3])}, r"both \(N,\)"),
        ({"cost_N": np.array([1, -2, 3])}, "costs >= 0"),
    ],
)
def test_what_cannot_be_placed_is_a_named_error(words: dict[str, Any], match: str) -> None:
    column = np.array([3, 9, 3])
    arguments = {"cost_N": column, "tokens_N": column, "dp": 2, "cp": 2}
    with pytest.raises(PlanError, match=match):
        spread(**(arguments | words))
