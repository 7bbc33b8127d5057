"""Every sample once; all ranks end alike; and the scenarios that users of other loaders report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import pytest
from distributed import Client

import megadask as md
from tests.megadask.helpers.data import corpus, pipeline, record_at, records, source
from tests.megadask.helpers.ranks import run, start
from tests.megadask.helpers.seen import (
    Seen,
    drain,
    every_token,
    see,
    shape,
    spans_by_step,
    take,
    tokens_delivered,
)

pytestmark = pytest.mark.timeout(60)

DATA = corpus({"a": 40, "b": 25, "c": 10}, longest=300)
ROWS = [row for rows in DATA.values() for row in rows]
#: One document fills one pack.
EVEN = 16


def counts(service: Any, unit: str = "samples") -> dict[str, dict[str, int]]:
    sources = service.audit()["sources"]
    return {name: units[unit] for name, units in sources.items()}


def ids(ranks: Sequence[Sequence[Seen]]) -> list[int]:
    """Return the records in the order of steps, microbatches and ranks."""
    order = [
        (batch.step, batch.microbatch, rank, number, record)
        for rank, seen in enumerate(ranks)
        for batch in seen
        for number, (record, _, _) in enumerate(batch.documents)
    ]
    return [record for *_, record in sorted(order)]


# Every sample once ------------------------------------------------------------------------------


def test_every_sample_once_in_each_of_two_epochs(client: Client, name: str) -> None:
    made = pipeline(DATA, epochs=2)
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
        audit = service.audit()
    assert tokens_delivered(ranks) == every_token(ROWS, times=2)
    spans = [span for seen in ranks for batch in seen for span in batch.spans]
    assert len(spans) == len(set(spans))
    assert any(start > 0 for *_, start, _ in spans), "no document was split"
    for source_name, rows in DATA.items():
        per_epoch = Counter(span[1] for span in spans if span[0] == source_name and span[4] == 0)
        assert per_epoch == {0: len(rows), 1: len(rows)}
        samples = audit["sources"][source_name]["samples"]
        assert samples == dict.fromkeys(samples, 0) | {
            "planned": 2 * len(rows),
            "delivered": 2 * len(rows),
        }
    tokens = audit["total"]["tokens"]
    assert tokens["delivered"] == 2 * sum(row["length"] for row in ROWS)
    assert audit["total"]["spans"]["delivered"] == len(spans)
    assert audit["ok"]


def test_sample_ids_name_their_records(client: Client, name: str) -> None:
    """A sample id means the record that the definition of lanes says, in both epochs."""
    made = pipeline(DATA, epochs=2)
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
    lanes = {one.name: (one.num_lanes, len(one.reader.shards())) for one in made.sources}
    for seen in ranks:
        for batch in seen:
            for (record, first, stop), span in zip(batch.documents, batch.spans, strict=True):
                name_of, _, lane, position, *bounds = span
                row = record_at(DATA[name_of], lane, position, *lanes[name_of])
                assert (record, first, stop) == (row["id"], *bounds)


def test_the_step_knows_its_loss_tokens(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        ranks = run(service, drain)
    by_step: Counter[int] = Counter()
    said: dict[int, set[int]] = {}
    for batch in (batch for seen in ranks for batch in seen):
        by_step[batch.step] += batch.num_loss_tokens
        said.setdefault(batch.step, set()).add(batch.num_loss_tokens_step)
    assert {step: {total} for step, total in by_step.items()} == said
    # A document of l tokens has l - 1 targets, however it is cut.
    assert sum(by_step.values()) == sum(row["length"] - 1 for row in ROWS)


def test_the_audit_says_what_is_not_delivered_yet(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        first = run(service, lambda loader: take(loader, 3))
        audit = service.audit()
        delivered = {span for seen in first for batch in seen for span in batch.spans}
        assert audit["total"]["spans"]["delivered"] == len(delivered)
        assert audit["total"]["spans"]["planned"] > len(delivered)
        assert audit["ok"]
        rest = run(service, drain)
        assert service.audit()["total"]["samples"]["delivered"] == len(ROWS)
        assert service.audit()["ok"]
    joined = [[*a, *b] for a, b in zip(first, rest, strict=True)]
    assert tokens_delivered(joined) == every_token(ROWS)


# Ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [2, 3])
def test_all_ranks_run_the_same_microbatches_and_end_at_one_step(
    client: Client, name: str, dp: int
) -> None:
    made = pipeline(DATA, global_batch=6, topology=md.ClientPlaceTree(dp=dp))
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
        ended_at = {tuple(mark) for mark in service.stats()["watermarks"].values()}
    assert all(shape(seen) == shape(ranks[0]) for seen in ranks)
    last = ranks[0][-1]
    assert last.is_last
    assert ended_at == {(last.step + 1, 0)}
    assert tokens_delivered(ranks) == every_token(ROWS)


def after_the_end(loader: md.Loader) -> list[Any]:
    whole = drain(loader)
    begin = time.monotonic()
    again: list[Any] = [
        whole,
        drain(loader),
        next(iter(loader), None),
        list(loader.steps()),
        list(loader.iterators(1)[0]),
        loader.state_dict()["step"],
    ]
    assert time.monotonic() - begin < 10, "asking again after the end took a wait's time"
    return again


def test_iterating_after_the_end_gives_nothing(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        for whole, *again, step in run(service, after_the_end):
            assert again == [[], None, [], []]
            assert step == whole[-1].step + 1
        # Nor for a loader that connects when everything is over.
        assert run(service, drain) == [[], []]
        assert service.audit()["ok"]


@pytest.mark.parametrize("stop", ["first", "all", "repeat"])
def test_stop_policies(client: Client, name: str, stop: str) -> None:
    sizes = {"small": 8, "large": 48}
    data = {
        "small": records([EVEN] * 8),
        "large": records([EVEN] * 48, first=100),
    }
    made = pipeline(data, seq_len=EVEN, global_batch=4, stop=stop)
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
        audit = service.audit()
    assert audit["ok"]
    assert all(shape(seen) == shape(ranks[0]) for seen in ranks)
    delivered = tokens_delivered(ranks)
    samples = {key: units["samples"] for key, units in audit["sources"].items()}
    if stop == "all":
        assert delivered == every_token([*data["small"], *data["large"]])
        assert [samples[key]["unread"] for key in sizes] == [0, 0]
    if stop == "first":
        assert all(delivered[row["id"], 0] == 1 for row in data["small"])
        read = sum(delivered[row["id"], 0] for row in data["large"])
        assert 7 <= read <= 9  # within one of its share
        assert samples["large"]["delivered"] == read
        assert samples["large"]["unread"] == 48 - read
        assert samples["small"]["unread"] == 0
    if stop == "repeat":
        times = {delivered[row["id"], 0] for row in data["large"]}
        assert times == {1}
        assert min(delivered[row["id"], 0] for row in data["small"]) > 1


def test_a_source_without_weight_is_unread(client: Client, name: str) -> None:
    def only_a(graph: md.DGraph) -> None:
        graph.mix({"a": 1.0, "b": 0.0})

    data = {"a": DATA["a"], "b": DATA["b"]}
    with md.serve(pipeline(data, strategy=only_a), client, name=name) as service:
        ranks = run(service, drain)
        samples = counts(service)
        assert service.audit()["ok"]
    assert tokens_delivered(ranks) == every_token(data["a"])
    assert samples["b"]["unread"] == len(data["b"])
    assert samples["b"]["planned"] == 0


# Scenarios of the field notes -------------------------------------------------------------------


def even(count: int, **options: Any) -> md.Pipeline:
    """A pipeline of ids, each of which fills one pack."""
    return pipeline({"ids": records([EVEN] * count)}, seq_len=EVEN, **options)


def documents(loader: md.Loader, batches: int | None = None) -> list[int]:
    seen = [see(batch) for batch in islice(loader, batches)]
    return [record for batch in seen for record, _, _ in batch.documents]


def test_scenario_1_resume_twice(client: Client, name: str) -> None:
    """100 ids by 4: take 7, save, load, take 5, save, load, drain."""
    made = even(
        100, global_batch=8, micro_batch=4, topology=md.ClientPlaceTree(), sources={"lanes": 16}
    )
    with md.serve(made, client, name=name) as service:
        (whole,) = run(service, documents)
    got: list[int] = []
    state = None
    for batches in (7, 5, None):
        with md.serve(made, client, name=name, resume=state) as service:

            def part(loader: md.Loader, batches: int | None = batches) -> Any:
                return documents(loader, batches), loader.state_dict()

            ((ids_of_part, state),) = run(service, part)
            assert service.audit()["ok"]
        got.extend(ids_of_part)
    assert got == whole
    assert sorted(got) == list(range(100))


@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize("taken", [3, 5], ids=["middle", "end"])
def test_scenario_2_epoch_boundary(client: Client, name: str, loaders: int, taken: int) -> None:
    """20 ids, 3 epochs, 4 a step: save in the middle and at the end of the first epoch."""
    made = even(20, global_batch=4, epochs=3, sources={"loaders": loaders})

    def steps(loader: md.Loader, count: int | None) -> Any:
        seen = [see(batch) for step in islice(loader.steps(), count) for batch in step]
        return seen, loader.state_dict()

    with md.serve(made, client, name=name) as service:
        whole = run(service, drain)
    with md.serve(made, client, name=name) as service:
        parts = run(service, lambda loader: steps(loader, taken))
    states = [state for _, state in parts]
    assert states[0] == states[1]
    with md.serve(made, client, name=name, resume=states[0]) as service:
        rest = run(service, drain)
    joined = [[*seen, *more] for (seen, _), more in zip(parts, rest, strict=True)]
    assert joined == whole
    for epoch in range(3):
        of_epoch = [s for seen in joined for b in seen for s in b.spans if s[1] == epoch]
        assert len({span[2:4] for span in of_epoch}) == len(of_epoch) == 20


def test_scenario_5_disjoint_over_ranks(client: Client, name: str) -> None:
    """One source, 8 shards, 4 ranks: pairwise disjoint, together complete."""
    made = pipeline(
        {"a": DATA["a"]},
        sources={"shards": 8, "lanes": 8},
        topology=md.ClientPlaceTree(dp=4),
    )
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
    spans = [{span for batch in seen for span in batch.spans} for seen in ranks]
    assert all(spans)
    assert sum(map(len, spans)) == len(set.union(*spans))
    assert tokens_delivered(ranks) == every_token(DATA["a"])


def test_scenario_5_the_same_source_listed_twice() -> None:
    one = source("a", DATA["a"])
    with pytest.raises(md.errors.ConfigError, match="'a'"):
        md.Pipeline(sources=[one, one], batching=md.Packed(seq_len=64, global_batch=2))


def test_scenario_7_uneven_counts(client: Client, name: str) -> None:
    """9 samples over 4 ranks: 3, 2, 2, 2, and none empty."""
    made = even(9, global_batch=12, topology=md.ClientPlaceTree(dp=4))
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
    assert all(shape(seen) == shape(ranks[0]) for seen in ranks)
    per_rank = [sum(len(batch.documents) for batch in seen) for seen in ranks]
    assert sorted(per_rank) == [2, 2, 2, 3]
    assert sorted(ids(ranks)) == list(range(9))


def test_scenario_7_caps(client: Client, name: str) -> None:
    """Eight documents of 1,000 tokens and eight of 100 under a cap of 2,048."""
    lengths = [1000] * 8 + [100] * 8
    made = pipeline({"a": records(lengths)}, seq_len=2048, global_batch=8)
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
    assert all(shape(seen) == shape(ranks[0]) for seen in ranks)
    for seen in ranks:
        for batch in seen:
            assert sum(stop - first for _, first, stop in batch.documents) <= 2048
    assert sorted(ids(ranks)) == list(range(16))


def test_a_rank_that_runs_ahead_gets_the_same_as_one_that_waits(client: Client, name: str) -> None:
    """Rank 1 drains what the declared skew allows, then rank 0 begins: nobody misses anything."""
    with md.serve(pipeline(DATA), client, name=name) as service:
        late = start(service, drain, ranks=[1])
        begun = run(service, lambda loader: take(loader, 1), ranks=[0])
        rest = run(service, drain, ranks=[0])
        ranks = [[*begun[0], *rest[0]], late.results()[0]]
        assert service.audit()["ok"]
    assert tokens_delivered(ranks) == every_token(ROWS)
    assert shape(ranks[0]) == shape(ranks[1])


def test_spans_of_a_step_come_by_the_mixture(client: Client, name: str) -> None:
    """With weights 3 : 1 of even documents, whole steps have three of one to one of the other."""

    def three_to_one(graph: md.DGraph) -> None:
        graph.mix({"a": 3.0, "b": 1.0})

    data = {"a": records([EVEN] * 60), "b": records([EVEN] * 20, first=100)}
    made = pipeline(data, seq_len=EVEN, global_batch=8, strategy=three_to_one)
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
    steps: Mapping[int, list[Any]] = spans_by_step(ranks)
    assert len(steps) == 10
    for spans in steps.values():
        assert Counter(span[0] for span in spans) == {"a": 6, "b": 2}
