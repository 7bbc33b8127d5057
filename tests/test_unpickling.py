"""Pickles run code: they are opened where the cluster itself hands them over, and nowhere else."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import megadask as md
from megadask.header import origin_of
from megadask.planner.plan import Plan
from megadask.saved import VERSION
from megadask.scheduling.journal import Journal
from megadask.scheduling.kept import last

ROOT = Path(__file__).resolve().parents[1]

#: Who opens pickles: specs and functions that the driver sent, errors and objects of the run.
OPENS = {
    "megadask/indexing/index.py": "the spec that the parent process gave to its own workers",
    "scheduling/collate.py": "Pipeline(collate=), from the driver",
    "scheduling/constructor_actor.py": "the run's spec, from the driver",
    "scheduling/errors.py": "an error of a role, for the trainers",
    "scheduling/loader_host.py": "the source's spec, from the driver",
    "scheduling/planner_actor.py": "the run's spec, from the driver",
}
CALLS = ("pickle.loads", "pickle.load", "cloudpickle.loads", "cloudpickle.load", "torch.load")


def opened(path: Path) -> bool:
    return (
        any(
            isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS
            for node in ast.walk(ast.parse(path.read_text()))
        )
        or "allow_pickle=True" in path.read_text()
    )


def test_pickles_are_opened_only_where_the_cluster_hands_them_over() -> None:
    paths = [*ROOT.glob("planner/*.py"), *ROOT.glob("scheduling/*.py")]
    folders = (
        "",
        "cli/",
        "demo/",
        "indexing/",
        "looking/",
        "readers/",
        "resuming/",
        "trainer/",
        "transforms/",
    )
    paths += [path for folder in ("", *folders) for path in ROOT.glob(f"megadask/{folder}/*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in paths if opened(path)}
    assert found == set(OPENS)


class Trap:
    """Says so when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was opened",))


def test_states_plans_and_journals_that_are_pickles_are_refused(tmp_path: Path) -> None:
    trap = pickle.dumps(Trap())
    with pytest.raises(md.errors.StateError):
        Plan.from_arrow(trap)
    source = md.Source("a", md.readers.InMemory([{"tokens": [1, 2]}]))
    pipeline = md.Pipeline(sources=[source], batching=md.Packed(seq_len=8, global_batch=1))
    for point in (trap.hex(), trap.decode("latin-1")):
        state = {"version": VERSION, "point": point, "pipeline": json.dumps(pipeline.components)}
        with pytest.raises(md.errors.StateError):
            origin_of(pipeline, state)
    journal = Journal(str(tmp_path / "run"))
    journal.begin(1, trap)  # whole, by its hash
    with pytest.raises(md.errors.JournalError, match="replayed"):
        last(journal.head())
    (tmp_path / "run" / "generation-000001" / "000000000.full").write_bytes(trap)
    assert journal.head() == []
