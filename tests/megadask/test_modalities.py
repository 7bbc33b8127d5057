"""A modality on a running service: items are routed with the plan, and change no sample."""

from __future__ import annotations

import io
import wave
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.megadask.helpers.data import STRIDE, corpus, pipeline, unfold
from tests.megadask.helpers.photos import PHOTOS, photos
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import digest, drain, spans_by_step, take

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


@pytest.mark.parametrize("names", [("tokens",), ("image", "image_grid")])
def test_names_that_a_batch_has_otherwise_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(md.errors.ConfigError, match=r"no key of a batch has|one key twice"):
        pipeline(DATA, sources={"modalities": names})


# Delivery -------------------------------------------------------------------------------------


BY_ID = {row["id"]: photos(row) for rows in PHOTOS.values() for row in rows}


def deliver(encode: str | None, axis: Any = "world", **options: Any) -> md.Pipeline:
    def strategy(graph: md.DGraph) -> None:
        graph.mix({"a": 1, "b": 1})
        if encode is not None:
            cost = md.costs.VisionEncoder("image", hidden=64)
            graph.select("image", encode=encode).distribute(axis).cost(cost)

    sources = {"transform": photos, "modalities": ("image",)}
    packed = {"pad_to_multiple": 4}
    return pipeline(PHOTOS, sources=sources, strategy=strategy, packed=packed, **options)


def everything(loader: md.Loader) -> list[dict[str, Any]]:
    return [dict(batch) for batch in loader]


