"""A state taken anywhere gives the rest of the run, exactly, on any topology."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import megadask as md
from megadask.scheduling.constructor_actor import ConstructorActor
from megadask.scheduling.journal import Journal
from tests.megadask.helpers.data import (
    corpus,
    pipeline,
    records,
    unfold,
    unfold_masked,
    write_jsonl,
)
from tests.megadask.helpers.faulty import drop_every_third
from tests.megadask.helpers.ranks import Ranks, connect, run
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import (
    Seen,
    drain,
    every_token,
    merge,
    see,
    shape,
    spans_by_step,
    take,
    take_steps,
    tokens_delivered,
)

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).resolve().parents[2]
ROWS = [row for rows in DATA.values() for row in rows]
State = dict[str, Any]

#: Where states are taken, in batches from the beginning. A step has four of them at dp=2.
POINTS = ("begin", "step_inside", "step_end", "epoch_inside", "last_step", "end")


@pytest.fixture(scope="module")
def whole(client: Client) -> list[list[Seen]]:
    """The uninterrupted run."""
    with md.serve(make(), client, name="whole") as service:
        return run(service, drain)


def number_of(point: str, whole: Sequence[Sequence[Seen]]) -> int:
    """Return how many batches of a rank lie before a point."""
    fixed = {"begin": 0, "step_inside": 5, "step_end": 8, "epoch_inside": 18, "end": len(whole[0])}
    if point in fixed:
        return fixed[point]
    return max(number for number, batch in enumerate(whole[0]) if batch.microbatch)


@pytest.fixture(scope="module")
def saved(client: Client, whole: list[list[Seen]]) -> dict[str, State]:
    """The states at all points, taken in one run; both ranks must have the same."""
    numbers = {number_of(point, whole): point for point in POINTS}

    def body(loader: md.Loader) -> dict[str, State]:
        states = {"begin": loader.state_dict()}
        for number, _ in enumerate(loader, 1):
            if number in numbers:
                states[numbers[number]] = loader.state_dict()
        return states

    with md.serve(make(), client, name="saved") as service:
        first, second = run(service, body)
    assert first == second
    assert tuple(first) == POINTS
    return first


def split(seen: Sequence[Sequence[Seen]], number: int) -> tuple[list[Any], list[Any]]:
    return [list(s[:number]) for s in seen], [list(s[number:]) for s in seen]


# The state itself -------------------------------------------------------------------------------


def test_a_state_is_small_plain_json(saved: Mapping[str, State]) -> None:
    for point, state in saved.items():
        text = json.dumps(state)
        assert json.loads(text) == state
        assert len(text) < 20_000, f"{point}: {len(text)} bytes"
    # It does not grow with the run.
    assert len(json.dumps(saved["last_step"])) < 3 * len(json.dumps(saved["step_inside"]))


def test_the_points_are_what_they_say(
    saved: Mapping[str, State], whole: Sequence[Sequence[Seen]]
) -> None:
    assert (saved["step_inside"]["step"], saved["step_inside"]["microbatch"]) == (1, 1)
    assert (saved["step_end"]["step"], saved["step_end"]["microbatch"]) == (2, 0)
    first, rest = split(whole, number_of("epoch_inside", whole))
    assert epochs(first, "a") == {0}
    assert epochs(rest, "a") == {0, 1}
    assert saved["last_step"]["microbatch"] > 0


def epochs(ranks: Sequence[Sequence[Seen]], of_source: str) -> set[int]:
    spans = [span for seen in ranks for batch in seen for span in batch.spans]
    return {span[1] for span in spans if span[0] == of_source}


def test_state_dict_needs_no_service(client: Client, name: str) -> None:
    with md.serve(make(), client, name=name) as service:

        def body(loader: md.Loader) -> State:
            take(loader, 5)
            return loader.state_dict()

        loaders = [connect(service, rank) for rank in range(2)]
        states = Ranks([partial(body, loader) for loader in loaders]).results()
    for loader in loaders:
        assert loader.state_dict() == states[0], "the state changed when the service closed"
        loader.close()
        assert loader.state_dict() == states[0], "the state changed when the loader closed"
    with md.serve(make(), client, name=name, resume=states[1]) as service:
        assert service.audit()["ok"]


def test_a_state_may_be_taken_at_every_batch(client: Client, name: str) -> None:
    """Whatever the loop form, the same batches give the same states."""

    def flat(loader: md.Loader) -> list[State]:
        return [loader.state_dict() for _ in loader]

    def stepwise(loader: md.Loader) -> list[State]:
        return [loader.state_dict() for step in loader.steps() for _ in step]

    runs = []
    for number, body in enumerate((flat, stepwise)):
        made = make(dp=1 + number, epochs=1)
        with md.serve(made, client, name=f"{name}-{number}") as service:
            runs.append(run(service, body))
    assert runs[1][0] == runs[1][1]
    # At the ends of steps a state knows nothing of the topology.
    ends = [[state for state in states if state["microbatch"] == 0] for states, *_ in runs]
    assert ends[0] == ends[1]
    assert len(ends[0]) >= 4


# (a) In a new process, on a new cluster ---------------------------------------------------------


def test_resume_in_a_new_process_with_other_ranks_and_loaders(
    tmp_path: Path, saved: Mapping[str, State], whole: Sequence[Sequence[Seen]]
) -> None:
    layouts = {"step_inside": (4, 2), "epoch_inside": (1, 3), "end": (2, 1)}
    jobs = [
        {"state": saved[point], "dp": dp, "loaders": loaders}
        for point, (dp, loaders) in layouts.items()
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, "-m", "tests.megadask.helpers.restore", "jobs.json", "done.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    uninterrupted = spans_by_step(whole)
    results = json.loads((tmp_path / "done.json").read_text())
    for point, result in zip(layouts, results, strict=True):
        first, _ = split(whole, number_of(point, whole))
        rest = {int(step): [tuple(s) for s in spans] for step, spans in result["steps"].items()}
        assert merge(spans_by_step(first), rest) == uninterrupted, point
        assert result["ok"], point


@pytest.mark.parametrize("point", ["step_inside", "step_end", "last_step"])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_resume_delivers_exactly_the_rest(
    client: Client,
    name: str,
    saved: Mapping[str, State],
    whole: Sequence[Sequence[Seen]],
    point: str,
    dp: int,
) -> None:
    with md.serve(make(dp), client, name=name, resume=saved[point]) as service:
        ranks = run(service, drain)
        audit = service.audit()
    first, rest = split(whole, number_of(point, whole))
    assert merge(spans_by_step(first), spans_by_step(ranks)) == spans_by_step(whole)
    assert tokens_delivered([*first, *ranks]) == every_token(ROWS, times=2)
    assert audit["ok"]
    assert audit["total"]["spans"]["delivered"] == sum(len(b.spans) for s in ranks for b in s)
    if dp == 2:
        assert ranks == rest, "the same topology must go on with the same placement"


def test_resume_again_and_again_within_one_step(
    client: Client, name: str, whole: Sequence[Sequence[Seen]]
) -> None:
    """Interrupted after every second microbatch, each time with another number of ranks."""
    parts, state = [], None
    for number, dp in enumerate((2, 4, 1, 2, 1, 4, 2)):
        last = number == 6

        def body(loader: md.Loader, last: bool = last) -> Any:
            return drain(loader) if last else take(loader, 2), loader.state_dict()

        with md.serve(make(dp), client, name=name, resume=state) as service:
            results = run(service, body)
            assert service.audit()["ok"]
        assert all(after == results[0][1] for _, after in results)
        state = json.loads(json.dumps(results[0][1]))
        parts.append([seen for seen, _ in results])
    assert merge(*(spans_by_step(part) for part in parts)) == spans_by_step(whole)


# Anything, interrupted anywhere ------------------------------------------------------------------


def anything(rng: random.Random) -> Callable[[int, int], md.Pipeline]:
    """Return a random pipeline, as a function of its ranks and loaders."""
    counts = {"abcd"[i]: rng.randint(5, 50) for i in range(rng.randint(1, 4))}
    data = corpus(counts, longest=rng.choice([40, 150, 400]), seed=rng.randint(0, 99))
    packed = {
        "pad_to_multiple": rng.choice([1, 4, 8]),
        "overflow": rng.choice(["split", "truncate", "drop"]),
        "max_documents": rng.choice([None, 2]),
    }
    sources = {"lanes": rng.choice([1, 3, 8]), "shards": rng.choice([1, 4, 5])}
    sources["transform"] = rng.choice([unfold, drop_every_third])
    options = {
        "seq_len": rng.choice([64, 128]),
        "micro_batch": rng.choice([1, 2]),
        "global_batch": rng.choice([8, 16, md.Schedule.linear(8, 24, 0, 4)]),
        "epochs": rng.choice([1, 2]),
        "stop": rng.choice(["first", "all", "repeat"]),
        "window": rng.choice([1, 3, 64]),
        "patience": rng.choice([1, 2, 4]),
    }
    weights = {name: rng.choice([1.0, 2.0, 0.5]) for name in data}
    by, method = rng.choice(["samples", "tokens"]), rng.choice(["assignment", "greedy", "none"])

    def strategy(graph: md.DGraph) -> None:
        graph.mix(weights, by=by).distribute("dp").balance(method)

    def made(dp: int, loaders: int) -> md.Pipeline:
        tree = md.ClientPlaceTree(dp=dp)
        of_sources = {**sources, "loaders": loaders}
        return pipeline(
            data, sources=of_sources, packed=packed, topology=tree, strategy=strategy, **options
        )

    return made


@pytest.mark.parametrize("seed", range(1, 7))
def test_random_runs_interrupted_twice(local_client: Client, name: str, seed: int) -> None:
    rng = random.Random(seed)
    made = anything(rng)
    with md.serve(made(rng.choice([1, 2, 4]), 1), local_client, name=name) as service:
        uninterrupted = run(service, drain)
        assert service.audit()["ok"]
    assert all(shape(seen) == shape(uninterrupted[0]) for seen in uninterrupted)
    parts, state = [], None
    for batches in (rng.randint(0, 5), rng.randint(0, 5), None):

        def body(loader: md.Loader, batches: int | None = batches) -> Any:
            return [see(batch) for batch in islice(loader, batches)], loader.state_dict()

        again = made(rng.choice([1, 2, 4]), rng.randint(1, 4))
        with md.serve(again, local_client, name=name, resume=state) as service:
            results = run(service, body)
            assert service.audit()["ok"]
        assert all(after == results[0][1] for _, after in results)
        state = json.loads(json.dumps(results[0][1]))
        parts.append(spans_by_step([seen for seen, _ in results]))
    assert merge(*parts) == spans_by_step(uninterrupted)


# (b) On a running service -----------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_load_on_a_running_service(
    client: Client,
    name: str,
    saved: Mapping[str, State],
    whole: Sequence[Sequence[Seen]],
    point: str,
) -> None:
    def body(loader: md.Loader) -> Any:
        begun = take(loader, 11)
        loader.load_state_dict(saved[point])
        return begun, drain(loader)

    with md.serve(make(), client, name=name) as service:
        results = run(service, body)
        audit = service.audit()
    _, rest = split(whole, number_of(point, whole))
    assert [after for _, after in results] == rest
    assert [begun for begun, _ in results] == split(whole, 11)[0]
    assert audit["ok"]
    assert audit["total"]["samples"]["repeated"] == 0


def test_a_state_that_was_loaded_is_the_state(
    client: Client, name: str, saved: Mapping[str, State]
) -> None:
    """Saved again before the first batch (a signal, a checkpoint at step 0) it must not be lost."""

    def body(loader: md.Loader) -> Any:
        take(loader, 2)
        loader.load_state_dict(saved["step_inside"])
        at_once = loader.state_dict()
        take(loader, 1)
        loader.load_state_dict(saved["step_inside"])
        next(iter(loader.steps()))
        return at_once, loader.state_dict()

    with md.serve(make(), client, name=name) as service:
        for states in run(service, body):
            assert states == (saved["step_inside"], saved["step_inside"])


@pytest.mark.parametrize("ahead", [0, 1])
def test_load_forward_and_back_and_at_once(
    client: Client,
    name: str,
    saved: Mapping[str, State],
    whole: Sequence[Sequence[Seen]],
    ahead: int,
) -> None:
    """Loads that follow each other without a batch in between: the last one holds.

    One rank has loaded both states, and waits for its batch, before the other loads the first.
    """
    loaded = threading.Event()

    def body(loader: md.Loader) -> Any:
        loader.load_state_dict(saved["epoch_inside"])
        take(loader, 1)
        if loader.rank != ahead:
            assert loaded.wait(30)
        loader.load_state_dict(saved["step_inside"])
        loader.load_state_dict(saved["step_end"])
        loaded.set()
        return drain(loader)

    with md.serve(make(), client, name=name) as service:
        assert run(service, body) == split(whole, number_of("step_end", whole))[1]
        assert service.audit()["ok"]


def test_ranks_that_do_not_stand_alike_go_back_to_the_beginning(
    client: Client, name: str, whole: Sequence[Sequence[Seen]]
) -> None:
    """Rank 1 was ahead when the job failed; rank 0 still stands where all are to go back to."""
    with md.serve(make(), client, name=name) as service:
        loaders = [connect(service, rank) for rank in range(2)]
        origin = loaders[0].state_dict()
        take(loaders[1], 3)
        loaders[1].close()
        loaders[1] = connect(service, 1)
        loaders[0].load_state_dict(origin)
        # Rank 0 is first, as far as it may go alone.
        early = Ranks([lambda: drain(loaders[0])])
        loaders[1].load_state_dict(origin)
        late = Ranks([lambda: drain(loaders[1])])
        assert [late.results()[0], early.results()[0]] == [whole[1], whole[0]]
        assert service.audit()["ok"]
        for loader in loaders:
            loader.close()


def test_a_rank_that_reads_on_before_the_others_load(
    client: Client, name: str, whole: Sequence[Sequence[Seen]]
) -> None:
    """As above, but rank 0 has read and acknowledged before rank 1 comes to load the state."""
    with md.serve(make(), client, name=name) as service:
        loaders = [connect(service, rank) for rank in range(2)]
        origin = loaders[0].state_dict()
        take(loaders[1], 3)
        loaders[0].load_state_dict(origin)
        early = Ranks([lambda: take(loaders[0], 3)])
        # It may wait for rank 1, or read on; both are right.
        early._threads[0].join(2.0)
        loaders[1].load_state_dict(origin)
        late = Ranks([lambda: drain(loaders[1])])
        begun = early.results()[0]
        rest = Ranks([lambda: drain(loaders[0])]).results()[0]
        assert [[*begun, *rest], late.results()[0]] == whole
        for loader in loaders:
            loader.close()


def test_unequal_points_are_an_error_that_names_the_ranks(
    client: Client, name: str, saved: Mapping[str, State], whole: Sequence[Sequence[Seen]]
) -> None:
    def loads(point: str) -> Any:
        def body(loader: md.Loader) -> Any:
            try:
                loader.load_state_dict(saved[point])
                return take(loader, 1)
            except md.errors.StateError as error:
                message = str(error)
            loader.load_state_dict(saved["step_end"])
            return message, drain(loader)

        return body

    with md.serve(make(), client, name=name) as service:
        loaders = [connect(service, rank) for rank in range(2)]
        bodies = [loads("step_inside"), loads("epoch_inside")]
        results = Ranks(
            [partial(body, loader) for body, loader in zip(bodies, loaders, strict=True)]
        ).results()
        for loader in loaders:
            loader.close()
    for message, _ in results:
        assert "[0]" in message
        assert "[1]" in message
        assert "step 1, microbatch 1" in message
        assert "step 4" in message or "step 5" in message
    # The ranks may agree afterwards.
    assert [rest for _, rest in results] == split(whole, number_of("step_end", whole))[1]


def test_a_rank_that_loads_alone_is_told_so(
    client: Client, name: str, saved: Mapping[str, State]
) -> None:
    with (
        md.serve(make(), client, name=name) as service,
        connect(service, 0, timeout=2.0) as loader,
        connect(service, 1) as other,
    ):
        take(other, 1)
        loader.load_state_dict(saved["step_inside"])
        with pytest.raises(md.errors.DeadlineError, match="other ranks"):
            next(iter(loader))


def test_a_trainer_that_comes_back_goes_on(
    client: Client, name: str, whole: Sequence[Sequence[Seen]]
) -> None:
    """A loader that is gone without a word: its successor begins at what was not acknowledged."""

    def body(loader: md.Loader) -> list[Seen]:
        return drain(loader)

    with md.serve(make(), client, name=name) as service:
        lost = connect(service, 0)
        assert take(lost, 3) == whole[0][:3]
        ranks = run(service, body)
        assert ranks[1] == whole[1]
        at = whole[0].index(ranks[0][0])
        assert at < 3
        assert ranks[0] == whole[0][at:]
        assert service.audit()["ok"]
        lost.close()


def test_a_trainer_that_joins_by_an_old_watermark_catches_up(
    local_client: Client,
    name: str,
    whole: Sequence[Sequence[Seen]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor hears of what its predecessor acknowledged only after it has joined."""
    gate, report = threading.Event(), ConstructorActor._report

    async def hold_back(self: ConstructorActor) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.01)
        await report(self)

    monkeypatch.setattr(ConstructorActor, "_report", hold_back)
    with md.serve(make(), local_client, name=name) as service:
        lost = connect(service, 0)
        take(lost, 3)
        with connect(service, 0) as heir, connect(service, 1) as other:
            assert tuple(service.stats()["watermarks"]["0"]) == (0, 0)
            threading.Timer(0.2, gate.set).start()
            both = Ranks([partial(drain, heir), partial(drain, other)]).results()
        assert both == [list(whole[0][2:]), list(whole[1])]
        assert service.audit()["ok"]
        lost.close()


