"""Laws of the shuffle: a permutation, the same wherever it is taken up, and as good as it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from megadask.planner.batching import Packed
from megadask.planner.ids import Verdict
from megadask.planner.state import LaneCursor
from megadask.scheduling import shuffle
from megadask.scheduling.lanes import Read, lane_shards, ordered_rows, read_lane, read_rows
from megadask.scheduling.reading import BadRecord, Shard, TruncatedShard
from megadask.scheduling.shuffle import BLOCK_ROWS, STORED_BYTES, rows_of_block, size_of
from megadask.scheduling.spec import SourceSpec
from tests.fakes import MemoryReader
from tests.strategies import laws


class Cut(MemoryReader):
    """Some shards cannot be read beyond a row; counts the rows that were read."""

    cuts: dict[int, int] = {}  # noqa: RUF012
    num_read = 0

    def read(self, shard: int, start: int = 0) -> Iterator[Any]:
        for row, record in enumerate(super().read(shard, start), start):
            if row >= self.cuts.get(shard, row + 1):
                break
            self.num_read += 1
            yield record
        if shard in self.cuts:
            raise TruncatedShard("cut off")


def spec(reader: MemoryReader, **changes: Any) -> SourceSpec:
    declared: dict[str, Any] = {
        "name": "web",
        "index": 0,
        "reader": reader,
        "transform": None,
        "wants_rng": False,
        "lanes": 1,
        "seed": 7,
        "on_error": "skip",
        "max_consecutive_errors": 1000,
        "scalars": (),
        "modalities": (),
        "batching": Packed(seq_len=4, global_batch=1),
        "shuffle": 4,
    }
    return SourceSpec(**(declared | changes))


def numbered(*sizes: int) -> list[list[Any]]:
    """Return shards of so many samples each; the one token of a sample is its number."""
    first = np.cumsum([0, *sizes])
    return [
        [{"tokens": np.array([k])} for k in range(first[i], first[i + 1])]
        for i in range(len(sizes))
    ]


def read(
    source: SourceSpec, epoch: int = 0, lane: int = 0, at: LaneCursor | None = None
) -> list[Read]:
    return list(read_lane(source, epoch, lane, at or LaneCursor()))


def facts(reads: list[Read]) -> list[tuple[Any, ...]]:
    return [(r.position, r.shard, r.row, r.where, r.verdict, r.reason, _number(r)) for r in reads]


def _number(read: Read) -> int:
    return -1 if read.sample is None else int(read.sample["tokens"][0])


def numbers(source: SourceSpec, epoch: int = 0) -> list[int]:
    """Return the samples of an epoch, lane after lane."""
    lanes = range(source.lanes)
    return [_number(one) for lane in lanes for one in read(source, epoch, lane)]


@st.composite
def sources(draw: st.DrawFn) -> SourceSpec:
    """Shuffled sources of a few shards, with records that are bad and shards that are cut."""
    shards = numbered(*draw(st.lists(st.integers(0, 11), min_size=1, max_size=5)))
    for rows in shards:
        for row in range(len(rows)):
            if draw(st.integers(0, 9)) == 0:
                rows[row] = BadRecord("bad")
    reader = Cut(shards)
    reader.cuts = {
        shard: draw(st.integers(0, len(rows)))
        for shard, rows in enumerate(shards)
        if draw(st.integers(0, 3)) == 0
    }
    return spec(reader, lanes=draw(st.integers(1, 3)), shuffle=draw(st.integers(1, 6)))


@pytest.fixture(params=[shuffle.HELD_BYTES, 1200, 1], ids=["roomy", "narrow", "one record"])
def held_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What may be held of a block: one that has no room is read again for the rest."""
    monkeypatch.setattr(shuffle, "HELD_BYTES", request.param)
    return int(request.param)


@laws
@given(source=sources(), epoch=st.integers(0, 2))
def test_an_epoch_has_every_record_once(source: SourceSpec, epoch: int) -> None:
    reader: Any = source.reader
    rows = {
        shard: list(enumerate(content))[: reader.cuts.get(shard, len(content))]
        for shard, content in enumerate(reader.content)
    }
    for lane in range(source.lanes):
        reads = read(source, epoch, lane)
        assert [one.position for one in reads] == list(range(len(reads)))
        shards = lane_shards(source, lane, epoch)
        assert sorted(shards) == list(range(lane, len(rows), source.lanes))
        for ordinal, shard in enumerate(shards):
            mine = [one for one in reads if one.shard == ordinal]
            assert [one.row for one in mine] == list(range(len(mine)))
            stones = [one.row for one in mine if one.verdict is Verdict.TOMBSTONE]
            assert stones == [len(rows[shard])] * (shard in reader.cuts)
            names = [one.where for one in mine if one.verdict is not Verdict.TOMBSTONE]
            assert sorted(names) == sorted(f"shard memory#{shard}, row {n}" for n, _ in rows[shard])
            for one in mine[: len(rows[shard])]:
                # Messages name the row of the file, and no row leaves its block.
                row = int(one.where.rpartition(" ")[2])
                assert row // source.shuffle == one.row // source.shuffle
                record = rows[shard][row][1]
                assert (one.sample is None) == isinstance(record, BadRecord)
                assert one.sample is None or one.sample["tokens"] == record["tokens"]
    assert reader.num_open == 0


