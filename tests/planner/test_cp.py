"""Laws of context-parallel layouts: counts are those of the tokens, and "auto" takes the lesser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.cp import (
    Context,
    Layout,
    Packs,
    attention_work,
    choose_layout,
    slowest_work,
)
from megadask.planner.draw import DrawRules
from megadask.planner.errors import ConfigError, PlanError
from megadask.planner.graph import DGraph
from megadask.planner.place import place, place_rest
from megadask.planner.strategy import Strategy
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.assemble import cp_positions
from tests.fakes import Driver, MemorySource, ok
from tests.strategies import laws

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Packs, int]:
    """Packs of documents that both layouts can cut, and the size of a group."""
    cp = draw(st.integers(1, 4))  # 1 cuts nothing
    multiple = 2 * cp
    seq_len = multiple * draw(st.integers(1, 6))
    size, pack, offset = [], [], []
    num_packs = draw(st.integers(1, 4))
    for number in range(num_packs):
        left = seq_len
        for chunks in draw(st.lists(st.integers(0, 4), max_size=4)):
            tokens = chunks * multiple
            if tokens <= left:
                size.append(tokens)
                pack.append(number)
                offset.append(seq_len - left)
                left -= tokens
    columns = (np.array(column, np.int64) for column in (size, pack, offset))
    size_N, pack_N, offset_N = columns
    packs = Packs(
        size_N=size_N, pack_N=pack_N, offset_N=offset_N, num_packs=num_packs, seq_len=seq_len
    )
    return packs, cp


def documents_of(packs: Packs, pack: int) -> np.ndarray[Any, Any]:
    """Return (T,) the document of every token of a pack, -1 in its tail."""
    document_T = np.full(packs.seq_len, -1)
    for n in np.flatnonzero(packs.pack_N == pack):
        document_T[packs.offset_N[n] : packs.offset_N[n] + packs.size_N[n]] = n
    return document_T


def starts_of(packs: Packs, pack: int) -> np.ndarray[Any, Any]:
    """Return what `assemble` calls cu_seqlens_padded, of one pack."""
    size_D = packs.size_N[packs.pack_N == pack]
    return np.concatenate([[0], np.cumsum(size_D)])[None]


def counted(packs: Packs, cp: int, layout: Layout, tile: int) -> list[list[int]]:
    """Count token by token: runs of queries, in tiles, each up to the keys of its last query."""
    work = [[0] * cp for _ in range(packs.num_packs)]
    for pack in range(packs.num_packs):
        document_T = documents_of(packs, pack)
        for rank in range(cp):
            where = cp_positions(starts_of(packs, pack), packs.seq_len, rank, cp, layout)[0]
            fragments: list[list[int]] = []
            last = None
            for token in where.tolist():
                document = document_T[token]
                chunk = _chunk_of(packs, token, document, cp, layout)
                if document >= 0 and (document, chunk) != last:
                    fragments.append([])
                last = (document, chunk)
                if document >= 0:
                    fragments[-1].append(token - int(packs.offset_N[document]))
            for fragment in fragments:
                for first in range(0, len(fragment), tile):
                    work[pack][rank] += tile * (fragment[first : first + tile][-1] + 1)
    return work


def _chunk_of(packs: Packs, token: int, document: int, cp: int, layout: Layout) -> int:
    if cp == 1:
        return 0
    if layout == "sequence" or document < 0:
        return token * 2 * cp // packs.seq_len
    return int((token - packs.offset_N[document]) * 2 * cp // packs.size_N[document])


@laws
@given(steps(), st.sampled_from(LAYOUTS), st.integers(1, 9))
def test_the_work_is_that_of_a_count_over_tokens(
    step: tuple[Packs, int], layout: Layout, tile: int
) -> None:
    packs, cp = step
    assert attention_work(packs, cp, layout, tile).tolist() == counted(packs, cp, layout, tile)


@laws
@given(steps())
def test_all_layouts_do_the_same_work_between_them(step: tuple[Packs, int]) -> None:
    packs, cp = step
    pairs = int((packs.size_N * (packs.size_N + 1) // 2).sum())
    for layout in LAYOUTS:
        assert attention_work(packs, cp, layout).sum() == pairs
    assert (np.ptp(attention_work(packs, cp, "document", 7), axis=1) == 0).all()


@laws
@given(steps(), st.integers(1, 40))
def test_tiles_add_work_and_never_save_any(step: tuple[Packs, int], tile: int) -> None:
    packs, cp = step
    for layout in LAYOUTS:
        exact = attention_work(packs, cp, layout)
        assert (attention_work(packs, cp, layout, tile) >= exact).all()


@laws
@given(steps(), st.integers(1, 40))
def test_auto_is_never_slower_than_either(step: tuple[Packs, int], tile: int) -> None:
    packs, cp = step
    packs = replace(packs, num_packs=4)
    for num_buckets, num_microbatches in ((1, 1), (1, 4), (2, 2), (4, 1)):
        took = {
            layout: slowest_work(
                attention_work(packs, cp, layout, tile), num_buckets, num_microbatches
            )
            for layout in LAYOUTS
        }
        context = Context(layout="auto", tile=tile)
        chosen = choose_layout(context, packs, cp, num_buckets, num_microbatches)
        assert took[chosen] == min(took.values())


def test_a_step_waits_for_the_slowest_rank_of_every_microbatch_and_the_slowest_bucket() -> None:
    work_FR = np.array([[1, 5], [7, 2], [4, 4], [4, 4]])
    assert slowest_work(work_FR, num_buckets=2, num_microbatches=2) == 5 + 7
    assert slowest_work(work_FR, num_buckets=4, num_microbatches=1) == 7
    assert slowest_work(work_FR, num_buckets=2, num_microbatches=1) == max(1 + 7, 5 + 2, 4 + 4)


def a_pack(sizes: list[int], seq_len: int) -> Packs:
    size_N = np.array(sizes)
    return Packs(
        size_N=size_N,
        pack_N=np.zeros_like(size_N),
        offset_N=np.cumsum(size_N) - size_N,
        num_packs=1,
        seq_len=seq_len,
    )


def test_long_documents_are_cut_each_and_short_ones_with_their_pack() -> None:
    context = Context(layout="auto")
    mixed = a_pack([16384, *[1024] * 16], 32768)
    assert choose_layout(context, mixed, 4, 1, 1) == "document"
    short = a_pack([256] * 128, 32768)
    assert choose_layout(context, short, 4, 1, 1) == "sequence"
    assert choose_layout(context, short, 1, 1, 1) == "document"
    assert choose_layout(Context(layout="auto", tile=1), short, 4, 1, 1) == "document"
    assert choose_layout(Context(layout="sequence"), mixed, 4, 1, 1) == "sequence"


@pytest.mark.parametrize(
    ("packs", "layout", "match"),
    [
        (a_pack([8, 6], 32), "document", "span.*got 6 tokens"),
        (a_pack([8], 30), "sequence", "pack.*got 30 tokens"),
    ],
)
def test_what_cannot_be_cut_is_a_named_error(packs: Packs, layout: Layout, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        attention_work(packs, 2, layout)


@pytest.mark.parametrize("words", [{"layout": "zigzag"}, {"tile": 0}, {"tile": 1.5}])
def test_bad_words_are_named_at_once(words: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(words))):
        DGraph(topology=ClientPlaceTree(cp=2)).context(**words)


def test_a_layout_needs_ranks_that_share_packs() -> None:
    tree = ClientPlaceTree(dp=2, cp=2)
    with pytest.raises(ConfigError, match=r"context\('sequence'\).*'dp', 'cp'"):
        DGraph(topology=tree).distribute(("dp", "cp")).context("sequence")
    with pytest.raises(ConfigError, match=r"context\('auto'\).*'world'"):
        DGraph(topology=tree).context().distribute("world")
    DGraph(topology=tree).distribute(("dp", "cp")).context("document")
    DGraph(topology=ClientPlaceTree(dp=2)).context().distribute("world")
    assert DGraph().context().freeze().context == Context(layout="auto")
    assert DGraph().freeze().context == Context(layout="document")


# In plans ---------------------------------------------------------------------------------------

BATCHING = Packed(seq_len=64, global_batch=8, pad_to_multiple=8)
#: Long documents and short ones in turn, so that steps differ.
SOURCE = MemorySource("a", 0, [ok(*[64] * 8, *[8] * 64, *[40, 24] * 8)], BATCHING)


def plan_steps(context: Context, cp: int, num_buckets: int = 2) -> list[str]:
    driver = Driver([SOURCE], DrawRules(batching=BATCHING, epochs=1))
    strategy = Strategy(context=context)
    plans = [
        place(drawn, strategy, BATCHING, ClientPlaceTree(dp=num_buckets, cp=cp), driver.mixture)
        for drawn in driver.draws()
    ]
    return [plan.cp_layout for plan in plans]


def test_a_plan_says_how_its_packs_are_cut() -> None:
    assert plan_steps(Context(layout="auto", tile=16), cp=4) == [
        "document",
        "sequence",
        "document",
    ]
    assert set(plan_steps(Context(layout="sequence"), cp=4)) == {"sequence"}
    assert set(plan_steps(Context(), cp=4)) == {"document"}
    assert set(plan_steps(Context(layout="sequence"), cp=1)) == {"document"}


@pytest.mark.parametrize("now", [2, 4])
def test_the_rest_of_a_step_is_cut_as_it_was_or_chosen_anew(now: int) -> None:
    driver = Driver([SOURCE], DrawRules(batching=BATCHING, epochs=1))
    strategy = Strategy(context=Context(layout="auto", tile=16))
    driver.draw()
    drawn = driver.draw()
    plan = place(drawn, strategy, BATCHING, ClientPlaceTree(dp=2, cp=4), driver.mixture)
    assert plan.cp_layout == "sequence"
    rest = place_rest(
        drawn,
        strategy,
        BATCHING,
        ClientPlaceTree(dp=now, cp=4),
        driver.mixture,
        consumed_N=plan.microbatch_N < 2,
        first_microbatch=2,
        assignment_digest=plan.assignment_digest,
    )
    assert rest.cp_layout == "sequence"
    assert (rest.assignment_digest == plan.assignment_digest) == (now == 2)


def test_the_rest_of_a_step_that_is_placed_anew_has_a_layout_of_its_own() -> None:
    source = MemorySource("a", 0, [ok(*[8] * 32, *[64] * 4)], BATCHING)
    driver = Driver([source], DrawRules(batching=BATCHING, epochs=1))
    drawn = driver.draw()
    strategy = Strategy(context=Context(layout="auto", tile=16))
    assert (
        place(drawn, strategy, BATCHING, ClientPlaceTree(cp=4), driver.mixture).cp_layout
        == "sequence"
    )
    rest = place_rest(
        drawn,
        strategy,
        BATCHING,
        ClientPlaceTree(cp=4),
        driver.mixture,
        consumed_N=drawn.table["tokens"] == 8,
        first_microbatch=4,
        assignment_digest="of another topology",
    )
    assert rest.cp_layout == "document"
