"""Pairs, fields, extras, samples without tokens, and collate, through worker processes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client

import megadask as md
from megadask.scheduling.assemble import cp_positions
from tests.megadask.helpers.data import STRIDE, Corpus, corpus, pipeline, source
from tests.megadask.helpers.payload import (
    count_vowels,
    fails,
    pair,
    picture,
    returns,
    stack,
    stops,
    text,
    without_bounds,
)
from tests.megadask.helpers.ranks import run, start
from tests.megadask.helpers.seen import digest

pytestmark = pytest.mark.timeout(90)

DATA = corpus({"pairs": 30, "text": 40}, longest=100)
LENGTHS = {row["id"]: row["length"] for rows in DATA.values() for row in rows}
SEQ = 256
PACKED = {"pad_to_multiple": 4, "sequences": 2, "aligned": {"advantages": "float32"}}


def equal_weights(graph: md.DGraph) -> None:
    graph.mix({"pairs": 1, "text": 1})
    graph.cost(md.costs.Transformer(hidden=8)).balance("assignment")


def made(**options: Any) -> md.Pipeline:
    sources = [
        source("pairs", DATA["pairs"], transform=pair, extras=("url", "scores")),
        source("text", DATA["text"], transform=text, extras=("url",)),
    ]
    batching = md.Packed(seq_len=SEQ, global_batch=8, **PACKED)
    return md.Pipeline(
        sources=sources, batching=batching, strategy=equal_weights, epochs=1, **options
    )


def keep(loader: md.Loader) -> list[dict[str, Any]]:
    return list(loader)


def expected_sequences(ident: int, is_pair: bool) -> list[list[int]]:
    tokens = list(range(ident * STRIDE, ident * STRIDE + LENGTHS[ident]))
    return [tokens, tokens[len(tokens) // 2 :]] if is_pair else [tokens]


def test_ranks_get_pairs_with_their_fields_and_extras(client: Client, name: str) -> None:
    tree = md.ClientPlaceTree(cp=2, tp=2)
    with md.serve(made(topology=tree), client, name=name) as service:
        ranks = run(service, keep)
        assert service.audit()["ok"]
    delivered = []
    for rank, batches in enumerate(ranks):
        here = tree.coords(rank)
        peer = next(
            other for other in range(4) if tree.coords(other) == {**here, "tp": 1 - here["tp"]}
        )
        for batch, same in zip(batches, ranks[peer], strict=True):
            assert digest(batch) == digest(same)
            assert list(batch["extras"]) == list(same["extras"])
            assert batch["sample_ids"] == same["sample_ids"]
        if here["tp"] == here["cp"] == 0:
            other = next(rank for rank in range(4) if tree.coords(rank) == {**here, "cp": 1})
            for parts in zip(batches, ranks[other], strict=True):
                delivered += check_whole(parts, tree)
    assert sorted(delivered) == sorted(LENGTHS)


def check_whole(parts: tuple[dict[str, Any], ...], tree: md.ClientPlaceTree) -> list[int]:
    """Put the slices of a microbatch together, check it, and return the records in it."""
    first = parts[0]
    bounds = first["cu_seqlens_padded"].numpy()
    assert bounds.shape == (1, 2 * 16 + 1)
    whole = {}
    for key in ("tokens", "labels", "loss_mask", "position_ids", "advantages"):
        array = np.full((1, SEQ), -1.0)
        for cp_rank, part in enumerate(parts):
            where = cp_positions(bounds, SEQ, cp_rank, 2, part["cp_layout"])
            np.put_along_axis(array, where, part[key].numpy(), axis=1)
        whole[key] = array[0]
    lengths = np.diff(first["cu_seqlens"][0].numpy())
    starts = [int(start) for start, n in zip(bounds[0, :-1], lengths, strict=True) if n]
    lengths = [int(n) for n in lengths if n]
    counts = first["num_sequences"].tolist()
    assert sum(counts) == len(lengths)
    found, at, real = [], 0, np.zeros(SEQ, bool)
    for n, (ident, count) in enumerate(zip(first["sample_ids"], counts, strict=True)):
        record = int(whole["tokens"][starts[at]]) // STRIDE
        is_pair = ident.source == "pairs"
        sequences = expected_sequences(record, is_pair)
        assert count == len(sequences)
        for tokens in sequences:
            inside = slice(starts[at], starts[at] + lengths[at])
            real[inside] = True
            assert whole["tokens"][inside].tolist() == tokens
            assert whole["position_ids"][inside].tolist() == list(range(len(tokens)))
            assert whole["labels"][inside].tolist() == [*tokens[1:], 0]
            # The mask of a token is the weight of predicting it.
            first_target = 1 if is_pair else 0
            mask = [float(first_target <= i < len(tokens) - 1) for i in range(len(tokens))]
            assert whole["loss_mask"][inside].tolist() == mask
            advantages = [token * 0.5 * is_pair for token in tokens]
            assert whole["advantages"][inside].tolist() == advantages
            at += 1
        assert first["extras"]["url"][n] == f"{ident.source}/{record}"
        scores = first["extras"]["scores"][n]
        assert (scores is None) != is_pair
        if is_pair:
            assert scores.tolist() == [record, LENGTHS[record]]
        found.append(record)
    assert not any(array[~real].any() for array in whole.values())
    return found


def test_a_run_without_pairs_has_none_of_these_keys(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        (batch, *_), _ = run(service, keep)
    assert not {"extras", "num_sequences", "advantages"} & set(batch)


def test_keys_may_name_fields_and_extras(client: Client, name: str) -> None:
    with md.serve(made(), client, name=name) as service:
        with pytest.raises(md.errors.ConfigError, match=r"got \['lab'\].*'advantages'"):
            start(service, keep, keys=["tokens", "lab"]).results()
        [batches] = run(service, keep, keys=["advantages", "extras"])
    assert {"advantages", "extras"} <= set(batches[0])
    assert "tokens" not in batches[0]


# Collate ----------------------------------------------------------------------------------------


def test_collate_sees_whole_microbatches_and_what_it_returns_is_delivered(
    client: Client, name: str
) -> None:
    tree = md.ClientPlaceTree(cp=2)
    plain = made(topology=tree)
    hooked = made(topology=tree, collate=count_vowels)
    assert hooked.components == plain.components
    assert hooked.digest != plain.digest
    results = []
    for number, declared in enumerate((plain, hooked)):
        with md.serve(declared, client, name=f"{name}-{number}") as service:
            results.append(run(service, keep))
            assert service.audit()["ok"]
    for before, after in zip(*results, strict=True):
        for one, other in zip(before, after, strict=True):
            assert "position_ids" not in other
            for key in ("tokens", "labels", "loss_mask", "cu_seqlens_padded", "num_sequences"):
                assert torch.equal(one[key], other[key])
            assert torch.equal(one["advantages"] + 1, other["advantages"])
            assert (
                other["starts"].tolist()
                == (one["spans"][:, 0] + one["step"] * 1000 + one["microbatch"]).tolist()
            )
            assert other["lanes"].tolist() == [ident.lane for ident in one["sample_ids"]]
            assert other["share"] == 0.25
            assert other["extras"] == {"path": [url.upper() for url in one["extras"]["url"]]}
            for fact in ("num_loss_tokens", "num_loss_tokens_step", "sample_ids", "is_last"):
                assert one[fact] == other[fact]


def test_slices_are_cut_and_counted_whatever_collate_left_out(client: Client, name: str) -> None:
    declared = made(topology=md.ClientPlaceTree(cp=2), collate=without_bounds)
    with md.serve(declared, client, name=name) as service:
        first, second = run(service, keep)
    facts = {*("sample_ids", "spans", "step", "microbatch", "is_last"), "cp_layout"}
    facts |= {"num_loss_tokens", "num_loss_tokens_step"}
    assert set(first[0]) == {"tokens"} | facts
    assert first[0]["tokens"].shape == (1, SEQ // 2)
    totals = {batch["step"]: batch["num_loss_tokens_step"] for batch in first}
    counted = sum(batch["num_loss_tokens"] for batch in (*first, *second))
    assert counted == sum(totals.values())


@pytest.mark.parametrize(
    ("collate", "error", "message"),
    [
        pytest.param(fails, KeyError, "no such column", id="raises"),
        pytest.param(stops, md.errors.ServiceError, "StopIteration", id="stops"),
        pytest.param(partial(returns, [1]), md.errors.ConfigError, "returned; got list", id="list"),
        pytest.param(
            partial(returns, {"x": [1]}), md.errors.ConfigError, "'x'; got list", id="value"
        ),
        pytest.param(
            partial(returns, {"x": np.array(["a"])}),
            md.errors.ConfigError,
            "'x'; got array of <U1",
            id="texts",
        ),
        pytest.param(
            partial(returns, {"is_last": np.zeros(1)}),
            md.errors.ConfigError,
            "a key; got 'is_last'",
            id="fact",
        ),
        pytest.param(
            partial(returns, {"extras": {"url": []}}),
            md.errors.ConfigError,
            "'extras'.*one a span",
            id="extras",
        ),
        pytest.param(
            partial(returns, {"tokens": np.zeros((1, 3), int)}),
            md.errors.ConfigError,
            r"'tokens', which is cut.*got shape \(1, 3\).*256",
            id="shape",
        ),
    ],
)
def test_errors_of_collate_reach_every_trainer(
    client: Client, name: str, collate: Any, error: type[Exception], message: str
) -> None:
    declared = made(topology=md.ClientPlaceTree(cp=2), collate=collate)
    with md.serve(declared, client, name=name) as service:
        outcomes = start(service, keep).outcomes()
    for caught in outcomes:
        assert isinstance(caught, error), caught
        with pytest.raises(error, match=message):
            raise caught
        assert "MegaDask: Pipeline(collate=), step 0, microbatch 0" in caught.__notes__


def test_collate_is_checked_when_it_is_declared() -> None:
    with pytest.raises(md.errors.ConfigError, match=r"collate=\); got 3"):
        made(collate=3)
    lock = __import__("threading").Lock()
    with pytest.raises(md.errors.ConfigError, match=r"Pipeline\(collate=\) does not pickle"):
        made(collate=lambda batch: batch if lock else None)


# Samples without tokens -------------------------------------------------------------------------


SIZED: Corpus = {"photos": DATA["pairs"]}


@pytest.mark.parametrize("kind", [md.Packed, md.Padded])
def test_samples_without_tokens_are_planned_by_their_size(
    client: Client, name: str, kind: Any
) -> None:
    photos = source(
        "photos", SIZED["photos"], transform=picture, size="pixels", extras=("pixels", "label")
    )
    batching = kind(seq_len=128, global_batch=4)
    for collate in (None, stack):
        declared = md.Pipeline(
            sources=[photos],
            batching=batching,
            epochs=1,
            topology=md.ClientPlaceTree(dp=2),
            collate=collate,
        )
        with md.serve(declared, client, name=f"{name}-{collate is None}") as service:
            ranks = run(service, keep)
            assert service.audit()["ok"]
        seen: list[int] = []
        steps: Counter[int] = Counter()
        planned = {}
        for batch in (batch for batches in ranks for batch in batches):
            assert not {"tokens", "loss_mask", "position_ids"} & set(batch)
            assert batch["num_loss_tokens"] == len(batch["sample_ids"])
            steps[batch["step"]] += len(batch["sample_ids"])
            planned[batch["step"]] = batch["num_loss_tokens_step"]
            lengths = [n for n in batch["cu_seqlens"].diff(dim=1).flatten().tolist() if n]
            if collate is None:
                pixels = batch["extras"]["pixels"]
                assert [len(one) for one in pixels] == lengths
                ids = [int(one[0, 0]) for one in pixels]
                labels = batch["extras"]["label"]
                assert "labels" not in batch
            else:
                pixels = batch["pixels"].split(lengths)
                ids = [int(one[0, 0]) for one in pixels]
                labels = batch["labels"].tolist()
            assert labels == [ident % 3 for ident in ids]
            seen += ids
        assert sorted(seen) == sorted(row["id"] for row in SIZED["photos"])
        assert steps == planned


def test_samples_count_once_over_slices_and_not_beside_tokens(client: Client, name: str) -> None:
    photos = source(
        "photos", SIZED["photos"], transform=picture, size="pixels", extras=("pixels", "label")
    )
    batching = md.Packed(seq_len=128, global_batch=4, pad_to_multiple=4)
    tree = md.ClientPlaceTree(cp=2)
    alone = md.Pipeline(sources=[photos], batching=batching, epochs=1, topology=tree)
    words = source("text", DATA["text"])
    beside = md.Pipeline(sources=[photos, words], batching=batching, epochs=1, topology=tree)
    for number, declared in enumerate((alone, beside)):
        with md.serve(declared, client, name=f"{name}-{number}") as service:
            first, second = run(service, keep)
        totals = {batch["step"]: batch["num_loss_tokens_step"] for batch in first}
        counted = sum(batch["num_loss_tokens"] for batch in (*first, *second))
        lengths = [row["length"] for row in DATA["text"]]
        expected = len(SIZED["photos"]) if declared is alone else sum(lengths) - len(lengths)
        assert counted == sum(totals.values()) == expected
        for batch in first:
            for ident, label in zip(batch["sample_ids"], batch["extras"]["label"], strict=True):
                assert (label is None) == (ident.source == "text")
            assert ("tokens" in batch) == (declared is beside)


def test_a_size_without_anything_to_deliver_is_refused() -> None:
    with pytest.raises(md.errors.ConfigError, match=r"Source\('photos', size=\).*extras="):
        md.Pipeline(
            sources=[source("photos", SIZED["photos"], transform=picture, size="pixels")],
            batching=md.Packed(seq_len=128, global_batch=4),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extras": "url"}, r"extras=\); got 'url'; expected a list of names"),
        ({"extras": [1]}, r"extras=\); got \[1\]"),
        ({"size": 3}, r"size=\); got 3"),
        ({"modalities": ["sequences"]}, r"modalities=\); got \['sequences'\]"),
    ],
)
def test_what_a_source_declares_is_checked(options: Any, message: str) -> None:
    with pytest.raises(md.errors.ConfigError, match=message):
        source("text", DATA["text"], **options)


def test_a_field_has_no_name_of_items() -> None:
    with pytest.raises(md.errors.ConfigError, match=r"Packed\(aligned=\) and.*'image_index'"):
        pipeline(
            DATA,
            packed={"aligned": {"image_index": "int64"}},
            sources={"modalities": ("image",)},
        )


def test_a_resumed_run_notices_other_payload() -> None:
    names = [
        pipeline({"text": DATA["text"]}, sources={"transform": text, **options}).components
        for options in ({}, {"extras": ("url",)}, {"size": "url", "extras": ("url",)})
    ]
    assert len({parts["source text"] for parts in names}) == 3