# Other pipelines --------------------------------------------------------------------------------


def _other(change: str) -> tuple[md.Pipeline, tuple[str, str]]:
    """Return a pipeline that differs in one thing, and what its error must name on both sides."""
    if change == "seed":
        return make(seed=7), ("seed: 0", "7")
    if change == "batching":
        return make(seq_len=64), ("seq_len: 128 in", "64 in")
    if change == "epochs":
        return make(epochs=3), ("epochs: 2 in", "3 in")
    if change == "mixture":
        return make(strategy=_heavy_a), ("mixture: weights: ", "5.0 in")
    if change == "lanes":
        data = {"sources": {"lanes": 2}}
        return pipeline(DATA, epochs=2, **data), ("source a: lanes: 3 in", "2 in")
    if change == "transform":
        return pipeline(DATA, epochs=2, sources={"transform": unfold_masked}), ("unfold(", "masked")
    if change == "records":
        other = corpus({"a": 41, "b": 25, "c": 10}, longest=300)
        return pipeline(other, epochs=2), ("source a", "source a")
    assert change == "source_gone"
    return pipeline({key: DATA[key] for key in ("a", "b")}, epochs=2), ("source c", "missing")


def _heavy_a(graph: md.DGraph) -> None:
    graph.mix({"a": 5.0, "b": 1.0, "c": 1.0})


