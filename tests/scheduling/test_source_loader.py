"""Laws of Source Loaders: what they report and serve depends on the data and the ids alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.batching import Fixed, Overflow, Packed
from megadask.planner.errors import ConfigError
from megadask.planner.ids import Verdict
from megadask.planner.metadata import SPAN_COLUMNS, Metadata, concat
from megadask.planner.pouring import parts
from megadask.planner.state import LaneCursor
from megadask.scheduling import lanes, source_loader
from megadask.scheduling.errors import SourceError
from megadask.scheduling.lanes import lane_shards
from megadask.scheduling.reading import BadRecord, TruncatedShard
from megadask.scheduling.source_loader import KEPT_REASONS, Described, SourceLoader
from megadask.scheduling.spec import SourceSpec
from tests.fakes import MemoryReader, source_spec
from tests.strategies import laws

BATCHING = Packed(seq_len=4, global_batch=1)
PLENTY = 2**20
MANY = 10_000
START = LaneCursor()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))


def spec(reader: MemoryReader, **changes: Any) -> SourceSpec:
    declared = {"index": 2, "batching": BATCHING, "max_consecutive_errors": 100}
    return source_spec(reader, **(declared | changes))


def documents(*lengths: int, first: int = 0) -> list[dict[str, Any]]:
    """Return samples of these lengths, with tokens that no two of them share."""
    return [{"tokens": 100 * (first + k) + np.arange(n)} for k, n in enumerate(lengths)]


def loader(*shards: list[Any], faults: Any = None, **changes: Any) -> SourceLoader:
    return SourceLoader(spec(MemoryReader(shards, faults), **changes), PLENTY)


def everything(loader: SourceLoader, epoch: int = 0) -> Metadata:
    """Return the metadata of all lanes in one epoch."""
    cursors = dict.fromkeys(range(loader.spec.lanes), START)
    described = loader.describe(epoch, cursors, MANY)
    assert described.ended == set(cursors)
    return described.table


def column(table: Metadata, *names: str) -> list[Any]:
    values = [table[name].tolist() for name in names]
    return values[0] if len(values) == 1 else list(zip(*values, strict=True))


def pieces(payload: Mapping[str, Any], name: str = "tokens") -> list[list[Any]]:
    return [payload[name][a:b].tolist() for a, b in pairwise(payload["offsets"])]


def assert_equal(one: Metadata, other: Metadata) -> None:
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# Metadata -------------------------------------------------------------------------------------


def test_metadata_names_every_span_and_where_its_record_lies() -> None:
    shards = [documents(3), documents(2, first=1), documents(9, 1, first=2)]
    table = everything(loader(*shards, lanes=2))
    assert column(table, "lane", "position", "shard", "row", "start", "stop") == [
        (0, 0, 0, 0, 0, 3),
        (0, 1, 1, 0, 0, 4),  # shard 1 of lane 0 is the third of the reader
        (0, 1, 1, 0, 4, 8),
        (0, 1, 1, 0, 8, 9),
        (0, 2, 1, 1, 0, 1),
        (1, 0, 0, 0, 0, 2),
    ]
    assert column(table, "tokens") == [3, 4, 4, 1, 1, 2]
    assert column(table, "length") == [3, 9, 9, 9, 1, 2]
    assert column(table, "loss_tokens") == [2, 4, 4, 0, 0, 1]
    assert column(table, "bytes") == [8 * n for n in (3, 9, 9, 9, 1, 2)]
    assert set(column(table, "source")) == {2}
    assert len(set(column(table, "checksum"))) == 4
    assert {name: str(table[name].dtype) for name in SPAN_COLUMNS} == SPAN_COLUMNS


def test_epochs_read_alike() -> None:
    one = loader(documents(3, 5), documents(2, first=2), lanes=2)
    first, second = everything(one, 0), everything(one, 1)
    assert set(column(second, "epoch")) == {1}
    assert_equal(first, second.with_columns(epoch=first["epoch"]))


def test_the_end_of_a_lane_is_seen_when_more_is_asked_for() -> None:
    one = loader(documents(1, 1))
    described = one.describe(0, {0: START}, 2)
    assert not described.ended
    assert described.cursors == {0: LaneCursor(position=2, shard=0, row=2)}
    last = one.describe(0, described.cursors, 3)
    assert last.ended == {0}
    assert last.table.num_rows == 0
    assert one.describe(0, last.cursors, 9).ended == {0}  # and asked again
    assert one.num_open_lanes == 0


def test_lanes_without_shards_and_shards_without_records_end_at_once() -> None:
    one = loader([], documents(1), [], lanes=2)
    described = one.describe(0, {0: START, 1: START}, 5)
    assert described.ended == {0, 1}
    assert column(described.table, "lane", "position", "shard") == [(1, 0, 0)]


shard_lists = st.lists(
    st.lists(
        st.integers(1, 11) | st.sampled_from([0, "bad", "fails"]),
        max_size=5,
    ),
    min_size=1,
    max_size=7,
)


def fail_on_request(record: Mapping[str, Any]) -> Mapping[str, Any]:
    if "fails" in record:
        raise ValueError("as requested")
    return record


def mixed(shards: list[list[Any]]) -> list[list[Any]]:
    """Return records: samples by their length, empty ones, bad ones, and such that fail."""
    made = []
    for number, shard in enumerate(shards):
        records: list[Any] = []
        for row, what in enumerate(shard):
            tokens = 1000 * number + 100 * row + np.arange(what if isinstance(what, int) else 1)
            mask = (tokens % 3 > 0).astype(float)
            records.append({"tokens": tokens, "loss_mask": mask, "quality": float(row)})
            if what == "bad":
                records[-1] = BadRecord("as requested")
            elif what == "fails":
                records[-1]["fails"] = True
        made.append(records)
    return made


def described_by(
    loaders: list[SourceLoader], parts: list[list[int]], steps: Iterator[int]
) -> Metadata:
    """Return an epoch as several loaders of some lanes each report it, until after until."""
    cursors = {lane: START for part in parts for lane in part}
    until, tables = 0, []
    while cursors:
        until += next(steps)
        for loader, part in zip(loaders, parts, strict=True):
            asked = {lane: cursors[lane] for lane in part if lane in cursors}
            described = loader.describe(0, asked, until)
            tables.append(described.table)
            cursors |= described.cursors
            for lane in described.ended:
                del cursors[lane]
    table = concat(tables)
    return table.take(np.lexsort((table["start"], table["position"], table["lane"])))


@laws
@given(shard_lists, st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1), st.data())
def test_metadata_does_not_depend_on_who_reads_which_lane_in_which_steps(
    shards: list[list[Any]], num_lanes: int, steps: list[int], data: st.DataObject
) -> None:
    source = spec(
        MemoryReader(mixed(shards)),
        lanes=num_lanes,
        on_error="skip",
        transform=fail_on_request,
        scalars=("quality",),
    )
    whole = everything(SourceLoader(source, PLENTY))
    owner = [data.draw(st.integers(0, 2)) for _ in range(num_lanes)]
    parts = [[lane for lane in range(num_lanes) if owner[lane] == k] for k in range(3)]
    loaders = [SourceLoader(source, data.draw(st.sampled_from([0, 100, PLENTY]))) for _ in parts]
    endless = (step for _ in iter(int, 1) for step in steps)
    assert_equal(described_by(loaders, parts, endless), whole)
    # Any of them serves any sample, from its cache or by reading it again.
    good = whole.take(whole["verdict"] == Verdict.OK)
    if not good.num_rows:
        return
    order = np.array(data.draw(st.permutations(range(good.num_rows))))
    wanted = good.take(order)
    expected = {}
    for lane in range(num_lanes):
        for ordinal, shard in enumerate(lane_shards(source, lane)):
            for row, record in enumerate(source.reader.content[shard]):  # type: ignore[attr-defined]
                expected[lane, ordinal, row] = record
    for one in loaders:
        for _ in range(2):
            payload = one.serve(wanted)
            for number, (lane, shard, row, start, stop, length) in enumerate(
                column(wanted, "lane", "shard", "row", "start", "stop", "length")
            ):
                record = expected[lane, shard, row]
                piece = slice(start, min(stop + 1, length))
                assert pieces(payload)[number] == record["tokens"][piece].tolist()
                assert pieces(payload, "mask")[number] == record["loss_mask"][piece].tolist()
        one.close()
        assert one.spec.reader.num_open == 0  # type: ignore[attr-defined]


@laws
@given(shard_lists, st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1), st.data())
def test_lanes_that_come_and_go_change_nothing_and_leave_nothing(
    shards: list[list[Any]], num_lanes: int, steps: list[int], data: st.DataObject
) -> None:
    """Between any two calls; calls for lanes that are not its own are answered too."""
    content = mixed(shards)
    options: dict[str, Any] = {"lanes": num_lanes, "on_error": "skip", "transform": fail_on_request}
    one = SourceLoader(spec(MemoryReader(content), **options), PLENTY)
    other = SourceLoader(spec(MemoryReader(content), **options), PLENTY)
    good = everything(other).take(everything(other)["verdict"] == Verdict.OK)
    cursors = dict.fromkeys(range(num_lanes), START)
    for step in steps:
        own = data.draw(st.sets(st.integers(0, num_lanes - 1)))
        one.keep(own)
        assert set(one._open) <= own
        until = step + max((at.position for at in cursors.values()), default=0)
        described, expected = (each.describe(0, cursors, until) for each in (one, other))
        assert_equal(described.table, expected.table)
        assert (described.cursors, described.ended) == (expected.cursors, expected.ended)
        cursors = {k: at for k, at in described.cursors.items() if k not in described.ended}
        if good.num_rows:
            served = one.serve(good)
            for name, array in other.serve(good).items():
                np.testing.assert_array_equal(served[name], array)
        assert set(one._open) <= own
        assert {lane for _, lane, _ in (*one.cache._fresh, *one.cache._served)} <= own
    one.close()
    assert one.spec.reader.num_open == 0  # type: ignore[attr-defined]


def test_asking_again_from_an_earlier_cursor_gives_the_same() -> None:
    one = loader(documents(1, 2, 3), documents(4, 5, first=3))
    first = one.describe(0, {0: START}, 2)
    whole = one.describe(0, {0: START}, MANY)
    middle = one.describe(0, first.cursors, MANY)
    assert_equal(concat([first.table, middle.table]), whole.table)


def test_a_slow_source_returns_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 100, 2))
    clock = SimpleNamespace(monotonic=lambda: float(next(times)))
    monkeypatch.setattr(source_loader, "time", clock)
    one = loader(documents(*[1] * 8), documents(1, first=8), lanes=2)
    first = one.describe(0, {0: START, 1: START}, MANY)
    assert 0 < first.table.num_rows < 8
    assert not first.ended
    assert set(first.cursors) == {0}
    monkeypatch.undo()
    rest = one.describe(0, {1: START, **first.cursors}, MANY)
    assert first.table.num_rows + rest.table.num_rows == 9


# Verdicts -------------------------------------------------------------------------------------


def test_records_without_tokens_are_filtered() -> None:
    def keep_odd(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return record if record["tokens"][0] % 200 else None

    one = loader([*documents(2, 3, 1), {"tokens": np.array([])}], transform=keep_odd)
    one.spec = replace(one.spec, transform=lambda r: keep_odd(r) if len(r["tokens"]) else r)
    table = everything(one)
    assert column(table, "verdict") == [Verdict.FILTERED, Verdict.OK] + [Verdict.FILTERED] * 2
    assert column(table, "position") == [0, 1, 2, 3]
    assert column(table, "tokens") == [0, 3, 0, 0]
    assert one.skip_reasons == []


@pytest.mark.parametrize(
    "bad", [BadRecord("line 7"), {"fails": True}, {"text": "a"}], ids=["read", "fails", "no tokens"]
)
def test_bad_records_are_skipped_with_their_reason(bad: Any) -> None:
    one = loader(
        [*documents(2), bad, *documents(3, first=2)], on_error="skip", transform=fail_on_request
    )
    table = everything(one)
    assert column(table, "verdict") == [Verdict.OK, Verdict.SKIPPED, Verdict.OK]
    assert column(table, "row") == [0, 1, 2]
    [reason] = one.skip_reasons
    assert reason.startswith("shard memory#0, row 1: ")


def test_a_function_decides_about_every_bad_record() -> None:
    asked = []

    def decide(error: Exception, where: str) -> Any:
        asked.append((type(error).__name__, where))
        return "skip" if isinstance(error, SourceError) else "raise"

    records = [*documents(2), BadRecord("line 7"), {"fails": True}]
    one = loader(records, on_error=decide, transform=fail_on_request)
    with pytest.raises(ValueError, match="as requested"):
        everything(one)
    assert asked == [
        ("SourceError", "source 'web', shard memory#0, row 1"),
        ("ValueError", "source 'web', shard memory#0, row 2"),
    ]
    assert len(one.skip_reasons) == 1


def test_a_function_that_does_not_decide_is_named() -> None:
    one = loader([BadRecord("line 7")], on_error=lambda error, where: None)
    with pytest.raises(ConfigError, match=r"on_error=.*got None"):
        everything(one)


def test_only_some_reasons_are_kept() -> None:
    one = loader([BadRecord(str(k)) for k in range(50)] + documents(1), on_error="skip")
    everything(one)
    assert len(one.skip_reasons) == KEPT_REASONS


def test_a_bad_record_raises_where_the_policy_says_so() -> None:
    one = loader([*documents(2), BadRecord("line 7")])
    with pytest.raises(SourceError, match=r"'web'.*memory#0, row 1.*line 7"):
        everything(one)


def test_the_error_of_a_transform_is_raised_as_it_is() -> None:
    one = loader([*documents(2), {"fails": True}], transform=fail_on_request)
    with pytest.raises(ValueError, match="as requested") as caught:
        everything(one)
    assert any("'web', shard memory#0, row 1, epoch 0" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (7, "int"),
        ({"text": "a"}, "text"),
        ({"tokens": [[1]]}, r"shape \(1, 1\)"),
        ({"tokens": [0.5]}, "float64"),
        ({"tokens": [1, 2], "loss_mask": [1]}, r"\(1,\).*\(2,\)"),
        ({"tokens": [1], "quality": "high"}, "quality.*high"),
    ],
    ids=["number", "no tokens", "nested", "floats", "mask", "scalar"],
)
def test_what_is_no_sample_is_named(sample: Any, message: str) -> None:
    one = loader([{}], transform=lambda record: sample, scalars=("quality",))
    with pytest.raises(ConfigError, match=message):
        everything(one)


@pytest.mark.parametrize("bad", [BadRecord("line"), {"fails": True}], ids=["read", "transform"])
def test_too_many_bad_records_in_a_row_are_fatal(bad: Any) -> None:
    def made(*runs: int) -> SourceLoader:
        records: list[Any] = []
        for run in runs:
            records += [*[bad] * run, *documents(1)]
        return loader(records, on_error="skip", max_consecutive_errors=3, transform=fail_on_request)

    assert everything(made(2, 2, 0, 2)).num_rows == 10
    with pytest.raises(SourceError, match=r"in a row.*got 3.*max_consecutive_errors=3"):
        everything(made(2, 3))


def test_shards_that_cannot_be_read_count_as_bad_records_too() -> None:
    shards = [documents(1) for _ in range(5)]
    faults = {(number, 0): [TruncatedShard("cut")] for number in range(1, 5)}
    one = loader(*shards, faults=faults, on_error="skip", max_consecutive_errors=3)
    with pytest.raises(SourceError, match="in a row"):
        everything(one)


def test_a_truncated_shard_ends_in_one_tombstone() -> None:
    class Truncated(MemoryReader):
        def read(self, shard: int, start: int = 0) -> Iterator[Any]:
            yield from super().read(shard, start)
            if shard == 0:
                raise TruncatedShard("cut off")

    reader = Truncated([documents(1, 1), documents(1, first=2)])
    one = SourceLoader(spec(reader, on_error="skip"), PLENTY)
    table = everything(one)
    assert column(table, "verdict", "position", "shard", "row") == [
        (Verdict.OK, 0, 0, 0),
        (Verdict.OK, 1, 0, 1),
        (Verdict.TOMBSTONE, 2, 0, 2),
        (Verdict.OK, 3, 1, 0),
    ]
    for until in range(5):  # it can be taken up at any place
        head = one.describe(0, {0: START}, until)
        tail = one.describe(0, head.cursors, MANY)
        assert_equal(concat([head.table, tail.table]), table)
    with pytest.raises(SourceError, match=r"memory#0, row 2.*cut off"):
        everything(SourceLoader(replace(one.spec, on_error="raise"), PLENTY))


# Storage that fails ---------------------------------------------------------------------------


def test_errors_of_storage_are_tried_again() -> None:
    faults = {(0, 1): [OSError("one"), TimeoutError("two"), OSError("three")], (0, 2): [OSError()]}
    one = loader(documents(1, 2, 3), faults=faults)
    assert column(everything(one), "tokens") == [1, 2, 3]
    assert one.spec.reader.num_opened == 5  # type: ignore[attr-defined]


def test_errors_of_storage_that_do_not_pass_are_fatal_under_any_policy() -> None:
    faults = {(0, 1): [OSError(f"no {k}") for k in range(4)]}
    one = loader(documents(1, 2, 3), faults=faults, on_error="skip")
    with pytest.raises(SourceError, match=r"memory#0, row 1.*OSError: no 3"):
        everything(one)
    assert one.num_open_lanes == 0


def test_a_reader_may_fail_before_its_first_record() -> None:
    class Eager(MemoryReader):
        def read(self, shard: int, start: int = 0) -> Iterator[Any]:
            if failures:
                raise failures.pop()
            return super().read(shard, start)

    failures: list[Exception] = [OSError("first"), OSError("second")]
    one = SourceLoader(spec(Eager([documents(1, 2)])), PLENTY)
    assert column(everything(one), "tokens") == [1, 2]
    failures.append(TruncatedShard("gone"))
    one.spec = replace(one.spec, on_error="skip")
    assert column(everything(one), "verdict") == [Verdict.TOMBSTONE]


@pytest.mark.parametrize(
    ("errors", "changes"),
    [
        ([OSError()] * 4, {}),
        ([RuntimeError("reader")], {}),
        ([], {"transform": fail_on_request}),
        ([], {"batching": replace(BATCHING, overflow="error")}),
    ],
    ids=["storage", "reader", "transform", "cut"],
)
def test_a_lane_that_failed_is_not_taken_for_one_that_has_ended(
    errors: list[Exception], changes: dict[str, Any]
) -> None:
    records = [*documents(1), {"tokens": np.arange(9)}, *documents(2, first=2)]
    if "transform" in changes:
        records[1]["fails"] = True
    one = loader(records, faults={(0, 1): list(errors)}, **changes)
    first = one.describe(0, {0: START}, 1)
    with pytest.raises(Exception):  # noqa: B017, PT011 each of them has its own
        one.describe(0, first.cursors, MANY)
    if errors:  # they have passed: the same call goes on where the lane stood
        rest = one.describe(0, first.cursors, MANY)
        assert column(rest.table, "position") == [1, 1, 1, 2]
    else:
        with pytest.raises(Exception):  # noqa: B017, PT011
            one.describe(0, first.cursors, MANY)


# Overflow and targets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overflow", "rows"),
    [
        ("split", [(0, 4, 10, 4), (4, 8, 10, 4), (8, 10, 10, 1)]),
        ("truncate", [(0, 4, 4, 3)]),
        ("drop", [(0, 0, 0, 0)]),
    ],
)
def test_documents_that_are_too_long(overflow: Overflow, rows: list[tuple[int, ...]]) -> None:
    batching = replace(BATCHING, overflow=overflow)
    one = loader(documents(10, 4), batching=batching)
    table = everything(one)
    found = column(table, "start", "stop", "length", "loss_tokens")
    assert found == [*rows, (0, 4, 4, 3)]
    assert table["verdict"][0] == (Verdict.FILTERED if overflow == "drop" else Verdict.OK)
    good = table.take(table["verdict"] == Verdict.OK)
    served = pieces(one.serve(good))
    # One token more where the document goes on: the target of the last.
    expected = [list(range(start, min(stop + 1, length))) for start, stop, length, _ in rows]
    assert served[:-1] == [tokens for tokens in expected if tokens]
    assert served[-1] == [100, 101, 102, 103]


def test_a_document_that_is_too_long_is_an_error_where_declared() -> None:
    one = loader(documents(5), batching=replace(BATCHING, overflow="error"))
    with pytest.raises(ConfigError, match=r"5 tokens.*seq_len=4"):
        everything(one)


@laws
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=20),
    st.booleans(),
    st.sampled_from(["split", "truncate"]),
)
def test_targets_are_counted_once_however_a_document_is_cut(
    mask: list[float], masked: bool, overflow: Overflow
) -> None:
    """The target of input i is token i + 1; the mask says of each token whether to predict it."""
    sample = {"tokens": np.arange(len(mask)), **({"loss_mask": mask} if masked else {})}
    one = loader([sample], batching=replace(BATCHING, overflow=overflow))
    table = everything(one)
    length = len(mask) if overflow == "split" else min(len(mask), BATCHING.seq_len)
    weights = mask[1:length] if masked else [1.0] * (length - 1)
    assert table["loss_tokens"].sum() == np.count_nonzero(weights)
    # What is served says the same: the weight of an input is that of the token behind it.
    payload = one.serve(table)
    counted = [
        sum(weight != 0 for weight in piece[1:]) if masked else len(piece) - 1
        for piece in pieces(payload, "mask" if masked else "tokens")
    ]
    assert counted == table["loss_tokens"].tolist()


def test_masks_are_ones_where_only_other_samples_have_one() -> None:
    records = [{"tokens": [1, 2]}, {"tokens": [3, 4, 5], "loss_mask": [0, 1, 0]}]
    one = loader(records)
    payload = one.serve(everything(one))
    assert pieces(payload, "mask") == [[1, 1], [0, 1, 0]]
    assert payload["mask"].dtype == np.float32
    assert "mask" not in loader(documents(1)).serve(everything(loader(documents(1))))


# Serving --------------------------------------------------------------------------------------


def test_samples_that_were_evicted_are_read_again() -> None:
    one = loader(documents(3, 9, 2), documents(4, first=3))
    table = everything(one)
    payload = one.serve(table)
    assert one.num_rereads == 0
    one.cache.clear()
    again = one.serve(table)
    assert one.num_rereads == 4
    assert list(again) == list(payload)
    for name in payload:
        np.testing.assert_array_equal(again[name], payload[name])
        assert again[name].dtype == payload[name].dtype


def test_reading_again_does_not_move_the_lane() -> None:
    one = loader(documents(*[2] * 9))
    first = one.describe(0, {0: START}, 5)
    one.cache.clear()
    one.serve(first.table)
    rest = one.describe(0, first.cursors, MANY)
    assert column(rest.table, "position") == [5, 6, 7, 8]
    assert one.spec.reader.num_opened == 2  # type: ignore[attr-defined]


def test_a_loader_without_memory_serves_all_the_same() -> None:
    small = SourceLoader(spec(MemoryReader([documents(3, 9, 2)])), 0)
    table = everything(small)
    assert pieces(small.serve(table)) == pieces(loader(documents(3, 9, 2)).serve(table))
    assert small.cache.bytes == 0


def test_only_what_is_delivered_is_kept() -> None:
    """A transform may leave the whole record in its sample."""
    records = [{"tokens": np.arange(4), "text": "x" * 1000, "quality": 3}]
    one = loader(records, scalars=("quality",))
    assert column(everything(one), "quality") == [3.0]
    assert one.cache.bytes == 32
    [(sample, _)] = one.cache._fresh.values()
    assert list(sample) == ["tokens"]


def test_items_are_ragged_columns_and_keep_their_sample_whole() -> None:
    patches = [np.zeros((3, 8)), np.zeros((5, 8))]
    records = [{"tokens": [1, 2], "image": patches}, {"tokens": np.arange(9)}, {"tokens": []}]
    ragged = everything(loader(records, modalities=("image",))).ragged["image"]
    assert ragged.lengths_I.tolist() == [3, 5]
    assert np.diff(ragged.offsets).tolist() == [2, 0, 0, 0, 0]
    one = loader([{"tokens": [1], "image": np.zeros(3)}], modalities=("image",))
    with pytest.raises(ConfigError, match=r"items 'image'.*ndarray"):
        everything(one)
    one = loader([{"tokens": np.arange(9), "image": patches}], modalities=("image",))
    with pytest.raises(ConfigError, match=r"items 'image'.*cannot be cut.*9 tokens") as caught:
        everything(one)
    assert "source 'web', shard memory#0, row 0" in caught.value.__notes__[0]


def test_scalars_are_columns_nan_where_there_is_none() -> None:
    records = [{"tokens": [1], "quality": 2}, {"tokens": [1], "quality": None}, {"tokens": [1]}]
    table = everything(loader([*records, {"tokens": []}], scalars=("length_s", "quality")))
    np.testing.assert_array_equal(table["quality"], [2, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(table["length_s"], [np.nan] * 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[0].__setitem__(1, {"tokens": np.array([1, 2, 4])}), "checksum"),
        (lambda c: c[0].__setitem__(1, BadRecord("rotten")), "SKIPPED.*rotten"),
        (lambda c: c[0].__setitem__(1, {"tokens": []}), "FILTERED"),
        (lambda c: c[0].pop(), "ends before row 1"),
        (lambda c: c[0].__setitem__(1, {"tokens": np.array([1, 2, 3], np.int32)}), "checksum"),
    ],
    ids=["value", "bad", "empty", "gone", "dtype"],
)
def test_a_sample_that_reads_differently_is_fatal(
    change: Callable[[list[list[Any]]], None], message: str
) -> None:
    content = [[*documents(2), {"tokens": np.array([1, 2, 3])}]]
    one = SourceLoader(spec(MemoryReader(content), on_error="skip"), PLENTY)
    table = everything(one)
    change(content)
    assert pieces(one.serve(table))[1] == [1, 2, 3]  # while it is in memory, nothing is read
    one.cache.clear()
    with pytest.raises(SourceError, match=rf"sample 0/0/1 reads differently.*{message}"):
        one.serve(table)


def noisy(record: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"tokens": record["tokens"] + rng.integers(0, 1000, len(record["tokens"]))}


def test_random_transforms_are_keyed_by_the_sample() -> None:
    def made(shards: int, **changes: Any) -> SourceLoader:
        content = [documents(5, 5) for _ in range(shards)]
        return loader(*content, transform=noisy, wants_rng=True, **changes)

    one = made(2, lanes=2)
    table = everything(one)
    payload = pieces(one.serve(table))
    one.cache.clear()
    assert pieces(one.serve(table)) == payload  # the same when read again, in any order
    other = made(2, lanes=2)
    turned = table.take(np.arange(table.num_rows)[::-1])
    assert pieces(other.serve(turned))[::-1] == payload
    # Unlike in every epoch, lane, source and seed.
    checksums = set(column(table, "checksum")) | set(column(everything(one, 1), "checksum"))
    checksums |= set(column(everything(made(2, lanes=2, seed=8)), "checksum"))
    checksums |= set(column(everything(made(2, lanes=2, name="code")), "checksum"))
    assert len(checksums) == 4 * 4


def test_a_random_transform_that_draws_elsewhere_is_found_out() -> None:
    rng = np.random.default_rng()

    def careless(record: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": record["tokens"] + rng.integers(0, 10**9)}

    one = loader(documents(5), transform=careless)
    table = everything(one)
    one.cache.clear()
    with pytest.raises(SourceError, match=r"draw from `rng`"):
        one.serve(table)


def test_closing_closes_files_and_may_be_repeated() -> None:
    one = loader(documents(1, 1), documents(1, first=2), lanes=2)
    one.describe(0, {0: START, 1: START}, 1)
    assert one.num_open_lanes == one.spec.reader.num_open == 2  # type: ignore[attr-defined]
    one.close()
    one.close()
    assert one.num_open_lanes == one.spec.reader.num_open == 0  # type: ignore[attr-defined]
    assert isinstance(one.describe(0, {0: START}, 1), Described)
    one.close()


# Documents that are cut after the draw ----------------------------------------------------------


def test_fixed_has_documents_whole_and_serves_any_part_of_them() -> None:
    made = loader(documents(9, 2), batching=Fixed(seq_len=4, global_batch=1))
    table = everything(made)
    assert column(table, "start", "stop", "length", "loss_tokens") == [(0, 9, 9, 8), (0, 2, 2, 1)]
    whole = table.take(np.array([0, 0, 0]))
    asked = parts(whole, np.arange(3), np.array([0, 3, 8]), np.array([3, 8, 9]))
    assert pieces(made.serve(asked)) == [[0, 1, 2, 3], [3, 4, 5, 6, 7, 8], [8]]


def test_fixed_refuses_a_loss_mask_and_names_the_record() -> None:
    shards = [documents(3), [{"tokens": np.arange(4), "loss_mask": np.ones(4)}]]
    made = loader(*shards, batching=Fixed(seq_len=4, global_batch=1))
    with pytest.raises(ConfigError, match=r"Fixed cuts anywhere.*loss_mask.*Packed") as caught:
        everything(made)
    assert caught.value.__notes__ == ["MegaDask: source 'web', shard memory#1, row 0"]
