"""Laws of reading planned payload forward, and of what entries say of spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megadask.planner.batching import Packed
from megadask.planner.ids import Verdict
from megadask.planner.state import LaneCursor
from megadask.scheduling import forward
from megadask.scheduling.forward import MOST_OPEN, Forward
from megadask.scheduling.known import Entry, mask_runs
from megadask.scheduling.lanes import Read, describe_lane
from megadask.scheduling.reading import Shard
from megadask.scheduling.samples import num_targets
from megadask.scheduling.spec import SourceSpec
from tests.fakes import CutReader, MemoryReader, numbered, source_spec
from tests.strategies import laws

PACKS = Packed(seq_len=4, global_batch=1)


class Known(MemoryReader):
    """What is known of the same records."""

    def read(self, shard: int, start: int = 0) -> Iterator[Any]:
        for record in super().read(shard, start):
            yield Entry(tokens=len(record["tokens"]))

    def shards(self) -> list[Shard]:
        return [Shard(f"memory#{n}") for n in range(len(self.content))]


def spec(payload: CutReader, **changes: Any) -> SourceSpec:
    declared = {"on_error": "skip", "batching": PACKS, "known": Known(payload.content)}
    return source_spec(payload, **(declared | changes))


def places(source: SourceSpec, epoch: int, lane: int) -> list[LaneCursor]:
    """Return the records of a lane as planning knows them."""
    reads = describe_lane(source, epoch, lane, LaneCursor())
    return [LaneCursor(position=r.position, shard=r.shard, row=r.row) for r in reads]


def test_a_lane_that_is_not_retained_is_closed_and_read_again() -> None:
    payload = CutReader(numbered(4, 4))
    source = spec(payload, lanes=2)
    one = Forward(source, 10**6)
    last = {lane: places(source, 0, lane)[-2:-1] for lane in range(2)}
    before = {lane: list(one.read(0, lane, last[lane])) for lane in range(2)}
    assert payload.num_open == 2
    one.retain(lambda lane: lane == 1)
    assert payload.num_open == 1
    assert {key[1] for key in one._passed} == {1}
    [again] = one.read(0, 0, last[0])
    assert again.sample is not None
    assert before[0][0].sample is not None
    np.testing.assert_array_equal(again.sample["tokens"], before[0][0].sample["tokens"])
    one.close()
    assert payload.num_open == 0
    assert one._bytes == 0


@settings(laws, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    cuts=st.dictionaries(st.integers(0, 1), st.integers(0, 8), max_size=2),
    shuffle=st.sampled_from([0, 1, 4, 6]),
    limit_bytes=st.sampled_from([0, 700, 10**6]),
    data=st.data(),
)
def test_any_order_of_asking_gives_what_was_planned(
    sizes: list[int], cuts: dict[int, int], shuffle: int, limit_bytes: int, data: st.DataObject
) -> None:
    payload = CutReader(numbered(*sizes))
    source = spec(payload, shuffle=shuffle)
    # In which order they would be read, were all of it there.
    expected = {
        at: int(read.sample["tokens"][0])
        for at, read in zip(
            places(source, 1, 0),
            _all(source),
            strict=True,
        )
        if read.sample is not None
    }
    payload.cuts = {shard: row for shard, row in cuts.items() if shard < len(sizes)}
    gone = {
        record["tokens"][0]
        for shard, row in payload.cuts.items()
        for record in payload.content[shard][row:]
    }
    one = Forward(source, limit_bytes)
    todo = list(data.draw(st.permutations(list(expected))))
    while todo:
        shard = todo[0].shard
        count = data.draw(st.integers(1, 5))
        part = sorted((at for at in todo if at.shard == shard), key=lambda at: at.row)[:count]
        todo = [at for at in todo if at not in part]
        for at, read in zip(part, one.read(1, 0, part), strict=True):
            assert read.position == at.position
            if expected[at] in gone:
                assert read.verdict is Verdict.TOMBSTONE
            else:
                assert read.sample is not None
                assert read.sample["tokens"] == expected[at]
        assert payload.num_open <= MOST_OPEN
    one.close()
    assert payload.num_open == 0


def test_rows_keep_their_numbers_where_payload_ends_inside_a_block() -> None:
    payload = CutReader(numbered(10))
    source = spec(payload, shuffle=4)
    wanted = places(source, 1, 0)
    whole = [_number(read) for read in Forward(source, 10**6).read(1, 0, wanted)]
    assert sorted(whole) == list(range(10))
    payload.cuts = {0: 6}
    rest = [_number(read) for read in Forward(source, 10**6).read(1, 0, wanted)]
    assert rest == [number if number < 6 else -1 for number in whole]
    # The block goes on behind its gap: else the numbers would be the same without it.
    assert -1 in rest[4:7]
    assert max(rest[5:8]) >= 4


def _number(read: Read) -> int:
    return -1 if read.sample is None else int(read.sample["tokens"][0])


def _all(source: SourceSpec) -> Iterator[Any]:
    """Read a lane shard after shard."""
    one = Forward(source, 10**6)
    wanted = places(source, 1, 0)
    for shard in sorted({at.shard for at in wanted}):
        yield from one.read(1, 0, [at for at in wanted if at.shard == shard])
    one.close()


def test_in_about_the_order_of_the_lane_each_row_is_read_once() -> None:
    payload = CutReader(numbered(*[51] * 6))
    for shuffle in (0, 10):
        source = spec(payload, shuffle=shuffle, lanes=2)
        one = Forward(source, 10**6)
        payload.num_opened = 0
        for first in range(0, 153, 20):  # steps of 20 records of each lane, every third in turn
            for turn in range(3):
                for lane in range(2):
                    wanted = places(source, 0, lane)[first + turn : first + 20 : 3]
                    for shard in sorted({at.shard for at in wanted}):
                        part = [at for at in wanted if at.shard == shard]
                        assert len(list(one.read(0, lane, part))) == len(part)
        assert (one.num_read, payload.num_opened) == (306, 6)
        one.close()


def test_a_row_far_ahead_is_opened_there(monkeypatch: Any) -> None:
    monkeypatch.setattr(forward, "FAR_ROWS", 10)
    one = Forward(spec(CutReader(numbered(200))), 10**6)
    for row in (0, 5, 150, 151, 20):
        [read] = one.read(0, 0, [LaneCursor(position=row, row=row)])
        assert read.sample is not None
        assert read.sample["tokens"] == row
    assert one.num_read == 6 + 2 + 1
    one.close()


# What entries say of spans ------------------------------------------------------------------------


@laws
@given(mask=st.lists(st.booleans(), min_size=1, max_size=30), seq_len=st.integers(1, 12))
def test_runs_of_a_mask_count_targets_as_the_mask_does(mask: list[bool], seq_len: int) -> None:
    array = np.array(mask, np.float32)
    sample = {"tokens": np.arange(len(mask)), "loss_mask": array}
    entry = Entry(tokens=len(mask), loss_runs=mask_runs(array))
    for overflow in ("split", "truncate"):
        cuts = Packed(seq_len=seq_len, global_batch=1, overflow=overflow).cut(len(mask))
        length = cuts[-1][1]
        for start, stop in cuts:
            expected = num_targets(sample, start, stop, length)
            assert entry.num_targets(start, stop, length) == expected


@laws
@given(tokens=st.integers(1, 40), seq_len=st.integers(1, 12), data=st.data())
def test_shares_of_targets_add_up(tokens: int, seq_len: int, data: st.DataObject) -> None:
    loss = data.draw(st.integers(0, tokens - 1))
    cuts = Packed(seq_len=seq_len, global_batch=1).cut(tokens)
    known = Entry(tokens=tokens, loss_tokens=loss)
    shares = [known.num_targets(start, stop, tokens) for start, stop in cuts]
    whole = [Entry(tokens=tokens).num_targets(start, stop, tokens) for start, stop in cuts]
    assert sum(shares) == loss
    assert sum(whole) == tokens - 1
    assert all(0 <= share <= most for share, most in zip(shares, whole, strict=True))
