"""All errors say what, got, limit and remedy, and survive the way from one process to another."""

from __future__ import annotations

import pickle

import pytest

import megadask as md

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


def test_a_quoted_sentence_does_not_double_its_full_stop() -> None:
    error = md.errors.SourceError("bad record", got="Expected object.", remedy="Repair it.")
    assert str(error) == "bad record; got Expected object. Repair it."