@laws
@given(source=sources(), data=st.data())
def test_a_lane_reads_alike_from_any_record(source: SourceSpec, data: st.DataObject) -> None:
    reader: Any = source.reader
    lane = data.draw(st.integers(0, source.lanes - 1))
    whole = read(source, 1, lane)
    if not whole:
        return
    first = data.draw(st.integers(0, len(whole) - 1))
    one = whole[first]
    reader.num_read = reader.num_opened = 0
    rest = read_lane(
        source, 1, lane, LaneCursor(position=one.position, shard=one.shard, row=one.row)
    )
    again = next(rest)
    # Taking up costs one shard opened, at the block of the record, and that block read.
    assert reader.num_opened == 1
    assert reader.num_read <= source.shuffle
    assert facts([again, *rest]) == facts(whole[first:])
    wanted = [
        LaneCursor(position=r.position, shard=r.shard, row=r.row)
        for r in whole
        if r.shard == one.shard
    ]
    wanted = [at for at in wanted if data.draw(st.booleans())]
    if wanted:
        found = read_rows(source, 1, lane, wanted)
        assert facts(list(found)) == facts([whole[at.position] for at in wanted])
    assert reader.num_open == 0


def test_what_is_held_does_not_change_the_order(held_bytes: int) -> None:
    shards = numbered(10, 3, 7)
    shards[0][5] = BadRecord("bad")
    reader = Cut(shards)
    reader.cuts = {2: 6}
    source = spec(reader, lanes=2, shuffle=5)
    reads = facts(read(source, 0, 0) + read(source, 0, 1))
    # Also in other processes and with other versions: else no saved state could be resumed.
    assert [one[-1] for one in reads if one[4] is not Verdict.TOMBSTONE] == ORDER
    assert len({one[3] for one in reads}) == 10 + 3 + 6 + 1
    assert reader.num_open == 0
    # Rows beyond the first reading are those of blocks that had no room.
    assert (reader.num_read > 2 * 19) == (held_bytes == 1)
    at = LaneCursor(position=4, shard=0, row=4)
    assert facts(read(source, 0, 0, at)) == facts(read(source, 0, 0))[4:]


def test_orders_differ_by_epoch_seed_and_source_and_by_nothing_else() -> None:
    shards = numbered(*[20] * 12)
    source = spec(MemoryReader(shards), lanes=2, shuffle=10)
    orders = [
        numbers(source, 0),
        numbers(source, 1),
        numbers(spec(MemoryReader(shards), lanes=2, shuffle=10, seed=8)),
        numbers(spec(MemoryReader(shards), lanes=2, shuffle=10, name="code")),
        numbers(spec(MemoryReader(shards), lanes=2, shuffle=5)),
    ]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(240))}
    assert numbers(spec(MemoryReader(shards), lanes=2, shuffle=10)) == orders[0]
    assert numbers(spec(MemoryReader(shards), lanes=2, shuffle=0)) != sorted(orders[0])  # by lanes
    plain = spec(MemoryReader(shards), shuffle=0)
    assert numbers(plain, 0) == numbers(plain, 1) == list(range(240))
    # A block of one row permutes shards and keeps rows.
    kept = numbers(spec(MemoryReader(shards), shuffle=1))
    assert [number % 20 for number in kept] == list(range(20)) * 12
    assert kept != list(range(240))


def test_a_shard_added_behind_changes_the_order_but_of_its_blocks() -> None:
    """Why shards cannot be added to a shuffled source: they come between those that were read."""
    old, new = (spec(MemoryReader(numbered(*[8] * count)), shuffle=8) for count in (6, 7))
    before = [shard for shard in lane_shards(new, 0) if shard < 6]
    assert before != lane_shards(old, 0) or lane_shards(new, 0)[-1] != 6
    blocks = [{tuple(numbers(one)[8 * i : 8 * i + 8]) for i in range(6)} for one in (old, new)]
    assert len(blocks[0] & blocks[1]) >= 5


