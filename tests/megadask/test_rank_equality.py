"""Laws of what ranks get, on random meshes: equal bytes for a bucket, and slices that add up."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from distributed import Client

import megadask as md
from tests.megadask.helpers.data import corpus, pipeline
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import Seen, digest, every_token, see, shape, tokens_delivered

pytestmark = pytest.mark.timeout(90)

SEQ = 64
DATA = corpus({"a": 24, "b": 12}, longest=150, seed=2)
TOKENS = ("tokens", "labels", "loss_mask", "position_ids")


def random_mesh(rng: random.Random) -> md.ClientPlaceTree:
    """Return a mesh of 2 to 8 ranks; of those with context parallelism more than of others."""
    while True:
        sizes = {axis: rng.choice([1, 2, 4]) for axis in ("dp", "tp")}
        sizes |= {"cp": rng.choice([1, 2, 2, 4]), "pp": rng.choice([1, 1, 2, 3])}
        order = rng.sample(["dp", "cp", "tp", "pp"], 4)
        tree = md.ClientPlaceTree(**sizes, order=tuple(order))
        if 2 <= tree.world_size <= 8:
            return tree


@pytest.mark.parametrize("layout", ["document", "sequence"])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_get_equal_bytes_and_slices_add_up(
    local_client: Client, name: str, seed: int, layout: str
) -> None:
    rng = random.Random(f"{seed} {layout}")
    tree = random_mesh(rng)
    multiple = 2 * tree.cp if layout == "document" else rng.choice([1, 4])
    made = pipeline(
        DATA,
        seq_len=SEQ,
        global_batch=8,
        micro_batch=rng.choice([1, 2]) if tree.dp < 4 else 1,
        packed={"pad_to_multiple": multiple},
        topology=tree,
        strategy=lambda graph: graph.context(layout),
    )
    with md.serve(made, local_client, name=name) as service:
        ranks = run(service, list)
        assert service.audit()["ok"]
    check(tree, ranks, layout)


def test_the_meshes_are_of_all_kinds() -> None:
    trees = [
        random_mesh(random.Random(f"{seed} {layout}"))
        for seed in range(4)
        for layout in ("document", "sequence")
    ]
    for axis in ("dp", "cp", "tp", "pp"):
        assert any(getattr(tree, axis) > 1 for tree in trees), axis
    assert any(tree.cp > 1 and tree.dp > 1 for tree in trees)
    assert max(tree.world_size for tree in trees) == 8


def check(tree: md.ClientPlaceTree, ranks: Sequence[Sequence[Any]], layout: str) -> None:
    whole: dict[int, list[Seen]] = {}
    for bucket in range(tree.num_buckets("dp")):
        slices = defaultdict(list)  # (cp, pp) coordinates to their ranks
        for rank in tree.ranks_of(bucket, "dp"):
            coords = tree.coords(rank)
            slices[coords["cp"], coords["pp"]].append(rank)
            if coords["pp"] not in (0, tree.pp - 1):
                for batch in ranks[rank]:
                    assert not set(TOKENS) & set(batch)
        for same in slices.values():
            digests = [list(map(digest, ranks[rank])) for rank in same]
            assert all(one == digests[0] for one in digests)
        firsts = []  # by cp: what the first and the last stage get between them
        for cp in range(tree.cp):
            ends = [ranks[slices[cp, pp][0]] for pp in (0, tree.pp - 1)]
            firsts.append([{**first, **last} for first, last in zip(*ends, strict=True)])
        for batches in zip(*firsts, strict=True):
            assert {batch["cp_layout"] for batch in batches} == {
                layout if tree.cp > 1 else "document"
            }
        whole[bucket] = [see(join(parts, layout)) for parts in zip(*firsts, strict=True)]
    # `see` has looked at every token, label and position; together they are the corpus.
    assert tokens_delivered(whole.values()) == every_token([*DATA["a"], *DATA["b"]])
    assert len({tuple(shape(seen)) for seen in whole.values()}) == 1
    for steps in zip(*whole.values(), strict=True):
        assert len({batch.num_loss_tokens_step for batch in steps}) == 1
    counted = [batch.num_loss_tokens for seen in whole.values() for batch in seen]
    steps = {batch.step: batch.num_loss_tokens_step for batch in whole[0]}
    assert sum(counted) == sum(steps.values())


def join(parts: Sequence[Mapping[str, Any]], layout: str) -> dict[str, Any]:
    """Return the batch whose slices these are, by the definition.

    Of whatever is cut, a document and its pads or the pack, rank r has chunks r and 2 cp - 1 - r.
    """
    cp = len(parts)
    first = parts[0]
    for other in parts[1:]:
        for key in ("cu_seqlens", "cu_seqlens_padded", "spans"):
            assert torch.equal(first[key], other[key])
        assert first["sample_ids"] == other["sample_ids"]
    num_packs = len(first["tokens"])
    joined = {**first, "num_loss_tokens": sum(part["num_loss_tokens"] for part in parts)}
    for key in TOKENS:
        assert all(part[key].shape == (num_packs, SEQ // cp) for part in parts)
        joined[key] = torch.stack(
            [
                _pack([part[key][q] for part in parts], _bounds(first, q, layout))
                for q in range(num_packs)
            ]
        )
    return joined


def _bounds(batch: Mapping[str, Any], pack: int, layout: str) -> list[int]:
    if layout == "sequence":
        return [0, SEQ]
    return sorted({*batch["cu_seqlens_padded"][pack].tolist(), SEQ})


def _pack(rows: Sequence[torch.Tensor], bounds: Sequence[int]) -> torch.Tensor:
    cp = len(rows)
    parts: list[torch.Tensor] = []
    for start, stop in pairwise(bounds):
        # What came before was shared out evenly.
        own = [row[start // cp : stop // cp] for row in rows]
        halves = [row.chunk(2) if cp > 1 else (row, row[:0]) for row in own]
        parts += [half[0] for half in halves]
        parts += [half[1] for half in reversed(halves)]
    return torch.cat(parts)
