"""Records transformed several at a time: as one by one, whatever comes together."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice, pairwise, repeat
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Built
from tokenizers import models, pre_tokenizers

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.errors import ConfigError
from megadask.planner.state import LaneCursor
from megadask.scheduling import batched, lanes
from megadask.scheduling.batched import (
    BATCH_BYTES,
    BATCH_RECORDS,
    FIRST_RECORDS,
    GROWTH,
    batch_shares,
    transformed_ahead,
)
from megadask.scheduling.errors import SourceError
from megadask.scheduling.lanes import Read, read_lane, read_rows
from megadask.scheduling.reading import BadRecord, TruncatedShard
from megadask.scheduling.spec import OnError, SourceSpec
from megadask.transforms import (
    Batched,
    Bytes,
    Chain,
    Tokenizer,
    TransformError,
)
from tests.fakes import MemoryReader, source_spec
from tests.strategies import laws


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "RETRY_DELAYS_S", ())


def spec(
    rows: list[Any], transform: Any, on_error: OnError = "skip", faults: Any = None
) -> SourceSpec:
    return source_spec(MemoryReader([rows], faults), transform=transform, on_error=on_error)


def tokenizer() -> Tokenizer:
    built = Built(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, ".": 3}, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(built, eos=".")


def plainly(read: Read) -> tuple[Any, ...]:
    tokens = None if read.sample is None else read.sample["tokens"].tolist()
    return (read.position, read.shard, read.row, read.verdict, tokens, read.reason)


def until_error(reads: Iterator[Read]) -> tuple[list[tuple[Any, ...]], str]:
    found: list[tuple[Any, ...]] = []
    try:
        for read in reads:
            found += [plainly(read)]
    except Exception as error:
        return found, f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return found, ""


def alone(transform: Any) -> Any:
    """Return a transform without its batches."""
    return lambda record: transform(record)


texts = st.lists(st.sampled_from(["a", "b", "c", "."]), max_size=5).map(" ".join)
records = st.builds(lambda text: {"text": text}, texts)
bad = st.sampled_from([{"text": None}, {"other": "a"}, BadRecord("rotten"), {"text": b"a"}])


@laws
@given(
    st.lists(records | records | bad, max_size=2 * BATCH_RECORDS + 5),
    st.sampled_from(["skip", "raise"]),
    st.integers(0, 30),
    st.sampled_from([None, OSError("gone"), TruncatedShard("cut")]),
    st.booleans(),
)
def test_batches_give_what_records_give_alone(
    rows: list[Any], on_error: OnError, start: int, fault: Exception | None, in_chain: bool
) -> None:
    transform = Chain(tokenizer()) if in_chain else tokenizer()
    at = LaneCursor(position=min(start, len(rows)), row=min(start, len(rows)))

    def seen(made: Any) -> Any:
        fails = {(0, len(rows) // 2): [fault] * 3} if fault is not None and rows else None
        return until_error(read_lane(spec(rows, made, on_error, fails), 0, 0, at))

    assert seen(transform) == seen(alone(transform))


@dataclass
class Counting:
    """Counts what it is given; a record "bad" fails a whole batch."""

    sizes: list[int] = field(default_factory=list)

    def __call__(self, record: Any) -> Any:
        if record["text"] == "bad":
            raise ValueError("bad on its own")
        return {"tokens": [len(record["text"])]}

    def batch(self, given_ones: list[Any]) -> Any:
        self.sizes.append(len(given_ones))
        if any(one["text"] == "bad" for one in given_ones):
            raise RuntimeError("the batch fails")
        return [self(one) for one in given_ones]


def test_what_fails_a_batch_is_judged_alone() -> None:
    counting = Counting()
    rows = [{"text": "bad" if n == 5 else "x" * n} for n in range(1, 10)]
    reads = list(read_lane(spec(rows, counting), 0, 0, LaneCursor()))
    assert counting.sizes == [4, 5]
    assert [read.reason is None for read in reads] == [n != 5 for n in range(1, 10)]
    assert "ValueError: bad on its own" in str(reads[4].reason)


def test_a_batch_is_bounded_in_records_and_bytes() -> None:
    counting = Counting()
    small = [{"text": "x"}] * (10 * BATCH_RECORDS)
    large = [{"text": "x" * (BATCH_BYTES * 3 // 4)}] * 40
    list(read_lane(spec([*small, *large], counting), 0, 0, LaneCursor()))
    first, *grown = counting.sizes[: counting.sizes.index(BATCH_RECORDS)]
    assert first == FIRST_RECORDS
    assert [first, *grown] == [4, 8, 16, 32]
    assert all(now == before * GROWTH for before, now in pairwise([first, *grown]))
    assert max(counting.sizes) == BATCH_RECORDS
    assert set(counting.sizes[-20:]) == {1, 2}  # 3/4 of the bytes of a whole one each


def test_a_function_of_several_records_gets_more_of_them() -> None:
    sizes: list[int] = []

    def function(given_ones: Any) -> Any:
        sizes.append(len(given_ones))
        return [{"tokens": [1]}] * len(given_ones)

    list(read_lane(spec([{"text": "x" * BATCH_BYTES}] * 12, Batched(function)), 0, 0, LaneCursor()))
    assert sizes == [4, 8]


def batches(lane: int, record_bytes: int) -> Iterator[int]:
    """Yield how many records each batch of a lane has; goes on when these were taken."""
    counting = Counting()
    one, record = spec([], counting), {"text": "x" * record_bytes}
    ahead = transformed_ahead(one, zip(count(), repeat(record)), batch_shares(one, lane))
    for _ in ahead:
        yield counting.sizes[-1]
        for _ in islice(ahead, counting.sizes[-1] - 1):
            pass


@pytest.mark.parametrize("record_bytes", [1, 4000])
@pytest.mark.parametrize("num_lanes", [8, 16, 64, 200])
def test_lanes_that_are_read_in_turn_need_their_batches_in_turn(
    num_lanes: int, record_bytes: int
) -> None:
    """No turn over all lanes is much dearer than others, and the first ones are cheap."""
    lanes_left = [0] * num_lanes
    of_lanes = [batches(lane, record_bytes) for lane in range(num_lanes)]
    whole, turns = min(BATCH_RECORDS, -(-BATCH_BYTES // record_bytes)), []
    for _ in range(10 * BATCH_RECORDS):
        needed = [0 if left else next(of_lanes[n]) for n, left in enumerate(lanes_left)]
        assert max(needed) <= whole
        lanes_left = [old + new - 1 for old, new in zip(lanes_left, needed, strict=True)]
        turns.append(sum(needed))
    assert turns[0] <= FIRST_RECORDS * num_lanes
    assert max(turns) <= whole * num_lanes / 4


def test_where_reading_is_slow_a_batch_is_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "AHEAD_S", 0.0)
    counting = Counting()
    reads = list(read_lane(spec([{"text": "x"}] * 3, counting), 0, 0, LaneCursor()))
    assert len(reads) == 3
    assert counting.sizes == [1, 1, 1]


def test_records_are_read_a_batch_ahead_and_no_further() -> None:
    reader = MemoryReader([[{"text": "x"}] * 300], {(0, BATCH_RECORDS): [KeyError("too far")]})
    one = spec([], Counting())
    reads = read_lane(SourceSpec(**{**vars(one), "reader": reader}), 0, 0, LaneCursor())
    assert next(reads).position == 0
    reads.close()  # type: ignore[attr-defined]
    assert reader.num_open == 0


def test_records_that_are_read_again_are_transformed_alone() -> None:
    counting = Counting()
    one = spec([{"text": "x" * n} for n in range(1, 9)], counting)
    wanted = [LaneCursor(position=n, row=n) for n in (2, 5)]
    assert [plainly(read)[4] for read in read_rows(one, 0, 0, wanted)] == [[3], [6]]
    assert counting.sizes == []


@pytest.mark.parametrize("result", [None, [], [{"tokens": [1]}] * 3, ({"tokens": [1]},) * 2])
def test_a_batch_of_another_length_is_an_error(result: Any) -> None:
    made = Batched(lambda given_ones: result)
    with pytest.raises(ConfigError, match=r"'web': batch\(\).*a list of 2"):
        list(read_lane(spec([{"text": "a"}] * 2, made), 0, 0, LaneCursor()))
    with pytest.raises(ConfigError, match="a list of one"):
        made({"text": "a"})


def lengths(given_ones: Any) -> list[Any]:
    return [
        {"tokens": np.full(len(one["text"]), 7)}
        if one["text"] not in ("", "bad")
        else (TransformError("bad") if one["text"] else None)
        for one in given_ones
    ]


def test_batched_functions_may_drop_and_fail_records() -> None:
    made = Batched(lengths, size=2)
    rows = [{"text": text} for text in ("a", "", "bad", "aaa", "aa")]
    found, _ = until_error(read_lane(spec(rows, made), 0, 0, LaneCursor()))
    assert found == until_error(read_lane(spec(rows, alone(made)), 0, 0, LaneCursor()))[0]
    assert [tokens for *_, tokens, _ in found] == [[7], None, None, [7, 7, 7], [7, 7]]
    with pytest.raises(SourceError):
        list(read_lane(spec([BadRecord("rotten")], made, "raise"), 0, 0, LaneCursor()))


def test_batched_is_declared_checked_and_compared() -> None:
    made = Batched(lengths)
    assert pickle.loads(pickle.dumps(made)) == made != Batched(lengths, size=3)
    assert fingerprint(made) == fingerprint(Batched(lengths, size=3))
    for arguments in ((3,), (lengths, 0), (lengths, True)):
        with pytest.raises(ConfigError, match="Batched"):
            Batched(*arguments)  # type: ignore[arg-type]


def test_a_chain_batches_if_all_of_it_can() -> None:
    assert Chain(tokenizer()).batch is not None
    assert Chain(Bytes()).batch is None
    assert Chain(lambda record: record, tokenizer()).batch is None
    chain = Chain(Batched(lambda ones: [one if one["text"] else None for one in ones]), tokenizer())
    assert chain.batch is not None
    results = chain.batch([{"text": "a b"}, {"text": ""}, {"text": 3}, {"text": "b"}])
    assert [type(one).__name__ for one in results] == [
        "dict",
        "NoneType",
        "TransformError",
        "dict",
    ]
