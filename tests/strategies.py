"""What the property tests draw from: weights, batching, sources of all kinds, and whole worlds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from megadask.planner.batching import Batching, Fixed, Packed, Padded
from megadask.planner.draw import DrawRules
from megadask.planner.ids import Verdict
from megadask.planner.metadata import SPAN_COLUMNS, Metadata, Ragged
from tests.fakes import Driver, MemorySource, Record

#: Examples of a law; time says nothing about the code, as machines differ.
laws = settings(max_examples=20, deadline=None)
few_laws = settings(max_examples=10, deadline=None)

ChunkSizes = Callable[[], int]

weights = st.floats(0.05, 1.0)
#: Numbers of records to fetch, asked for one after the other.
chunks = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(
    lambda sizes: itertools.cycle(sizes).__next__
)


@st.composite
def batchings(draw: st.DrawFn, micro_batch: int | None = None) -> Packed:
    """Small packs, so that few documents fit and many are split."""
    multiple = draw(st.sampled_from([1, 1, 2, 4]))
    return Packed(
        seq_len=multiple * draw(st.integers(2, 12)),
        global_batch=draw(st.integers(1, 6)),
        micro_batch=micro_batch or draw(st.integers(1, 2)),
        overflow=draw(st.sampled_from(["split", "split", "truncate", "drop"])),
        pad_to_multiple=multiple,
        max_documents=draw(st.none() | st.integers(1, 3)),
    )


@st.composite
def padded_batchings(draw: st.DrawFn) -> Padded:
    """Few short rows."""
    multiple = draw(st.sampled_from([1, 1, 2, 4]))
    return Padded(
        seq_len=multiple * draw(st.integers(2, 12)),
        global_batch=draw(st.integers(1, 8)),
        micro_batch=draw(st.integers(1, 3)),
        overflow=draw(st.sampled_from(["split", "truncate", "drop"])),
        pad_to_multiple=multiple,
        pad_to=draw(st.sampled_from(["seq_len", "longest"])),
    )


@st.composite
def fixed_batchings(draw: st.DrawFn) -> Fixed:
    """Small packs, so that documents reach over several of them, and over several steps."""
    multiple = draw(st.sampled_from([1, 1, 2, 4]))
    return Fixed(
        seq_len=multiple * draw(st.integers(2, 12)),
        global_batch=draw(st.integers(1, 4)),
        micro_batch=draw(st.integers(1, 2)),
        pad_to_multiple=multiple,
        max_documents=draw(st.none() | st.integers(1, 3)),
    )


@st.composite
def memory_sources(
    draw: st.DrawFn, index: int, batching: Batching, max_lanes: int = 3, max_records: int = 6
) -> MemorySource:
    """Sources of uneven lanes; at least one of their records can be read."""
    tokens = st.integers(1, batching.seq_len) | st.integers(1, 3 * batching.seq_len)
    good = st.builds(Record, tokens)
    bad = st.builds(Record, st.just(0), st.sampled_from(list(Verdict)[1:]))
    records = st.lists(good | good | good | bad, max_size=max_records)
    lanes = draw(st.lists(records, min_size=1, max_size=max_lanes))
    lanes[0].append(Record(draw(st.integers(1, batching.seq_len))))
    return MemorySource(f"source{index}", index, lanes, batching)


@dataclass(frozen=True, eq=False)
class World:
    """Sources, and how steps are drawn from them."""

    sources: list[MemorySource]
    rules: DrawRules
    weights: Mapping[str, float]

    def driver(self, **options: Any) -> Driver:
        return Driver(self.sources, self.rules, self.weights, **options)


@st.composite
def worlds(
    draw: st.DrawFn,
    max_sources: int = 3,
    batching: st.SearchStrategy[Batching] | None = None,
    **fixed: Any,
) -> World:
    """Worlds whose data ends, unless ``fixed`` has other rules for the draw."""
    chosen = draw(batchings() if batching is None else batching)
    sources = [
        draw(memory_sources(index, chosen)) for index in range(draw(st.integers(1, max_sources)))
    ]
    rules: dict[str, Any] = {
        "mix_by": draw(st.sampled_from(["samples", "tokens"])),
        "window": draw(st.integers(1, 6)),
        "patience": draw(st.integers(1, 4)),
        "epochs": draw(st.integers(1, 3)),
        "stop": "all",
    }
    return World(
        sources=sources,
        rules=DrawRules(batching=chosen, **(rules | fixed)),
        weights={source.name: draw(weights) for source in sources},
    )


@st.composite
def span_tables(draw: st.DrawFn, num_sources: int = 2, max_rows: int = 6) -> Metadata:
    """Span tables with a scalar and a modality, of values that need not fit each other."""
    num_rows = draw(st.integers(0, max_rows))
    most = {"uint8": 3, "int32": 2**31 - 1, "int64": 2**62, "uint32": 2**32 - 1}
    columns: dict[str, Any] = {
        name: np.array(
            draw(st.lists(st.integers(0, most[dtype]), min_size=num_rows, max_size=num_rows)), dtype
        )
        for name, dtype in SPAN_COLUMNS.items()
    }
    columns["source"] %= num_sources
    scalars = st.lists(st.floats(allow_nan=False, width=32), min_size=num_rows, max_size=num_rows)
    columns["quality"] = np.array(draw(scalars), np.float64)
    items = draw(
        st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=num_rows, max_size=num_rows)
    )
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in items])]).astype(np.int64)
    lengths = np.array(list(itertools.chain(*items)), np.int64)
    return Metadata(columns, {"image": Ragged(lengths, offsets)})
