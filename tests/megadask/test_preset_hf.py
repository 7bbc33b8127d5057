"""``connect(preset="hf")`` against a real model of transformers, with random weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import megadask as md
from megadask.scheduling.assemble import Pieces, assemble, num_loss_tokens, slice_cp
from megadask.trainer.presets import Form, to_hf
from tests.megadask.helpers.data import pipeline, records
from tests.megadask.helpers.ranks import run

pytestmark = pytest.mark.timeout(120)

VOCABULARY = 64
SEQ = 32


def make_model(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


Document = tuple[np.ndarray, np.ndarray, int, int]  # tokens, mask, start, stop of its span


def documents(lengths: Sequence[int], seed: int = 0, cut: Sequence[bool] = ()) -> list[Document]:
    """Return documents; of those that are cut the span lacks the last token, its last target."""
    rng = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths):
        goes_on = number < len(cut) and cut[number]
        tokens = rng.integers(0, VOCABULARY, length + goes_on)
        made.append((tokens, rng.random(len(tokens)) < 0.8, 0, length))
    return made


def pack(rows: Sequence[Sequence[Document]], multiple: int = 1) -> dict[str, Any]:
    """Return the batch of some packs of documents, as a loader without preset makes it."""
    spec = md.Packed(seq_len=SEQ, global_batch=1, micro_batch=len(rows), pad_to_multiple=multiple)
    flat = [(q, document) for q, row in enumerate(rows) for document in row]
    offset, before = [], dict.fromkeys(range(len(rows)), 0)
    for q, document in flat:
        offset.append(before[q])
        before[q] += int(spec.padded(np.array([document[3]]))[0])
    tokens = [document[0] for _, document in flat]
    pieces = Pieces(
        pack_N=np.array([q for q, _ in flat], np.int64),
        offset_N=np.array(offset, np.int64),
        start_N=np.array([document[2] for _, document in flat], np.int64),
        stop_N=np.array([document[3] for _, document in flat], np.int64),
        tokens=np.concatenate([*tokens, np.zeros(0, np.int64)]),
        token_offsets=np.cumsum([0, *(len(one) for one in tokens)]),
        mask=np.concatenate([*(document[1] for _, document in flat), np.zeros(0, bool)]),
    )
    return as_batch(assemble(spec, pieces))


def as_batch(arrays: dict[str, Any], total: int | None = None) -> dict[str, Any]:
    count = num_loss_tokens(arrays)
    batch: dict[str, Any] = {
        key: int(value) if value.ndim == 0 else torch.from_numpy(value)
        for key, value in arrays.items()
    }
    facts = {"num_loss_tokens": count, "num_loss_tokens_step": count if total is None else total}
    return {**batch, **facts, "step": 0, "microbatch": 0, "is_last": True}


def assert_near(one: torch.Tensor, other: Any) -> None:
    """Compare sums of losses: transformers computes these in float32."""
    torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def own(model: Any, document: Document) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the model says of a document alone: logits, and the sum of its loss."""
    tokens, mask, _, stop = document
    inputs = torch.from_numpy(tokens)[None]
    logits = model(input_ids=inputs[:, :stop]).logits[0]
    targets = inputs[0, 1:]
    loss = torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none")
    return logits, (loss * torch.from_numpy(mask[1:])).sum()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_logits_and_loss_are_those_of_the_documents_alone(attention: str, multiple: int) -> None:
    model = make_model(attention)
    rows = [documents([5, 1, 8, 7], 1), documents([32], 2), documents([3], 3), []]
    batch = pack(rows, multiple)
    inputs = md.model_inputs(to_hf(batch, is_sliced=False))
    assert "attention_mask" not in inputs
    assert inputs["input_ids"].shape == (1, 4 * SEQ)
    with torch.no_grad():
        output = model(**inputs)
        alone = [[own(model, document) for document in row] for row in rows]
    assert torch.isfinite(output.logits).all()
    for q, row in enumerate(alone):
        for n, (logits, _) in enumerate(row):
            first = q * SEQ + int(batch["cu_seqlens_padded"][q, n])
            torch.testing.assert_close(output.logits[0, first : first + len(logits)], logits)
    total = sum(loss for row in alone for _, loss in row)
    assert_near(output.loss * batch["num_loss_tokens_step"], total)


