"""Fingerprints: whatever a transform or a cost goes by counts, in every process alike."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

import megadask as md
from megadask.fingerprints.fingerprint import fingerprint
from tests.megadask.helpers.declared import DECLARED as BASIC
from tests.megadask.helpers.declared_finely import ALIKE
from tests.megadask.helpers.declared_finely import DECLARED as FINE

DECLARED = {**BASIC, **FINE}
ROOT = Path(__file__).resolve().parents[2]

_PRINTS = """
import importlib, json, sys
from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.graph import DGraph

def of(transform):
    return fingerprint(transform), fingerprint(DGraph().cost(transform).freeze())

found = {}
for number in range(int(sys.argv[1])):
    module = importlib.import_module(f"own.m{number}")
    before = of(module.t)
    exec(open(f"own/use{number}.txt").read(), vars(module))
    found[number] = list(zip(before, of(module.t)))
print(json.dumps(found))
"""


def _write(folder: Path, limit: int) -> None:
    package = folder / "own"
    package.mkdir(parents=True)
    helper = f"limit = {limit}\ndef cut(tokens): return tokens[:limit]\n"
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text(helper)
    (folder / "beside.py").write_text(helper)
    for number, text in enumerate(DECLARED.values()):
        declared, _, use = text.replace("LIMIT", str(limit)).partition("USE\n")
        (package / f"m{number}.py").write_text(declared)
        (package / f"use{number}.txt").write_text(use)


#: Before and after use.
Pair = tuple[str, str]


def _prints(folder: Path, hash_seed: int) -> list[dict[str, Pair]]:
    """Return the fingerprints of each, made in a new process: as a transform, and as a cost."""
    done = subprocess.run(
        [sys.executable, "-c", _PRINTS, str(len(DECLARED))],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout).values()
    return [
        dict(zip(DECLARED, map(tuple, pairs), strict=True)) for pairs in zip(*found, strict=True)
    ]


@pytest.fixture(scope="module")
def all_prints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[dict[str, Pair]]]:
    folder = tmp_path_factory.mktemp("fingerprints")
    for name, limit in (("first", 50), ("again", 50), ("other", 57)):
        _write(folder / name, limit)
    return {
        "first": _prints(folder / "first", 1),
        "cached": _prints(folder / "first", 2),  # its modules come from their bytecode
        "again": _prints(folder / "again", 77),
        "other": _prints(folder / "other", 1),
    }


@pytest.fixture(params=[0, 1], ids=["transform", "cost"])
def prints(request: pytest.FixtureRequest, all_prints: Any) -> dict[str, dict[str, Pair]]:
    return {process: found[request.param] for process, found in all_prints.items()}


@pytest.mark.parametrize("case", DECLARED)
class TestOfWhatItGoesBy:
    def test_another_process_has_the_same(self, prints: Any, case: str) -> None:
        assert prints["first"][case] == prints["cached"][case] == prints["again"][case]

    def test_another_limit_is_another_transform(self, prints: Any, case: str) -> None:
        assert prints["first"][case][0] != prints["other"][case][0]

    def test_use_changes_nothing(self, prints: Any, case: str) -> None:
        before, after = prints["first"][case]
        assert before == after


@pytest.mark.parametrize("case", ALIKE)
def test_what_is_declared_alike_is_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    one, other = (_declared(tmp_path, monkeypatch, text) for text in ALIKE[case])
    assert one == other


def test_equal_code_of_another_file_has_its_own_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["def t(record): return record  # one", "def t(record): return record  # other"]
    one, other = (_declared(tmp_path, monkeypatch, text) for text in texts)
    assert one != other


def _declared(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """Return the fingerprint of ``t`` of a module that is forgotten again."""
    place = folder / str(len(list(folder.iterdir())))
    place.mkdir()
    (place / "alike.py").write_text(text)
    with monkeypatch.context() as patched:
        patched.syspath_prepend(place)
        found = fingerprint(importlib.import_module("alike").t)
    del sys.modules["alike"]
    return found


@pytest.mark.parametrize(
    "wrap",
    [
        lambda held: (held, held),
        lambda held: frozenset({held, (1, held)}),
        lambda held: {"a": held, "b": (held, held)},
    ],
    ids=["tuples", "frozensets", "dicts"],
)
@pytest.mark.timeout(10)
def test_what_is_held_often_is_looked_into_once(wrap: Any) -> None:
    held: Any = frozenset()
    for _ in range(200):
        held = wrap(held)
    assert fingerprint(lambda record: held) == fingerprint(lambda record: held)


class _RaisesAlways:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self, record: Any) -> Any:
        return record


class _RaisingClass(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)


class _OfRaisingClass(metaclass=_RaisingClass):
    def __call__(self, record: Any) -> Any:
        return record


def _partial_of_itself() -> Any:
    made: Any = partial(len)
    made.__setstate__((made, (), {}, {}))
    return made


class _Raises:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self, record: Any) -> Any:
        return record


class _RaisesToo:
    def fingerprint(self, of: str) -> str:
        return of

    def __getstate__(self) -> Any:
        raise TypeError

    def __call__(self, record: Any) -> Any:
        return record


class _Deep:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, record: Any) -> Any:
        return record


def _deep() -> Any:
    value: Any = []
    for _ in range(10_000):
        value = _Deep([value])
    return value


ANY: dict[str, Any] = {
    "nothing": None,
    "a builtin": len,
    "a class": dict,
    "a class of classes": type,
    "a method of a class": str.upper,
    "a method of a text": "a".upper,
    "a method of a list": [].append,
    "a method of another package": os.environ.get,
    "a function of another package": json.loads,
    "a class of ours": md.transforms.Bytes,
    "a class of its own": _Raises,
    "a partial of partials": partial(partial, partial),
    "what raises": _Raises(),
    "what raises in other places": _RaisesToo(),
    "what holds what raises always": _Deep(_RaisesAlways()),
    "a method of what has no name": MethodType(partial(len), 3),
    "a partial of itself": _partial_of_itself(),
    "what is deep": _deep(),
    "what holds a lock": _Deep(threading.Lock()),
    "what holds a module": _Deep(pytest),
    "what holds an iterator": _Deep(iter([])),
    "what cannot be called": 3,
}


@pytest.mark.parametrize("transform", ANY.values(), ids=ANY)
def test_every_callable_has_one(transform: Any) -> None:
    made = fingerprint(transform)
    assert made == fingerprint(transform)
    assert len(made) < 400
    assert " at 0x" not in made


def test_what_raises_always_has_one() -> None:
    for cls in (_RaisesAlways, _OfRaisingClass):  # no cases, as pytest looks at these
        made = cls()
        assert fingerprint(made) == fingerprint(made)
        assert fingerprint(_Deep(made)) == fingerprint(_Deep(made))


def test_it_shows_the_numbers_that_differ() -> None:
    prints = [fingerprint(partial(_Deep, inner=n)) for n in (50, 57)]
    assert "inner=50" in prints[0]
    assert "inner=57" in prints[1]


def test_tokenizers_count_by_what_they_do() -> None:
    tokenizers = pytest.importorskip("tokenizers")

    def made(*words: str) -> Any:
        vocabulary = {word: number for number, word in enumerate(words)}
        model = tokenizers.models.WordLevel(vocabulary, unk_token=words[0])
        return tokenizers.Tokenizer(model)

    one, same, other = made("a", "b"), made("a", "b"), made("a", "c")
    prints = [fingerprint(_Deep(tokenizer)) for tokenizer in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    one.enable_truncation(5)  # as calls of transformers do
    assert fingerprint(_Deep(one)) == prints[0]