@pytest.mark.parametrize(
    "change",
    ["seed", "batching", "epochs", "mixture", "lanes", "transform", "records", "source_gone"],
)
def test_a_state_of_another_pipeline(
    client: Client, name: str, saved: Mapping[str, State], change: str
) -> None:
    made, (then, now) = _other(change)
    with pytest.raises(md.errors.StateError) as caught:
        md.serve(made, client, name=name, resume=saved["step_end"])
    assert then in str(caught.value)
    assert now in str(caught.value)
    # Nothing is left running under the name.
    with (
        md.serve(made, client, name=name) as service,
        connect(service, 0) as loader,
        pytest.raises(md.errors.StateError) as caught,
    ):
        loader.load_state_dict(saved["step_end"])
    assert then in str(caught.value)
    assert now in str(caught.value)


@pytest.mark.parametrize(
    "state", [{}, {"version": 1}, {"version": 99, "point": "", "pipeline": "{}"}, "text", [1]]
)
def test_what_is_no_state(client: Client, name: str, state: Any) -> None:
    is_state = isinstance(state, Mapping)
    with pytest.raises(md.errors.StateError if is_state else md.errors.ConfigError):
        md.serve(make(), client, name=name, resume=state)
    with (
        md.serve(make(), client, name=name) as service,
        connect(service, 0) as loader,
        pytest.raises(md.errors.StateError),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("place", ["last", "first"])
def test_a_source_may_be_added(
    client: Client,
    name: str,
    saved: Mapping[str, State],
    whole: Sequence[Sequence[Seen]],
    place: str,
) -> None:
    added = records([20] * 12, first=500)
    data = {**DATA, "new": added} if place == "last" else {"new": added, **DATA}
    made = pipeline(data, epochs=2, topology=md.ClientPlaceTree(dp=4))
    with md.serve(made, client, name=name, resume=saved["step_end"]) as service:
        ranks = run(service, drain)
        assert service.audit()["ok"]
    first, _ = split(whole, number_of("step_end", whole))
    delivered = tokens_delivered([*first, *ranks])
    assert delivered == every_token([*ROWS, *added], times=2)


def test_shards_may_be_added_behind(client: Client, name: str, tmp_path: Path) -> None:
    rows = records([30] * 40)

    def files(number: int) -> md.Pipeline:
        path = write_jsonl(tmp_path, rows[: 10 * number], files=number)
        reader = md.readers.Jsonl(path)
        one = md.Source("a", reader, transform=unfold, lanes=2)
        return md.Pipeline(
            sources=[one],
            topology=md.ClientPlaceTree(dp=2),
            batching=md.Packed(seq_len=64, global_batch=4),
            epochs=1,
        )

    with md.serve(files(2), client, name=name) as service:
        parts = run(service, lambda loader: (take_steps(loader, 1), loader.state_dict()))
    with md.serve(files(4), client, name=name, resume=parts[0][1]) as service:
        rest = run(service, drain)
        assert service.audit()["ok"]
    assert tokens_delivered([*(seen for seen, _ in parts), *rest]) == every_token(rows)


# Mixtures set while running ---------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_resumed_run_has_the_mixture_that_was_set(
    client: Client, name: str, tmp_path: Path, when: str
) -> None:
    """Saved behind the change, or between its answer and its step: the resumed run has it too."""
    made = mixed()
    options: dict[str, Any] = {"limits": md.Limits(lead_steps=1)}
    if when == "before":  # then the state has not seen it, but the journal has
        options["checkpoint"] = str(tmp_path / "run")
    with md.serve(made, client, name=name, **options) as service:
        first = run(service, lambda loader: take_steps(loader, 1))
        assert service.set_mixture({"a": 1.0, "b": 3.0}, at_step=8) == 8
        steps = {"before": 2, "after": 10}[when]
        parts = run(service, lambda loader: (take_steps(loader, steps), loader.state_dict()))
        rest = run(service, drain)
    with md.serve(made, client, name=name, resume=parts[0][1], **options) as service:
        resumed = run(service, drain)
        assert service.audit()["ok"]
    assert spans_by_step(resumed) == spans_by_step(rest)
    joined = [[*f, *p, *r] for f, (p, _), r in zip(first, parts, rest, strict=True)]
    assert [share_of_b(joined, step) for step in (6, 7, 8, 9)] == [4, 4, 6, 6]