def by_sequences(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """Attend as varlen kernels do: within each sequence, whatever positions say."""
    assert mask is None
    assert torch.equal(given["cu_seq_lens_q"], given["cu_seq_lens_k"])
    out = torch.zeros_like(query)
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    for first, stop in pairwise(given["cu_seq_lens_q"].tolist()):
        assert stop - first <= given["max_length_q"] == given["max_length_k"]
        parts = (tensor[:, :, first:stop] for tensor in (query, key, value))
        out[:, :, first:stop] = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, scale=scaling
        )
    return out.transpose(1, 2), None


@pytest.mark.parametrize("multiple", [1, 4])
def test_sequences_reach_attention_and_are_those_of_the_positions(multiple: int) -> None:
    """What flash attention goes by and what sdpa goes by mean the same documents."""
    transformers.AttentionInterface.register("by_sequences", by_sequences)
    batch = pack([documents([5, 1, 8, 7], 1), documents([32], 2), []], multiple)
    inputs = md.model_inputs(to_hf(batch, is_sliced=False))
    with torch.no_grad():
        one = make_model("by_sequences")(**inputs).logits[0]
        two = make_model("sdpa")(**inputs).logits[0]
    ends = batch["cu_seqlens_padded"][:, :-1] + batch["cu_seqlens"].diff(dim=1)
    at = torch.arange(SEQ)
    for q in range(3):
        starts = batch["cu_seqlens_padded"][q, :-1]
        real = ((at >= starts[:, None]) & (at < ends[q][:, None])).any(0)
        rows = slice(q * SEQ, (q + 1) * SEQ)
        torch.testing.assert_close(one[rows][real], two[rows][real])


def test_without_shift_labels_the_loss_is_the_same_for_whole_documents() -> None:
    model = make_model()
    batch = to_hf(pack([documents([9, 14, 6], 4)]), is_sliced=False)
    inputs = md.model_inputs(batch)
    with torch.no_grad():
        loss = model(**inputs).loss
        del inputs["shift_labels"]
        torch.testing.assert_close(model(**inputs).loss, loss)


def test_the_last_target_of_a_piece_is_in_shift_labels_only() -> None:
    """A document goes on behind its span: labels lack one target, shift_labels do not."""
    model = make_model()
    rows = [documents([10, 15], 5, cut=[True, True])]
    for document in rows[0]:
        document[1][:] = True
    batch = pack(rows)
    made = to_hf(batch, is_sliced=False)
    assert int((made["shift_labels"] >= 0).sum()) == batch["num_loss_tokens"] == 25
    assert int((made["labels"] >= 0).sum()) == 23
    with torch.no_grad():
        loss = model(**md.model_inputs(made)).loss
        total = sum(own(model, document)[1] for document in rows[0])
    assert_near(loss * 25, total)


def test_microbatches_of_a_step_add_up_and_a_filler_adds_nothing() -> None:
    model = make_model()
    rows = [documents([12, 9], 6), documents([20], 7), []]
    total = sum(pack([row])["num_loss_tokens"] for row in rows)
    loss = torch.zeros(())
    for row in rows:
        batch = pack([row]) | {"num_loss_tokens_step": total}
        part = model(**md.model_inputs(to_hf(batch, is_sliced=False))).loss
        part.backward()
        assert row or part == 0
        loss += part.detach()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    with torch.no_grad():
        alone = sum(own(model, document)[1] for row in rows for document in row)
    assert_near(loss * total, alone)


def test_a_step_without_any_target_has_loss_0() -> None:
    batch = to_hf(pack([documents([1, 1])]), is_sliced=False)
    assert make_model()(**md.model_inputs(batch)).loss == 0


def test_padded_rows_get_a_mask_and_no_sequences() -> None:
    model = make_model()
    rows = [documents([5], 8), documents([32], 9), documents([17], 10)]
    batch = pack(rows)
    lengths = torch.tensor([row[0][3] for row in rows])
    mask = torch.arange(SEQ) < lengths[:, None]
    made = to_hf({**batch, "attention_mask": mask, "lengths": lengths.int()}, is_sliced=False)
    inputs = md.model_inputs(made)
    assert set(inputs) == {
        *("input_ids", "position_ids", "attention_mask", "use_cache"),
        *("labels", "shift_labels", "num_items_in_batch"),
    }
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (3, SEQ)
    with torch.no_grad():
        output = model(**inputs)
        for q, row in enumerate(rows):
            logits, _ = own(model, row[0])
            torch.testing.assert_close(output.logits[q, : len(logits)], logits)
        total = sum(own(model, row[0])[1] for row in rows)
    assert_near(output.loss * batch["num_loss_tokens"], total)


