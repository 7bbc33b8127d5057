"""A modality on a running service: items are routed with the plan, and change no sample."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.megadask.helpers.data import corpus, pipeline, unfold
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import drain, spans_by_step, take

pytestmark = pytest.mark.timeout(60)

DATA = corpus({"a": 40, "b": 20}, longest=128)


def with_images(record: Mapping[str, Any]) -> dict[str, Any]:
    count = int(record["id"]) % 3
    return {**unfold(record), "image": [np.zeros((n + 1, 4), np.uint8) for n in range(count)]}


def encode_apart(graph: md.DGraph) -> None:
    graph.mix({"a": 1, "b": 1})
    graph.select("image").cost(md.costs.VisionEncoder("image", hidden=64))


def made(**options: Any) -> md.Pipeline:
    sources = {"transform": with_images, "modalities": ("image",)}
    return pipeline(DATA, sources=sources, strategy=encode_apart, **options)


def test_plans_route_the_items_of_their_spans(
    local_cluster: LocalCluster, local_client: Client, name: str
) -> None:
    tree = md.ClientPlaceTree(dp=2, tp=2)
    with md.serve(made(topology=tree), local_client, name=name) as service:
        run(service, partial(take, count=1))
        record = local_cluster.scheduler.plugins["megadask-supervisor"]._runs[name].record
        plan = record.plans[0].plan
        routing = plan.routing["image"]
        assert len(routing.loads) == 4
        expected = [
            (row, item)
            for row, sample in enumerate(plan.sample_ids(np.arange(plan.table.num_rows)))
            if plan.table["start"][row] == 0
            for item in range(image_count(plan, row, sample))
        ]
        found = zip(routing.span_I.tolist(), routing.item_I.tolist(), strict=True)
        assert sorted(found) == expected
        assert expected
        np.testing.assert_array_equal(routing.bucket_I, plan.bucket_N[routing.span_I])


def image_count(plan: Any, row: int, sample: md.SampleId) -> int:
    ragged = plan.table.ragged["image"]
    count = int(ragged.offsets[row + 1] - ragged.offsets[row])
    assert ragged.lengths_I[ragged.offsets[row] : ragged.offsets[row + 1]].tolist() == [
        *range(1, count + 1)
    ]
    return count


def test_the_same_samples_are_delivered_with_and_without(local_client: Client, name: str) -> None:
    plain = pipeline(DATA, strategy=lambda graph: graph.mix({"a": 1, "b": 1}))
    seen = []
    for declared in (plain, made()):
        with md.serve(declared, local_client, name=name) as service:
            seen.append(spans_by_step(run(service, drain)))
            assert service.audit()["ok"]
    assert seen[0] == seen[1]


def test_a_modality_that_no_source_reports_is_named() -> None:
    with pytest.raises(md.errors.ConfigError, match=r"'image'.*Source\(modalities="):
        pipeline(DATA, strategy=encode_apart)
    with pytest.raises(md.errors.ConfigError, match="max_tokens"):
        pipeline(DATA, strategy=lambda graph: graph.balance(max_tokens=10))
    with pytest.raises(md.errors.ConfigError, match="equal_counts"):
        pipeline(DATA, strategy=lambda graph: graph.balance(equal_counts=True))