def items_in(batch: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The first numbers of the items that a rank was given, having checked how they lie."""
    bounds = batch["image_cu_seqlens"].tolist()
    assert bounds[-1] == len(batch["image"])
    found = []
    for place, (first, last) in enumerate(pairwise(bounds)):
        item = batch["image"][first:last]
        assert item[:, 0].tolist() == list(range(int(item[0, 0]), int(item[0, 0]) + len(item)))
        assert batch["image_grid"][place].tolist() == [len(item), 1]
        assert batch["image_rows"][place] == len(item)
        found.append((int(item[0, 0]), len(item)))
    return found


def documents(batch: Mapping[str, Any]) -> list[int]:
    """The records of a whole batch, in the order of its packs."""
    return [
        int(batch["tokens"][pack, first]) // STRIDE
        for pack, firsts in enumerate(batch["cu_seqlens_padded"].tolist())
        for first, length in zip(firsts, batch["cu_seqlens"][pack].diff().tolist(), strict=False)
        if length
    ]


def carry_out(ranks: list[dict[str, Any]]) -> list[dict[tuple[int, int], Any]]:
    """Do what `md.exchange` does for all ranks of one turn; (microbatch, place) to the item."""
    wires: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for server, batch in enumerate(ranks):
        items = batch["image"].tensor_split(batch["image_cu_seqlens"][1:-1].long())
        for user, number in batch["image_send"].tolist():
            wires[server, user].append(items[number])
    came = [
        {
            (microbatch, place): wires[server, user].pop(0)
            for server, microbatch, place in batch["image_receive"].tolist()
        }
        for user, batch in enumerate(ranks)
    ]
    assert not any(wires.values())
    return came


def rows_of(came: dict[tuple[int, int], Any], batch: Mapping[str, Any]) -> Any:
    """The rows that a microbatch uses, of all that came to its rank."""
    mine = [came[key] for key in sorted(came) if key[0] == batch["microbatch"]]
    return np.concatenate([np.empty((0, 2), int), *mine])


def placed(batches: list[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Which row replaces which token, over some slices of a batch."""
    return sorted(
        pair
        for batch in batches
        for pair in zip(
            batch["tokens"].flatten().tolist(),
            batch["image_index"].flatten().tolist(),
            strict=True,
        )
    )


def check_index(batch: Mapping[str, Any], rows: Any) -> None:
    """Every token that the sample replaces is replaced by the very row that the sample says."""
    expected = {}
    for record in documents(batch):
        sample = BY_ID[record]
        if "image" in sample:
            own = np.concatenate(sample["image"])
            index = sample["image_index"]
            for token, row in zip(sample["tokens"].tolist(), index.tolist(), strict=True):
                if row >= 0:
                    expected[token] = own[row].tolist()
    is_item = batch["image_index"] >= 0
    tokens, index = batch["tokens"][is_item], batch["image_index"][is_item]
    found = dict(zip(tokens.tolist(), rows[index].tolist(), strict=True))
    assert found == expected


@pytest.mark.parametrize("encode", ["step", "microbatch", None])
def test_items_reach_who_encodes_them_and_their_places(
    client: Client, name: str, encode: str | None
) -> None:
    declared = deliver(encode, global_batch=8, topology=md.ClientPlaceTree(dp=2))
    with md.serve(declared, client, name=name) as service:
        ranks = run(service, everything)
        assert service.audit()["ok"]
    assert len(ranks[0]) == len(ranks[1]) > 4
    encoded: list[tuple[int, ...]] = []
    came: list[dict[tuple[int, int], Any]] = [{}, {}]
    largest = [0, 0]
    for batches in zip(*ranks, strict=True):
        has_turn = [f"image{ending}" in batches[0] for ending in ("", "_cu_seqlens")]
        assert all(("image" in batch) == has_turn[0] == has_turn[1] for batch in batches)
        if encode == "step":
            assert has_turn[0] == (batches[0]["microbatch"] == 0)
        if has_turn[0]:
            here = [items_in(batch) for batch in batches]
            encoded += [item for items in here for item in items]
            largest = [a + sum(n for _, n in items) for a, items in zip(largest, here, strict=True)]
            assert ("image_send" in batches[0]) == (encode is not None)
            if encode is not None:
                came = carry_out(list(batches))
        for rank, batch in enumerate(batches):
            check_index(batch, batch["image"] if encode is None else rows_of(came[rank], batch))
    # Every item of the data is encoded exactly once, wherever that is.
    expected = [
        (int(item[0, 0]), len(item))
        for sample in BY_ID.values()
        for item in sample.get("image", [])
    ]
    assert sorted(encoded) == sorted(expected)
    if encode == "step":
        assert max(largest) / (sum(largest) / 2) < 1.2


def test_ranks_that_share_work_and_slices(local_client: Client, name: str) -> None:
    """dp=2, cp=2, tp=2, encoders along dp and cp: tensor-parallel peers encode the same."""
    tree = md.ClientPlaceTree(dp=2, cp=2, tp=2)
    declared = deliver("microbatch", ("dp", "cp"), global_batch=4, topology=tree)
    whole = deliver(None, global_batch=4, topology=md.ClientPlaceTree(dp=2))
    with md.serve(declared, local_client, name=name) as service:
        ranks = run(service, everything)
    with md.serve(whole, local_client, name=name) as service:
        plain = run(service, everything)
    num_items = 0
    for at, batches in enumerate(zip(*ranks, strict=True)):
        came = carry_out(list(batches))
        for rank, batch in enumerate(batches):
            place = tree.coords(rank)
            peer = next(r for r in range(8) if tree.coords(r) == place | {"tp": 0})
            np.testing.assert_array_equal(batch["image"], batches[peer]["image"])
            num_items += len(items_in(batch))
            rows, own = rows_of(came[rank], batch), plain[place["dp"]][at]["image"]
            assert rows.tolist() == (own.tolist() if len(own) else [])
        for dp in range(2):
            ends = ({"pp": 0, "dp": dp, "cp": cp, "tp": 0} for cp in range(2))
            slices = [batches[r] for end in ends for r in range(8) if tree.coords(r) == end]
            assert placed(slices) == placed([plain[dp][at]])
    assert num_items == 2 * sum(len(sample.get("image", [])) for sample in BY_ID.values())


def test_items_go_to_the_first_stage_only(local_client: Client, name: str) -> None:
    declared = deliver(None, topology=md.ClientPlaceTree(dp=1, pp=3), global_batch=2)
    with md.serve(declared, local_client, name=name) as service:
        first, middle, last = run(service, lambda loader: dict(next(iter(loader))))
    own = {"image", "image_cu_seqlens", "image_rows", "image_grid", "image_index"}
    assert own <= first.keys()
    assert not own & (middle.keys() | last.keys())


def test_items_that_were_evicted_are_read_again(local_client: Client, name: str) -> None:
    limits = md.Limits(loader_bytes=500, constructor_bytes=0)
    declared = deliver("step", global_batch=8)
    seen = []
    for options in ({}, {"limits": limits}):
        with md.serve(declared, local_client, name=name, **options) as service:
            ranks = run(service, everything)
            seen.append([[digest(batch) for batch in batches] for batches in ranks])
            rereads = sum(loader["rereads"] for loader in service.stats()["loaders"])
    assert seen[0] == seen[1]
    assert rereads


def test_after_a_resume_in_its_middle_a_step_brings_the_items_that_are_left(
    local_client: Client, name: str
) -> None:
    declared = deliver("step", global_batch=8)

    def begin(loader: md.Loader) -> Any:
        batches = [dict(batch) for batch in islice(loader, 5)]
        assert [batch["microbatch"] for batch in batches] == [0, 1, 2, 3, 0]
        return loader.state_dict()

    with md.serve(declared, local_client, name=name) as service:
        state, same = run(service, begin)
    assert state == same
    with md.serve(declared, local_client, name=name, resume=state) as service:
        ranks = run(service, lambda loader: [dict(batch) for batch in islice(loader, 3)])
    assert [(batch["step"], batch["microbatch"]) for batch in ranks[0]] == [(1, 1), (1, 2), (1, 3)]
    assert ["image" in batch for batch in ranks[0]] == [True, False, False]
    encoded = [item for batches in ranks for item in items_in(batches[0])]
    left = [record for batches in ranks for batch in batches for record in documents(batch)]
    images = [item for record in left for item in BY_ID[record].get("image", [])]
    assert sorted(encoded) == sorted((int(item[0, 0]), len(item)) for item in images)
    came = carry_out([batches[0] for batches in ranks])
    for rank, batches in enumerate(ranks):
        for batch in batches:
            check_index(batch, rows_of(came[rank], batch))


def test_images_audio_and_video_come_together(local_client: Client, name: str) -> None:
    """From files to the places of their embeddings; a source of text alone beside them."""
    rng = np.random.default_rng(0)

    def record(number: int) -> dict[str, Any]:
        tone = io.BytesIO()
        with wave.open(tone, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            samples = rng.integers(-9000, 9000, 800 + 160 * number, np.int16)
            file.writeframes(samples.tobytes())
        return {
            "text": f"{number}<audio>: <image>" + "<video>" * (number % 2),
            "image": rng.integers(0, 256, (16, 16 * (1 + number % 3), 3), np.uint8),
            "audio": tone.getvalue(),
            "video": [list(rng.integers(0, 256, (3, 16, 16, 3), np.uint8))] * (number % 2),
        }

    transforms = md.transforms
    words = transforms.Bytes("text")
    also = (transforms.Placeholders("audio", 258), transforms.Placeholders("video", 259))
    see = transforms.Chain(
        transforms.DecodeImage("image", patch=8),
        transforms.LogMel("audio", sample_rate=8000, n_mels=20, hop=160, window=400),
        transforms.Frames("video", patch=16),
        transforms.Placeholders("image", 257, words, also=also),
    )
    records = [record(number) for number in range(12)]
    modalities = ("audio", "image", "video")
    texts = [{"text": f"{number}. only text"} for number in range(20)]
    declared = md.Pipeline(
        sources=[
            md.Source("seen", md.readers.InMemory(records), see, modalities=modalities),
            md.Source("read", md.readers.InMemory(texts), words),
        ],
        topology=md.ClientPlaceTree(dp=2),
        batching=md.Packed(seq_len=128, global_batch=4),
        epochs=1,
    )
    with md.serve(declared, local_client, name=name) as service:
        batches = [batch for batches in run(service, everything) for batch in batches]
    # Every placeholder of a record gets the sum of its own row, whatever lies around it.
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for batch in batches:
        bounds = zip(batch["cu_seqlens_padded"], batch["cu_seqlens"].diff(), strict=True)
        starts = [
            (pack, first, first + length)
            for pack, (firsts, lengths) in enumerate(bounds)
            for first, length in zip(firsts.tolist(), lengths.tolist(), strict=False)
            if length
        ]
        for modality in modalities:
            sums = batch[modality].double().sum(-1, keepdim=True)
            index = batch[f"{modality}_index"]
            zeros = sums.new_zeros((*index.shape, 1))
            placed = md.scatter_embeddings(zeros, md.exchange(sums, batch, modality), index)
            for pack, first, last in starts:
                is_item = index[pack, first:last] >= 0
                if is_item.any():
                    text = bytes(t for t in batch["tokens"][pack, first:last].tolist() if t < 256)
                    number = int(text.partition(b":")[0])
                    found[modality, number] = placed[pack, first:last][is_item].flatten().tolist()
    expected = {
        (modality, number): np.concatenate(sample[modality]).sum(-1, dtype=np.float64).tolist()
        for number, sample in enumerate(map(see, records))
        for modality in modalities
        if sample is not None and sample[modality]
    }
    assert found.keys() == expected.keys()
    for key, numbers in expected.items():
        np.testing.assert_allclose(found[key], numbers, rtol=1e-12)
