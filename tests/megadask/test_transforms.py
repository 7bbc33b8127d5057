"""Transforms: tokens out of texts, chains, fingerprints, and who is given a generator."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.errors import ConfigError
from megadask.transforms import (
    Bytes,
    Chain,
    Tokenizer,
    TransformError,
    wants_rng,
)

tokenizers = pytest.importorskip("tokenizers")

Record = Mapping[str, Any]


def _word_level(**vocabulary: int) -> Any:
    vocabulary = vocabulary or {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4, "[EOS]": 5}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return built


def _tokens(transform: Any, text: Any) -> list[int]:
    sample = transform({"text": text})
    assert sample["tokens"].ndim == 1
    assert np.issubdtype(sample["tokens"].dtype, np.integer)
    return list(sample["tokens"])


def _upper(record: Record) -> Record:
    return {**record, "text": record["text"].upper()}


def _drop_short(record: Record) -> Record | None:
    return record if len(record["text"]) > 2 else None


def _shuffle(record: Record, rng: np.random.Generator) -> Record:
    return {**record, "text": "".join(rng.permutation(list(record["text"])))}


@dataclass(frozen=True)
class _Cut:
    length: int

    def __call__(self, record: Record, *, rng: np.random.Generator | None = None) -> Record:
        return {**record, "text": record["text"][: self.length]}


class TestBytes:
    @given(st.text(), st.booleans())
    def test_tokens_are_the_bytes(self, text: str, eos: bool) -> None:
        sample = Bytes(eos=eos)({"text": text})
        expected = [*text.encode(), *([256] if eos else [])]
        assert (list(sample["tokens"]) if sample else []) == expected

    def test_bytes_are_taken_as_they_are(self) -> None:
        assert _tokens(Bytes(), b"\xff\x00") == [255, 0, 256]

    def test_every_token_is_in_the_vocabulary(self) -> None:
        assert max(_tokens(Bytes(), bytes(range(256)))) < Bytes().vocab_size

    def test_nothing_is_dropped(self) -> None:
        assert Bytes(eos=False)({"text": ""}) is None
        assert _tokens(Bytes(eos=True), "") == [256]

    def test_fingerprint(self) -> None:
        prints = {
            Bytes().fingerprint(),
            Bytes("body").fingerprint(),
            Bytes(eos=False).fingerprint(),
        }
        assert len(prints) == 3
        assert pickle.loads(pickle.dumps(Bytes("body"))) == Bytes("body")


@pytest.mark.parametrize("transform", [Bytes(), Tokenizer(_word_level())], ids=repr)
class TestColumns:
    def test_a_column_that_is_missing(self, transform: Any) -> None:
        with pytest.raises(TransformError, match=r"no column 'text'.*\['body', 'url'\]"):
            transform({"url": "", "body": ""})

    @pytest.mark.parametrize(("value", "name"), [(None, "null"), (3, "int"), (["a"], "list")])
    def test_a_column_that_is_no_text(self, transform: Any, value: Any, name: str) -> None:
        with pytest.raises(TransformError, match=f"'text' is not a text.*{name}"):
            transform({"text": value})

    def test_the_error_pickles(self, transform: Any) -> None:
        with pytest.raises(TransformError) as caught:
            transform({})
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    def test_a_lone_surrogate_is_an_error_of_the_record(self, transform: Any) -> None:
        with pytest.raises((ValueError, TypeError)):
            transform({"text": "\ud800"})


class TestTokenizer:
    def test_tokens(self) -> None:
        assert _tokens(Tokenizer(_word_level()), "to be or not") == [1, 2, 3, 4]

    @pytest.mark.parametrize("eos", ["[EOS]", 5])
    def test_end_of_document(self, eos: str | int) -> None:
        transform = Tokenizer(_word_level(), eos=eos)
        assert _tokens(transform, "to be") == [1, 2, 5]
        assert transform.eos_id == 5

    @pytest.mark.parametrize("eos", ["</s>", 6, -1])
    def test_a_token_that_is_unknown(self, eos: str | int) -> None:
        with pytest.raises(ConfigError, match="below 6"):
            Tokenizer(_word_level(), eos=eos)

    def test_vocab_size_counts_ids_not_words(self) -> None:
        transform = Tokenizer(_word_level(**{"[UNK]": 0, "far": 40_000}))
        assert transform.vocab_size == 40_001
        assert _tokens(transform, "far") == [40_000]

    def test_padding_and_truncation_are_switched_off(self) -> None:
        built = _word_level()
        built.enable_padding(length=8)
        built.enable_truncation(2)
        assert _tokens(Tokenizer(built), "to be or not") == [1, 2, 3, 4]
        assert len(built.encode("to be or not").ids) == 8  # the caller's is left alone

    def test_special_tokens_are_added_on_demand(self) -> None:
        built = _word_level()
        built.post_processor = tokenizers.processors.TemplateProcessing(
            single="[EOS] $A", special_tokens=[("[EOS]", 5)]
        )
        assert _tokens(Tokenizer(built), "to") == [1]
        assert _tokens(Tokenizer(built, add_special_tokens=True), "to") == [5, 1]

    def test_an_empty_text_is_dropped(self) -> None:
        assert Tokenizer(_word_level())({"text": ""}) is None
        assert _tokens(Tokenizer(_word_level(), eos=5), "") == [5]

    def test_from_a_file_or_its_folder(self, tmp_path: Path) -> None:
        _word_level().save(str(tmp_path / "tokenizer.json"))
        from_file = Tokenizer(tmp_path / "tokenizer.json")
        assert from_file == Tokenizer(str(tmp_path)) == Tokenizer(_word_level())
        (tmp_path / "tokenizer.json").unlink()
        assert _tokens(pickle.loads(pickle.dumps(from_file)), "be") == [2]

    def test_from_transformers(self) -> None:
        class Fast:
            backend_tokenizer = _word_level()

        fast: Any = Fast()
        assert Tokenizer(fast) == Tokenizer(_word_level())

    def test_what_is_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="does not exist"):
            Tokenizer(tmp_path / "none.json")
        (tmp_path / "bad.json").write_text("{}")
        with pytest.raises(ConfigError, match="not the JSON of a tokenizer"):
            Tokenizer(tmp_path / "bad.json")
        number: Any = 3
        with pytest.raises(ConfigError, match="got int"):
            Tokenizer(number)

    def test_fingerprint_follows_the_vocabulary_and_the_options(self) -> None:
        transforms = [
            Tokenizer(_word_level()),
            Tokenizer(_word_level(**{"[UNK]": 0, "to": 2, "be": 1})),
            Tokenizer(_word_level(), eos=5),
            Tokenizer(_word_level(), "body"),
            Tokenizer(_word_level(), add_special_tokens=True),
        ]
        assert len({transform.fingerprint() for transform in transforms}) == len(transforms)
        for transform in transforms:
            copy = pickle.loads(pickle.dumps(transform))
            assert copy == transform
            assert hash(copy) == hash(transform)
            assert copy.fingerprint() == transform.fingerprint()

    def test_another_process_tokenizes_and_fingerprints_alike(self, tmp_path: Path) -> None:
        transform = Tokenizer(_word_level())
        (tmp_path / "t.pickle").write_bytes(pickle.dumps(transform))
        code = (
            "import pickle, sys; t = pickle.load(open(sys.argv[1], 'rb'))\n"
            "print(t({'text': 'to be'})['tokens'].tolist(), t.fingerprint(), sep='|')\n"
            "assert 'torch' not in sys.modules and 'dask' not in sys.modules"
        )
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "t.pickle")],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert result.stdout.strip() == f"[1, 2]|{transform.fingerprint()}"


class TestChain:
    def test_one_after_another(self) -> None:
        assert _tokens(Chain(_upper, Bytes(eos=False)), "ab") == list(b"AB")

    def test_none_ends_it(self) -> None:
        assert Chain(_drop_short, Bytes())({"text": "ab"}) is None
        assert _tokens(Chain(_drop_short, Bytes()), "abc") == [*b"abc", 256]

    def test_those_that_ask_share_the_generator(self) -> None:
        chain = Chain(_upper, _shuffle, _Cut(3), Bytes(eos=False))
        first = chain({"text": "abcdefgh"}, rng=np.random.default_rng(0))
        again = chain({"text": "abcdefgh"}, rng=np.random.default_rng(0))
        other = chain({"text": "abcdefgh"}, rng=np.random.default_rng(1))
        assert first is not None
        assert again is not None
        assert other is not None
        assert list(first["tokens"]) == list(again["tokens"]) != list(other["tokens"])

    def test_an_empty_chain(self) -> None:
        with pytest.raises(ConfigError, match="at least one"):
            Chain()

    def test_fingerprint_follows_the_order_and_the_parts(self) -> None:
        chains = [Chain(_upper, Bytes()), Chain(_drop_short, Bytes()), Chain(_Cut(1), _Cut(2))]
        chains += [Chain(_Cut(2), _Cut(1)), Chain(_upper, Chain(_upper, Bytes()))]
        assert len({chain.fingerprint() for chain in chains}) == len(chains)

    def test_it_pickles_and_compares(self) -> None:
        chain = Chain(_upper, Tokenizer(_word_level()))
        copy = pickle.loads(pickle.dumps(chain))
        assert copy == chain
        assert hash(copy) == hash(chain)
        assert copy.fingerprint() == chain.fingerprint()
        assert chain != Chain(_upper)


class _Declared:
    wants_rng = True

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Bytes(), False),
        (Tokenizer(_word_level()), False),
        (_upper, False),
        (_shuffle, True),
        (_Cut(1), True),
        (functools.partial(_shuffle), True),
        (lambda record: record, False),
        (lambda record, rng: record, True),
        pytest.param(lambda record, other=None: record, False, id="another parameter"),
        (dict, False),
        (_Declared(), True),
        (Chain(_upper, Bytes()), False),
        (Chain(_upper, Chain(_shuffle), Bytes()), True),
    ],
)
def test_who_is_given_a_generator(transform: Any, expected: bool) -> None:
    assert wants_rng(transform) is expected


class TestFingerprint:
    def test_of_a_transform_with_its_own(self) -> None:
        assert fingerprint(Bytes()) == Bytes().fingerprint()

    def test_tells_functions_and_their_arguments_apart(self) -> None:
        transforms = [
            _upper,
            _drop_short,
            functools.partial(_upper),
            functools.partial(_Cut, length=1),
            functools.partial(_Cut, length=2),
            _Cut(1),
            _Cut(2),
            _Declared(),
            str.upper,
        ]
        prints = [fingerprint(transform) for transform in transforms]
        assert len(set(prints)) == len(prints)
        assert prints == [fingerprint(transform) for transform in transforms]

    def test_holds_no_address(self) -> None:
        assert " at 0x" not in fingerprint(_Declared())
