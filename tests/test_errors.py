"""All errors say what, got, limit and remedy, and survive the way from one process to another."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import distributed  # noqa: F401 - it changes how errors pickle
import pytest

import megadask as md
from megadask.scheduling.errors import pack_error, travelling, unpack_error

EVERY = [getattr(md.errors, name) for name in md.errors.__all__]
SHAPED = [error for error in EVERY if issubclass(error, md.errors.MegaDaskError)]


@pytest.mark.parametrize("kind", SHAPED)
def test_an_error_survives_pickling(kind: type[md.errors.MegaDaskError]) -> None:
    error = kind("a thing is wrong", got=3, limit="4", remedy="Do this.")
    error.add_note("seen by a test")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error) == "a thing is wrong; got 3; expected 4. Do this."
    parts = (again.what, again.got, again.limit, again.remedy)
    assert parts == ("a thing is wrong", "3", "4", "Do this.")
    assert again.__notes__ == ["seen by a test"]


def raised(act: Callable[[], object]) -> Exception:
    try:
        act()
    except Exception as error:
        error.add_note("seen by a test")
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("act", "kept"),
    [
        (lambda: [][1], IndexError),
        (lambda: "\ud800".encode(), None),
        (lambda: b"\xff".decode(), None),
        (lambda: Path("no such folder/file").read_text(), None),
    ],
    ids=["index", "encode", "decode", "file"],
)
def test_errors_of_users_say_the_same_in_another_process(
    act: Callable[[], object], kept: type[Exception] | None
) -> None:
    error = raised(act)
    told = pickle.loads(pickle.dumps(travelling(error)))
    assert isinstance(told, kept or md.errors.SourceError)
    for text in (str(error), "seen by a test"):
        assert text in " ".join([str(told), *getattr(told, "__notes__", ())])
    assert str(error) in str(unpack_error(pack_error(error)))


def test_a_quoted_sentence_does_not_double_its_full_stop() -> None:
    error = md.errors.SourceError("bad record", got="Expected object.", remedy="Repair it.")
    assert str(error) == "bad record; got Expected object. Repair it."
