"""What bench_cpu.py compares with: the plain DataLoader packs every document of its files once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def flow() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("psutil")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from flow import corpus, feeds
    finally:
        sys.path.pop(0)
    return SimpleNamespace(corpus=corpus, feeds=feeds)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_processes_pack_every_document_once(
    flow: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq_len = 256
    web = flow.corpus.write(kind, tmp_path / kind, 40_000, 1024)
    reader = web.reader()
    num_shards = len(reader.shards())
    documents = [
        [web.transform(record)["tokens"] for record in reader.read(shard)]
        for shard in range(num_shards)
    ]
    assert sum(map(len, documents)) == web.documents
    assert sum(len(tokens) for some in documents for tokens in some) == web.tokens
    own = SimpleNamespace(id=0, num_workers=1)
    monkeypatch.setattr(flow.feeds, "get_worker_info", lambda: own)
    for rank in range(flow.corpus.RANKS):
        mine = documents[rank :: flow.corpus.RANKS]
        expected = np.concatenate([tokens for some in mine for tokens in some])
        packs = flow.feeds.Packs(web, seq_len, rank)
        number = (len(expected) - 1) // seq_len
        taken = [pack for pack, _ in zip(packs, range(number), strict=False)]
        assert np.array_equal(
            np.concatenate([pack["tokens"] for pack in taken]), expected[: number * seq_len]
        )
        assert np.array_equal(
            np.concatenate([pack["labels"] for pack in taken]), expected[1 : number * seq_len + 1]
        )
