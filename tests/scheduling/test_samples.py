"""What a sample may hold: its checked form, what is refused, and what the loader serves of it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megadask.planner.batching import Batching, Fixed, Packed, Padded
from megadask.planner.errors import ConfigError, StateError
from megadask.planner.ids import Verdict
from megadask.planner.metadata import Metadata
from megadask.planner.state import LaneCursor
from megadask.scheduling.errors import SourceError
from megadask.scheduling.extras import decode, encode_row, join_rows
from megadask.scheduling.samples import Form, check_sample, num_targets, payload_of, weigh
from megadask.scheduling.source_loader import SourceLoader
from megadask.transforms import Batched, Bytes
from tests.fakes import MemoryReader, source_spec
from tests.strategies import laws

PLENTY = 2**20


def form(**declared: Any) -> Form:
    packed = {name: declared.pop(name) for name in ("aligned", "position_axes") if name in declared}
    batching = Packed(seq_len=64, global_batch=1, **packed)
    return Form(fields=batching.fields, **declared)


def loader(records: list[Any], batching: Batching | None = None, **changes: Any) -> SourceLoader:
    declared = {"batching": batching} if batching else {}
    return SourceLoader(source_spec(MemoryReader([records]), **(declared | changes)), PLENTY)


def described(one: SourceLoader) -> Metadata:
    return one.describe(0, {0: LaneCursor()}, 1000).table


def rows(payload: Mapping[str, Any], name: str, offsets: str) -> list[Any]:
    return [payload[name][..., a:b].tolist() for a, b in pairwise(payload[offsets])]


# Whose memory it is -----------------------------------------------------------------------------

FORMS = {  # what a transform may hold the numbers of a part in, and fill again
    "array": np.array,
    "view": lambda values: np.concatenate([values, values])[: len(values)],
    "memoryview": lambda values: memoryview(np.array(values)),
    "read-only": lambda values: np.broadcast_to(np.array(values), np.shape(values)),
    "list": lambda values: np.array(values).tolist(),
}
PARTS: dict[str, tuple[Any, str]] = {
    "tokens": ([1, 2, 3], "int64"),
    "loss_mask": ([1, 0, 1], "float32"),
    "field": ([5, 6, 7], "int32"),
    "position_ids": ([0, 1, 0], "int32"),
    "image_index": ([-1, 0, 1], "int64"),
    "image_rows": ([1, 1], "int64"),
    "image_grid": ([[1, 2], [2, 1]], "int64"),
}


def filled_again(value: Any) -> None:
    """Overwrite numbers wherever they lie."""
    if isinstance(value, list):
        value[:] = [9] * len(value)
        return
    array = np.asarray(value)
    while isinstance(array.base, np.ndarray):
        array = array.base
    array[...] = 9


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("kind", FORMS)
def test_a_sample_is_kept_as_it_was_whatever_becomes_of_its_buffers(kind: str, axes: int) -> None:
    declared = form(modalities=("image",), aligned={"field": "int32"}, position_axes=axes)
    sample = {name: FORMS[kind](np.array(*part)) for name, part in PARTS.items()}
    items = [FORMS[kind](np.ones((2, 3), np.float32)), FORMS[kind](np.zeros((1, 3), np.float32))]
    extra = np.arange(4)
    whole = form(extras=("own",))
    checked = payload_of(check_sample({**sample, "image": items}, declared), declared)
    extras = check_sample({"tokens": [1], "own": extra}, whole)
    pairs = form(num_sequences=2)
    sequences = [{"tokens": FORMS[kind](np.array([1, 2]))} for _ in range(2)]
    both = check_sample({"sequences": sequences}, pairs)
    alone = check_sample({"sequences": sequences[:1]}, pairs)
    kept = [
        (one, weigh(payload_of(one, by)))
        for one, by in ((checked, declared), (extras, whole), (both, pairs), (alone, pairs))
    ]
    for value in [*sample.values(), *items, extra, *(one["tokens"] for one in sequences)]:
        filled_again(value)
    for (one, before), by in zip(kept, (declared, whole, pairs, pairs), strict=True):
        assert weigh(payload_of(one, by)) == before


def test_a_transform_may_fill_one_buffer_for_every_record() -> None:
    buffer = np.zeros(4, np.int64)

    def transform(record: Any) -> Any:
        buffer[:] = record["n"]
        return {"tokens": buffer, "loss_mask": buffer > 0}

    one = loader([{"n": n} for n in range(6)], transform=transform)
    payload = one.serve(described(one))
    assert rows(payload, "tokens", "offsets") == [[n] * 4 for n in range(6)]


# Sequences --------------------------------------------------------------------------------------


def pair(first: int, *lengths: int) -> dict[str, Any]:
    ends = first + np.cumsum([0, *lengths])
    return {"sequences": [{"tokens": np.arange(a, b)} for a, b in pairwise(ends)]}


def test_sequences_lie_one_after_the_other_padded_but_for_the_last() -> None:
    sample = pair(1, 3, 2)
    sample["sequences"][1]["loss_mask"] = [1, 0.5]
    checked = check_sample(sample, form(num_sequences=2, pad_to_multiple=4))
    assert checked["tokens"].tolist() == [1, 2, 3, 0, 4, 5]
    assert checked["loss_mask"].tolist() == [0, 1, 1, 0, 0, 0.5]
    assert checked["sequences"].tolist() == [3, 2]
    assert num_targets(checked, 0, 6, 6) == 3


@laws
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_a_group_has_the_targets_of_its_sequences(lengths: list[int], multiple: int) -> None:
    checked = check_sample(pair(1, *lengths), form(num_sequences=4, pad_to_multiple=multiple))
    total = len(checked["tokens"])
    assert total == sum(-(-n // multiple) * multiple for n in lengths[:-1]) + lengths[-1]
    assert num_targets(checked, 0, total, total) == sum(n - 1 for n in lengths)
    assert checked["sequences"].tolist() == lengths


def test_one_sequence_is_a_plain_sample_and_none_is_dropped() -> None:
    plain = check_sample({"tokens": np.arange(1, 4)}, form())
    one = check_sample(pair(1, 3), form())
    assert one.keys() == plain.keys()
    assert one["tokens"].tolist() == plain["tokens"].tolist()
    assert not len(check_sample({"sequences": []}, form())["tokens"])


def test_fields_of_sequences_lie_with_their_tokens() -> None:
    declared = form(
        aligned={"advantages": "float32", "scores": "(2,)int64"},
        modalities=("image",),
        num_sequences=2,
        pad_to_multiple=4,
    )
    sample = pair(1, 3, 2)
    sample["image"] = [np.zeros((2, 5))]
    sample["sequences"][0] |= {"advantages": [1, 2, 3], "scores": [[1, 2, 3], [4, 5, 6]]}
    sample["sequences"][1] |= {"image_index": [1, 0]}
    checked = check_sample(sample, declared)
    assert checked["advantages"].tolist() == [1, 2, 3, 0, 0, 0]
    assert checked["advantages"].dtype == np.float32
    assert checked["scores"].tolist() == [[1, 2, 3, 0, 0, 0], [4, 5, 6, 0, 0, 0]]
    assert checked["image_index"].tolist() == [-1, -1, -1, -1, 1, 0]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (pair(1, 3, 2, 2), r"too many sequences; got 3.*at most 2.*Packed\(sequences=\)"),
        ({"sequences": {"tokens": [1]}}, "'sequences'; got dict; expected a list of dicts"),
        ({"sequences": [[1, 2]]}, "'sequences'.*a list of dicts with 'tokens'"),
        ({"sequences": [{"tokens": [1]}, {"tokens": []}]}, "sequence 1 of a sample; got no tokens"),
        ({"sequences": [{"tokens": [1.5]}, {"tokens": [1]}]}, "sequence 0 of a sample's 'tokens'"),
        (
            {"sequences": [{"tokens": [1], "loss_mask": [1, 1]}, {"tokens": [1]}]},
            "sequence 0 of a sample's 'loss_mask'",
        ),
        ({**pair(1, 2, 2), "tokens": [1]}, r"beside them; got \['tokens'\]"),
    ],
)
def test_sequences_that_are_refused(sample: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sample(sample, form(num_sequences=2))


def test_more_than_one_sequence_has_to_be_declared() -> None:
    with pytest.raises(ConfigError, match=r"got 2.*at most 1.*Packed\(sequences=\)"):
        described(loader([pair(1, 2, 3)]))


def test_real_lengths_are_ragged_metadata_and_travel_with_the_payload() -> None:
    batching = Packed(seq_len=64, global_batch=1, sequences=3, pad_to_multiple=4)
    one = loader([pair(1, 3, 5, 2), {"tokens": np.arange(6)}, pair(20, 1, 1)], batching)
    table = described(one)
    ragged = table.ragged["sequences"]
    assert ragged.lengths_I.tolist() == [3, 5, 2, 1, 1]
    assert np.diff(ragged.offsets).tolist() == [3, 0, 2]
    assert table["tokens"].tolist() == [14, 6, 5]
    assert table["loss_tokens"].tolist() == [7, 5, 0]
    payload = one.serve(table.take(np.array([2, 1, 0])))
    assert rows(payload, "sequences", "sequences_offsets") == [[1, 1], [], [3, 5, 2]]
    assert rows(payload, "tokens", "offsets")[0] == [20, 0, 0, 0, 21]


@pytest.mark.parametrize("overflow", ["split", "truncate", "error"])
def test_what_stays_together_and_is_too_long_is_an_error_that_names_its_record(
    overflow: Any,
) -> None:
    batching = Packed(seq_len=8, global_batch=1, sequences=2, overflow=overflow)
    for changes, sample in (
        ({}, pair(1, 5, 4)),
        ({"modalities": ("image",)}, {"tokens": np.arange(9), "image": [np.zeros((2, 2))]}),
        ({"size": "pixels", "extras": ("pixels",)}, {"pixels": np.zeros(9)}),
    ):
        with pytest.raises(ConfigError, match=r"cannot be cut.*9 tokens.*seq_len=8") as caught:
            described(loader([sample], batching, **changes))
        assert caught.value.__notes__ == ["MegaDask: source 'web', shard memory#0, row 0"]


def test_what_stays_together_and_is_too_long_is_dropped_where_that_is_declared() -> None:
    batching = Packed(seq_len=8, global_batch=1, sequences=2, overflow="drop")
    table = described(loader([pair(1, 5, 4), pair(1, 5, 3)], batching))
    assert table["verdict"].tolist() == [Verdict.FILTERED, Verdict.OK]


# Aligned fields ---------------------------------------------------------------------------------


def test_fields_are_served_with_their_tokens_and_filled_up() -> None:
    batching = Packed(
        seq_len=4, global_batch=1, aligned={"advantages": "float32", "scores": "(2,)int64"}
    )
    advantages = np.arange(6) / 2
    scores = np.arange(12).reshape(2, 6)
    one = loader(
        [
            {"tokens": np.arange(6), "advantages": advantages, "scores": scores},
            {"tokens": np.arange(3)},
        ],
        batching,
    )
    payload = one.serve(described(one))
    assert rows(payload, "tokens", "offsets") == [[0, 1, 2, 3, 4], [4, 5], [0, 1, 2]]
    assert payload["field:advantages"].dtype == np.float32
    assert rows(payload, "field:advantages", "offsets") == [
        [0, 0.5, 1, 1.5, 2],
        [2, 2.5],
        [0, 0, 0],
    ]
    assert rows(payload, "field:scores", "offsets") == [
        scores[:, :5].tolist(),
        scores[:, 4:].tolist(),
        [[0, 0, 0]] * 2,
    ]
    assert "field:position_ids" not in payload


def test_positions_of_one_axis_are_repeated_where_there_are_several() -> None:
    declared = form(position_axes=3)
    given_three = np.arange(9).reshape(3, 3)
    for positions, expected in ((given_three, given_three), ([5, 6, 7], [[5, 6, 7]] * 3)):
        checked = check_sample({"tokens": [1, 2, 3], "position_ids": positions}, declared)
        np.testing.assert_array_equal(checked["position_ids"], expected)
    assert "position_ids" not in check_sample({"tokens": [1]}, declared)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantages": [1.0]}, r"'advantages'; got float64 of shape \(1,\).*shape \(2,\)"),
        ({"advantages": ["a", "b"]}, "'advantages'; got <U1"),
        ({"group": [1.5, 2]}, "'group'; got float64.*int64"),
        ({"position_ids": np.zeros((3, 2), int)}, "'position_ids'.*position_axes="),
        ({"position_ids": [0, -1]}, "'position_ids'; got -1; expected >= 0"),
        ({"image_index": [0, 2]}, r"'image_index'; got 0\.\.2.*0\.\.1"),
        ({"image_grid": [[1, 2], [3, 4]]}, r"'image_grid'.*shape \(1, axes\)"),
        ({"image": [["a"]]}, "items 'image'.*numbers"),
        ({"image": [np.zeros((2, 3), "longdouble")]}, "items 'image'.*numbers"),
        ({"loss_mask": [1, np.nan]}, "'loss_mask'; got nan at 1; expected finite"),
        ({"loss_mask": [1e300, 1]}, "'loss_mask'; got inf at 0; expected finite"),
        (
            {"tokens": np.array([1, 2**63], np.uint64)},
            f"'tokens'; got {2**63}; expected integers of 64 bits",
        ),
    ],
)
def test_fields_that_are_refused(fields: Any, message: str) -> None:
    declared = form(aligned={"advantages": "float32", "group": "int64"}, modalities=("image",))
    sample = {"tokens": [1, 2], "image": [np.zeros((2, 3))], **fields}
    with pytest.raises(ConfigError, match=message):
        check_sample(sample, declared)


@pytest.mark.parametrize(
    ("dtype", "given", "lost"),
    [
        ("int8", [1, 300], 300),
        ("uint8", [1, -1], -1),
        ("bool", [1, 2], 2),
        ("int64", np.array([1, 2**63], np.uint64), 2**63),
        ("float16", [1.0, 1e9], 1e9),
        ("float16", [1, 100_000], 100_000),
    ],
)
def test_no_number_becomes_another_one_in_a_field(dtype: str, given: Any, lost: Any) -> None:
    with pytest.raises(ConfigError, match=f"'x'; got {lost}; expected numbers that {dtype} holds"):
        check_sample({"tokens": [1, 2], "x": given}, form(aligned={"x": dtype}))


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("uint8", [0, 255]),
        ("bool", [0, 1]),
        ("float16", [np.inf, np.nan]),
        ("float32", [0.1, -1e-50]),
        (">i4", [1, -2]),
    ],
)
def test_a_field_takes_numbers_that_its_type_holds(dtype: str, given: Any) -> None:
    checked = check_sample({"tokens": [1, 2], "x": given}, form(aligned={"x": dtype}))
    assert checked["x"].dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(checked["x"], np.array(given).astype(dtype))


@pytest.mark.parametrize(
    ("aligned", "message"),
    [
        ({"tokens": "int64"}, "a name; got 'tokens'"),
        ({"a:b": "int64"}, "a name; got 'a:b'"),
        ({3: "int64"}, "a name; got 3"),
        ({"x": "complex64"}, "the type of 'x'"),
        ({"x": "no such type"}, "the type of 'x'"),
        ({"x": "longdouble"}, "the type of 'x'"),
        ({"x": "(0,)int32"}, "the type of 'x'"),
        (["x"], r"aligned=\); got \['x'\]"),
    ],
)
def test_fields_are_declared_by_name_and_type(aligned: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Packed(seq_len=8, global_batch=1, aligned=aligned)


@pytest.mark.parametrize("field", ["sequences", "position_axes"])
@pytest.mark.parametrize("value", [0, True, 1.5, None])
def test_counts_of_packs_are_checked(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Packed\({field}=\).*an integer >= 1"):
        Packed(seq_len=8, global_batch=1, **{field: value})


# Items ------------------------------------------------------------------------------------------


def test_items_are_kept_and_weighed_but_not_served_with_the_tokens() -> None:
    items = [np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros((1, 3), np.uint8)]
    record = {
        "tokens": np.array([5, 9, 9, 9]),
        "image": items,
        "image_grid": [[2, 1], [1, 1]],
        "image_index": [-1, 0, 1, 2],
    }
    one = loader([record], modalities=("image",))
    table = described(one)
    assert table["bytes"].tolist() == [4 * 8 + 9 + 2 * 2 * 8 + 4 * 8]
    payload = one.serve(table)
    assert set(payload) == {"tokens", "offsets", "field:image_index", "rows:image"}
    assert payload["rows:image"].tolist() == [3]
    [(sample, *_)] = one.cache._served.values()
    assert [item.tolist() for item in sample["image"]] == [item.tolist() for item in items]
    assert sample["image_grid"].tolist() == [[2, 1], [1, 1]]


def item_table(table: Metadata, rows: list[int], numbers: list[int]) -> Metadata:
    return table.take(np.array(rows)).with_columns(item=np.array(numbers))


def test_items_are_served_one_by_one_in_the_order_asked_for() -> None:
    images = [np.full((n, 2), n, np.uint8) for n in (1, 2, 3)]
    records = [
        {"tokens": [1], "image": images[:2], "image_grid": [[1, 1], [2, 1]], "image_rows": [1, 1]},
        {"tokens": [2]},
        {"tokens": [3], "image": images[2:], "image_grid": [[3, 1]]},
    ]
    one = loader(records, modalities=("image",))
    wanted = item_table(described(one), [2, 0, 0], [0, 1, 0])
    reply = one.serve_items(wanted, "image")
    assert reply["items"].tolist() == [[3, 3]] * 3 + [[2, 2]] * 2 + [[1, 1]]
    assert reply["lengths"].tolist() == [3, 2, 1]
    assert reply["rows"].tolist() == [3, 1, 1]  # its own length where it does not say so
    assert reply["grid"].tolist() == [[3, 1], [2, 1], [1, 1]]
    one.cache.clear()
    for key, array in one.serve_items(wanted, "image").items():
        np.testing.assert_array_equal(array, reply[key])
    assert one.num_rereads == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"image": [np.zeros((1, 3), np.uint8)]}, "differ in form.*uint8"),
        ({"image": [np.zeros((1, 2), np.float32)]}, "differ in form.*float32"),
        ({"image": [np.zeros((1, 2), np.uint8)], "image_grid": [[1, 1]]}, "without a grid"),
    ],
)
def test_items_that_cannot_lie_together_are_an_error(other: Any, message: str) -> None:
    records = [{"tokens": [1], "image": [np.zeros((1, 2), np.uint8)]}, {"tokens": [2], **other}]
    one = loader(records, modalities=("image",))
    with pytest.raises(ConfigError, match=message):
        one.serve_items(item_table(described(one), [0, 1], [0, 0]), "image")


@pytest.mark.parametrize("rows", [[1], [1, -1], [[1, 1]], [0.5, 1.0]])
def test_numbers_of_embeddings_are_checked(rows: Any) -> None:
    record = {"tokens": [1], "image": [np.zeros((2, 1)), np.zeros((3, 1))], "image_rows": rows}
    with pytest.raises(ConfigError, match="'image_rows'"):
        described(loader([record], modalities=("image",)))
    index = {"tokens": [1, 1], "image": [np.zeros((4, 1))], "image_rows": [1]}
    with pytest.raises(ConfigError, match=r"'image_index'.*0\.\.0"):
        described(loader([{**index, "image_index": [0, 1]}], modalities=("image",)))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["image"][0].__setitem__((0, 0), 9),
        lambda r: r.__setitem__("image", [r["image"][0].reshape(3, 2)]),
        lambda r: r.__setitem__("image_grid", np.array([[1, 2]])),
        lambda r: r.__setitem__("url", "other"),
        lambda r: r.__setitem__("advantages", [1.0, 3.0]),
    ],
    ids=["item", "shape", "grid", "extra", "field"],
)
def test_all_payload_is_in_the_checksum(change: Any) -> None:
    record = {
        "tokens": np.array([5, 9]),
        "image": [np.zeros((2, 3))],
        "image_grid": np.array([[2, 1]]),
        "url": "one",
        "advantages": [1.0, 2.0],
    }
    batching = Packed(seq_len=8, global_batch=1, aligned={"advantages": "float32"})
    one = loader([record], batching, modalities=("image",), extras=("url",))
    table = described(one)
    one.cache.clear()
    assert one.serve(table)["tokens"].tolist() == [5, 9]
    change(record)
    one.cache.clear()
    with pytest.raises(SourceError, match=r"reads differently.*checksum"):
        one.serve(table)


def test_a_checksum_of_tokens_alone_is_theirs() -> None:
    tokens = np.arange(5, dtype=np.int16)
    payload = payload_of(check_sample({"tokens": tokens, "text": "kept not"}, form()), form())
    assert list(payload) == ["tokens"]
    assert weigh(payload)[0] == tokens.nbytes


# Extras -----------------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text()
lists = st.lists(st.integers(-9, 9), max_size=3) | st.lists(st.text(max_size=3), max_size=3)
values = plain | st.binary(max_size=8) | lists | st.fixed_dictionaries({"a": st.integers(0, 9)})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and (one == other or (one != one and other != other))


@laws
@given(st.lists(st.fixed_dictionaries({"url": values, "label": values}), max_size=5))
def test_extras_come_back_as_they_were_whatever_their_neighbours(records: list[Any]) -> None:
    encoded = [encode_row(record) for record in records]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int64)
    data: NDArray[np.uint8] = np.concatenate([np.empty(0, np.uint8), *encoded])
    extras = decode(join_rows(["label", "url", "other"], data, offsets))
    assert list(extras) == ["label", "url", "other"]
    assert extras["other"] == [None] * len(records)
    for name in ("url", "label"):
        assert all(same(r[name], v) for r, v in zip(records, extras[name], strict=True))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.zeros((0, 4), np.int8),
        np.array([True, False]),
        np.array(["ab", "c"]),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
    ],
    ids=["float16", "empty", "bool", "text", "fortran"],
)
def test_arrays_come_back_with_their_shape_and_type(array: NDArray[Any]) -> None:
    row = encode_row({"x": array})
    [value] = decode(join_rows(["x"], row, np.array([0, len(row)])))["x"]
    assert same(array, value)
    assert value.flags.writeable


def test_names_of_extras_are_any_texts() -> None:
    names = ["two\nlines", "日本", "a:b"]
    rows = [encode_row({name: number for number, name in enumerate(names)})]
    data = join_rows(names, rows[0], np.array([0, len(rows[0])]))
    assert decode(data) == {name: [number] for number, name in enumerate(names)}


@pytest.mark.parametrize(
    "value",
    [object(), [1, "a"], {1, 2}, np.array([object()]), 2**70, [{"a": 1}, {"b": 2}], 1j],
    ids=["object", "mixed", "set", "objects", "huge", "lossy", "complex"],
)
def test_what_arrow_does_not_hold_is_an_error_that_names_its_record(value: Any) -> None:
    one = loader([{"tokens": [1], "meta": value}], extras=("meta",))
    with pytest.raises(ConfigError, match="a sample's extra 'meta'") as caught:
        described(one)
    assert "source 'web', shard memory#0, row 0" in caught.value.__notes__[0]
    skipping = loader([{"tokens": [1], "meta": value}], extras=("meta",), on_error="skip")
    assert described(skipping)["verdict"].tolist() == [Verdict.SKIPPED]


def test_other_bytes_are_no_extras() -> None:
    with pytest.raises(StateError, match="no extras"):
        decode(np.zeros(9, np.uint8))


def test_every_span_of_a_sample_has_its_extras() -> None:
    batching = Packed(seq_len=4, global_batch=1)
    one = loader([{"tokens": np.arange(6), "url": "a"}, {"tokens": [1]}], batching, extras=("url",))
    payload = one.serve(described(one))
    extras = decode(join_rows(["url"], payload["extras"], payload["extras_offsets"]))
    assert extras == {"url": ["a", "a", None]}


def test_extras_that_the_transform_leaves_out_are_those_of_the_record() -> None:
    records = [{"text": "ab", "url": "one", "label": 3}, {"text": "c", "url": "two"}]

    def shout(record: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**Bytes()(record), "url": record["url"].upper()}  # type: ignore[dict-item]

    def extras_of(transform: Any) -> Any:
        one = loader(records, transform=transform, extras=("url", "label"))
        payload = one.serve(described(one))
        return decode(join_rows(["url", "label"], payload["extras"], payload["extras_offsets"]))

    assert extras_of(Bytes()) == {"url": ["one", "two"], "label": [3, None]}
    batched = Batched(lambda given_ones: [Bytes()(one) for one in given_ones])
    assert extras_of(batched) == extras_of(Bytes())
    assert extras_of(shout) == {"url": ["ONE", "TWO"], "label": [3, None]}


# Samples without tokens -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "size"), [(3, 3), (np.int32(3), 3), (np.zeros((5, 2)), 5), ([1, 2], 2), ("abc", 3)]
)
def test_samples_without_tokens_are_counted_by_a_field(value: Any, size: int) -> None:
    one = loader([{"frames": value, "x": np.arange(3)}], size="frames", extras=("x",))
    table = described(one)
    assert table["tokens"].tolist() == [size]
    assert table["loss_tokens"].tolist() == [0]
    payload = one.serve(table)
    assert payload["tokens"].tolist() == [0] * size
    assert not payload["mask"].any()
    extras = decode(join_rows(["x"], payload["extras"], payload["extras_offsets"]))
    assert extras["x"][0].tolist() == [0, 1, 2]


def test_a_size_of_zero_is_dropped_and_none_is_an_error() -> None:
    one = loader([{"frames": 0}], size="frames", extras=("x",))
    assert described(one)["verdict"].tolist() == [Verdict.FILTERED]
    for record in ({"x": 1}, {"frames": -2}, {"frames": None}):
        with pytest.raises(ConfigError, match=r"Source\(size='frames'\)"):
            described(loader([record], size="frames", extras=("x",)))


def test_what_is_no_sample_says_what_one_is() -> None:
    with pytest.raises(ConfigError, match=r"got \['text'\].*Bytes.*Source\(size=\)"):
        check_sample({"text": "a"}, form())
    with pytest.raises(ConfigError, match="got list"):
        check_sample([1, 2], form())


# Other batching ---------------------------------------------------------------------------------


def test_padded_rows_and_fixed_packs_hold_no_pairs() -> None:
    for batching in (Padded(seq_len=64, global_batch=1), Fixed(seq_len=64, global_batch=1)):
        with pytest.raises(ConfigError, match=r"too many sequences.*at most 1"):
            described(loader([pair(1, 2, 3)], batching))


def test_where_documents_are_cut_anywhere_what_stays_together_is_refused() -> None:
    batching = Fixed(seq_len=64, global_batch=1)
    record = {"tokens": [1, 2], "image": [np.zeros((2, 2))]}
    with pytest.raises(ConfigError, match=r"Fixed cuts anywhere.*items 'image'.*Packed"):
        described(loader([record], batching, modalities=("image",)))
