"""Whatever a transform, its batches or ``on_error=`` do: the error says where, and none hangs."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest

import megadask as md
from megadask.planner.errors import ConfigError
from megadask.planner.state import LaneCursor
from megadask.scheduling.batched import transformed_ahead
from megadask.scheduling.errors import SourceError, pack_error, root_error, travelling, unpack_error
from megadask.scheduling.lanes import Read, read_lane
from megadask.scheduling.reading import BadRecord
from megadask.transforms import Batched, Chain
from tests.fakes import MemoryReader, source_spec

RECORDS = [{"n": n} for n in range(6)]
BAD = 3
PLACE = r"source 'web', shard .*, row 3"


def reads(transform: Any, on_error: Any = "raise", records: Any = RECORDS) -> list[Read]:
    spec = source_spec(MemoryReader([records]), transform=transform, on_error=on_error)
    return list(read_lane(spec, 0, 0, LaneCursor()))


def error_of(transform: Any) -> Exception:
    try:
        reads(transform)
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def text_of(error: Exception) -> str:
    """Return what an error says after its way to a trainer."""
    told = root_error(ExceptionGroup("of tasks", [travelling(error)]))
    there = unpack_error(pack_error(told))
    return " ".join([f"{type(there).__name__}: {there}", *getattr(there, "__notes__", ())])


# Batches ----------------------------------------------------------------------------------------


class Own:
    """A transform with batches that says of them what it is told to."""

    def __init__(self, **said: Any) -> None:
        vars(self).update(said)

    def __call__(self, record: Any) -> Any:
        return {"tokens": [record["n"]]}

    def batch(self, records: list[Any]) -> list[Any]:
        return [self(record) for record in records]


LIMITS = ["batch_bytes", "batch_records"]
NO_LIMITS = [0, -1, None, "x", 1.5, True, float("nan")]


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", NO_LIMITS)
def test_limits_of_batches_are_checked_where_a_source_is_declared(name: str, value: Any) -> None:
    reader = MemoryReader([RECORDS])
    with pytest.raises(ConfigError, match=rf"'web'.*{name}; got .*an integer >= 1"):
        md.Source("web", reader, transform=Own(**{name: value}))
    without: Callable[[Any], Any] = lambda record: record  # noqa: E731
    setattr(without, name, value)  # of no meaning where there are no batches
    md.Source("web", reader, transform=without)
    md.Source("web", reader, transform=Own(**{name: 1}))


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", NO_LIMITS)
def test_a_batch_has_a_record_whatever_its_limits_are(name: str, value: Any) -> None:
    own = Own(**{name: value})
    assert [read.row for read in reads(own)] == list(range(len(RECORDS)))
    spec = source_spec(MemoryReader([RECORDS]), transform=own)
    rows = iter([(n, n, record) for n, record in enumerate(RECORDS)])
    assert [n for n, *_ in islice(transformed_ahead(spec, rows), 10)] == list(range(len(RECORDS)))


def numbered(results: list[Any]) -> dict[int, Any]:
    return dict(enumerate(results))


@pytest.mark.parametrize("kind", [tuple, numbered, iter, np.array, len])
def test_what_is_no_list_of_results_is_named(kind: Any) -> None:
    made = Batched(lambda records: kind([{"tokens": [1]} for _ in records]))
    name = type(kind([{"tokens": [1]}])).__name__
    with pytest.raises(ConfigError, match=rf"'web': batch\(\).*a {name}, which is no list"):
        reads(made)


# Errors of user code ----------------------------------------------------------------------------


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


class MuteToTheEnd(Exception):
    def __str__(self) -> str:
        raise asyncio.CancelledError

    __repr__ = __str__


class MuteBase(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")

    __repr__ = __str__


@dataclass(frozen=True)
class Frozen(Exception):
    code: int = 7


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class Own1(BaseException):
    pass


ENDS = [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt, asyncio.CancelledError]
ENDS += [BaseException, Own1, MuteBase]  # type: ignore[list-item]
ORDINARY = [ValueError, StopAsyncIteration, Mute, MuteToTheEnd, Frozen, Unpicklable, TimeoutError]
ORDINARY += [ExceptionGroup, OSError]
ids = {"ids": lambda kind: kind.__name__}


def made(kind: Any) -> BaseException:
    error: BaseException = kind("no", [ValueError()]) if kind is ExceptionGroup else kind()
    return error


def failing(kind: Any) -> Callable[[Any], Any]:
    def transform(record: Any) -> Any:
        if record["n"] == BAD:
            raise made(kind)
        return {"tokens": [1]}

    return transform


def batch_fails(kind: Any) -> Any:
    return Batched(lambda records: [failing(kind)(record) for record in records])


def batch_returns(kind: Any) -> Any:
    return Batched(lambda ones: [made(kind) if o["n"] == BAD else {"tokens": [1]} for o in ones])


def chain_returns(kind: Any) -> Any:
    return Chain(batch_returns(kind), Batched(lambda samples: list(samples)))


WAYS = [failing, batch_fails, batch_returns, chain_returns]


@pytest.mark.parametrize("way", WAYS, **ids)
@pytest.mark.parametrize("kind", [*ENDS, *ORDINARY], **ids)
def test_any_error_of_a_transform_names_the_record(kind: Any, way: Any) -> None:
    error = error_of(way(kind))
    said = text_of(error)
    for part in ("source 'web'", "row 3", kind.__name__):
        assert part in said
    if kind in ENDS:
        assert isinstance(error, SourceError)
        assert "the transform must not raise this" in said


@pytest.mark.parametrize("way", WAYS, **ids)
@pytest.mark.parametrize("kind", ORDINARY, **ids)
def test_any_ordinary_error_of_a_transform_can_be_skipped(kind: Any, way: Any) -> None:
    reasons = [read.reason for read in reads(way(kind), "skip")]
    assert [n for n, reason in enumerate(reasons) if reason] == [BAD]
    assert f"row 3: {kind.__name__}" in str(reasons[BAD])


# on_error= --------------------------------------------------------------------------------------


CASES = ["bad record", "error", "mute error"]


def bad_record(transform: Any) -> list[Any]:
    return [*RECORDS[:BAD], BadRecord("rotten"), *RECORDS[BAD + 1 :]] if transform is None else []


@pytest.mark.parametrize("transform", [None, failing(ValueError), failing(Mute)], ids=CASES)
@pytest.mark.parametrize("kind", [KeyError, Mute, asyncio.CancelledError, SystemExit, Frozen])
def test_a_function_on_error_that_fails_names_the_record(kind: Any, transform: Any) -> None:
    def decide(error: Exception, where: str) -> Any:
        raise kind

    records = bad_record(transform) or RECORDS
    with pytest.raises(SourceError, match=rf"{PLACE}.*on_error=.*{kind.__name__}") as caught:
        reads(transform or failing(Own1), decide, records)
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize("transform", [None, failing(ValueError), failing(Mute)], ids=CASES)
@pytest.mark.parametrize("answer", [None, "ignore", True, ["skip"], np.zeros(2), MuteBase()])
def test_an_answer_of_on_error_that_is_none_names_the_record(answer: Any, transform: Any) -> None:
    records = bad_record(transform) or RECORDS
    with pytest.raises(ConfigError, match=rf"{PLACE}.*on_error=.*returned.*expected") as caught:
        reads(transform or failing(Own1), lambda error, where: answer, records)
    assert isinstance(caught.value.__cause__, Exception)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
