"""What bench_throughput.py compares: every system gets every document once, and times add up."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def bench() -> Any:
    pytest.importorskip("torch")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from throughput import cells, corpora, ranks, steptimes, systems
    finally:
        sys.path.pop(0)
    parts = {"cells": cells, "corpora": corpora, "ranks": ranks}
    return SimpleNamespace(**parts, steptimes=steptimes, systems=systems)


@pytest.fixture(scope="module")
def prepared(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cell = bench.cells.Cell(data="bytes", context=2048, ranks=6, steps=3)
    times, _ = bench.steptimes.load()
    return bench.cells.Prepared(cell, tmp_path_factory.mktemp("cell"), times)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "jpeg", "equal"])
def test_documents_have_the_lengths_that_were_made_for_them(
    bench: Any, tmp_path: Path, kind: str
) -> None:
    context = 2048
    corpus = bench.corpora.make(kind, tmp_path / "corpus", 30_000, context)
    documents = bench.systems.Documents(corpus)
    samples = [documents.sample(n) for n in range(len(documents))]
    lengths = [len(sample["tokens"]) for sample in samples]
    assert lengths == documents.length_N.tolist()
    assert max(lengths) <= context
    assert sum(lengths) == corpus.tokens
    patches = sum(len(item) for sample in samples for item in sample.get("image", []))
    in_text = sum(int((sample["tokens"] == bench.corpora.IMAGE).sum()) for sample in samples)
    assert (patches > 0) == (kind == "jpeg")
    assert patches == (in_text if kind == "jpeg" else 0)
    if kind == "equal":
        assert set(lengths) == {context}


def test_every_baseline_goes_through_every_document_once(prepared: Any) -> None:
    feeds = dict(prepared.baselines())
    single = feeds["DataLoader, a sample each"]
    assert sorted(chain(*single.items)) == list(range(len(prepared.documents)))
    assert single.num_steps == max(map(len, single.items))

    by_kind = feeds["DataLoader, a kind a rank"]
    groups = [by_kind.data._groups[n] for items in by_kind.items for n in items]
    assert sorted(np.concatenate(groups)) == list(range(len(prepared.documents)))
    kinds = np.searchsorted(prepared.documents.first_S, np.concatenate(groups), "right")
    bounds = np.cumsum([sum(len(by_kind.data._groups[n]) for n in x) for x in by_kind.items])
    assert all(len(set(part)) == 1 for part in np.split(kinds, bounds[:-1]))

    fixed = feeds["DataLoader, fixed length"]
    assert sorted(chain(*fixed.items)) == list(range(len(fixed.data)))
    packed = np.concatenate([fixed.data[n]["tokens"] for n in range(len(fixed.data))])
    whole = [prepared.documents.sample(n)["tokens"] for n in fixed.data._order_N.tolist()]
    whole = np.concatenate(whole)
    assert packed[: len(whole)].tolist() == whole.tolist()
    assert not packed[len(whole) :].any()


def test_step_times_are_those_that_were_measured(bench: Any) -> None:
    times, _ = bench.steptimes.load()
    beyond_launch = np.subtract(times.seconds[1:], times.launch_s)
    assert times.of_documents(times.tokens[1:]) == pytest.approx(beyond_launch)
    assert times.of_microbatch([64, 0, 4096]) == pytest.approx(sum(times.of_documents([64, 4096])))
    floored = replace(times, floor_tokens=1024, scale=2.0)
    assert floored.of_microbatch([3, 5]) == pytest.approx(2 * times.of_microbatch([1024]))
    assert floored.of_microbatch([4096]) == pytest.approx(2 * times.of_microbatch([4096]))
    lengths = np.arange(1, 70_000, 7)
    assert (np.diff(times.of_documents(lengths)) > 0).all()


def test_a_pass_is_compared_with_what_the_slowest_ranks_take(bench: Any) -> None:
    logs = [
        bench.ranks.Log(
            first_wait_s=wait,
            began_s=10.0,
            ended_s=20.0,
            busy_s=busy,
            wait_s=[wait, wait],
            tokens=7,
        )
        for wait, busy in ((0.5, [[1.0, 2.0], [1.0]]), (1.5, [[0.5, 0.5], [4.0]]))
    ]
    done = bench.cells.Pass.of(logs)
    assert (done.tokens, done.num_steps, done.seconds, done.first_s) == (14, 2, 10.0, 1.5)
    assert done.ideal_s == 3.0 + 4.0
    assert done.imbalance == pytest.approx(7.0 / (2.0 + 2.5))
    assert done.of_bound == pytest.approx(0.7)
    assert done.wait_share == pytest.approx(0.2)