@pytest.mark.parametrize("later", [0, 3])
def test_a_state_inside_the_step_whose_draw_a_mixture_changed_says_so_itself(
    client: Client, name: str, later: int
) -> None:
    """The state before that step was committed before the mixture was set; there is no journal.

    later: by so many steps another mixture follows, which was set by then, too.
    """
    made = mixed(micro_batch=1)
    limits = md.Limits(lead_steps=1)
    with md.serve(made, client, name=name, limits=limits) as service:
        first = run(service, lambda loader: take_steps(loader, 1))
        step = service.set_mixture({"a": 1.0, "b": 3.0})
        if later:
            assert service.set_mixture({"a": 3.0, "b": 1.0}, at_step=step + later) == step + later
        before = run(service, lambda loader: take_steps(loader, step - 1))
        parts = run(service, lambda loader: (take(loader, 1), loader.state_dict()))
        rest = run(service, drain)
    state = parts[0][1]
    assert (state["step"], state["microbatch"]) == (step, 1)
    assert all(saved == state for _, saved in parts)
    with md.serve(made, client, name=name, limits=limits, resume=state) as service:
        assert run(service, drain) == rest
        assert service.audit()["ok"]
    joined = [[*f, *b, *p, *r] for f, b, (p, _), r in zip(first, before, parts, rest, strict=True)]
    shares = [share_of_b(joined, step + number) for number in (-1, 0, 1, 2, 3)]
    assert shares == [4, 6, 6, 6, 2 if later else 6]


