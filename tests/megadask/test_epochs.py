"""Epochs over real workers: every record once in each, in an order that nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from distributed import Client

import megadask as md
from tests.megadask.helpers.data import corpus, pipeline, records
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import Seen, drain, every_token, take_steps, tokens_delivered

pytestmark = pytest.mark.timeout(120)

#: One document fills one pack.
EVEN = 16
TWENTY = {"a": records([EVEN] * 20)}
#: Rows of a block, or the order as it is.
SHUFFLES = [False, 3]


def ids(ranks: Sequence[Sequence[Seen]]) -> list[int]:
    """Return the records in the order of steps, microbatches and ranks."""
    order = [
        (batch.step, batch.microbatch, rank, number, record)
        for rank, seen in enumerate(ranks)
        for batch in seen
        for number, (record, _, _) in enumerate(batch.documents)
    ]
    return [record for *_, record in sorted(order)]


def twenty(*, loaders: int = 1, dp: int = 1, **options: Any) -> md.Pipeline:
    """Return three epochs of twenty records, five steps each."""
    return pipeline(
        TWENTY,
        seq_len=EVEN,
        global_batch=4,
        epochs=3,
        window=1,
        sources={"loaders": loaders, **options},
        topology=md.ClientPlaceTree(dp=dp),
    )


def served(made: md.Pipeline, client: Client, name: str, **options: Any) -> list[int]:
    with md.serve(made, client, name=name, **options) as service:
        got = ids(run(service, drain))
        assert service.audit()["ok"]
    return got


@pytest.mark.parametrize("extra_loaders", [0, 2])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_resuming_at_and_inside_an_epoch(
    client: Client, name: str, shuffle: Any, extra_loaders: int
) -> None:
    """Field notes, scenario 2."""
    whole = served(twenty(shuffle=shuffle), client, f"{name}-0")
    epochs = [whole[first : first + 20] for first in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert (epochs[0] == epochs[1]) == (not shuffle)
    assert (epochs[1] == epochs[2]) == (not shuffle)

    made = twenty(shuffle=shuffle, loaders=1 + extra_loaders)
    states: dict[int, Any] = {}

    def save(loader: md.Loader) -> list[Seen]:
        seen = []
        for steps in (5, 2):  # up to the end of epoch 1, then into the middle of epoch 2
            seen += take_steps(loader, steps)
            states[len(seen)] = loader.state_dict()
        return seen

    with md.serve(made, client, name=f"{name}-1") as service:
        [seen] = run(service, save)
    assert ids([seen]) == whole[:28]
    for taken, state in states.items():
        rest = served(made, client, f"{name}-{taken}", resume=state)
        assert rest == whole[taken:]


@pytest.mark.parametrize("extra_loaders", [0, 2])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_ranks_of_one_source_are_disjoint_and_complete(
    client: Client, name: str, shuffle: Any, extra_loaders: int
) -> None:
    """Field notes, scenario 5."""
    data = {"a": records([EVEN] * 64)}
    options = {"shards": 8, "lanes": 8, "loaders": 1 + extra_loaders, "shuffle": shuffle}
    made = pipeline(
        data,
        seq_len=EVEN,
        global_batch=8,
        sources=options,
        topology=md.ClientPlaceTree(dp=4),
    )
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
    sets = [{record for batch in seen for record, *_ in batch.documents} for seen in ranks]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 64
    assert {len(one) for one in sets} == {16}
    with pytest.raises(md.errors.ConfigError, match="one name"):
        md.Pipeline(sources=[*made.sources, made.sources[0]], batching=made.batching)


def test_a_shuffle_changes_no_step_by_who_reads_it(client: Client, name: str) -> None:
    """Uneven documents of two sources, split: seed and epoch decide, not ranks or loaders."""
    data = corpus({"a": 40, "b": 25}, longest=300)
    rows = [row for part in data.values() for row in part]
    orders = {}
    for case, (dp, loaders, seed) in {
        "one": (1, 1, 0),
        "many": (4, 3, 0),
        "seed": (1, 1, 1),
    }.items():
        made = pipeline(
            data,
            epochs=2,
            seed=seed,
            sources={"loaders": loaders, "shuffle": True},
            topology=md.ClientPlaceTree(dp=dp),
        )
        with md.serve(made, client, name=f"{name}-{case}") as service:
            ranks = run(service, drain)
            assert service.audit()["ok"]
        assert tokens_delivered(ranks) == every_token(rows, times=2)
        steps: dict[int, Counter[Any]] = {}
        for batch in (batch for seen in ranks for batch in seen):
            steps.setdefault(batch.step, Counter()).update(batch.documents)
        orders[case] = steps
    assert orders["one"] == orders["many"]
    assert orders["one"] != orders["seed"]


def test_shards_are_not_added_to_a_shuffled_source(local_client: Client, name: str) -> None:
    """They would come between shards that were read."""
    grown = {"a": [*TWENTY["a"], *records([EVEN] * 4, first=20)]}
    for shuffle in SHUFFLES:
        saved = twenty(shuffle=shuffle, shards=5)
        more = pipeline(
            grown,
            seq_len=EVEN,
            global_batch=4,
            epochs=3,
            window=1,
            sources={"shuffle": shuffle, "shards": 6},
            topology=md.ClientPlaceTree(dp=1),
        )
        if shuffle:
            with pytest.raises(md.errors.StateError, match="between shards that were read"):
                more.check_resumable(saved.components)
        else:
            more.check_resumable(saved.components)
    with pytest.raises(md.errors.StateError, match="shuffle"):
        twenty(shuffle=True).check_resumable(twenty().components)


@pytest.mark.parametrize("wrong", [-1, 2.5, "yes", None])
def test_a_shuffle_that_makes_no_sense(wrong: Any) -> None:
    with pytest.raises(md.errors.ConfigError, match="shuffle="):
        twenty(shuffle=wrong)


def test_unread_records_of_a_shuffled_source(client: Client, name: str) -> None:
    data = {"a": records([EVEN] * 30), "b": records([EVEN] * 8, first=30)}
    made = pipeline(data, seq_len=EVEN, global_batch=4, stop="first", sources={"shuffle": 3})
    with md.serve(made, client, name=name) as service:
        run(service, drain)
        audit = service.audit()["sources"]
    for source, rows in data.items():
        samples = audit[source]["samples"]
        assert samples["delivered"] + samples["unread"] == len(rows)
    assert audit["a"]["samples"]["unread"] > 0
