"""What the public surface promises: every form of iteration, every call of a running service."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client
from torch.testing._internal.distributed.fake_pg import FakeStore

import megadask as md
from megadask.scheduling.assemble import ARRAY_KEYS
from tests.megadask.helpers.data import corpus, pipeline, records, unfold_masked
from tests.megadask.helpers.ranks import Ranks, connect, run, start
from tests.megadask.helpers.seen import (
    Seen,
    digest,
    drain,
    every_token,
    see,
    shape,
    spans_by_step,
    spans_of,
    take,
    take_steps,
    tokens_delivered,
)

pytestmark = pytest.mark.timeout(60)

DATA = corpus({"a": 40, "b": 25}, longest=300)
ROWS = [row for rows in DATA.values() for row in rows]
SEQ = 128


@pytest.fixture(scope="module")
def whole(client: Client) -> list[list[Seen]]:
    """What two ranks see of a whole run, iterating flat."""
    with md.serve(pipeline(DATA), client, name="whole") as service:
        return run(service, drain)


# Batches ----------------------------------------------------------------------------------------


def test_a_batch_has_the_keys_types_and_shapes_that_are_promised(client: Client, name: str) -> None:
    made = pipeline(DATA, micro_batch=2, packed={"max_documents": 20})
    with md.serve(made, client, name=name) as service:
        (batch, *_), _ = run(service, lambda loader: list(loader))
    assert {key: tuple(batch[key].shape) for key in ("tokens", "labels", "position_ids")} == (
        dict.fromkeys(("tokens", "labels", "position_ids"), (2, SEQ))
    )
    assert batch["loss_mask"].shape == (2, SEQ)
    for key in ("tokens", "labels", "position_ids"):
        assert batch[key].dtype == torch.int64
    assert batch["loss_mask"].dtype == torch.float32
    for key in ("cu_seqlens", "cu_seqlens_padded"):
        assert batch[key].dtype == torch.int32
        assert batch[key].shape == (2, 21)
        assert (batch[key].diff(dim=1) >= 0).all()
    assert type(batch["max_seqlen"]) is int
    assert batch["max_seqlen"] == SEQ
    assert all(isinstance(ident, md.SampleId) for ident in batch["sample_ids"])
    for key in ("step", "microbatch", "num_loss_tokens", "num_loss_tokens_step"):
        assert type(batch[key]) is int
    assert type(batch["is_last"]) is bool


def test_batches_keep_their_values_after_others_have_come(client: Client, name: str) -> None:
    """And they may be written to, without an effect on any other."""
    with md.serve(pipeline(DATA), client, name=name) as service:

        def body(loader: md.Loader) -> Any:
            kept = []
            for batch in loader:
                kept.append((batch, see(batch)))
                batch["position_ids"].add_(0)  # writable
            return [(see(batch), seen) for batch, seen in kept]

        for pairs in run(service, body, prefetch=8):
            assert all(now == then for now, then in pairs)


def test_a_mask_counts_in_the_loss(client: Client, name: str) -> None:
    made = pipeline(DATA, sources={"transform": unfold_masked})
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
    targets = sum(
        sum((row["id"] * 10_000 + token) % 3 > 0 for token in range(1, row["length"]))
        for row in ROWS
    )
    assert sum(batch.num_loss_tokens for seen in ranks for batch in seen) == targets


def test_only_the_keys_that_are_asked_for(client: Client, name: str) -> None:
    facts = {"sample_ids", "spans", "step", "microbatch", "is_last"}
    facts |= {"num_loss_tokens", "num_loss_tokens_step", "cp_layout"}
    with md.serve(pipeline(DATA), client, name=name) as service:
        some = run(service, list, keys=["tokens", "cu_seqlens"])
        assert service.audit()["ok"]
    with md.serve(pipeline(DATA), client, name=name) as service:
        every = run(service, list)
    for few, all_ in zip(some, every, strict=True):
        for batch, other in zip(few, all_, strict=True):
            assert set(batch) == facts | {"tokens", "cu_seqlens"}
            assert torch.equal(batch["tokens"], other["tokens"])
            assert all(batch[fact] == other[fact] for fact in facts - {"spans"})


# Steps ------------------------------------------------------------------------------------------


def test_steps_give_what_flat_iteration_gives(
    client: Client, name: str, whole: list[list[Seen]]
) -> None:
    def body(loader: md.Loader) -> Any:
        steps = []
        for step in loader.steps():
            head = (step.index, step.num_microbatches, len(step), step.num_loss_tokens)
            imbalance = step.imbalance
            steps.append((head, imbalance, [see(batch) for batch in step]))
        return steps

    with md.serve(pipeline(DATA), client, name=name) as service:
        ranks = run(service, body)
        planned = {one["step"]: one["imbalance"] for one in service.stats()["steps"]}
    for rank, steps in enumerate(ranks):
        assert [batch for *_, seen in steps for batch in seen] == whole[rank]
    for pair in zip(*ranks, strict=True):
        (head, imbalance, _), (other, _, _) = pair
        assert head == other
        index, num_microbatches, length, num_loss_tokens = head
        batches = [batch for _, _, seen in pair for batch in seen]
        assert {batch.step for batch in batches} == {index}
        assert num_microbatches == length == len(batches) // 2
        assert num_loss_tokens == sum(batch.num_loss_tokens for batch in batches)
        assert {batch.num_loss_tokens_step for batch in batches} == {num_loss_tokens}
        assert imbalance == pytest.approx(planned[index])
        assert imbalance >= 1.0
        for _, _, seen in pair:
            assert [batch.is_last for batch in seen] == [False] * (len(seen) - 1) + [True]


def test_a_step_that_is_left_early_is_an_error(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service, connect(service, 0) as loader:
        steps = loader.steps()
        step = next(steps)
        next(iter(step))
        with pytest.raises(md.errors.ServiceError, match="step 0 was left"):
            next(steps)


def test_forms_of_iteration_may_follow_each_other(
    client: Client, name: str, whole: list[list[Seen]]
) -> None:
    def body(loader: md.Loader) -> list[Seen]:
        seen = take(loader, 2)
        seen += take_steps(loader, 1)  # the rest of the step
        seen += [see(batch) for batch in islice(loader.iterators(1)[0], 3)]
        seen += take_steps(loader, 1)
        seen += drain(loader)
        return seen

    with md.serve(pipeline(DATA), client, name=name) as service:
        assert run(service, body) == whole
        assert service.audit()["ok"]


def test_a_step_in_the_middle_counts_what_is_left(client: Client, name: str) -> None:
    def body(loader: md.Loader) -> Any:
        (first,) = take(loader, 1)
        step = next(loader.steps())
        return first, step.index, len(step), step.num_loss_tokens, [see(b) for b in step]

    with md.serve(pipeline(DATA), client, name=name) as service:
        for first, index, left, tokens, rest in run(service, body):
            assert index == first.step == 0
            assert left == len(rest)
            assert rest[0].microbatch == 1
            assert tokens == first.num_loss_tokens_step


# Independent iterators --------------------------------------------------------------------------


def test_iterators_are_independent(client: Client, name: str, whole: list[list[Seen]]) -> None:
    """One may run ahead as far as it likes; both see everything; the slowest acknowledges."""

    def body(loader: md.Loader) -> Any:
        fast, slow = loader.iterators(2)
        ahead = [see(batch) for batch in islice(fast, 3)]
        at_start = loader.state_dict()
        behind = [see(batch) for batch in islice(slow, 2)]
        after_two = loader.state_dict()
        behind += [see(batch) for batch in slow]
        ahead += [see(batch) for batch in fast]
        return ahead, behind, at_start, after_two

    with md.serve(pipeline(DATA), client, name=name) as service:
        results = run(service, body)
        assert service.audit()["ok"]
        assert service.audit()["total"]["samples"]["delivered"] == len(ROWS)
    for rank, (ahead, behind, at_start, after_two) in enumerate(results):
        assert ahead == behind == whole[rank]
        assert (at_start["step"], at_start["microbatch"]) == (0, 0)
        assert (after_two["step"], after_two["microbatch"]) == (0, 2)


def test_iterators_acknowledge_what_all_have_passed(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:

        def body(loader: md.Loader) -> None:
            fast, slow = loader.iterators(2)
            list(islice(fast, 6))
            list(islice(slow, 3))

        run(service, body)
        marks = set(map(tuple, service.stats()["watermarks"].values()))
    # The third batch was given to both, and none has asked for the next.
    assert max(marks) <= (0, 3)


def test_a_batch_of_one_iterator_is_not_changed_by_the_other(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service, connect(service, 0) as loader:
        first, second = loader.iterators(2)
        batch = next(first)
        before = see(batch)
        del batch["tokens"]
        batch["extra"] = 1
        assert see(next(second)) == before


# Ranks that share a bucket ----------------------------------------------------------------------


def test_ranks_of_one_bucket_get_the_same_bytes(client: Client, name: str) -> None:
    tree = md.ClientPlaceTree(dp=2, tp=2, pp=2)
    with md.serve(pipeline(DATA, topology=tree), client, name=name) as service:
        ranks = run(service, drain, keys=ARRAY_KEYS)  # on every stage
        assert service.audit()["ok"]
        assert service.audit()["total"]["samples"]["repeated"] == 0
    buckets = [tree.bucket_of(rank, "dp") for rank in range(8)]
    for rank, seen in enumerate(ranks):
        assert seen == ranks[buckets.index(buckets[rank])]
    assert tokens_delivered([ranks[buckets.index(0)], ranks[buckets.index(1)]]) == every_token(ROWS)


def broadcast_along_tp(graph: md.DGraph) -> None:
    graph.distribute("dp").broadcast_at("tp")


def test_broadcast_ranks_get_facts_and_no_payload(client: Client, name: str) -> None:
    tree = md.ClientPlaceTree(dp=2, tp=2)
    made = pipeline(DATA, topology=tree, strategy=broadcast_along_tp)
    with md.serve(made, client, name=name) as service:
        ranks = run(service, list)
        assert service.audit()["ok"]
    payload = {"tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded"}
    for rank in range(4):
        of_first = ranks[rank - tree.coords(rank)["tp"]]
        for batch, other in zip(ranks[rank], of_first, strict=True):
            if tree.coords(rank)["tp"]:
                assert not payload & set(batch)
            else:
                assert payload <= set(batch)
            assert spans_of(batch) == spans_of(other)
            for fact in ("step", "microbatch", "is_last", "num_loss_tokens_step", "cp_layout"):
                assert batch[fact] == other[fact]
            assert batch["num_loss_tokens"] == other["num_loss_tokens"]


@pytest.mark.parametrize("strategy", [None, broadcast_along_tp])
def test_stages_in_the_middle_get_where_documents_end_and_no_tokens(
    client: Client, name: str, strategy: Callable[[md.DGraph], None] | None
) -> None:
    tree = md.ClientPlaceTree(pp=3, tp=2)
    with md.serve(pipeline(DATA, topology=tree, strategy=strategy), client, name=name) as service:
        ranks = run(service, list)
        assert service.audit()["ok"]
    for rank in (2, 3):
        for batch, first in zip(ranks[rank], ranks[0], strict=True):
            assert not {"tokens", "labels", "loss_mask", "position_ids"} & set(batch)
            for key in ("cu_seqlens", "cu_seqlens_padded"):
                assert torch.equal(batch[key], first[key])
            assert spans_of(batch) == spans_of(first)
            for fact in ("step", "microbatch", "is_last", "num_loss_tokens", "max_seqlen"):
                assert batch[fact] == first[fact]
    for batch, first in zip(ranks[4], ranks[0], strict=True):
        assert {"tokens", "position_ids"} <= set(first) - set(batch)
        assert {"labels", "loss_mask"} <= set(batch) - set(first)
        assert batch["num_loss_tokens"] == int((batch["loss_mask"] > 0).sum())


def cut_documents(graph: md.DGraph) -> None:
    graph.context("document")


def cut_packs(graph: md.DGraph) -> None:
    graph.context("sequence")


def cut_either(graph: md.DGraph) -> None:
    graph.context("auto", tile=16)


@pytest.mark.parametrize(
    ("strategy", "multiple", "layouts"),
    [
        (cut_documents, 4, {"document"}),
        (cut_packs, 1, {"sequence"}),
        (cut_either, 4, {"document", "sequence"}),
    ],
)
def test_slices_of_context_parallel_ranks_make_up_the_batch(
    client: Client,
    name: str,
    strategy: Callable[[md.DGraph], None],
    multiple: int,
    layouts: set[str],
) -> None:
    tree = md.ClientPlaceTree(dp=2, cp=2)
    packed = {"pad_to_multiple": multiple}
    with md.serve(pipeline(DATA, packed=packed), client, name=f"{name}-1") as service:
        expected = run(service, list)
    made = pipeline(DATA, topology=tree, packed=packed, strategy=strategy)
    with md.serve(made, client, name=name) as service:
        ranks = run(service, list)
        assert service.audit()["ok"]
    assert {batch["cp_layout"] for seen in ranks for batch in seen} == layouts
    for bucket, batches in enumerate(expected):
        first, second = (ranks[rank] for rank in tree.ranks_of(bucket, "dp"))
        for one, two, batch in zip(first, second, batches, strict=True):
            assert one["tokens"].shape == two["tokens"].shape == (1, SEQ // 2)
            assert one["num_loss_tokens"] + two["num_loss_tokens"] == batch["num_loss_tokens"]
            assert one["cp_layout"] == two["cp_layout"]
            cuts = batch["cu_seqlens_padded"]
            joined = _join(
                [one, two], cuts if one["cp_layout"] == "document" else cuts[:, :1], cp=2
            )
            for key in ("tokens", "labels", "loss_mask", "position_ids"):
                assert torch.equal(joined[key], batch[key]), key
            for key in ("cu_seqlens", "cu_seqlens_padded"):
                assert torch.equal(one[key], batch[key])
            assert spans_of(one) == spans_of(two) == spans_of(batch)


def own_packs(graph: md.DGraph) -> None:
    graph.distribute(("dp", "cp"))


def test_context_parallel_ranks_may_have_packs_of_their_own(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA, topology=md.ClientPlaceTree(dp=4)), client, name=name) as service:
        expected = run(service, list)
    tree = md.ClientPlaceTree(dp=2, cp=2)
    made = pipeline(DATA, topology=tree, strategy=own_packs)
    with md.serve(made, client, name=name) as service:
        ranks = run(service, list)
        assert service.audit()["ok"]
    for mine, theirs in zip(ranks, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one["cp_layout"] == "document"
            assert one["tokens"].shape == (1, SEQ)
            assert torch.equal(one["tokens"], other["tokens"])


def _join(slices: Sequence[Mapping[str, Any]], padded: torch.Tensor, cp: int) -> dict[str, Any]:
    """Put slices together by the definition: chunks r and 2 cp - 1 - r of whatever is cut."""
    bounds = [*padded[0].unique().tolist(), SEQ]
    joined = {}
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        row = torch.zeros_like(slices[0][key].repeat(1, cp)[0])
        taken = [0] * cp
        for first, stop in pairwise(bounds):
            chunk = (stop - first) // (2 * cp)
            for rank in range(cp):
                for number in (rank, 2 * cp - 1 - rank):
                    at = first + number * chunk
                    part = slices[rank][key][0, taken[rank] : taken[rank] + chunk]
                    row[at : at + chunk] = part
                    taken[rank] += chunk
        joined[key] = row[None]
    return joined


def test_scenario_8_context_parallel_padding(client: Client, name: str) -> None:
    """One document of 7 tokens at cp=2."""
    made = pipeline(
        {"a": records([7])},
        seq_len=8,
        global_batch=1,
        topology=md.ClientPlaceTree(cp=2),
        packed={"pad_to_multiple": 4},
    )
    with md.serve(made, client, name=name) as service:
        (first,), (second,) = run(service, list)
    assert first["cu_seqlens"][0, :2].tolist() == [0, 7]
    assert first["cu_seqlens_padded"][0, :2].tolist() == [0, 8]
    assert first["position_ids"][0, :3].tolist() == [0, 1, 6]
    assert second["position_ids"][0].tolist() == [2, 3, 4, 5]
    assert first["loss_mask"][0].tolist() == [1, 1, 0, 0]
    assert second["loss_mask"][0].tolist() == [1, 1, 1, 1]
    assert first["num_loss_tokens_step"] == 6


# The service ------------------------------------------------------------------------------------


EVEN = {"a": records([32] * 150), "b": records([32] * 150, first=200)}


def even(**options: Any) -> md.Pipeline:
    """Equal weights of even documents: 8 a step, so a step shows the mixture."""
    return pipeline(EVEN, seq_len=32, **options)


def shares(steps: Mapping[int, Sequence[Any]]) -> list[int]:
    """Return how many spans of each step are of source b."""
    return [Counter(span[0] for span in spans)["b"] for _, spans in sorted(steps.items())]


@pytest.mark.parametrize("ahead", [None, 3])
def test_set_mixture_holds_from_the_step_that_it_returns(
    client: Client, name: str, ahead: int | None
) -> None:
    with md.serve(even(), client, name=name) as service:
        first = run(service, lambda loader: take_steps(loader, 2))
        at = None if ahead is None else service.stats()["next_step"] + ahead
        step = service.set_mixture({"a": 1.0, "b": 3.0}, at_step=at)
        assert step == at if at is not None else step >= 2
        committed = service.stats()
        assert all(one["mixture"] == {"a": 0.5, "b": 0.5} for one in committed["steps"][:step])
        rest = run(service, lambda loader: take_steps(loader, step + 3))
        planned = {one["step"]: one["mixture"] for one in service.stats()["steps"]}
        audit = service.audit()
    by_step = shares(spans_by_step([[*a, *b] for a, b in zip(first, rest, strict=True)]))
    assert by_step[:step] == [4] * step
    assert by_step[step : step + 3] == [6] * 3
    assert planned[step - 1] == {"a": 0.5, "b": 0.5}
    assert planned[step] == {"a": 0.25, "b": 0.75}
    assert audit["ok"]


def test_set_mixture_twice_and_to_nothing(client: Client, name: str) -> None:
    """Later words win; a source that is not named gets nothing."""
    with md.serve(even(), client, name=name, limits=md.Limits(lead_steps=1)) as service:
        first = service.set_mixture({"a": 1.0, "b": 1.0}, at_step=6)
        second = service.set_mixture({"b": 1.0}, at_step=6)
        third = service.set_mixture({"a": 1.0}, at_step=8)
        assert [first, second, third] == [6, 6, 8]
        ranks = run(service, lambda loader: take_steps(loader, 10))
    assert shares(spans_by_step(ranks)) == [4] * 6 + [8] * 2 + [0] * 2


@pytest.mark.parametrize(
    ("weights", "at_step", "match"),
    [
        ({"a": 1.0, "z": 1.0}, None, "'?z'?"),
        ({"a": -1.0, "b": 1.0}, None, "'a'"),
        ({"a": 0.0, "b": 0.0}, None, "above 0"),
        ({}, None, "weights"),
        ({"a": float("nan"), "b": 1.0}, None, "'a'"),
        ({"a": 1.0}, 0, "committed"),
        ({"a": 1.0}, -1, "at_step"),
        ({"a": 1.0}, 2.5, "at_step"),
    ],
)
def test_set_mixture_refuses(
    client: Client, name: str, weights: dict[str, float], at_step: Any, match: str
) -> None:
    with md.serve(even(), client, name=name) as service:
        run(service, lambda loader: take_steps(loader, 2))
        with pytest.raises(md.errors.ConfigError, match=match):
            service.set_mixture(weights, at_step=at_step)
        ranks = run(service, lambda loader: take_steps(loader, 6))
        assert shares(spans_by_step(ranks)) == [4] * 6


def test_set_mixture_after_the_end(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        run(service, drain)
        with pytest.raises(md.errors.ServiceError, match="ended"):
            service.set_mixture({"a": 1.0})


def test_audit_and_stats_have_what_is_promised(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        run(service, drain)
        audit, stats = service.audit(), service.stats()
    kinds = {"planned", "delivered", "repeated", "lost", "skipped", "filtered", "unread"}
    assert set(audit) == {"sources", "total", "ok"}
    for units in [*audit["sources"].values(), audit["total"]]:
        assert set(units) == {"samples", "spans", "tokens"}
        assert all(set(counts) == kinds for counts in units.values())
    for unit in ("samples", "spans", "tokens"):
        for kind in kinds:
            total = sum(audit["sources"][one][unit][kind] for one in DATA)
            assert audit["total"][unit][kind] == total
    for step in stats["steps"]:
        assert {"step", "imbalance"} <= set(step)
        assert step["imbalance"] >= step["bound"] - 1e-9 >= 1.0 - 1e-9
    assert [step["step"] for step in stats["steps"]] == list(range(len(stats["steps"])))
    assert stats["draw_digest"]
    assert stats["assignment_digest"]
    assert stats["ended"]
    assert stats["closed"] is None
    assert {one["source"] for one in stats["loaders"]} == set(DATA)
    assert all(one["open_lanes"] == 0 for one in stats["loaders"])
    assert [one["held_bytes"] for one in stats["constructors"]] == [0]


def test_a_loader_counts_what_it_gave(client: Client, name: str) -> None:
    def body(loader: md.Loader) -> Any:
        before = loader.stats()
        seen = drain(loader)
        return before, len(seen), loader.stats()

    with md.serve(pipeline(DATA), client, name=name) as service:
        for rank, (before, count, after) in enumerate(run(service, body)):
            assert before["batches"] == 0
            assert after["batches"] == count
            assert after["rank"] == rank
            assert after["wait_s"] >= 0


# Validation beside training ---------------------------------------------------------------------


VALIDATION = corpus({"v": 90}, longest=200, seed=5)


def both() -> dict[str, md.Pipeline]:
    return {"train": pipeline(DATA), "val": pipeline(VALIDATION, restart=True)}


def passes(service: md.Service, counts: Sequence[int | None]) -> Any:
    """Run passes over the validation pipeline, breaking off where a count says so.

    The ranks begin each pass together, as training ranks do between their collectives.
    """
    together = threading.Barrier(2)

    def body(loader: md.Loader) -> Any:
        seen = []
        for count in counts:
            together.wait(60)
            seen.append([see(batch) for batch in islice(loader, count)])
            together.wait(60)
        return seen

    return run(service, body, pipeline="val")


def test_validation_begins_anew_with_each_pass(
    client: Client, name: str, whole: list[list[Seen]]
) -> None:
    with md.serve(both(), client, name=name) as service:
        trained = run(service, lambda loader: take(loader, 5))
        for one, two, three, four, five in passes(service, [None, None, 3, 1, None]):
            assert one == two == five
            assert three == one[:3]
            assert four == one[:1]
            assert len(one) > 3
        assert tokens_delivered(x[0] for x in passes(service, [None])) == every_token(
            VALIDATION["v"]
        )
        # Training was not disturbed.
        trained = [
            [*before, *after] for before, after in zip(trained, run(service, drain), strict=True)
        ]
        assert trained == whole
        assert service.audit()["ok"]


def test_validation_within_one_training_loop(
    client: Client, name: str, whole: list[list[Seen]]
) -> None:
    """As in a training script: one process, two loaders, a pass after every second step."""
    with md.serve(both(), client, name=name) as service:

        def body(rank: int) -> Any:
            trained, validated, states = [], [], []
            with (
                connect(service, rank) as train,
                connect(service, rank, pipeline="val") as val,
            ):
                for step in train.steps():
                    trained += [see(batch) for batch in step]
                    before = train.state_dict()
                    validated.append([see(b) for s in islice(val.steps(), 2) for b in s])
                    validated.append(drain(val))
                    states.append(before == train.state_dict())
            return trained, validated, states

        results = Ranks([partial(body, rank) for rank in range(2)]).results()
    for rank, (trained, validated, states) in enumerate(results):
        assert trained == whole[rank]
        assert all(states)
        assert len(validated) >= 4
        for broken_off, complete in zip(validated[::2], validated[1::2], strict=True):
            assert complete == validated[1]
            assert broken_off == complete[: len(broken_off)]


def test_idle_validation_holds_no_buffers(client: Client, name: str) -> None:
    with md.serve(both(), client, name=name) as service:
        for counts in ([None], [2]):
            passes(service, counts)
            stats = service.stats("val")
            assert [one["held_bytes"] for one in stats["constructors"]] == [0]
            assert stats["next_step"] == 0


def test_iterators_over_validation(client: Client, name: str) -> None:
    def body(loader: md.Loader) -> Any:
        one = [list(map(see, cursor)) for cursor in loader.iterators(2)]
        two = [list(map(see, cursor)) for cursor in loader.iterators(2)]
        return one, two

    with md.serve(both(), client, name=name) as service:
        for one, two in run(service, body, pipeline="val", timeout=10.0):
            assert one == two
            assert one[0] == one[1]
            assert one[0]


def test_a_rank_that_breaks_off_lets_the_others_finish_their_pass(
    client: Client, name: str
) -> None:
    """Rank 0 leaves its pass after one batch; rank 1 goes on to the end, then both begin anew."""
    made = pipeline({"v": records([32] * 60)}, restart=True, global_batch=2, seq_len=32)
    with md.serve(made, client, name=name) as service:

        def body(loader: md.Loader) -> Any:
            first = [see(b) for b in islice(loader, 1 if loader.rank == 0 else None)]
            return first, drain(loader)

        (short, again), (long, second) = run(service, body, timeout=20.0)
    assert short == again[:1]
    assert long == second
    assert len(long) > 8


def test_pipelines_have_names(client: Client, name: str) -> None:
    with md.serve(both(), client, name=name) as service:
        with pytest.raises(md.errors.ConfigError, match="test"):
            service.audit("test")
        with pytest.raises(md.errors.ServiceError, match="test"):
            connect(service, 0, pipeline="test")
        assert set(service.audit()["sources"]) == set(DATA)
        assert set(service.audit("train")["sources"]) == set(DATA)
        assert set(service.audit("val")["sources"]) == set(VALIDATION)


# Several services, and notebooks ----------------------------------------------------------------


def test_two_services_at_once(client: Client, name: str, whole: list[list[Seen]]) -> None:
    other = pipeline(VALIDATION, topology=md.ClientPlaceTree(dp=3), global_batch=6)
    with (
        md.serve(pipeline(DATA), client, name=f"{name}-1") as one,
        md.serve(other, client, name=f"{name}-2") as two,
    ):
        first, second = start(one, drain), start(two, drain)
        assert first.results() == whole
        assert tokens_delivered(second.results()) == every_token(VALIDATION["v"])
        one.close()
        assert two.audit()["ok"]


def test_a_cell_that_serves_may_run_again(
    client: Client, name: str, whole: list[list[Seen]], caplog: pytest.LogCaptureFixture
) -> None:
    old = md.serve(pipeline(DATA), client, name=name)
    lost = connect(old, 0)
    take(lost, 2)
    with caplog.at_level(logging.WARNING):
        new = md.serve(pipeline(DATA), client, name=name)
    assert [one.message for one in caplog.records if f"replaced service '{name}'" in one.message]
    try:
        for use in (drain, drain, lambda loader: loader.load_state_dict(loader.state_dict())):
            with pytest.raises(md.errors.ClosedError, match="another service took its name"):
                use(lost)
        with pytest.raises(md.errors.ClosedError, match="another service took its name"):
            old.stats()
        assert run(new, drain) == whole
        # The variable of the old cell is gone, or closed late by the garbage collector.
        old.close()
        assert new.audit()["ok"]
        assert new.stats()["closed"] is None
    finally:
        lost.close()
        new.close()


def test_a_service_that_is_over_is_replaced_without_a_word(
    client: Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    md.serve(pipeline(DATA), client, name=name).close()
    with caplog.at_level(logging.WARNING), md.serve(pipeline(DATA), client, name=name):
        assert not [one for one in caplog.records if "replaced" in one.message]


def test_a_cell_that_connects_may_run_again(
    client: Client, name: str, whole: list[list[Seen]]
) -> None:
    made = pipeline(DATA, topology=md.ClientPlaceTree())
    with md.serve(made, client, name=name) as service:
        old = connect(service, 0)
        seen = take(old, 2)
        new = connect(service, 0)
        rest = drain(new)
        assert rest[0] in seen or rest[0].microbatch == 2
        with pytest.raises(md.errors.ClaimError, match="rank 0"):
            drain(old)
        old.close()
        new.close()
        assert service.audit()["ok"]


def test_ranks_are_free_after_their_loader_closed(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        with connect(service, 0):
            assert set(service.stats()["trainers"]) == {"0"}
        assert service.stats()["trainers"] == {}


def test_a_scheduler_file_is_an_address(client: Client, name: str, tmp_path: Path) -> None:
    made = pipeline(DATA, topology=md.ClientPlaceTree())
    path = tmp_path / "scheduler.json"
    path.write_text(json.dumps({"address": client.scheduler.address}))
    with (
        md.serve(made, client, name=name) as service,
        md.connect(path, service.name, rank=0, timeout=20) as loader,
    ):
        assert len(take(loader, 1)) == 1


def test_the_rank_comes_from_the_environment(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        for variable, value in (("SLURM_PROCID", "1"), ("RANK", "0")):
            monkeypatch.setenv(variable, value)
            with md.connect(service.address, name, timeout=20) as loader:
                assert loader.rank == int(value)


#: Where the size of a job is said, beside the rank.
SIZES = {
    "WORLD_SIZE": "RANK",
    "SLURM_NTASKS": "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_ranks", [1, 3, 16])
def test_a_job_of_another_size_than_the_mesh(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch, size: str, num_ranks: int
) -> None:
    monkeypatch.setenv(SIZES[size], "0")
    monkeypatch.setenv(size, str(num_ranks))
    with md.serve(pipeline(DATA), client, name=name) as service:
        with pytest.raises(md.errors.ConfigError) as caught:
            md.connect(service.address, name, timeout=20)
        message = str(caught.value)
        assert f"took rank 0 from the environment's {SIZES[size]}" in message
        assert f"got {num_ranks} ranks by the environment's {size}" in message
        assert "expected 2 ranks" in message
        assert "pass connect(rank=)" in message
        # The rank is free again; and who names it knows better.
        assert service.stats()["trainers"] == {}
        with connect(service, 0):
            pass
        monkeypatch.setenv(size, "2")
        with md.connect(service.address, name, timeout=20) as loader:
            assert loader.rank == 0


def test_a_size_without_a_rank_says_nothing(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch job that runs one program has variables of its tasks, but no rank among them."""
    for size in SIZES:
        monkeypatch.setenv(size, "16")
    with (
        md.serve(pipeline(DATA), client, name=name) as service,
        md.connect(service.address, name, timeout=20) as loader,
    ):
        assert loader.rank == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_size_of_a_job_comes_from_torch(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setenv("RANK", "0")  # what torch knows counts
    monkeypatch.setenv("WORLD_SIZE", "16")
    with md.serve(pipeline(DATA), client, name=name) as service:
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=num_ranks
        )
        try:
            if num_ranks == 2:
                md.connect(service.address, name, timeout=20).close()
                return
            with pytest.raises(md.errors.ConfigError, match=f"{num_ranks} ranks by torch"):
                md.connect(service.address, name, timeout=20)
        finally:
            torch.distributed.destroy_process_group()


