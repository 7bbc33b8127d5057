"""Pipelines declared in YAML: equal to those declared in Python, and clear about what is wrong."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest

import megadask as md

TEXT = """
sources:
  web:
    reader: {Jsonl: web.jsonl}
    transform: {Bytes: {column: text, eos: false}}
  code:
    reader: {Jsonl: {paths: [code.jsonl]}}
    transform: {Chain: ["copy:copy", {Bytes: text}]}
    lanes: 2
    modalities: [image]
topology: {dp: 2, cp: 2}
strategy:
  mix: {weights: {0: {web: 0.7, code: 0.3}, 10: {web: 1}}, by: tokens}
  distribute: dp
  cost: {Transformer: {hidden: 64, layers: 2}}
  balance: {method: greedy, sync: step}
  broadcast_at: tp
  select: {modality: image, encode: microbatch, words: {distribute: [dp, cp], cost: Tokens}}
batching: {Packed: {seq_len: 64, global_batch: {0: 4, 10: 8}, pad_to_multiple: 4}}
seed: 7
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        Path(f"{name}.jsonl").write_text('{"text": "some text"}\n' * 3)


def read(text: str) -> md.Pipeline:
    Path("pipeline.yaml").write_text(text)
    return md.Pipeline.from_yaml("pipeline.yaml")


def strategy(graph: md.DGraph) -> None:
    graph.mix(md.Schedule.stages({0: {"web": 0.7, "code": 0.3}, 10: {"web": 1}}), by="tokens")
    graph.distribute("dp").cost(md.costs.Transformer(hidden=64, layers=2))
    graph.balance("greedy", sync="step").broadcast_at("tp")
    graph.select("image", encode="microbatch").distribute(("dp", "cp")).cost(md.costs.Tokens())


def test_a_file_declares_what_python_does() -> None:
    web = md.Source(
        "web", md.readers.Jsonl("web.jsonl"), transform=md.transforms.Bytes("text", eos=False)
    )
    code = md.Source(
        "code",
        md.readers.Jsonl(["code.jsonl"]),
        transform=md.transforms.Chain(copy.copy, md.transforms.Bytes("text")),
        lanes=2,
        modalities=("image",),
    )
    declared = md.Pipeline(
        sources=[web, code],
        topology=md.ClientPlaceTree(dp=2, cp=2),
        strategy=strategy,
        batching=md.Packed(
            seq_len=64, global_batch=md.Schedule.stages({0: 4, 10: 8}), pad_to_multiple=4
        ),
        seed=7,
    )
    pipeline = read(TEXT)
    assert pipeline.components == declared.components
    assert pipeline.digest == declared.digest
    assert pickle.loads(pickle.dumps(pipeline)).digest == declared.digest


def test_a_strategy_may_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_strategy.py").write_text("def balanced(graph):\n    graph.balance('greedy')\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = TEXT[: TEXT.index("strategy:")] + "strategy: own_strategy:balanced\n"
    pipeline = read(text + TEXT[TEXT.index("batching:") :])
    assert pipeline.frozen_strategy.method == "greedy"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("seed: 7", "sede: 7", "sede"),
        ("seed: 7", "seed: 7\nseed: 8", "'seed' a second time"),
        ("  code:\n", "  web:\n", "'web' a second time"),
        ("Jsonl: web.jsonl", "Jsnl: web.jsonl", "sources.web.reader"),
        ("lanes: 2", "lane: 2", "sources.code"),
        ("lanes: 2", "lanes: 0", "lanes="),
        ("column: text", "colunm: text", "sources.web.transform.Bytes"),
        ("copy:copy", "no_such_module:name", "no_such_module:name"),
        ("distribute: dp", "distribte: dp", "distribte"),
        ("distribute: dp", "distribute: dq", "dq"),
        ("hidden: 64", "hiden: 64", "strategy.cost.Transformer"),
        ("method: greedy", "method: gredy", "gredy"),
        ("encode: microbatch", "encode: mb", "select(encode=)"),
        ("words: {distribute", "words: {mix", "select"),
        ("topology: {dp: 2, cp: 2}", "topology: [2, 2]", "topology"),
        ("{Packed:", "{Pakced:", "or one of ['Fixed', 'Packed', 'Padded']"),
        ("seq_len: 64", "seq_len: [", "not YAML"),
        ("reader: {Jsonl: web.jsonl}", "lanes: 3", "no reader"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(old: str, new: str, named: str) -> None:
    assert old in TEXT
    with pytest.raises(md.errors.ConfigError) as caught:
        read(TEXT.replace(old, new, 1))
    text = str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))
    assert named in text, text


def test_a_collate_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_collate.py").write_text(
        "import functools\n\ndef f(batch, scale=1):\n    return batch\n\n"
        "def scaled(scale):\n    return functools.partial(f, scale=scale)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plain = read(TEXT + "collate: own_collate:f\n")
    assert plain.collate({"x": 1}) == {"x": 1}
    scaled = read(TEXT + "collate: {own_collate:scaled: {scale: 3}}\n")
    assert scaled.collate.keywords == {"scale": 3}
    assert read(TEXT + "collate:\n").collate is None
    with pytest.raises(md.errors.ConfigError, match="own_collate:g"):
        read(TEXT + "collate: own_collate:g\n")


def test_a_file_that_is_no_text_is_named() -> None:
    Path("pipeline.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(md.errors.ConfigError, match=r"pipeline\.yaml is not YAML"):
        md.Pipeline.from_yaml("pipeline.yaml")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in ("nowhere.yaml", str(tmp_path)):
        with pytest.raises(md.errors.ConfigError, match=f"{path} cannot be read"):
            md.Pipeline.from_yaml(path)


def test_other_batches_and_a_collate() -> None:
    text = TEXT[: TEXT.index("topology:")] + "batching: {Padded: {seq_len: 64, global_batch: 4}}\n"
    pipeline = read(text + "collate: json:loads\n")
    assert pipeline.batching == md.Padded(seq_len=64, global_batch=4)
    assert pipeline.collate is json.loads