def test_going_back_keeps_the_mixture_that_was_set(client: Client, name: str) -> None:
    with md.serve(mixed(), client, name=name, limits=md.Limits(lead_steps=1)) as service:

        def begin(loader: md.Loader) -> Any:
            take_steps(loader, 1)
            return loader.state_dict()

        states = run(service, begin)
        assert service.set_mixture({"a": 1.0, "b": 3.0}, at_step=6) == 6

        def twice(loader: md.Loader) -> Any:
            once = take_steps(loader, 8)
            loader.load_state_dict(states[0])
            return once, take_steps(loader, 8)

        results = run(service, twice)
    assert [again for _, again in results] == [once for once, _ in results]
    assert [share_of_b([once for once, _ in results], step) for step in (5, 6)] == [4, 6]


def mixed(**options: Any) -> md.Pipeline:
    data = {"a": records([32] * 120), "b": records([32] * 120, first=200)}
    return pipeline(data, seq_len=32, global_batch=8, **options)


def share_of_b(ranks: Sequence[Sequence[Seen]], step: int) -> int:
    return sum(span[0] == "b" for span in spans_by_step(ranks)[step])


# The journal ------------------------------------------------------------------------------------


def test_acknowledged_steps_without_a_state_are_an_error(
    client: Client, name: str, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "run")
    with md.serve(make(), client, name=name, checkpoint=checkpoint) as service:
        parts = run(service, lambda loader: (take_steps(loader, 2), loader.state_dict()))
    with pytest.raises(md.errors.MegaDaskError, match="resume") as caught:
        md.serve(make(), client, name=name, checkpoint=checkpoint)
    assert checkpoint in str(caught.value)
    with md.serve(make(), client, name=name, checkpoint=checkpoint, resume=parts[0][1]) as service:
        rest = run(service, drain)
    both = [*(seen for seen, _ in parts), *rest]
    assert tokens_delivered(both) == every_token(ROWS, times=2)
    journal = Journal(checkpoint)
    generations = journal.generations()
    assert len(generations) == 2
    kinds = [[entry.kind for entry in journal.read(number)] for number in generations]
    assert all(kind[0] == "full" for kind in kinds)
    # One delta for every step from where it was resumed, and the end.
    assert kinds[1].count("step") == len(spans_by_step(rest)) + 1


