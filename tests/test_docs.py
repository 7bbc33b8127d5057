"""Every Python block of README.md and docs/ runs; README's two commands exist."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from distributed import Client

from tests.conftest import LeakCheck

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_blocks_of_docs_run(
    no_leaks: LeakCheck, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_leaks(spare_fds=20)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for block in blocks(path):
        exec(compile(block, path.name, "exec"), namespace)


def test_readme_opens_with_commands_that_exist() -> None:
    opening = (ROOT / "README.md").read_text().split("```")[1]
    targets = re.findall(r"^make (\w+)", opening, re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.timeout(120)
def test_readme_trains(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's driver block serves, and its trainer block, in two ranks, trains from it."""
    monkeypatch.chdir(tmp_path)
    for name in ("web", "code"):
        (tmp_path / "data" / name).mkdir(parents=True)
        texts = pa.table({"text": [f"{name} {i} " * (i % 50 + 1) for i in range(500)]})
        pq.write_table(texts, tmp_path / "data" / name / "0.parquet", row_group_size=50)
    driver, trainer = blocks(ROOT / "README.md")
    seen: list[list[int]] = [[], []]

    def run_rank(rank: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(()))

        def model(batch: dict[str, Any]) -> torch.Tensor:
            if batch["step"] == 3:
                raise StopIteration
            seen[rank].append(batch["step"])
            return (weight * batch["loss_mask"]).sum()

        optimizer = torch.optim.SGD([weight], lr=0.1)
        namespace = {"model": model, "optimizer": optimizer, "world_size": 2, "rank": rank}
        with pytest.raises(StopIteration):
            exec(trainer, namespace | {"scheduler_address": client.scheduler.address})

    def train() -> None:
        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)

    lines = driver.replace("...  # the training runs", "train()")
    assert "train()" in lines
    exec(lines, {"client": client, "train": train})
    assert set(seen[0]) == set(seen[1]) == {0, 1, 2}