def test_large_records_make_small_blocks() -> None:
    assert rows_of_block(Shard("a", 10_000, 10_000 * 2000), BLOCK_ROWS) == BLOCK_ROWS
    assert rows_of_block(Shard("a", 100, 100 * 2**20), BLOCK_ROWS) == STORED_BYTES // 2**20
    assert rows_of_block(Shard("a", 3, 3 * 2**30), BLOCK_ROWS) == 1
    assert rows_of_block(Shard("a", None, 2**40), BLOCK_ROWS) == BLOCK_ROWS
    assert rows_of_block(Shard("a", 10), 7) == 7


def test_the_size_of_a_record_is_about_what_it_holds() -> None:
    record = {"text": "a" * 1000, "image": bytes(5000), "ids": np.zeros(100), "tags": ["b" * 300]}
    assert 1000 + 5000 + 800 + 300 < size_of(record) < 8000


#: Samples in the order of `test_what_is_held_does_not_change_the_order`; -1 is a bad record.
ORDER = [4, 2, 1, 3, 0, 6, 7, -1, 9, 8, 13, 17, 16, 15, 14, 18, 10, 11, 12]


# How good it is -----------------------------------------------------------------------------------


def test_every_place_of_a_block_is_as_likely_as_any_other() -> None:
    """Chi-square over (row, place) in 400 epochs; the seed is fixed, so it cannot flake."""
    rows = 20
    source = spec(MemoryReader(numbered(rows)), shuffle=rows)
    count_RP = np.zeros((rows, rows), int)
    for epoch in range(400):
        count_RP[numbers(source, epoch), np.arange(rows)] += 1
    expected = 400 / rows
    statistic = float(((count_RP - expected) ** 2 / expected).sum())
    assert 0.001 < stats.chi2.sf(statistic, (rows - 1) ** 2) < 0.999


def test_every_shard_comes_as_often_at_any_time() -> None:
    shards = 12
    source = spec(MemoryReader(numbered(*[1] * shards)), lanes=2)
    count_ST = np.zeros((shards, shards), int)
    for epoch in range(600):
        count_ST[numbers(source, epoch), np.arange(shards)] += 1
    half = shards // 2  # a lane holds every other shard, in every epoch
    assert (count_ST[0::2, half:] == 0).all()
    assert (count_ST[1::2, :half] == 0).all()
    expected = 600 / half
    for lane in range(2):
        count_st = count_ST[lane::2, lane * half : (lane + 1) * half]
        statistic = float(((count_st - expected) ** 2 / expected).sum())
        assert 0.001 < stats.chi2.sf(statistic, (half - 1) ** 2) < 0.999


def test_neighbours_part_and_samples_move_far() -> None:
    """The figures of docs/readers.md: 16 lanes, 64 shards of 1,000 rows, blocks of 1,000."""
    num_shards, rows, lanes = 64, 1000, 16
    source = spec(MemoryReader(numbered(*[rows] * num_shards)), lanes=lanes, shuffle=BLOCK_ROWS)
    total = num_shards * rows
    by_lane = np.array([numbers_of_lane(source, 0, lane) for lane in range(lanes)])
    order = by_lane.T.ravel()  # canonical order: round-robin over lanes
    place = np.empty(total, int)
    place[order] = np.arange(total)
    moved = np.abs(place - np.arange(total)) / total
    assert 0.32 < moved.mean() < 0.35  # 1/3 is what a full shuffle has
    # Of two records that were neighbours, how far apart they are: a third of a block in its lanes.
    apart = np.abs(np.diff(place))
    assert 0.8 < np.median(apart) / (0.29 * BLOCK_ROWS * lanes) < 1.2
    # From one epoch to the next, too.
    next_place = np.empty(total, int)
    next_place[np.array([numbers_of_lane(source, 1, k) for k in range(lanes)]).T.ravel()] = (
        np.arange(total)
    )
    assert 0.28 < (np.abs(next_place - place) / total).mean() < 0.38
    # A batch of 256 has records of many shards.
    shards_of_batch = [len(set(order[i : i + 256] // rows)) for i in range(0, total, 256)]
    assert min(shards_of_batch) >= lanes
    assert Counter((order // rows).tolist()) == dict.fromkeys(range(num_shards), rows)


def numbers_of_lane(source: SourceSpec, epoch: int, lane: int) -> list[int]:
    return [
        int(record["tokens"][0])
        for shard in lane_shards(source, lane, epoch)
        for _, _, record in ordered_rows(source, source.reader, epoch, shard, 0)
    ]
