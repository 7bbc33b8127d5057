"""From samples of all kinds to slices of a batch: loader, wire, gather, assemble, and cutting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megadask.planner.batching import Packed
from megadask.planner.costs import Measured, Tokens, Transformer
from megadask.planner.cp import Layout, Packs, attention_work
from megadask.planner.metadata import Metadata, Ragged
from megadask.planner.sequences import padded_table, sequences_of
from megadask.planner.state import LaneCursor
from megadask.scheduling.assemble import assemble, num_loss_tokens, slice_cp
from megadask.scheduling.extras import decode
from megadask.scheduling.gather import Payload
from megadask.scheduling.source_loader import SourceLoader
from megadask.scheduling.spec import SourceSpec
from tests.fakes import MemoryReader
from tests.strategies import laws

MULTIPLE = 24  # can be cut for any number of ranks up to 4
FIELDS = ("advantages", "scores")
AXES = 3


def of_tokens(tokens: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return fields that a token alone decides."""
    return {
        "advantages": (tokens * 0.5).astype(np.float32),
        "scores": np.stack([tokens, -tokens]).astype(np.int64),
    }


def positions_of(tokens: NDArray[Any]) -> NDArray[np.int64]:
    return np.stack([tokens + 1000 * axis for axis in range(AXES)])


