"""Laws of the Planner's feed, over loaders in this process: order, resumption, verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.draw import Draw, DrawRules, Starved, draw
from megadask.planner.ids import Verdict
from megadask.planner.lines import Rows
from megadask.planner.state import LaneCursor, PlannerState, SourceState
from megadask.planner.weights import quantise
from megadask.scheduling.errors import SourceError
from megadask.scheduling.feed import SourceFeed
from megadask.scheduling.loader_host import _describe
from megadask.scheduling.mirror import Mirror
from megadask.scheduling.owners import Answer, LoaderAddress, Partners
from megadask.scheduling.reading import BadRecord
from megadask.scheduling.source_loader import SourceLoader
from megadask.scheduling.spec import SourceSpec
from tests.fakes import MemoryReader, restored, source_spec, spans
from tests.strategies import few_laws

BATCHING = Packed(seq_len=4, global_batch=2)


class LocalPartners:
    """Loaders that share the lanes of one source, asked without a cluster."""

    def __init__(self, spec: SourceSpec, num_loaders: int) -> None:
        self._loaders = [SourceLoader(spec, 100) for _ in range(num_loaders)]
        lanes = range(spec.lanes)
        self._owners = [
            LoaderAddress(tuple(lanes[first::num_loaders]), str(first), str(first))
            for first in range(num_loaders)
        ]

    def shadows(self, source: str) -> list[LoaderAddress]:
        return []

    async def loaders(self, source: str) -> list[LoaderAddress]:
        return self._owners

    async def read(self, source: str, lane: int, call: str, **arguments: Any) -> Answer:
        assert call == "describe"
        [owner] = [owner for owner in self._owners if lane in owner.lanes]
        assert all(int(k) in owner.lanes for k in arguments["cursors"])
        return Answer(_describe(self._loaders[int(owner.address)], **arguments), by_shadow=False)


def source(content: list[list[Any]], lanes: int) -> SourceSpec:
    options = {"name": "a", "lanes": lanes, "on_error": "skip", "batching": BATCHING}
    return source_spec(MemoryReader(content), **options)


def feed_of(
    spec: SourceSpec,
    state: SourceState | None = None,
    num_loaders: int = 1,
    epochs: int | None = 2,
    overrides: Mapping[tuple[int, int, int], int] | None = None,
) -> SourceFeed:
    state = state or PlannerState.initial({"a": spec.lanes}).sources["a"]
    partners = cast(Partners, LocalPartners(spec, num_loaders))
    mirror = Mirror(partners, "planner")
    return SourceFeed("a", state, partners, epochs, overrides or {}, mirror)


def fetch_all(feed: SourceFeed, step: int = 5) -> Rows:
    while not feed.complete:
        asyncio.run(feed.fetch(step))
    return feed.rows


class Planned:
    """Draws over a feed, as the Planner actor does."""

    def __init__(self, feed: SourceFeed, rules: DrawRules, state: PlannerState, step: int) -> None:
        self.feed = feed
        self.rules = rules
        self.state = state
        self.step = step

    def draw(self) -> Draw:
        while True:
            rows = {"a": self.feed.rows}
            drawn = draw(self.state, rows, quantise([1.0]), self.rules)
            if isinstance(drawn, Draw):
                break
            assert isinstance(drawn, Starved)
            assert list(drawn.wanted) == [drawn.source] == ["a"]
            asyncio.run(self.feed.fetch(self.step))
        self.state = drawn.state
        self.feed.trim(drawn.state.sources["a"], drawn.table.num_rows)
        return drawn


contents = st.lists(
    st.lists(st.integers(1, 9) | st.just("bad"), max_size=6), min_size=1, max_size=6
).filter(lambda shards: any(isinstance(n, int) for shard in shards for n in shard))


def records(shards: list[list[Any]]) -> list[list[Any]]:
    return [
        [BadRecord("bad") if n == "bad" else {"tokens": np.arange(n)} for n in shard]
        for shard in shards
    ]


@few_laws
@given(contents, st.integers(1, 5), st.integers(1, 3), st.integers(1, 20))
def test_spans_come_in_canonical_order_whoever_owns_the_lanes(
    shards: list[list[Any]], lanes: int, num_loaders: int, step: int
) -> None:
    spec = source(records(shards), lanes)
    rows = fetch_all(feed_of(spec, num_loaders=min(lanes, num_loaders)), step)
    assert rows.complete_epochs == 2
    whole = fetch_all(feed_of(spec), 1000)
    found = spans(rows.table)
    assert found == spans(whole.table)
    order = [(epoch, position, lane, start) for _, epoch, lane, position, start, _ in found]
    assert order == sorted(order)
    assert len(found) % 2 == 0
    assert len({span[1:4] for span in found}) == 2 * sum(map(len, shards))


@few_laws
@given(
    contents,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 8),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_a_feed_goes_on_from_any_state(
    shards: list[list[Any]], lanes: int, window: int, steps: int, step: int, other: int
) -> None:
    """However little is fetched at a time: between two rotations of the lanes, at their ends."""
    spec = source(records(shards), lanes)
    rules = DrawRules(batching=BATCHING, epochs=3, window=window)
    state = PlannerState.initial({"a": lanes})
    planned = Planned(feed_of(spec, epochs=3), rules, state, step)
    for _ in range(steps):
        planned.draw()
    saved = restored(planned.state)
    feed = feed_of(spec, saved.sources["a"], min(2, lanes), epochs=3)
    resumed = Planned(feed, rules, saved, other)
    for _ in range(8):
        one, two = planned.draw(), resumed.draw()
        assert spans(one.table) == spans(two.table)
        assert spans(one.passed) == spans(two.passed)
        assert one.state.to_json() == two.state.to_json()
        if not one.table.num_rows:
            return


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_feed_goes_on_between_two_rotations(lanes: int) -> None:
    spec = source(records([[1, 1]] * lanes), lanes)
    state = SourceState(
        cursor=(0, 0, lanes, 0), lanes=(LaneCursor(position=1, shard=0, row=1),) * lanes
    )
    feed = feed_of(spec, state)
    asyncio.run(feed.fetch(1))
    assert spans(feed.rows.table) == [(0, 0, lane, 1, 0, 1) for lane in range(lanes)]


def test_lanes_that_had_ended_hold_nothing_up() -> None:
    spec = source(records([[1], [1] * 30]), 2)
    at = (LaneCursor(position=1, row=1), LaneCursor(position=20, row=20))
    feed = feed_of(spec, SourceState(cursor=(0, 19, 2, 0), lanes=at))
    asyncio.run(feed.fetch(1))
    asyncio.run(feed.fetch(1))
    assert spans(feed.rows.table)[0] == (0, 0, 1, 20, 0, 1)


def test_committed_verdicts_override_a_later_reading() -> None:
    spec = source(records([[3, 9, 2]]), 1)
    rows = fetch_all(feed_of(spec, overrides={(0, 0, 1): int(Verdict.SKIPPED)}))
    verdicts = rows.table["verdict"][rows.table["epoch"] == 0].tolist()
    assert verdicts == [Verdict.OK, *[Verdict.SKIPPED] * 3, Verdict.OK]
    assert set(rows.table["verdict"][rows.table["epoch"] == 1].tolist()) == {Verdict.OK}


def test_an_epoch_of_which_nothing_can_be_read_is_fatal() -> None:
    feed = feed_of(source(records([["bad", "bad"], []]), 2))
    with pytest.raises(SourceError, match=r"'a' has nothing readable in epoch 0"):
        fetch_all(feed)


def test_the_rest_of_an_epoch_need_not_be_readable() -> None:
    content = records([[3, "bad"]])
    state = SourceState(cursor=(0, 0, 1, 0), lanes=(LaneCursor(position=1, row=1),))
    rows = fetch_all(feed_of(source(content, 1), replace(state), epochs=1))
    assert rows.table["verdict"].tolist() == [Verdict.SKIPPED]


@few_laws
@given(contents, st.integers(1, 5), st.integers(1, 3), st.integers(1, 20), st.integers(0, 9))
def test_a_fetch_that_fails_is_as_if_it_had_not_been(
    shards: list[list[Any]], lanes: int, num_loaders: int, step: int, before: int
) -> None:
    class Failing(LocalPartners):
        left = before

        async def read(self, source: str, lane: int, call: str, **arguments: Any) -> Answer:
            answer = await super().read(source, lane, call, **arguments)
            self.left -= 1
            if self.left == -1:
                raise SourceError("lost")
            return answer

    spec = source(records(shards), lanes)
    feed = feed_of(spec)
    feed._partners = cast(Partners, Failing(spec, min(lanes, num_loaders)))
    while not feed.complete:
        with suppress(ExceptionGroup):
            asyncio.run(feed.fetch(step))
    assert spans(feed.rows.table) == spans(fetch_all(feed_of(spec), 1000).table)


class Gated(LocalPartners):
    """Answers as often as it is let, or fails; notes how often it was asked."""

    fails = False

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec, 1)
        self.gate = asyncio.Semaphore(0)
        self.asked = 0

    async def read(self, source: str, lane: int, call: str, **arguments: Any) -> Answer:
        self.asked += 1
        await self.gate.acquire()
        if self.fails:
            raise SourceError("lost")
        return await super().read(source, lane, call, **arguments)


def gated_feed(num_records: int) -> tuple[SourceFeed, Gated]:
    spec = source(records([[1] * num_records]), 1)
    feed, partners = feed_of(spec, epochs=1), Gated(spec)
    feed._partners = cast(Partners, partners)
    return feed, partners


def test_who_needs_less_than_is_read_on_waits_for_that_alone() -> None:
    async def run() -> None:
        feed, partners = gated_feed(1000)
        feed.read_on(600)
        waiting = asyncio.create_task(feed.until(200))
        await asyncio.sleep(0)
        assert not waiting.done()
        partners.gate.release()
        await waiting
        assert 200 <= feed.num_ready < 600
        await feed.until(feed.num_ready)  # is there
        feed.read_on(700)  # by whoever reads already
        while feed.lacks(700):
            partners.gate.release()
            await asyncio.sleep(0)
        asked = partners.asked
        feed.read_on(700)
        await feed.until(700)
        assert partners.asked == asked

    asyncio.run(run())


def test_what_kept_a_feed_from_reading_on_hears_who_needs_it_and_it_is_tried_again() -> None:
    async def run() -> None:
        feed, partners = gated_feed(10)
        partners.fails = True
        feed.read_on(5)
        partners.gate.release()
        with pytest.raises(ExceptionGroup) as caught:
            await feed.until(5)
        assert caught.group_contains(SourceError, match="lost")
        assert feed.num_ready == 0
        partners.fails = False
        feed.read_on(20)  # more than there are
        partners.gate.release()
        await feed.until(5)
        partners.gate.release()
        await feed.until(20)
        assert feed.complete
        assert feed.num_ready == 10

    asyncio.run(run())


def test_a_closed_feed_asks_for_nothing_more() -> None:
    async def run() -> None:
        feed, partners = gated_feed(1000)
        feed.read_on(1000)
        while not partners.asked:
            await asyncio.sleep(0)
        feed.close()
        partners.gate.release()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
        assert partners.asked == 1

    asyncio.run(run())
