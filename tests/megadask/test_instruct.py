"""Instruction data: what counts in the loss begins and ends exactly where its part does."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Built

import megadask as md
from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.errors import ConfigError
from megadask.transforms import (
    CHATML,
    Bytes,
    Chat,
    Group,
    Preference,
    PromptResponse,
    Tokenizer,
    TransformError,
    Turn,
)
from tests.megadask.helpers.ranks import run
from tests.strategies import laws

END = 256
texts = st.text(max_size=12)


def word_tokenizer(eos: str | None = None) -> Tokenizer:
    """A tokenizer that would merge across parts: it knows "a b" as one token."""
    vocab = {"[UNK]": 0, "ask": 1, "tell": 2, "asktell": 3, "</s>": 4, "\n": 5, "user": 6}
    built = Built(models.WordLevel(vocab, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    built.add_special_tokens([AddedToken("</s>"), AddedToken("<|im_start|>")])
    return Tokenizer(built, eos=eos)


def decoded(tokens: Any) -> str:
    return bytes(token for token in np.asarray(tokens).tolist() if token < END).decode()


def learned(sample: Any) -> str:
    """Return what counts in the loss, an end as "$"."""
    tokens = np.asarray(sample["tokens"])[np.asarray(sample["loss_mask"])]
    assert (tokens[:-1] < END).all()
    return decoded(tokens) + ("$" if tokens[-1] == END else "")


# Prompt and response ----------------------------------------------------------------------------


@laws
@given(texts, texts)
def test_the_response_alone_counts(prompt: str, response: str) -> None:
    sample = PromptResponse(Bytes())({"prompt": prompt, "response": response})
    assert sample is not None
    assert decoded(sample["tokens"]) == prompt + response
    assert learned(sample) == f"{response}$"
    assert len(sample["tokens"]) == len(sample["loss_mask"])


def test_no_token_spans_prompt_and_response() -> None:
    made = PromptResponse(word_tokenizer("</s>"))
    sample = made({"prompt": "ask", "response": "tell"})
    assert sample is not None
    assert sample["tokens"].tolist() == [1, 2, 4]  # "asktell" is a token of its own
    assert sample["loss_mask"].tolist() == [False, True, True]


def test_what_ends_and_what_starts_a_sample() -> None:
    record = {"q": "ask", "a": "tell"}
    columns = {"prompt": "q", "response": "a"}
    plain = PromptResponse(word_tokenizer(), **columns)(record)
    assert plain is not None
    assert plain["tokens"].tolist() == [1, 2]
    without = PromptResponse(word_tokenizer("</s>"), **columns, eos=False)(record)
    assert without is not None
    assert without["tokens"].tolist() == [1, 2]
    started = PromptResponse(word_tokenizer(), **columns, start="</s>")(record)
    assert started is not None
    assert started["tokens"].tolist() == [4, 1, 2]
    assert started["loss_mask"].tolist() == [False, False, True]
    assert PromptResponse(Bytes(eos=False))({"prompt": "a", "response": ""}) is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, r"no column 'response'; got columns \['prompt'\]"),
        ({"prompt": "a", "response": None}, "'response' is not a text; got null"),
        ({"prompt": b"a", "response": "b"}, "'prompt' is not a text; got bytes"),
    ],
)
def test_records_that_hold_no_prompt_and_response(record: Any, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        PromptResponse(Bytes())(record)


# Conversations ----------------------------------------------------------------------------------

roles = st.sampled_from(["system", "user", "assistant", "tool"])
messages = st.lists(st.builds(lambda r, c: {"role": r, "content": c}, roles, texts), max_size=5)


@laws
@given(messages)
def test_only_what_the_assistant_says_counts(conversation: list[dict[str, str]]) -> None:
    sample = Chat(Bytes(eos=False))({"messages": conversation})
    said = [one["content"] for one in conversation if one["role"] == "assistant"]
    if not said:
        assert sample is None
        return
    assert sample is not None
    assert decoded(sample["tokens"]) == "".join(
        f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in conversation
    )
    assert learned(sample) == "".join(f"{content}<|im_end|>\n" for content in said)


def test_an_end_counts_if_what_it_ends_does() -> None:
    talk = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    for conversation, counts in ((talk, False), (talk[::-1], True)):
        sample = Chat(Bytes())({"messages": conversation})
        assert sample is not None
        assert sample["tokens"][-1] == END
        assert sample["loss_mask"][-1] == counts


def test_a_template_is_plain_data() -> None:
    template = {"human": Turn("H: ", "\n"), "model": Turn("M: ", "\n", learned=True)}
    made = Chat(Bytes(eos=False), "talk", template=template, start="^")
    sample = made(
        {"talk": [{"role": "human", "content": "hi"}, {"role": "model", "content": "yo"}]}
    )
    assert sample is not None
    assert decoded(sample["tokens"]) == "^H: hi\nM: yo\n"
    assert learned(sample) == "yo\n"


def test_special_tokens_of_a_template_are_found() -> None:
    sample = Chat(word_tokenizer())({"messages": [{"role": "assistant", "content": "tell"}]})
    assert sample is not None
    assert sample["tokens"][0] == 7  # <|im_start|>


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hello", r"'messages' is not a conversation; got str.*\"role\""),
        (None, "got null"),
        (["hello"], "message 0 of column 'messages' is not a message; got str"),
        ([{"role": "bard", "content": "a"}], r"message 0.*role; got 'bard'.*'assistant'"),
        ([{"content": "a"}], "message 0.*role; got None"),
        ([{"role": "user", "content": None}], "message 0.*content is not a text; got null"),
    ],
)
def test_conversations_that_are_none(value: Any, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        Chat(Bytes())({"messages": value})


# Pairs and groups -------------------------------------------------------------------------------


@laws
@given(texts, st.lists(texts, max_size=4))
def test_a_group_is_a_sequence_for_every_response(prompt: str, responses: list[str]) -> None:
    sample = Group(Bytes())({"prompt": prompt, "responses": responses})
    if not responses:
        assert sample is None
        return
    assert sample is not None
    assert [decoded(one["tokens"]) for one in sample["sequences"]] == [
        prompt + response for response in responses
    ]
    assert [learned(one) for one in sample["sequences"]] == [f"{one}$" for one in responses]


def test_a_preference_is_the_chosen_and_the_rejected() -> None:
    sample = Preference(Bytes())({"prompt": "q", "chosen": "good", "rejected": "bad"})
    assert sample is not None
    assert [learned(one) for one in sample["sequences"]] == ["good$", "bad$"]
    dropped = Preference(Bytes(eos=False))({"prompt": "q", "chosen": "good", "rejected": ""})
    assert dropped is None


@pytest.mark.parametrize("value", ["a", None, ["a", 3]])
def test_responses_that_are_no_texts(value: Any) -> None:
    with pytest.raises(TransformError, match="'responses' is not a list of texts"):
        Group(Bytes())({"prompt": "q", "responses": value})


# What they have in common -----------------------------------------------------------------------

ALL = [PromptResponse, Chat, Preference, Group]


@pytest.mark.parametrize("kind", ALL)
def test_they_pickle_and_have_fingerprints(kind: Any) -> None:
    made = kind(word_tokenizer("</s>"))
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    prints = {
        fingerprint(one)
        for one in (made, kind(word_tokenizer()), kind(Bytes()), kind(Bytes(), eos=False))
    }
    assert len(prints) == 4
    assert fingerprint(again) == fingerprint(made)
    assert " at 0x" not in fingerprint(made)
    assert all(isinstance(column, str) for column in made.columns)


def test_another_template_is_another_transform() -> None:
    other = {**CHATML, "user": Turn("U", "")}
    assert fingerprint(Chat(Bytes())) != fingerprint(Chat(Bytes(), template=other))


@pytest.mark.parametrize("kind", ALL)
def test_what_they_are_declared_with_is_checked(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"\(encoder\); got str"):
        kind("gpt2")
    with pytest.raises(ConfigError, match=r"\(eos=\); got 1"):
        kind(Bytes(), eos=1)
    with pytest.raises(ConfigError, match=r"\(start=\); got None"):
        kind(Bytes(), start=None)


def test_templates_are_checked() -> None:
    for template in ({}, "chatml", {"user": ("a", "b")}):
        with pytest.raises(ConfigError, match=r"Chat\(template=\)"):
            Chat(Bytes(), template=template)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no role to learn from"):
        Chat(Bytes(), template={"user": Turn("", "")})


def test_encoders_give_what_transforms_give_without_what_is_added() -> None:
    assert Bytes("column").encode("hé").tolist() == list("hé".encode())
    assert (Bytes().eos_id, Bytes(eos=False).eos_id) == (256, None)
    made = word_tokenizer("</s>")
    assert made.encode("ask tell").tolist() == [1, 2]
    sample = made({"text": "ask tell"})
    assert sample is not None
    assert sample["tokens"].tolist() == [1, 2, 4]


# From files -------------------------------------------------------------------------------------

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": f"answer {n}" * (n % 4 + 1)},
        ]
    }
    for n in range(12)
]
PAIRS = [{"prompt": f"{n}?", "chosen": "yes" * (n + 1), "rejected": "no"} for n in range(12)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_from_files_to_trainers(client: Client, name: str, tmp_path: Path, format: str) -> None:
    for stem, rows in (("chats", CHATS), ("pairs", PAIRS)):
        if format == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{stem}.parquet")
        else:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"{stem}.jsonl").write_text(lines)
    reader = md.readers.Parquet if format == "parquet" else md.readers.Jsonl
    pipeline = md.Pipeline(
        sources=[
            md.Source("chats", reader(str(tmp_path / f"chats.{format}")), transform=Chat(Bytes())),
            md.Source(
                "pairs", reader(str(tmp_path / f"pairs.{format}")), transform=Preference(Bytes())
            ),
        ],
        batching=md.Packed(seq_len=256, global_batch=2, sequences=2),
        epochs=1,
    )
    with md.serve(pipeline, client, name=name) as service:
        [batches] = run(service, list)
        assert service.audit()["ok"]
    found = []
    for batch in batches:
        for pack, mask in zip(batch["labels"], batch["loss_mask"], strict=True):
            found += decoded([t if t < END else 10 for t in pack[mask > 0].tolist()]).split("\n")
    answers = [f"answer {n}" * (n % 4 + 1) + "<|im_end|>" for n in range(12)]
    expected = [*answers, *(row[key] for row in PAIRS for key in ("chosen", "rejected"))]
    assert sorted(filter(None, found)) == sorted(expected)