def test_loaders_of_one_process_do_not_share_batches(client: Client, name: str) -> None:
    """Two ranks in one thread, in turns."""
    with (
        md.serve(pipeline(DATA), client, name=name) as service,
        connect(service, 0) as first,
        connect(service, 1) as second,
    ):
        pairs = [(see(a), see(b)) for a, b in zip(first, second, strict=False)]
    ranks = [[pair[rank] for pair in pairs] for rank in range(2)]
    assert shape(ranks[0]) == shape(ranks[1])
    assert tokens_delivered(ranks) == every_token(ROWS)


def test_objects_say_what_they_are(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        assert name in repr(service)
        with connect(service, 1) as loader:
            assert "rank 1" in repr(loader)
            assert "step 0" in repr(loader)
    assert "closed" in repr(service)
    assert "a (3 lanes)" in str(pipeline(DATA))


def test_digest_sees_every_byte() -> None:
    """The helper that other tests lean on."""
    batch = {"tokens": torch.zeros(2, 3), "step": 1}
    other = {"tokens": torch.from_numpy(np.zeros((2, 3), np.float32)), "step": 2}
    assert digest(batch) == digest(other)
    other["tokens"][1, 2] = 1
    assert digest(batch) != digest(other)


def test_serving_does_not_go_by_what_the_client_has_cached(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask overwrites the client's list of workers with an empty one every two seconds."""
    monkeypatch.setattr(client, "scheduler_info", lambda *_, **__: {"workers": {}})
    with md.serve(both(), client, name=name) as service:
        assert service.stats()["workers"]
