"""What the steps of a run consist of where nothing happens but the same changes of mixture."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from distributed import Client
from soaking.account import Span

import megadask as md
from tests.conftest import make_cluster
from tests.faults.machine import origin_with
from tests.megadask.helpers.ranks import connect


def spans_of_steps(
    pipeline: md.Pipeline, mixtures: Mapping[int, Mapping[str, float]], num_steps: int
) -> dict[int, list[Span]]:
    """Return the spans of each of so many steps of a pipeline of one rank."""
    spans: dict[int, list[Span]] = {}
    with (
        make_cluster(processes=False, n_workers=1) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(pipeline, client, resume=origin_with(pipeline, mixtures)) as service,
        connect(service, 0, timeout=120) as loader,
    ):
        for step in islice(loader.steps(), num_steps):
            found = spans[step.index] = []
            for batch in step:
                bounds = batch["spans"].tolist()
                found += [(*i, *b) for i, b in zip(batch["sample_ids"], bounds, strict=True)]
    return spans
