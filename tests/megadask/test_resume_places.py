"""States from places that are easy to get wrong: between epochs, within documents, after a reshard.

Each is taken up on other ranks and loaders, and that run is interrupted again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import megadask as md
from tests.megadask.helpers.data import corpus, pipeline, records, unfold, write_jsonl
from tests.megadask.helpers.ranks import run, start
from tests.megadask.helpers.seen import (
    Seen,
    drain,
    merge,
    see,
    spans_by_step,
    take,
    take_steps,
)

pytestmark = pytest.mark.timeout(120)

DATA = corpus({"a": 40, "b": 30}, longest=150)
Made = Callable[[int, int], md.Pipeline]


def _packed(**options: Any) -> Made:
    def made(dp: int, loaders: int) -> md.Pipeline:
        sources = {"loaders": loaders, **options.get("sources", {})}
        more = {name: value for name, value in options.items() if name != "sources"}
        tree = md.ClientPlaceTree(dp=dp)
        return pipeline(DATA, sources=sources, topology=tree, **{"epochs": 2, **more})

    return made


def _even(dp: int, loaders: int) -> md.Pipeline:
    """Epochs are four steps long, exactly."""
    rows = {"a": records([32] * 32)}
    options = {"sources": {"loaders": loaders, "shards": 4}, "topology": md.ClientPlaceTree(dp=dp)}
    return pipeline(rows, seq_len=32, global_batch=8, epochs=3, **options)


def _indexed(folder: Path) -> Made:
    path = write_jsonl(folder, DATA["a"], files=4)
    plain = md.Source("a", md.readers.Jsonl(path), transform=unfold, lanes=3)
    md.index(plain, str(folder / "a.arrow"))

    def made(dp: int, loaders: int) -> md.Pipeline:
        options = {"lanes": 3, "loaders": loaders, "index": str(folder / "a.arrow")}
        return md.Pipeline(
            sources=[md.Source("a", md.readers.Jsonl(path), transform=unfold, **options)],
            topology=md.ClientPlaceTree(dp=dp),
            batching=md.Packed(seq_len=32, global_batch=8),
            epochs=2,
        )

    return made


FIXED = md.Fixed(seq_len=64, global_batch=8)
MADE: dict[str, Callable[[Path], Made]] = {
    "between epochs": lambda _: _even,
    "fixed": lambda _: _packed(batching=FIXED),
    "padded": lambda _: _packed(batching=md.Padded(seq_len=64, global_batch=8)),
    "shuffled": lambda _: _packed(seq_len=64, sources={"shuffle": 7}),
    "shuffled, fixed": lambda _: _packed(batching=FIXED, sources={"shuffle": True}),
    "indexed": _indexed,
}


def _part(client: Client, name: str, made: md.Pipeline, state: Any, count: int | None) -> Any:
    """Return what ranks got of so many batches, and their state through JSON."""
    with md.serve(made, client, name=name, resume=state) as service:

        def body(loader: md.Loader) -> Any:
            return [see(batch) for batch in islice(loader, count)], loader.state_dict()

        results = run(service, body)
        assert service.audit()["ok"]
    assert all(after == results[0][1] for _, after in results)
    return [seen for seen, _ in results], json.loads(json.dumps(results[0][1]))


@pytest.mark.parametrize("kind", MADE)
def test_interrupted_twice_on_other_ranks(
    local_client: Client, name: str, tmp_path: Path, kind: str
) -> None:
    made = MADE[kind](tmp_path)
    name = name.replace(" ", "-")
    whole, _ = _part(local_client, name, made(2, 1), None, None)
    # A step has four batches at dp=2: the first stop is between two steps, and of epochs where
    # these are four steps long; the second, at dp=4, inside of one.
    first, state = _part(local_client, name, made(2, 2), None, 16)
    assert (state["step"], state["microbatch"]) == (4, 0)
    second, again = _part(local_client, name, made(4, 3), state, 3)
    assert again["microbatch"] == 1
    rest, end = _part(local_client, name, made(1, 1), again, None)
    nothing, same = _part(local_client, name, made(2, 1), end, None)
    assert nothing == [[], []]
    assert same == end
    parts = [spans_by_step(part) for part in (first, second, rest)]
    assert merge(*parts) == spans_by_step(whole)
    if kind == "between epochs":
        assert _epochs(first) == {0}
        assert _epochs(second) == {1}
    if "fixed" in kind:
        begun = [span for span in parts[1][4] if span[4] > 0]
        assert begun, "no document was cut where the run was stopped"


def _epochs(ranks: list[list[Seen]]) -> set[int]:
    return {span[1] for seen in ranks for batch in seen for span in batch.spans}


def test_after_a_reshard(local_client: Client, name: str) -> None:
    made = _packed(epochs=None)
    begun = threading.Barrier(3, timeout=30)

    def until_resharded(loader: md.Loader) -> list[Seen]:
        seen = take(loader, 3)
        begun.wait()
        try:
            for batch in loader:
                seen.append(see(batch))
        except md.errors.ReshardedError:
            return seen
        raise AssertionError("it was not resharded")

    with md.serve(made(2, 1), local_client, name=name) as service:
        ranks = start(service, until_resharded)
        begun.wait()
        step = service.reshard(md.ClientPlaceTree(dp=4))
        first = ranks.results()
        parts = run(service, lambda loader: (take(loader, 3), loader.state_dict()))
    state = json.loads(json.dumps(parts[0][1]))
    assert (state["step"], state["microbatch"]) == (step + 1, 1)
    with md.serve(made(1, 2), local_client, name=name, resume=state) as service:
        rest = run(service, lambda loader: take_steps(loader, 3))
    found = merge(*map(spans_by_step, (first, [seen for seen, _ in parts], rest)))
    with md.serve(made(2, 1), local_client, name=name) as service:
        whole = run(service, lambda loader: take_steps(loader, len(found)))
    assert found == spans_by_step(whole)


# From the journal ---------------------------------------------------------------------------------


def test_the_state_before_a_step_from_the_journal(
    local_client: Client, name: str, tmp_path: Path
) -> None:
    """As the trainers would have saved it; for those who did not."""
    checkpoint = str(tmp_path / "run")
    made = _packed()
    with md.serve(made(2, 1), local_client, name=name, checkpoint=checkpoint) as service:

        def body(loader: md.Loader) -> Any:
            states = [loader.state_dict()]
            for step in islice(loader.steps(), 3):
                list(step)
                states.append(loader.state_dict())
            return states

        states, _ = run(service, body)
        for step, state in enumerate(states):
            assert md.state_at(checkpoint, step) == state
        with pytest.raises(md.errors.StateError, match=r"step 999.*steps 0 to"):
            md.state_at(checkpoint, 999)
    assert md.state_at(checkpoint) == states[3]
    with md.serve(made(4, 1), local_client, name=name, resume=md.state_at(checkpoint, 2)) as again:
        rest = run(again, drain)
    assert min(spans_by_step(rest)) == 2
    with pytest.raises(md.errors.StateError, match="no journal"):
        md.state_at(str(tmp_path / "nothing"))