@st.composite
def samples(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Samples of one sequence or several, each with or without mask, fields, positions, extras."""
    made, first = [], 1
    for number in range(draw(st.integers(0, 7))):
        count = draw(st.integers(1, 3))
        longest = 30 if count > 1 else 300
        sequences = []
        for _ in range(count):
            length = draw(st.integers(1, longest))
            tokens = np.arange(first, first + length)
            first += length
            one: dict[str, Any] = {"tokens": tokens}
            if draw(st.booleans()):
                one["loss_mask"] = tokens % 3 > 0
            if draw(st.booleans()):
                one |= of_tokens(tokens)
            if draw(st.booleans()):
                one["position_ids"] = positions_of(tokens)
            sequences.append(one)
        sample = {"sequences": sequences} if count > 1 else sequences[0]
        made.append({**sample, "number": number} if draw(st.booleans()) else sample)
    return made


def sequences(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return sample.get("sequences", [sample])


@st.composite
def worlds(draw: st.DrawFn) -> Any:
    """Samples, and the microbatches that they come to by way of one loader or two."""
    spec = Packed(
        seq_len=MULTIPLE * 6,
        global_batch=1,
        micro_batch=draw(st.integers(1, 2)),
        pad_to_multiple=MULTIPLE,
        max_documents=draw(st.integers(1, 6)),
        sequences=3,
        aligned={"advantages": "float32", "scores": "(2,)int64"},
        position_axes=AXES,
    )
    records = draw(samples())
    source = SourceSpec(
        name="web",
        index=0,
        reader=MemoryReader([records]),
        transform=None,
        wants_rng=False,
        lanes=1,
        seed=0,
        on_error="raise",
        max_consecutive_errors=9,
        scalars=(),
        modalities=(),
        batching=spec,
        extras=("number",),
    )
    loader = SourceLoader(source, 2**20)
    table = loader.describe(0, {0: LaneCursor()}, 1000).table
    microbatches = []
    for rows, pack_n, offset_n in place(spec, table):
        mine = table.take(rows)
        owner_n = np.array(
            draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
        )
        parts = [np.flatnonzero(owner_n == owner) for owner in (0, 1)]
        parts = [part for part in parts if len(part)]
        payload = Payload(len(rows), parts, [loader.serve(mine.take(part)) for part in parts])
        every = np.arange(len(rows))
        batch = assemble(spec, payload.pieces(every, mine, pack_n, offset_n, spec))
        facts = SimpleNamespace(
            rows=mine,
            num_sequences=payload.num_sequences(every),
            extras=decode(payload.extras(every, ["number"])),
        )
        microbatches.append((batch, facts))
    return spec, records, microbatches


def place(spec: Packed, table: Metadata) -> list[Any]:
    """Next fit: return (rows, packs, offsets) of every microbatch."""
    packs: list[list[tuple[int, int]]] = [[]]
    filled = 0
    for row, size in enumerate(spec.padded(table["tokens"]).tolist()):
        if filled + size > spec.seq_len or len(packs[-1]) == spec.documents_limit:
            packs.append([])
            filled = 0
        packs[-1].append((row, filled))
        filled += size
    made = []
    for first in range(0, len(packs), spec.micro_batch):
        placed = [
            (row, pack, offset)
            for pack, rows in enumerate(packs[first : first + spec.micro_batch])
            for row, offset in rows
        ]
        rows, pack_n, offset_n = np.array(placed, np.int64).reshape(-1, 3).T
        made.append((rows, pack_n, offset_n))
    return made


def targets(batches: Any) -> list[tuple[int, int]]:
    return sorted(
        (int(token), int(label))
        for batch in batches
        for token, label in zip(
            batch["tokens"][batch["loss_mask"] > 0],
            batch["labels"][batch["loss_mask"] > 0],
            strict=True,
        )
    )


@laws
@given(worlds())
def test_every_sequence_has_its_own_targets_whole_and_sliced(world: Any) -> None:
    _, records, microbatches = world
    expected = sorted(
        (int(one["tokens"][i]), int(one["tokens"][i + 1]))
        for sample in records
        for one in sequences(sample)
        for i in range(len(one["tokens"]) - 1)
        if one.get("loss_mask", np.ones(300))[i + 1]
    )
    batches = [batch for batch, _ in microbatches]
    assert targets(batches) == expected
    planned = sum(int(facts.rows["loss_tokens"].sum()) for _, facts in microbatches)
    assert planned == len(expected)
    for cp_size, layout in ((2, "document"), (3, "sequence"), (4, "document")):
        slices = [
            slice_cp(batch, rank, cp_size, layout, FIELDS)  # type: ignore[arg-type]
            for batch in batches
            for rank in range(cp_size)
        ]
        assert targets(slices) == expected
        assert sum(map(num_loss_tokens, slices)) == len(expected)
        for part in slices:
            check_fields(part)


def check_fields(batch: Any) -> None:
    """Check that fields lie with their tokens: those of a token, or none at all."""
    tokens = batch["tokens"]
    for name, array in of_tokens(tokens).items():
        assert batch[name].shape == array.shape
        assert batch[name].dtype == array.dtype
        has_none = (batch[name] == 0) & (tokens > 0)
        np.testing.assert_array_equal(batch[name][~has_none], array[~has_none])


@laws
@given(worlds())
def test_every_sequence_lies_whole_with_its_fields_and_positions(world: Any) -> None:
    spec, records, microbatches = world
    whole = {int(one["tokens"][0]): one for sample in records for one in sequences(sample)}
    found = 0
    for batch, facts in microbatches:
        assert batch["position_ids"].shape == (AXES, spec.micro_batch, spec.seq_len)
        assert batch["cu_seqlens"].shape == (spec.micro_batch, 3 * spec.documents_limit + 1)
        used = np.zeros(batch["tokens"].shape, bool)
        for q in range(spec.micro_batch):
            lengths, starts = np.diff(batch["cu_seqlens"][q]), batch["cu_seqlens_padded"][q]
            for length, start in zip(lengths[lengths > 0], starts[:-1][lengths > 0], strict=True):
                inside = slice(start, start + length)
                used[q, inside] = True
                tokens = batch["tokens"][q, inside]
                for name in FIELDS:
                    sample = next(one for one in whole.values() if tokens[0] in one["tokens"])
                    expected = of_tokens(tokens)[name] * (name in sample)
                    np.testing.assert_array_equal(batch[name][..., q, inside], expected)
                counted = np.broadcast_to(np.arange(length), (AXES, length))
                given_ones = positions_of(tokens) if "position_ids" in sample else counted
                np.testing.assert_array_equal(batch["position_ids"][:, q, inside], given_ones)
                found += length
        for name in ("tokens", "labels", "loss_mask", "position_ids", *FIELDS):
            assert not batch[name][..., ~used].any()
        assert facts.num_sequences.sum() == (np.diff(batch["cu_seqlens"]) > 0).sum()
    assert found == sum(len(one["tokens"]) for one in whole.values())


@laws
@given(worlds())
def test_extras_and_counts_are_in_the_order_of_the_spans(world: Any) -> None:
    _, records, microbatches = world
    for _, facts in microbatches:
        own = [records[position] for position in facts.rows["position"].tolist()]
        assert facts.extras == {"number": [sample.get("number") for sample in own]}
        assert facts.num_sequences.tolist() == [len(sequences(sample)) for sample in own]


# What the planner makes of sequences ------------------------------------------------------------


def table_of(groups: list[list[int]], spec: Packed) -> Metadata:
    """Return a table of spans, each of a group of sequences or, with one, of a plain document."""
    tokens = [sum(spec.padded(np.array(group))[:-1].tolist()) + group[-1] for group in groups]
    ragged = Ragged.of([group if len(group) > 1 else [] for group in groups])
    return Metadata({"tokens": np.array(tokens, np.int64)}, {"sequences": ragged})


groups = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=6)


@laws
@given(groups)
def test_sequences_cost_what_documents_of_their_lengths_cost(drawn: list[list[int]]) -> None:
    spec = Packed(seq_len=512, global_batch=1, sequences=4, pad_to_multiple=8)
    costs = (
        Transformer(hidden=64),
        Measured.from_coefficients(1e-3, 1e-4, 1e-5),
        Tokens(),
    )
    for cost in costs:
        whole = np.asarray(cost(padded_table(table_of(drawn, spec), spec)), float)
        for group, value in zip(drawn, whole, strict=True):
            alone = padded_table(Metadata({"tokens": np.array(group, np.int64)}), spec)
            np.testing.assert_allclose(value, np.sum(cost(alone)), rtol=1e-9)


@laws
@given(groups, st.sampled_from([2, 4]))
def test_context_parallel_work_is_that_of_the_sequences(drawn: list[list[int]], cp: int) -> None:
    spec = Packed(seq_len=2048, global_batch=1, sequences=4, pad_to_multiple=8)
    table = table_of(drawn, spec)
    parts = sequences_of(table, spec)
    assert parts.row_D.tolist() == [n for n, group in enumerate(drawn) for _ in group]
    lengths = np.array([length for group in drawn for length in group])
    np.testing.assert_array_equal(parts.size_D, spec.padded(lengths))
    size_N = spec.padded(table["tokens"])
    offset_N = np.cumsum(size_N) - size_N
    expanded = Packs(
        size_N=parts.size_D,
        pack_N=np.zeros_like(parts.row_D),
        offset_N=offset_N[parts.row_D] + parts.first_D,
        num_packs=1,
        seq_len=spec.seq_len,
    )
    plain = Packs(
        size_N=spec.padded(lengths),
        pack_N=np.zeros(len(lengths), np.int64),
        offset_N=np.cumsum(spec.padded(lengths)) - spec.padded(lengths),
        num_packs=1,
        seq_len=spec.seq_len,
    )
    for layout in get_args(Layout):
        np.testing.assert_array_equal(
            attention_work(expanded, cp, layout), attention_work(plain, cp, layout)
        )
