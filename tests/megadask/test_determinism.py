"""The same data in the same steps, whatever the number of loaders, buffers, ranks, and runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import megadask as md
from megadask.scheduling.spec import Limits
from tests.megadask.helpers.data import (
    corpus,
    pipeline,
    unfold,
    unfold_masked,
    write_jsonl,
    write_parquet,
)
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import Seen, drain, shape, spans_by_step

pytestmark = pytest.mark.timeout(60)

DATA = corpus({"a": 50, "b": 35, "c": 15}, longest=300)
DIGESTS = ("draw_digest", "assignment_digest")


def once(
    client: Client,
    name: str,
    made: md.Pipeline,
    *,
    prefetch: int = 4,
    **options: Any,
) -> tuple[list[list[Seen]], dict[str, Any]]:
    """Return what all ranks see of a whole run, and the digests of its plans."""
    with md.serve(made, client, name=name, **options) as service:
        ranks = run(service, drain, prefetch=prefetch)
        stats = service.stats()
        assert service.audit()["ok"]
    return ranks, {key: stats[key] for key in DIGESTS}


@pytest.fixture(scope="module")
def reference(client: Client) -> tuple[list[list[Seen]], dict[str, Any]]:
    return once(client, "reference", pipeline(DATA))


@pytest.mark.parametrize(
    ("sources", "prefetch", "limits", "constructors"),
    [
        pytest.param({}, 4, Limits(), None, id="again"),
        pytest.param({"loaders": 2}, 4, Limits(), None, id="2-loaders"),
        pytest.param({"loaders": 5, "lanes": 3}, 4, Limits(), None, id="5-loaders"),
        pytest.param({}, 1, Limits(), None, id="prefetch-1"),
        pytest.param({}, 8, Limits(), None, id="prefetch-8"),
        pytest.param({}, 4, Limits(lead_steps=1), None, id="lead-1"),
        pytest.param({}, 8, Limits(lead_steps=8), None, id="lead-8"),
        pytest.param({}, 4, Limits(), 2, id="2-constructors"),
        pytest.param({"loaders": 2}, 1, Limits(loader_bytes=1), None, id="no-sample-cache"),
        pytest.param({}, 8, Limits(constructor_bytes=1), None, id="no-batch-buffer"),
    ],
)
def test_batches_do_not_depend_on_how_they_are_made(
    client: Client,
    name: str,
    reference: tuple[list[list[Seen]], dict[str, Any]],
    sources: Mapping[str, Any],
    prefetch: int,
    limits: Limits,
    constructors: int | None,
) -> None:
    made = pipeline(DATA, sources=sources)
    got = once(client, name, made, prefetch=prefetch, limits=limits, constructors=constructors)
    assert got[1] == reference[1]
    assert got[0] == reference[0]  # digests of the bytes of every batch among them


def test_a_run_has_more_than_one_step_and_split_documents(
    reference: tuple[list[list[Seen]], dict[str, Any]],
) -> None:
    """Else the tests above would prove little."""
    ranks, digests = reference
    assert all(digests.values())
    assert len(spans_by_step(ranks)) >= 4
    assert any(span[4] > 0 for batch in ranks[0] for span in batch.spans)


def test_another_seed_draws_the_same_where_nothing_is_random(client: Client, name: str) -> None:
    """The seed belongs to random transforms alone: it is no shuffle."""
    ranks, _ = once(client, name, pipeline(DATA, seed=7))
    again, _ = once(client, name, pipeline(DATA, seed=8))
    assert spans_by_step(ranks) == spans_by_step(again)


def test_steps_do_not_depend_on_the_number_of_ranks(client: Client, name: str) -> None:
    steps = {}
    for dp in (1, 2, 4):
        made = pipeline(DATA, topology=md.ClientPlaceTree(dp=dp), packed={"pad_to_multiple": 4})
        ranks, digests = once(client, f"{name}-{dp}", made)
        assert all(shape(seen) == shape(ranks[0]) for seen in ranks)
        steps[dp] = (spans_by_step(ranks), digests["draw_digest"])
    assert steps[1] == steps[2] == steps[4]


def defer(graph: md.DGraph) -> None:
    graph.mix({"a": 0.5, "b": 0.3, "c": 0.2}).cost(md.costs.Transformer(16)).defer(2, ways=8)


def test_deferred_steps_do_not_depend_on_the_number_of_ranks_or_loaders(
    client: Client, name: str
) -> None:
    steps = []
    for dp, loaders in ((1, 1), (4, 3)):
        tree = md.ClientPlaceTree(dp=dp)
        made = pipeline(DATA, topology=tree, strategy=defer, sources={"loaders": loaders})
        ranks, _ = once(client, f"{name}-{dp}", made)
        steps.append(spans_by_step(ranks))
    assert steps[0] == steps[1]
    plain = pipeline(DATA, strategy=lambda graph: graph.mix({"a": 0.5, "b": 0.3, "c": 0.2}))
    ranks, _ = once(client, name, plain)
    undeferred = spans_by_step(ranks)
    assert undeferred != steps[0]
    every = [sorted(s for step in own.values() for s in step) for own in (undeferred, steps[0])]
    assert every[0] == every[1]


def ids_and_digests(loader: md.Loader) -> list[tuple[int, Any]]:
    return [(batch["step"], batch["sample_ids"]) for batch in loader]


def test_steps_do_not_depend_on_context_parallelism(client: Client, name: str) -> None:
    steps = {}
    for cp in (1, 2):
        tree = md.ClientPlaceTree(dp=2, cp=cp)
        made = pipeline(DATA, topology=tree, packed={"pad_to_multiple": 4})
        with md.serve(made, client, name=f"{name}-{cp}") as service:
            ranks = run(service, ids_and_digests)
            digests = {key: service.stats()[key] for key in DIGESTS}
        of_bucket = {tree.bucket_of(rank, "dp"): seen for rank, seen in enumerate(ranks)}
        for rank, seen in enumerate(ranks):
            assert seen == of_bucket[tree.bucket_of(rank, "dp")]
        steps[cp] = (of_bucket, digests)
    assert steps[1] == steps[2]


def jitter(record: Mapping[str, Any], rng: Any) -> dict[str, Any]:
    """A random transform: keeps a random part of the record."""
    kept = int(rng.integers(1, int(record["length"]) + 1))
    return unfold({"id": record["id"], "length": kept})


def test_random_transforms_draw_by_seed_and_sample(local_client: Client, name: str) -> None:
    def lengths(seed: int, loaders: int, dp: int) -> dict[Any, int]:
        made = pipeline(
            DATA,
            sources={"transform": jitter, "loaders": loaders},
            topology=md.ClientPlaceTree(dp=dp),
            seed=seed,
            epochs=2,
        )
        ranks, _ = once(local_client, f"{name}-{seed}-{loaders}-{dp}", made)
        found: dict[Any, int] = {}
        for seen in ranks:
            for batch in seen:
                for span in batch.spans:
                    found[span[:4]] = max(found.get(span[:4], 0), span[5])
        return found

    one = lengths(0, 1, 2)
    assert one == lengths(0, 2, 4)
    assert one != lengths(1, 1, 2)
    by_epoch = [{key[2:]: n for key, n in one.items() if key[:2] == ("a", e)} for e in (0, 1)]
    assert by_epoch[0].keys() == by_epoch[1].keys()
    assert by_epoch[0] != by_epoch[1], "a record is the same random one in every epoch"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_give_what_memory_gives(client: Client, name: str, tmp_path: Path, kind: str) -> None:
    """Sources on files: as many loaders as lanes, or one, see the same."""
    runs = []
    for loaders in (1, 3):
        sources = []
        for source, rows in DATA.items():
            if kind == "parquet":
                reader: Any = md.readers.Parquet(write_parquet(tmp_path / source, rows))
            else:
                reader = md.readers.Jsonl(write_jsonl(tmp_path / source, rows))
            sources.append(
                md.Source(source, reader, transform=unfold_masked, lanes=3, loaders=loaders)
            )
        made = md.Pipeline(
            sources=sources,
            topology=md.ClientPlaceTree(dp=2),
            strategy=equal_weights,
            batching=md.Packed(seq_len=128, global_batch=8),
            epochs=1,
        )
        runs.append(once(client, f"{name}-{loaders}", made))
    assert runs[0] == runs[1]
    delivered = {document[0] for seen in runs[0][0] for b in seen for document in b.documents}
    assert delivered == {row["id"] for rows in DATA.values() for row in rows}


def equal_weights(graph: md.DGraph) -> None:
    graph.mix(dict.fromkeys(DATA, 1.0))
