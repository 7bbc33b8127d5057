"""Padded and Fixed through real workers: everything once, exact resumes, any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client

import megadask as md
from tests.megadask.helpers.data import corpus, pipeline, records, unfold_masked
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import (
    Seen,
    drain,
    every_token,
    merge,
    see,
    shape,
    spans_by_step,
    take,
    tokens_delivered,
)

pytestmark = pytest.mark.timeout(90)

DATA = corpus({"a": 40, "b": 25, "c": 10}, longest=300)
ROWS = [row for rows in DATA.values() for row in rows]
BATCHINGS: dict[str, Any] = {
    "padded": md.Padded(128, 8, micro_batch=2, pad_to_multiple=4, pad_to="longest"),
    "fixed": md.Fixed(64, 8),
}
State = dict[str, Any]


def make(kind: str, dp: int = 2) -> md.Pipeline:
    # A micro-batch of 2 is for up to four ranks, whatever it is.
    return pipeline(DATA, batching=BATCHINGS[kind], topology=md.ClientPlaceTree(dp=dp))


def planned_rows(kind: str) -> list[dict[str, int]]:
    """Return the records as long as they are trained on."""
    most = 128 if kind == "padded" else 10_000
    return [{**row, "length": min(row["length"], most)} for row in ROWS]


def watch(loader: md.Loader, after: int) -> tuple[list[Seen], State, int]:
    """Return everything, the state behind some batches, and the tokens of all sequences."""
    seen, state, capacity = [], {}, 0
    for batch in loader:
        seen.append(see(batch))
        capacity += batch["tokens"].numel()
        check_mask(batch)
        if len(seen) == after:
            state = loader.state_dict()
    return seen, state, capacity


def check_mask(batch: Mapping[str, Any]) -> None:
    """Rows of one document say where it ends; other batches must not."""
    if batch["cu_seqlens"].shape[1] > 2:
        assert not {"attention_mask", "lengths"} & batch.keys()
        return
    lengths = batch["lengths"]
    within = torch.arange(batch["tokens"].shape[1])
    assert (batch["attention_mask"] == (within < lengths[:, None])).all()
    assert sum(b - a for a, b in batch["spans"].tolist()) == int(lengths.sum())


@pytest.fixture(scope="module", params=BATCHINGS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(client: Client, kind: str) -> tuple[list[list[Seen]], State]:
    """The uninterrupted run on two ranks, and its state inside a step."""
    after = 5
    with md.serve(make(kind), client, name=f"whole-{kind}") as service:
        ranks = run(service, partial(watch, after=after))
        audit, stats = service.audit(), service.stats()
    seen = [one for one, _, _ in ranks]
    assert seen[0][after].microbatch > 0
    assert ranks[0][1] == ranks[1][1]
    assert audit["ok"]
    assert audit["total"]["tokens"]["delivered"] == sum(r["length"] for r in planned_rows(kind))
    assert audit["total"]["samples"]["delivered"] == len(ROWS)
    packing = stats["packing"]
    assert packing["capacity_tokens"] == sum(capacity for _, _, capacity in ranks)
    assert packing["num_tokens"] == sum(row["length"] for row in planned_rows(kind))
    assert packing["efficiency"] == packing["num_tokens"] / packing["capacity_tokens"]
    if kind == "fixed":  # full but for the last pack, and what the last step is filled up with
        assert all(step["efficiency"] == 1.0 for step in stats["steps"][:-1])
    return seen, ranks[0][1]


def test_every_token_once_and_l_minus_one_targets(
    whole: tuple[list[list[Seen]], State], kind: str
) -> None:
    ranks, _ = whole
    rows = planned_rows(kind)
    assert tokens_delivered(ranks) == every_token(rows)
    batches = [batch for seen in ranks for batch in seen]
    assert sum(batch.num_loss_tokens for batch in batches) == sum(r["length"] - 1 for r in rows)
    assert all(shape(seen) == shape(ranks[0]) for seen in ranks)
    starts = [start for batch in batches for *_, start, _ in batch.spans]
    assert any(starts) == (kind == "fixed")


def test_batches_are_bit_equal_after_a_resume_inside_a_step(
    client: Client, whole: tuple[list[list[Seen]], State], kind: str
) -> None:
    ranks, state = whole
    with md.serve(make(kind), client, name=f"again-{kind}", resume=state) as service:
        rest = run(service, drain)
        assert service.audit()["ok"]
    assert rest == [seen[5:] for seen in ranks]


@pytest.mark.parametrize("dp", [1, 4])
def test_the_same_ids_make_the_same_steps_on_any_number_of_ranks(
    client: Client, whole: tuple[list[list[Seen]], State], kind: str, dp: int
) -> None:
    ranks, state = whole
    with md.serve(make(kind, dp), client, name=f"other-{kind}-{dp}", resume=state) as service:
        rest = run(service, drain)
        assert service.audit()["ok"]
    first = [seen[:5] for seen in ranks]
    assert merge(spans_by_step(first), spans_by_step(rest)) == spans_by_step(ranks)
    assert tokens_delivered([*first, *rest]) == every_token(planned_rows(kind))
    assert all(shape(seen) == shape(rest[0]) for seen in rest)


def test_slices_of_rows_are_the_rows(local_client: Client, name: str) -> None:
    """Under context parallelism rows are cut to the same length on all ranks of a group."""
    data = {"a": DATA["a"]}
    batching = md.Padded(128, 4, pad_to_multiple=4, pad_to="longest")
    made = pipeline(data, batching=batching, topology=md.ClientPlaceTree(dp=1, cp=2))

    def body(loader: md.Loader) -> list[dict[str, Any]]:
        return list(islice(loader, 6))

    with md.serve(made, local_client, name=name) as service:
        ranks = run(service, body)
    widths = set()
    for one, other in zip(*ranks, strict=True):
        assert one["max_seqlen"] == other["max_seqlen"]
        widths.add(one["max_seqlen"])
        assert (one["lengths"] == other["lengths"]).all()
        assert one["tokens"].shape == other["tokens"].shape == (1, one["max_seqlen"] // 2)
        masks = [batch["attention_mask"] for batch in (one, other)]
        assert sum(int(mask.sum()) for mask in masks) == int(one["lengths"].sum())
        real = torch.cat([batch["tokens"][batch["attention_mask"]] for batch in (one, other)])
        real = real.sort().values
        assert (real.diff() == 1).all()
    assert len(widths) > 1


def test_fixed_refuses_masked_samples_where_a_trainer_hears_of_it(
    local_client: Client, name: str
) -> None:
    made = pipeline(
        {"a": DATA["a"]}, batching=md.Fixed(64, 4), sources={"transform": unfold_masked}
    )
    with (
        md.serve(made, local_client, name=name) as service,
        pytest.raises(md.errors.ConfigError, match=r"(?s)loss_mask.*Packed.*'a', shard .*row 0"),
    ):
        run(service, lambda loader: take(loader, 1))


# Scenario 7 of the field notes ------------------------------------------------------------------


def test_scenario_7_uneven_counts_of_rows(local_client: Client, name: str) -> None:
    """9 samples of uneven lengths over 4 ranks: 3, 2, 2, 2, and none empty."""

    def evenly(graph: md.DGraph) -> None:
        graph.distribute("dp").balance("assignment", equal_counts=True)

    rows = records([60, 50, 40, 5, 5, 5, 4, 3, 2])
    made = pipeline(
        {"a": rows},
        batching=md.Padded(64, 12),
        topology=md.ClientPlaceTree(dp=4),
        strategy=evenly,
    )
    with md.serve(made, local_client, name=name) as service:
        ranks = run(service, drain)
    assert sorted(sum(len(batch.documents) for batch in seen) for seen in ranks) == [2, 2, 2, 3]
    assert all(shape(seen) == shape(ranks[0]) for seen in ranks)
    assert len(ranks[0]) == 3
    assert tokens_delivered(ranks) == every_token(rows)


@pytest.mark.parametrize("batching", [md.Padded(2048, 16), md.Fixed(2048, 2)], ids=str)
def test_scenario_7_caps(local_client: Client, name: str, batching: Any) -> None:
    """Eight documents of 1,000 tokens and eight of 100 over 2 ranks, under a cap of 2,048."""
    rows = records([1000, 100] * 8)
    made = pipeline({"a": rows}, batching=batching)
    with md.serve(made, local_client, name=name) as service:
        ranks = run(service, drain)
    assert all(shape(seen) == shape(ranks[0]) for seen in ranks)
    for batch in (batch for seen in ranks for batch in seen):
        assert sum(stop - start for _, start, stop in batch.documents) <= 2048
    assert tokens_delivered(ranks) == every_token(rows)
    per_rank = np.array([sum(b - a for s in seen for _, a, b in s.documents) for seen in ranks])
    assert per_rank.sum() == 8800
    if isinstance(batching, md.Padded):
        assert per_rank.tolist() == [4400, 4400]