def test_a_journal_without_acknowledged_steps_may_be_taken_over(
    client: Client, name: str, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "run")
    for _ in range(2):
        with md.serve(make(), client, name=name, checkpoint=checkpoint):
            pass
    assert len(Journal(checkpoint).generations()) == 2


def test_a_service_that_was_resumed_can_be_resumed_from_its_first_state(
    client: Client, name: str, tmp_path: Path, whole: Sequence[Sequence[Seen]]
) -> None:
    """The trainers' state wins over later records of the journal."""
    checkpoint = str(tmp_path / "run")
    with md.serve(make(), client, name=name, checkpoint=checkpoint) as service:
        parts = run(service, lambda loader: (take(loader, 5), loader.state_dict()))
    for _ in range(2):
        with md.serve(
            make(), client, name=name, checkpoint=checkpoint, resume=parts[0][1]
        ) as service:
            ranks = run(service, lambda loader: take(loader, 6))
        assert ranks == [seen[5:11] for seen in whole]


def test_several_pipelines_resume_by_name(
    client: Client, name: str, saved: Mapping[str, State], whole: Sequence[Sequence[Seen]]
) -> None:
    several = {"train": make(), "val": pipeline({"v": records([9] * 8)}, global_batch=2)}
    with pytest.raises(md.errors.StateError, match="by name"):
        md.serve(several, client, name=name, resume=saved["step_end"])
    with pytest.raises(md.errors.ConfigError, match="test"):
        md.serve(several, client, name=name, resume={"test": saved["step_end"]})
    with md.serve(several, client, name=name, resume={"train": saved["step_end"]}) as service:
        assert run(service, drain) == split(whole, number_of("step_end", whole))[1]
        validated = run(service, drain, pipeline="val")
    assert tokens_delivered(validated) == every_token(records([9] * 8))
