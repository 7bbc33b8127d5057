"""Whatever user code raises, trainers hear of it and where it was; and the workers live on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from distributed import Client

import megadask as md
from tests.megadask.helpers.data import corpus, source
from tests.megadask.helpers.raising import ERRORS, Raises

pytestmark = pytest.mark.timeout(90)

ROWS = corpus({"web": 20}, longest=100)["web"]
LIMITS = md.Limits(reply_s=15, silent_s=8, journal_s=5, recovery_s=15)


def pipeline(transform: Any = None, **options: Any) -> md.Pipeline:
    web = source("web", ROWS) if transform is None else source("web", ROWS, transform=transform)
    batching = md.Packed(seq_len=128, global_batch=4)
    return md.Pipeline(sources=[web], batching=batching, epochs=1, **options)


def by_cost(raises: Raises) -> md.Pipeline:
    def strategy(graph: md.DGraph) -> None:
        graph.distribute("dp").cost(raises).balance("assignment")

    return pipeline(strategy=strategy, topology=md.ClientPlaceTree(dp=2))


def by_collate(raises: Raises) -> md.Pipeline:
    return pipeline(collate=raises)


WAYS: dict[str, Callable[[Raises], md.Pipeline]] = {
    "source 'web'": pipeline,
    "planning step 0": by_cost,
    "Pipeline(collate=)": by_collate,
}


@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("words", ERRORS)
def test_any_error_of_user_code_reaches_trainers_and_says_where(
    client: Client, name: str, words: str, where: str
) -> None:
    workers = client.run(lambda: None).keys()
    with md.serve(WAYS[where](Raises(words)), client, name=name, limits=LIMITS) as service:
        with (
            md.connect(service.address, service=name, rank=0, timeout=30) as loader,
            pytest.raises(Exception) as caught,  # noqa: PT011
        ):
            next(iter(loader))
        error = caught.value
        said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        for word in (*words.split(": "), where):
            assert word in said
        is_ours = isinstance(error, md.errors.MegaDaskError)
        assert is_ours or isinstance(error, ValueError | ExceptionGroup), error
    assert client.run(lambda: None).keys() == workers, "a worker was lost"