packs = st.lists(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=4).filter(
        lambda row: sum(-(-length // 4) * 4 for length, _ in row) <= SEQ
    ),
    min_size=1,
    max_size=3,
)


@given(packs, st.sampled_from([1, 4]), st.integers(0, 99))
@settings(max_examples=60)
def test_laws_of_labels_and_sequences(
    rows: list[list[tuple[int, bool]]], multiple: int, seed: int
) -> None:
    made = [
        documents([n for n, _ in row], seed + q, [cut for _, cut in row])
        for q, row in enumerate(rows)
    ]
    batch = pack(made, multiple)
    before = copy.deepcopy(batch)
    hf = to_hf(batch, is_sliced=False)
    assert all(torch.equal(batch[k], v) for k, v in before.items() if torch.is_tensor(v))
    # A label is the token itself or nothing, and nothing at the first token of a document.
    labels, tokens = hf["labels"][0], hf["input_ids"][0]
    counted = labels >= 0
    assert (labels[counted] == tokens[counted]).all()
    assert (hf["labels"][0][hf["position_ids"][0] == 0] == -100).all()
    # Shifted within their document, both say the same but for what lies outside of a piece.
    lost = sum(bool(cut and doc[1][-1]) for row, docs in zip(rows, made, strict=True)
               for (_, cut), doc in zip(row, docs, strict=True))  # fmt: skip
    assert int((hf["shift_labels"] >= 0).sum()) == batch["num_loss_tokens"]
    assert int(counted.sum()) == batch["num_loss_tokens"] - lost
    # Sequences tile the row: each document, and the tail of each pack.
    bounds = hf["cu_seq_lens_q"]
    assert torch.equal(bounds, hf["cu_seq_lens_k"])
    assert bounds.dtype == torch.int32
    assert bounds[0] == 0
    assert bounds[-1] == len(made) * SEQ
    assert (bounds.diff() >= 0).all()
    assert bounds.diff().max() <= hf["max_length_q"] == hf["max_length_k"] == SEQ
    starts = set(bounds.tolist())
    for q in range(len(made)):
        assert {q * SEQ + start for start in batch["cu_seqlens_padded"][q].tolist()} <= starts
    assert len(bounds) == batch["cu_seqlens_padded"].numel() + 1  # static


@given(st.integers(0, 99))
@settings(max_examples=20)
def test_slices_have_shift_labels_and_whole_sequences(seed: int) -> None:
    whole = pack([documents([7, 12], seed), documents([21], seed + 1)], 4)
    arrays = {
        key: value.numpy() if torch.is_tensor(value) else np.array(value)
        for key, value in whole.items()
        if key not in {"step", "microbatch", "is_last"} and not key.startswith("num_")
    }
    total = 0
    for rank in range(2):
        mine = as_batch(slice_cp(arrays, rank, 2), whole["num_loss_tokens"])
        made = to_hf(mine, is_sliced=True)
        assert not {"labels", "cu_seq_lens_q", "max_length_q", "attention_mask"} & set(made)
        assert made["input_ids"].shape == (2, SEQ // 2)
        assert torch.equal(made["cu_seqlens_padded"], whole["cu_seqlens_padded"])
        assert made["max_seqlen"] == SEQ
        total += int((made["shift_labels"] >= 0).sum())
        assert made["num_items_in_batch"] == max(1, whole["num_loss_tokens"])
    assert total == whole["num_loss_tokens"]


def test_weights_other_than_0_and_1_are_refused() -> None:
    batch = pack([documents([9])])
    batch["loss_mask"] *= 0.5
    with pytest.raises(md.errors.ConfigError, match=r"loss weights.*0\.5"):
        to_hf(batch, is_sliced=False)


@pytest.mark.parametrize("key", ["input_ids", "shift_labels", "cu_seq_lens_q", "use_cache"])
def test_what_the_preset_makes_does_not_take_the_place_of_somebodys_own(key: str) -> None:
    batch = pack([documents([9])]) | {key: torch.zeros(1, SEQ)}
    with pytest.raises(md.errors.ConfigError, match=f"two keys of a batch.*{key}"):
        to_hf(batch, is_sliced=False)
    with pytest.raises(md.errors.ConfigError, match=f"two keys of a batch.*{key}"):
        Form(preset="hf").check(batch.keys(), is_sliced=False)


def test_other_names_do_not_take_the_place_of_what_a_collate_returns() -> None:
    form = Form(names={"tokens": "mine"})
    form.check(["tokens", "labels"], is_sliced=False)  # a collate's keys are not known by then
    batch = {"tokens": torch.zeros(1, 4), "mine": torch.ones(3)}
    with pytest.raises(md.errors.ConfigError, match=r"names=\): two keys of a batch.*mine"):
        form.apply(batch, is_sliced=False)


def test_stages_of_a_pipeline_get_their_part() -> None:
    batch = pack([documents([9, 4]), documents([30])])
    ends = {key: batch[key] for key in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")}
    facts = {"num_loss_tokens_step": 1}
    inputs = {"tokens", "position_ids"}
    sequences = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    first = to_hf({**{k: batch[k] for k in inputs}, **ends, **facts}, is_sliced=False)
    assert set(md.model_inputs(first)) == {"input_ids", "position_ids", "use_cache"} | sequences
    middle = to_hf({**ends, **facts}, is_sliced=False)
    assert set(md.model_inputs(middle)) == sequences
    targets = {"labels", "loss_mask"}
    last = to_hf({**{k: batch[k] for k in targets}, **ends, **facts}, is_sliced=False)
    assert (
        set(md.model_inputs(last)) == {"labels", "shift_labels", "num_items_in_batch"} | sequences
    )
    assert torch.equal(last["labels"], to_hf(batch, is_sliced=False)["labels"])


def test_positions_with_axes_become_one_row() -> None:
    batch = pack([documents([9, 4]), documents([30])])
    batch["position_ids"] = torch.arange(3 * 2 * SEQ).reshape(3, 2, SEQ)
    batch["spans"] = torch.zeros(2, SEQ)  # a fact is no array of tokens, whatever its shape
    made = to_hf(batch, is_sliced=False)
    assert made["position_ids"].shape == (3, 1, 2 * SEQ)
    assert torch.equal(made["position_ids"][1, 0], torch.arange(2 * SEQ, 4 * SEQ))
    assert made["spans"].shape == (2, SEQ)


def test_a_loader_hands_out_what_the_model_takes(client: Client, name: str) -> None:
    """Over two ranks and all microbatches of a step: the loss is the mean over its targets."""

    def small(record: Any) -> dict[str, Any]:
        rng = np.random.default_rng(record["id"])
        return {"tokens": rng.integers(0, VOCABULARY, record["length"])}

    lengths = [5, 20, 31, 8, 32, 2, 11, 29, 70]
    made = pipeline(
        {"a": records(lengths)},
        seq_len=SEQ,
        micro_batch=2,
        packed={"max_documents": 8},
        sources={"transform": small},
    )
    with md.serve(made, client, name=name) as service:
        ranks = run(service, list, preset="hf")
    model = make_model()
    steps: dict[int, list[Any]] = {}
    for batch in (batch for batches in ranks for batch in batches):
        assert batch["max_length_q"] == SEQ
        with torch.no_grad():
            loss = model(**md.model_inputs(batch)).loss
        steps.setdefault(batch["step"], []).append(loss * batch["num_loss_tokens_step"])
    samples = [(small(record)["tokens"]) for record in records(lengths)]
    with torch.no_grad():
        expected = sum(
            own(model, (t[i : i + SEQ + 1], np.ones(SEQ + 1, bool)[: len(t) - i], 0,
                        min(SEQ, len(t) - i)))[1]
            for t in samples
            for i in range(0, len(t), SEQ)
        )  # fmt: skip
    assert_near(sum(map(sum, steps.values())), expected)


def test_context_parallel_ranks_share_the_loss(client: Client, name: str) -> None:
    """Each has its slice, without `labels`; targets are those of the whole."""
    made = pipeline(
        {"a": records([7, 30, 12, 61])},
        seq_len=SEQ,
        global_batch=2,
        topology=md.ClientPlaceTree(cp=2),
        packed={"pad_to_multiple": 4},
    )
    with md.serve(made, client, name=name) as service:
        first, second = run(service, list, preset="hf", names={"max_seqlen": "max_length"})
    for one, two in zip(first, second, strict=True):
        for batch in (one, two):
            assert not {"labels", "cu_seq_lens_q", "max_seqlen"} & set(batch)
            assert batch["max_length"] == SEQ
            assert batch["input_ids"].shape == batch["shift_labels"].shape == (1, SEQ // 2)
            counted = batch["shift_labels"] >= 0
            assert int(counted.sum()) == batch["num_loss_tokens"]
            assert (batch["shift_labels"] == batch["input_ids"] + 1)[counted].all()
    total = sum(batch["num_loss_tokens"] for batch in (*first, *second))
    assert total == 6 + 29 + 11 + 60
