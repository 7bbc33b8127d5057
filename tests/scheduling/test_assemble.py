"""Laws 18-20 of a microbatch: labels per document, slices that are the batch, static shapes."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megadask.planner.batching import Batching, Fixed, Packed, Padded
from megadask.planner.cp import Layout
from megadask.planner.errors import ConfigError, PlanError
from megadask.scheduling.assemble import (
    TOKEN_KEYS,
    Pieces,
    assemble,
    cp_positions,
    most_bytes,
    num_loss_tokens,
    slice_cp,
)

Batch = dict[str, NDArray[Any]]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
Spans = list[tuple[int, int, int]]  # (document, start, stop)


def make_documents(lengths: list[int], *, masked: bool = False) -> list[tuple[Any, Any]]:
    """Give every token of every document a number of its own, from 1, and some a mask of 0."""
    documents, first = [], 1
    for length in lengths:
        tokens = np.arange(first, first + length, dtype=np.int32)
        mask = tokens % 3 != 0 if masked else np.ones(length, bool)
        documents.append((tokens, mask))
        first += length
    return documents


def place(spec: Batching, spans: Spans) -> list[list[tuple[int, int]]]:
    """First fit: return for every microbatch the (span, pack * T + offset) in it."""
    filled: list[list[int]] = []  # of every pack: padded tokens, documents
    microbatches: list[list[tuple[int, int]]] = []
    for n, (_, start, stop) in enumerate(spans):
        size = int(spec.padded(np.array([stop - start]))[0])
        pack = 0
        while pack < len(filled) and (
            filled[pack][0] + size > spec.seq_len or filled[pack][1] == spec.documents_limit
        ):
            pack += 1
        if pack == len(filled):
            filled.append([0, 0])
        if pack // spec.micro_batch == len(microbatches):
            microbatches.append([])
        row = pack % spec.micro_batch
        microbatches[pack // spec.micro_batch].append((n, row * spec.seq_len + filled[pack][0]))
        filled[pack][0] += size
        filled[pack][1] += 1
    return microbatches


def make_pieces(
    spec: Batching,
    documents: list[tuple[Any, Any]],
    spans: Spans,
    placed: list[tuple[int, int]],
    *,
    with_mask: bool = True,
) -> Pieces:
    rows = [(*spans[n], where) for n, where in placed]
    slices = [documents[d][0][start : stop + 1] for d, start, stop, _ in rows]
    masks = [documents[d][1][start : stop + 1] for d, start, stop, _ in rows]
    where_N = np.array([where for *_, where in rows], np.int64)
    return Pieces(
        pack_N=where_N // spec.seq_len,
        offset_N=where_N % spec.seq_len,
        start_N=np.array([start for _, start, _, _ in rows], np.int64),
        stop_N=np.array([stop for _, _, stop, _ in rows], np.int64),
        tokens=np.concatenate([np.empty(0, np.int32), *slices]),
        token_offsets=np.cumsum([0, *map(len, slices)]).astype(np.int64),
        mask=np.concatenate([np.empty(0, bool), *masks]) if with_mask else None,
    )


def one_pack(spec: Batching, lengths: list[int]) -> Batch:
    spans = [(d, 0, length) for d, length in enumerate(lengths)]
    (placed,) = place(spec, spans) or [[]]
    return assemble(spec, make_pieces(spec, make_documents(lengths), spans, placed))


def targets(batches: list[Batch]) -> list[tuple[int, int]]:
    """Return (input, label) wherever there is loss."""
    return sorted(
        (int(token), int(label))
        for batch in batches
        for token, label in zip(
            batch["tokens"][batch["loss_mask"] > 0],
            batch["labels"][batch["loss_mask"] > 0],
            strict=True,
        )
    )


@st.composite
def steps(draw: st.DrawFn, *, masked: bool = True) -> tuple[Packed, list[tuple[Any, Any]], Spans]:
    """Draw a batching that fits cp up to 4, documents, and a way to cut them."""
    multiple = 24
    spec = Packed(
        seq_len=multiple * draw(st.integers(1, 6)),
        global_batch=1,
        micro_batch=draw(st.integers(1, 3)),
        pad_to_multiple=multiple,
        max_documents=draw(st.integers(1, 6)),
    )
    lengths = draw(st.lists(st.integers(1, 3 * spec.seq_len), max_size=8))
    spans: Spans = []
    for document, length in enumerate(lengths):
        cuts = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
        for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), length], strict=True):
            spans += [(document, start + a, start + b) for a, b in spec.cut(stop - start)]
    return spec, make_documents(lengths, masked=masked and draw(st.booleans())), spans


def assemble_all(spec: Batching, documents: list[tuple[Any, Any]], spans: Spans) -> list[Batch]:
    return [
        assemble(spec, make_pieces(spec, documents, spans, placed)) for placed in place(spec, spans)
    ]


@given(steps())
def test_a_document_has_the_same_targets_however_it_is_cut_and_sliced(step: Any) -> None:
    spec, documents, spans = step
    expected = sorted(
        (int(tokens[i]), int(tokens[i + 1]))
        for tokens, mask in documents
        for i in range(len(tokens) - 1)
        if mask[i + 1]
    )
    batches = assemble_all(spec, documents, spans)
    assert targets(batches) == expected
    for cp_size, layout in product((2, 3, 4), LAYOUTS):
        slices = [slice_cp(batch, r, cp_size, layout) for batch in batches for r in range(cp_size)]
        assert targets(slices) == expected
        assert sum(map(num_loss_tokens, slices)) == len(expected)


@given(steps(), st.integers(1, 4), st.sampled_from(LAYOUTS))
def test_the_slices_put_together_are_the_batch(step: Any, cp_size: int, layout: Layout) -> None:
    spec, documents, spans = step
    for batch in assemble_all(spec, documents, spans):
        positions = [
            cp_positions(batch["cu_seqlens_padded"], spec.seq_len, r, cp_size, layout)
            for r in range(cp_size)
        ]
        slices = [slice_cp(batch, r, cp_size, layout) for r in range(cp_size)]
        for key in TOKEN_KEYS:
            again = np.full_like(batch[key], -1)
            for where, part in zip(positions, slices, strict=True):
                assert part[key].dtype == batch[key].dtype
                np.put_along_axis(again, where, part[key], axis=1)
            np.testing.assert_array_equal(again, batch[key])
        for key in batch.keys() - set(TOKEN_KEYS):
            assert all(part[key] is batch[key] for part in slices)


@given(steps(), st.integers(2, 4))
def test_all_slices_do_the_same_causal_attention(step: Any, cp_size: int) -> None:
    spec, documents, spans = step
    for batch in assemble_all(spec, documents, spans):
        bounds = batch["cu_seqlens_padded"]
        work = []
        for rank in range(cp_size):
            positions = cp_positions(bounds, spec.seq_len, rank, cp_size)
            starts = [
                row[np.searchsorted(row, where, side="right") - 1]
                for row, where in zip(bounds, positions, strict=True)
            ]
            work.append((positions - np.array(starts) + 1).sum())
        assert len(set(work)) == 1


@given(steps())
def test_every_span_lies_whole_where_the_sequences_say(step: Any) -> None:
    spec, documents, spans = step
    found = []
    for batch in assemble_all(spec, documents, spans):
        for q in range(spec.micro_batch):
            lengths, starts = np.diff(batch["cu_seqlens"][q]), batch["cu_seqlens_padded"][q]
            used = np.zeros(spec.seq_len, bool)
            for length, start in zip(lengths[lengths > 0], starts[:-1][lengths > 0], strict=True):
                inside = slice(start, start + length)
                used[inside] = True
                found.append(batch["tokens"][q, inside].tolist())
                assert batch["position_ids"][q, inside].tolist() == list(range(length))
            for key in TOKEN_KEYS:
                assert not batch[key][q, ~used].any()
    assert sorted(found) == sorted(documents[d][0][a:b].tolist() for d, a, b in spans)


@given(steps())
def test_shapes_depend_on_the_declaration_alone(step: Any) -> None:
    spec, documents, spans = step
    packs, length, limit = spec.micro_batch, spec.seq_len, spec.documents_limit
    empty = assemble(spec, make_pieces(spec, documents, spans, []))
    for batch in [empty, *assemble_all(spec, documents, spans)]:
        assert {key: (array.shape, array.dtype.name) for key, array in batch.items()} == {
            "tokens": ((packs, length), "int64"),
            "labels": ((packs, length), "int64"),
            "loss_mask": ((packs, length), "float32"),
            "position_ids": ((packs, length), "int64"),
            "cu_seqlens": ((packs, limit + 1), "int32"),
            "cu_seqlens_padded": ((packs, limit + 1), "int32"),
            "max_seqlen": ((), "int64"),
        }
        assert batch["max_seqlen"] == length
        for key in ("cu_seqlens", "cu_seqlens_padded"):
            assert (batch[key][:, 0] == 0).all()
            assert (np.diff(batch[key], axis=1) >= 0).all()


@given(steps(), st.randoms(use_true_random=False))
def test_the_order_of_the_spans_does_not_matter(step: Any, random: Any) -> None:
    spec, documents, spans = step
    for placed in place(spec, spans):
        batch = assemble(spec, make_pieces(spec, documents, spans, placed))
        random.shuffle(placed)
        again = assemble(spec, make_pieces(spec, documents, spans, placed))
        for key, array in batch.items():
            np.testing.assert_array_equal(again[key], array)


@given(steps(masked=False))
def test_no_mask_is_a_mask_of_ones(step: Any) -> None:
    spec, documents, spans = step
    for placed in place(spec, spans):
        batch, again = (
            assemble(spec, make_pieces(spec, documents, spans, placed, with_mask=with_mask))
            for with_mask in (False, True)
        )
        np.testing.assert_array_equal(batch["loss_mask"], again["loss_mask"])


def test_seven_tokens_at_cp_two() -> None:
    batch = one_pack(Packed(seq_len=8, global_batch=1, pad_to_multiple=4), [7])
    assert batch["cu_seqlens"][0, :2].tolist() == [0, 7]
    assert batch["cu_seqlens_padded"][0, :2].tolist() == [0, 8]
    assert (batch["cu_seqlens"][0, 1:] == 7).all()
    assert (batch["cu_seqlens_padded"][0, 1:] == 8).all()
    first, second = (slice_cp(batch, rank, 2) for rank in (0, 1))
    assert first["tokens"].tolist() == [[1, 2, 7, 0]]
    assert first["position_ids"].tolist() == [[0, 1, 6, 0]]
    assert first["labels"].tolist() == [[2, 3, 0, 0]]
    assert first["loss_mask"].tolist() == [[1, 1, 0, 0]]
    assert second["position_ids"].tolist() == [[2, 3, 4, 5]]
    assert second["loss_mask"].tolist() == [[1, 1, 1, 1]]
    assert num_loss_tokens(first) + num_loss_tokens(second) == 6


def test_the_tail_of_a_pack_is_in_no_sequence_and_is_shared_evenly() -> None:
    batch = one_pack(Packed(seq_len=16, global_batch=1, pad_to_multiple=4), [3])
    assert (batch["cu_seqlens_padded"][0, 1:] == 4).all()
    assert cp_positions(batch["cu_seqlens_padded"], 16, 0, 2).tolist() == [
        [0, 3, 4, 5, 6, 13, 14, 15]
    ]
    assert cp_positions(batch["cu_seqlens_padded"], 16, 1, 2).tolist() == [
        [1, 2, 7, 8, 9, 10, 11, 12]
    ]


def test_the_pack_as_a_whole_is_cut_whatever_documents_it_holds() -> None:
    batch = one_pack(Packed(seq_len=16, global_batch=1), [3, 5])
    first, second = (slice_cp(batch, rank, 2, "sequence") for rank in (0, 1))
    assert first["tokens"].tolist() == [[1, 2, 3, 4, 0, 0, 0, 0]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
    assert second["position_ids"].tolist() == [[1, 2, 3, 4, 0, 0, 0, 0]]
    assert (num_loss_tokens(first), num_loss_tokens(second)) == (3, 3)
    assert first["cu_seqlens"] is batch["cu_seqlens"]


def test_the_mask_weighs_the_predicted_token_and_keeps_its_label() -> None:
    spec = Packed(seq_len=8, global_batch=1)
    pieces = Pieces(
        pack_N=np.array([0]),
        offset_N=np.array([0]),
        start_N=np.array([2]),
        stop_N=np.array([5]),
        tokens=np.array([11, 12, 13, 14]),
        token_offsets=np.array([0, 4]),
        mask=np.array([1, 0, 0.5, 1]),
    )
    batch = assemble(spec, pieces)
    assert batch["labels"].tolist() == [[12, 13, 14, 0, 0, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0.5, 1, 0, 0, 0, 0, 0]]
    assert num_loss_tokens(batch) == 2


def test_a_microbatch_without_spans_has_no_loss() -> None:
    batch = one_pack(Packed(seq_len=16, global_batch=1, pad_to_multiple=4, micro_batch=2), [])
    assert num_loss_tokens(batch) == 0
    assert not any(batch[key].any() for key in batch.keys() - {"max_seqlen"})
    assert slice_cp(batch, 1, 2)["tokens"].shape == (2, 8)


@pytest.mark.parametrize(
    ("spec", "cp_rank", "cp_size", "message"),
    [
        (Packed(seq_len=12, global_batch=1, pad_to_multiple=6), 0, 4, "seq_len.*multiple of 2"),
        (Packed(seq_len=16, global_batch=1, pad_to_multiple=2), 0, 2, "pad_to_multiple"),
        (Packed(seq_len=16, global_batch=1, pad_to_multiple=4), 2, 2, "rank"),
        (Packed(seq_len=16, global_batch=1, pad_to_multiple=4), 0, 0, "rank"),
    ],
)
def test_what_cannot_be_sliced_is_a_named_error(
    spec: Packed, cp_rank: int, cp_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        slice_cp(one_pack(spec, [5]), cp_rank, cp_size)


@pytest.mark.parametrize(
    ("pack_N", "offset_N", "slices", "message"),
    [
        ([0, 0], [0, 3], [4, 4], "overlap"),
        ([0, 0], [0, 5], [4, 4], "gaps"),
        ([0, 2], [0, 0], [4, 4], "no pack"),
        ([0, -1], [0, 0], [4, 4], "no pack"),
        ([0, 0], [0, 4], [4, 6], "not as long"),
        ([0, 0], [0, 4], [4, 3], "not as long"),
    ],
)
def test_a_plan_that_does_not_add_up_is_a_named_error(
    pack_N: list[int], offset_N: list[int], slices: list[int], message: str
) -> None:
    pieces = Pieces(
        pack_N=np.array(pack_N),
        offset_N=np.array(offset_N),
        start_N=np.zeros(2, np.int64),
        stop_N=np.full(2, 4),
        tokens=np.ones(sum(slices), np.int64),
        token_offsets=np.cumsum([0, *slices]),
    )
    with pytest.raises(PlanError, match=message):
        assemble(Packed(seq_len=16, global_batch=1, micro_batch=2), pieces)


def test_a_pack_holds_at_most_its_tokens_and_documents() -> None:
    def pieces(lengths: list[int]) -> Pieces:
        ends = np.cumsum(lengths)
        return Pieces(
            pack_N=np.zeros(len(lengths), np.int64),
            offset_N=ends - lengths,
            start_N=np.zeros(len(lengths), np.int64),
            stop_N=np.array(lengths),
            tokens=np.ones(ends[-1], np.int64),
            token_offsets=np.array([0, *ends]),
        )

    spec = Packed(seq_len=8, global_batch=1, max_documents=2)
    assemble(spec, pieces([4, 4]))
    with pytest.raises(PlanError, match="do not fit"):
        assemble(spec, pieces([4, 5]))
    with pytest.raises(PlanError, match="too many documents"):
        assemble(spec, pieces([1, 1, 1]))


# Rows of one document --------------------------------------------------------------------------


@st.composite
def padded_steps(draw: st.DrawFn) -> tuple[Padded, list[tuple[Any, Any]], Spans]:
    """Draw rows that fit cp up to 4, and documents of which some are longer than a row."""
    spec = Padded(
        seq_len=24 * draw(st.integers(1, 4)),
        global_batch=1,
        micro_batch=draw(st.integers(1, 3)),
        overflow=draw(st.sampled_from(["split", "truncate", "drop"])),
        pad_to_multiple=24,
        pad_to=draw(st.sampled_from(["seq_len", "longest"])),
    )
    lengths = draw(st.lists(st.integers(1, 2 * spec.seq_len), max_size=6))
    spans = [(d, *cut) for d, length in enumerate(lengths) for cut in spec.cut(length)]
    return spec, make_documents(lengths, masked=draw(st.booleans())), spans


@given(padded_steps())
def test_rows_say_where_their_real_tokens_are(step: Any) -> None:
    spec, documents, spans = step
    rows = iter(spans)
    for batch in assemble_all(spec, documents, spans):
        size_Q = np.diff(batch["cu_seqlens_padded"], axis=1)[:, 0]
        width = spec.seq_len if spec.pad_to == "seq_len" else max(24, size_Q.max())
        assert batch["max_seqlen"] == width
        assert batch["lengths"].dtype == np.int32
        assert batch["attention_mask"].dtype == bool
        for key in (*TOKEN_KEYS, "attention_mask"):
            assert batch[key].shape == (spec.micro_batch, width)
        np.testing.assert_array_equal(batch["cu_seqlens"][:, 1], batch["lengths"])
        np.testing.assert_array_equal(batch["attention_mask"], batch["tokens"] > 0)
        for row in range(spec.micro_batch):
            document, start, stop = next(rows, (0, 0, 0))
            length = batch["lengths"][row]
            assert length == stop - start
            tokens = documents[document][0][start:stop] if length else []
            assert batch["tokens"][row, :length].tolist() == list(tokens)
            assert batch["attention_mask"][row].tolist() == [n < length for n in range(width)]


@given(padded_steps(), st.integers(2, 4), st.sampled_from(LAYOUTS))
def test_slices_of_rows_put_together_are_the_rows(step: Any, cp: int, layout: Layout) -> None:
    spec, documents, spans = step
    for batch in assemble_all(spec, documents, spans):
        bounds, width = batch["cu_seqlens_padded"], int(batch["max_seqlen"])
        slices = [slice_cp(batch, rank, cp, layout) for rank in range(cp)]
        for key in (*TOKEN_KEYS, "attention_mask"):
            again = np.zeros_like(batch[key])
            for rank, part in enumerate(slices):
                assert part[key].shape == (spec.micro_batch, width // cp)
                where = cp_positions(bounds, width, rank, cp, layout)
                np.put_along_axis(again, where, part[key], axis=1)
            np.testing.assert_array_equal(again, batch[key])
        assert all(part["lengths"] is batch["lengths"] for part in slices)


def num_bytes(batch: Batch) -> int:
    return sum(array.nbytes for array in batch.values())


def test_no_microbatch_is_larger_than_the_largest() -> None:
    spec = Padded(seq_len=64, global_batch=1, micro_batch=2, pad_to_multiple=8, pad_to="longest")
    largest = most_bytes(spec)
    assert largest == num_bytes(one_pack(spec, [5, 64]))
    assert num_bytes(one_pack(spec, [5, 9])) < largest
    empty = one_pack(spec, [])
    assert empty["tokens"].shape == (2, 8)
    assert not empty["attention_mask"].any()
    # Static shapes: the first one tells.
    for static in (Padded(64, 1), Packed(64, 1), Fixed(64, 1)):
        assert most_bytes(static) is None
        assert num_bytes(one_pack(static, [])) == num_bytes(one_pack(static, [7]))


def test_only_rows_of_one_document_have_a_mask() -> None:
    """With one, attention of packs would ignore where documents begin."""
    for spec in (Packed(16, 1), Fixed(16, 1)):
        assert not {"attention_mask", "lengths"} & one_pack(spec, [5, 6]).keys()
