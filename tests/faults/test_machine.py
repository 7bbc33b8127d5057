"""Whatever befalls a run, in whatever order: every span once, batches as in an undisturbed run.

A rule-based machine over the real runtime, in one process. It always tries the same few runs;
``MEGADASK_MACHINE=100`` tries so many others.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
from distributed import Client, LocalCluster
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import megadask as md
from megadask.planner.state import MixtureEvent, PlannerState
from megadask.saved import to_saved
from megadask.scheduling.point import Point
from tests.conftest import make_cluster, wait_until
from tests.megadask.helpers.ranks import Ranks, connect
from tests.megadask.helpers.resharding import until_resharded
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import Seen, Span, see

MOST_WORKERS = 4
#: Small, so that batches are evicted and built again.
LIMITS = md.Limits(constructor_bytes=40_000, lead_steps=2)
#: Of one microbatch of the data, for all buckets: at least what is held beside the limit.
MOST_BYTES = 8 * 20_000

topologies = st.sampled_from([1, 2, 4])
weights = st.fixed_dictionaries({name: st.integers(0, 3) for name in DATA}).filter(
    lambda by_source: any(by_source.values())
)


class Machine(RuleBasedStateMachine):
    """A service, its ranks, and what they have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="megadask-machine-")
        self.events: dict[int, dict[str, float]] = {}
        self.seen: dict[tuple[int, int], list[Seen]] = {}
        self.saved: list[str] = []
        self.loaders: list[md.Loader] = []

    # What happens -----------------------------------------------------------------------------

    @initialize(workers=st.integers(1, 3), dp=topologies, shadows=st.integers(0, 1))
    def begin(self, workers: int, dp: int, shadows: int) -> None:
        self.shadows = shadows
        self.open(workers, dp, None)

    @rule(count=st.integers(1, 6))
    def train(self, count: int) -> None:
        self.take(count)

    @precondition(lambda self: len(self.workers) > 1)
    @rule(which=st.integers(0, MOST_WORKERS), asleep=st.booleans(), meanwhile=st.booleans())
    def lose_a_worker(self, which: int, asleep: bool, meanwhile: bool) -> None:
        """It closes without a word, or is given up and goes on as if nothing were."""
        # Not what is present now: what can be lost must not depend on how fast others go.
        lose = partial(self.lose, self.workers.pop(which % len(self.workers)), asleep)
        if meanwhile:
            self.take(4, disturb=lose)
        else:
            lose()

    @precondition(lambda self: len(self.workers) < MOST_WORKERS)
    @rule()
    def add_a_worker(self) -> None:
        before = self.present()
        self.cluster.scale(len(self.cluster.worker_spec) + 1)
        assert wait_until(lambda: self.present() - before, 30)
        self.workers += self.present() - before

    @precondition(lambda self: len(self.workers) > 1)
    @rule(which=st.integers(0, MOST_WORKERS), meanwhile=st.booleans())
    def retire_a_worker(self, which: int, meanwhile: bool) -> None:
        worker = self.workers[which % len(self.workers)]

        def retire() -> None:
            self.service.retire(worker)
            self.client.retire_workers([worker])
            assert worker not in self.present()

        if meanwhile:
            self.take(4, disturb=retire)
        else:
            retire()
        self.workers.remove(worker)

    @rule(dp=topologies)
    def reshard(self, dp: int) -> None:
        ranks = Ranks([partial(until_resharded, iter(loader)) for loader in self.loaders])
        step = self.service.reshard(md.ClientPlaceTree(dp=dp))
        self.note(ranks.results())
        assert all(key[0] < step for key in self.seen)
        self.connect(dp)

    @rule(by_source=weights)
    def set_mixture(self, by_source: dict[str, int]) -> None:
        chosen = {name: float(weight) for name, weight in by_source.items() if weight}
        self.events[self.service.set_mixture(chosen)] = chosen

    @rule()
    def checkpoint(self) -> None:
        states = {json.dumps(loader.state_dict()) for loader in self.loaders}
        assert len(states) == 1, "the states of the ranks differ"
        self.saved = [*self.saved, *states][-2:]

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 1), workers=st.integers(1, 3), dp=topologies)
    def restore_elsewhere(self, which: int, workers: int, dp: int) -> None:
        state = json.loads(self.saved[which % len(self.saved)])
        self.close()
        self.forget(state)
        self.open(workers, dp, state)

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 1))
    def go_back(self, which: int) -> None:
        state = json.loads(self.saved[which % len(self.saved)])
        self.forget(state)
        for loader in self.loaders:
            loader.load_state_dict(state)
        self.take(1)

    # What must hold ---------------------------------------------------------------------------

    @invariant()
    def every_span_comes_once(self) -> None:
        counts = Counter(span for seen in self.seen.values() for one in seen for span in one.spans)
        assert not [span for span, count in counts.items() if count > 1]

    @invariant()
    def the_audit_agrees(self) -> None:
        if self.loaders:
            audit = self.service.audit()
            assert audit["ok"], audit

    @invariant()
    def buffers_are_bounded(self) -> None:
        if self.loaders:
            stats = self.service.stats()
            for part in stats["constructors"]:
                assert part.get("held_bytes", 0) <= LIMITS.constructor_bytes + MOST_BYTES
            for part in [*stats["loaders"], *stats["shadows"]]:
                assert part.get("cached_bytes", 0) <= LIMITS.loader_bytes

    def teardown(self) -> None:
        try:
            self.close()
            if self.seen:
                self.compare()
        finally:
            shutil.rmtree(self.folder)

    def compare(self) -> None:
        """Each step has the spans that it has where nothing happens but the same events."""
        last = max(self.seen)
        expected = undisturbed(self.events, last[0] + 1)
        got: dict[int, list[Span]] = {}
        for (step, _), seen in self.seen.items():
            got.setdefault(step, []).extend(span for one in seen for span in one.spans)
        assert sorted(got) == list(range(last[0] + 1))
        whole = last[0] + self.seen[last][0].is_last
        for step in range(whole):
            assert sorted(got[step]) == expected[step], f"step {step}"
        if whole not in got:
            return
        assert set(got[whole]) < set(expected[whole]), f"step {whole}, as far as it has come"

    # How --------------------------------------------------------------------------------------

    def present(self) -> set[str]:
        return set(self.client.nthreads())

    def open(self, workers: int, dp: int, state: dict[str, Any] | None) -> None:
        self.cluster: LocalCluster = make_cluster(processes=False, n_workers=workers)
        self.client = Client(self.cluster, set_as_default=False)
        self.workers = list(self.present())
        self.service = md.serve(
            make(dp, loaders=2, shadows=self.shadows, epochs=None),
            self.client,
            checkpoint=self.folder,
            resume=state,
            limits=LIMITS,
        )
        self.connect(dp)

    def connect(self, dp: int) -> None:
        for loader in self.loaders:
            loader.close()
        self.loaders = [connect(self.service, rank) for rank in range(dp)]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()
        if self.loaders:
            self.loaders = []
            self.service.close()
            self.client.close()
            self.cluster.close()

    def take(self, count: int, disturb: Callable[[], None] = lambda: None) -> None:
        """Take batches on all ranks; disturb where rank 0 has the second one."""

        def body(loader: md.Loader) -> list[Seen]:
            seen = []
            for number, batch in enumerate(islice(loader, count)):
                if number == 1 and loader.rank == 0:
                    disturb()
                seen.append(see(batch))
            assert len(seen) == count
            return seen

        self.note(Ranks([partial(body, loader) for loader in self.loaders]).results())

    def note(self, ranks: list[list[Seen]]) -> None:
        for seen in zip(*ranks, strict=True):
            [key] = {(one.step, one.microbatch) for one in seen}
            assert key not in self.seen, "a microbatch came twice"
            assert len({(one.is_last, one.num_loss_tokens_step) for one in seen}) == 1
            self.seen[key] = list(seen)

    def forget(self, state: dict[str, Any]) -> None:
        """What is behind a state counts as never seen."""
        point = (state["step"], state["microbatch"])
        self.seen = {key: seen for key, seen in self.seen.items() if key < point}

    def lose(self, address: str, asleep: bool) -> None:
        if asleep:
            self.cluster.sync(
                self.cluster.scheduler.remove_worker, address, stimulus_id="test", close=False
            )
            return
        [worker] = [one for one in self.cluster.workers.values() if one.address == address]
        self.cluster.sync(worker.close, timeout=0, executor_wait=False, nanny=False)


def undisturbed(events: dict[int, dict[str, float]], num_steps: int) -> dict[int, list[Span]]:
    """Return the spans of so many steps, with these mixtures, on one rank."""
    declared = make(dp=1, epochs=None)
    state = PlannerState.initial({source.name: source.num_lanes for source in declared.sources})
    for step, by_source in sorted(events.items()):
        state = state.with_event(MixtureEvent(step=step, weights=by_source))
    origin = to_saved(declared.components, Point(step=0, state=state.to_json()))
    spans: dict[int, list[Span]] = {}
    with (
        make_cluster(processes=False, n_workers=1) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(declared, client, resume=origin) as service,
        connect(service, 0) as loader,
    ):
        for step in islice(loader.steps(), num_steps):
            seen = [see(batch) for batch in step]
            spans[step.index] = sorted(span for one in seen for span in one.spans)
    return spans


@pytest.mark.timeout(600)
def test_whatever_happens() -> None:
    asked = os.environ.get("MEGADASK_MACHINE")
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=int(asked or 5),
            stateful_step_count=10,
            derandomize=asked is None,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate],  # what depends on a race does not shrink
            suppress_health_check=list(HealthCheck),
        ),
    )
