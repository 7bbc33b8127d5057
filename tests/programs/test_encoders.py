"""Embeddings of items reach the ranks that use them, and their gradients come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client

import megadask as md
from tests.megadask.helpers.data import pipeline
from tests.megadask.helpers.encoding import Tiny, gradients
from tests.megadask.helpers.gloo import Members, start_members
from tests.megadask.helpers.photos import PHOTOS, photos
from tests.megadask.helpers.ranks import run

pytestmark = pytest.mark.timeout(120)


def a_batch(lengths: list[int], receive: list[list[int]], **facts: Any) -> dict[str, Any]:
    """A batch of rank 0 in a world of one."""
    send = sorted([0, number] for number in range(len(receive)))
    return {
        "microbatch": 0,
        "image_cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "image_rows": torch.tensor(lengths, dtype=torch.int64),
        "image_send": torch.tensor(send, dtype=torch.int64).reshape(-1, 2),
        "image_receive": torch.tensor(receive, dtype=torch.int64).reshape(-1, 3),
        **facts,
    }


class TestAlone:
    def test_rows_come_in_the_order_of_the_microbatch(self) -> None:
        own = torch.arange(6.0)[:, None].requires_grad_()
        batch = a_batch([1, 2, 3], [[0, 0, 1], [0, 0, 2], [0, 0, 0]])
        found = md.exchange(own, batch, "image")
        assert found.flatten().tolist() == [3, 4, 5, 0, 1, 2]
        (found.flatten() * torch.arange(6.0)).sum().backward()
        assert own.grad is not None
        assert own.grad.flatten().tolist() == [3, 4, 5, 0, 1, 2]

    def test_rows_per_item_differ_from_what_was_planned(self) -> None:
        batch = a_batch([4, 8], [[0, 0, 1], [0, 0, 0]])
        rows = torch.tensor([1, 2])
        found = md.exchange(torch.arange(3.0)[:, None], batch, "image", rows_per_item=rows)
        assert found.flatten().tolist() == [1, 2, 0]
        with pytest.raises(md.errors.ConfigError, match=r"3 rows.*12.*rows_per_item"):
            md.exchange(torch.zeros(3, 1), batch, "image")
        with pytest.raises(md.errors.ConfigError, match="rows_per_item"):
            md.exchange(torch.zeros(3, 1), batch, "image", rows_per_item=rows[:1])

    def test_a_placeholder_goes_nowhere_and_stays_in_the_graph(self) -> None:
        weight = torch.ones(2, requires_grad=True)
        batch = a_batch([], [], image=torch.zeros(0, 0))
        items, cu_seqlens = md.items_or_placeholder(batch, "image", torch.ones(5, 2))
        assert cu_seqlens.tolist() == [0, 5]
        found = md.exchange(items * weight, batch, "image")
        assert found.shape == (0, 2)
        tokens = torch.zeros(1, 3, 2)
        index = torch.full((1, 3), -1)
        md.scatter_embeddings(tokens, found, index).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [0, 0]

    def test_a_step_is_exchanged_at_once(self) -> None:
        own = torch.arange(6.0)[:, None].requires_grad_()
        batch = a_batch([1, 2, 3], [[0, 0, 0], [0, 2, 1], [0, 2, 0]])
        with pytest.raises(md.errors.ConfigError, match="exchange_step"):
            md.exchange(own, batch, "image")
        shared = md.exchange_step(own, batch, "image")
        assert [shared[m].flatten().tolist() for m in range(3)] == [[0], [], [3, 4, 5, 1, 2]]
        (2 * shared[0]).sum().backward()
        shared[1].sum()
        (3 * shared[2]).sum().backward()
        assert own.grad is None
        shared.backward()
        assert own.grad is not None
        assert own.grad.flatten().tolist() == [2, 3, 3, 3, 3, 3]

    def test_other_ranks_need_a_group(self) -> None:
        batch = a_batch([1], [[1, 0, 0]])
        with pytest.raises(md.errors.ConfigError, match=r"not in the process group.*\[1\]"):
            md.exchange(torch.zeros(1, 1), batch, "image")

    def test_a_later_microbatch_of_a_step_brings_no_items(self) -> None:
        with pytest.raises(md.errors.ConfigError, match="first microbatch"):
            md.exchange(torch.zeros(1, 1), {"microbatch": 3}, "image")

    def test_scatter(self) -> None:
        tokens = torch.zeros(2, 2, 1, requires_grad=True)
        items = torch.tensor([[1.0], [2.0]], requires_grad=True)
        index = torch.tensor([[-1, 1], [0, 1]])
        found = md.scatter_embeddings(tokens, items, index)
        assert found.flatten().tolist() == [0, 2, 1, 2]
        found.sum().backward()
        assert items.grad is not None
        assert tokens.grad is not None
        assert items.grad.flatten().tolist() == [1, 2]
        assert tokens.grad.flatten().tolist() == [1, 0, 0, 0]
        with pytest.raises(IndexError):
            md.scatter_embeddings(tokens, items, index + 1)
        with pytest.raises(md.errors.ConfigError, match="scatter_embeddings"):
            md.scatter_embeddings(tokens, torch.zeros(2, 3), index)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    with start_members(2, tmp_path_factory.mktemp("gloo")) as made:
        yield made


def declared(tree: md.ClientPlaceTree, encode: str | None) -> md.Pipeline:
    def strategy(graph: md.DGraph) -> None:
        graph.mix({"a": 1, "b": 1}).broadcast_at("tp")
        if encode is not None:
            cost = md.costs.VisionEncoder("image", hidden=64)
            graph.select("image", encode=encode).cost(cost)

    return pipeline(
        PHOTOS,
        sources={"transform": photos, "modalities": ("image",)},
        packed={"pad_to_multiple": 4},
        topology=tree,
        global_batch=4,
        strategy=strategy,
    )


@pytest.fixture(scope="module")
def alone(client: Client) -> list[Any]:
    """Loss and gradients of every step, in one process that encodes all items itself."""
    pipeline_of_one = declared(md.ClientPlaceTree(), None)
    with md.serve(pipeline_of_one, client, name="alone") as service:
        (seen,) = run(service, lambda loader: gradients(loader, Tiny(None)))
    assert len(seen) > 2
    assert all(np.abs(numbers[1:13]).max() > 1e-3 for _, numbers in seen)
    return seen


@pytest.mark.parametrize("encode", ["microbatch", "step"])
@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_two_ranks_have_the_gradients_of_one(
    client: Client, name: str, members: Members, alone: list[Any], axis: str, encode: str
) -> None:
    tree = md.ClientPlaceTree(**{axis: 2})
    with md.serve(declared(tree, encode), client, name=name) as service:
        first, second = members.run(service, "exchange_gradients", encode=encode)
    assert isinstance(first, list), first
    assert first == second
    assert [index for index, _ in first] == [index for index, _ in alone]
    for (_, found), (_, expected) in zip(first, alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_ranks_that_are_broadcast_to_encode_their_own_items(
    client: Client, name: str, members: Members, alone: list[Any]
) -> None:
    """Both tensor-parallel ranks have the whole loss, and between them they encode each item."""
    with md.serve(declared(md.ClientPlaceTree(tp=2), "microbatch"), client, name=name) as service:
        job = {"groups": [[0, 1]], "encode": "microbatch"}
        first, second = members.run(service, "exchange_gradients", **job)
    assert isinstance(first, list), first
    assert first == second
    for (_, found), (_, expected) in zip(first, alone, strict=True):
        np.testing.assert_allclose(found, 2 * np.array(expected), rtol=1e-6, atol=1e-9)


def test_a_rank_that_does_not_come_is_not_waited_for(
    client: Client, name: str, members: Members
) -> None:
    with md.serve(declared(md.ClientPlaceTree(dp=2), "microbatch"), client, name=name) as service:
        first, second = members.run(service, "come_alone")
    assert second == {}
    assert first["error"] == "DeadlineError"
    assert "timeout of the process group" in first["message"]


def test_the_hf_preset_leaves_items_as_they_are() -> None:
    from megadask.trainer.presets import to_hf

    index = torch.tensor([[-1, 0, 1], [-1, -1, -1]])
    items = {"image": torch.zeros(2, 3), "image_cu_seqlens": torch.tensor([0, 2])}
    made = to_hf({"tokens": torch.zeros(2, 3), "image_index": index, **items}, is_sliced=False)
    assert made["image"].shape == (2, 3)
    assert made["image_index"].shape == made["input_ids"].shape == (1, 6)
