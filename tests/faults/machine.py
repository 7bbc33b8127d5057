"""A service and its ranks, whatever befalls them: what must hold, and what an undisturbed run has.

`Machine` is rule-based, for hypothesis: it trains, and asks of the service what a user may. Who
inherits says what a cluster is, and how workers come and go.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

from distributed import Client
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
from tests.conftest import make_cluster
from tests.faults.helpers import WAIT_S
from tests.megadask.helpers.ranks import Ranks, connect
from tests.megadask.helpers.resharding import until_resharded
from tests.megadask.helpers.restore import DATA, make
from tests.megadask.helpers.seen import Seen, Span, see

ASKED = "MEGADASK_MACHINE"
#: How long the runs of one machine may take.
DEADLINE_S = 600 + 120 * int(os.environ.get(ASKED, 0))
MOST_WORKERS = 4
#: Of one microbatch of the data, for all buckets: at least what is held beside the limit.
MOST_BYTES = 8 * 20_000

topologies = st.sampled_from([1, 2, 4])
weights = st.fixed_dictionaries({name: st.integers(0, 3) for name in DATA}).filter(
    lambda by_source: any(by_source.values())
)


class Machine(RuleBasedStateMachine):
    """A service, its ranks, and what they have seen."""

    #: Small, so that batches are evicted and built again.
    limits = md.Limits(constructor_bytes=40_000, lead_steps=2)
    client: Client

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="megadask-machine-")
        self.events: dict[int, dict[str, float]] = {}
        self.seen: dict[tuple[int, int], list[Seen]] = {}
        self.saved: list[str] = []
        self.loaders: list[md.Loader] = []
        self.life = ExitStack()  # of the cluster and the service

    def start_cluster(self, workers: int) -> None:
        """Start so many workers, and `client`; what ends them goes on `life`."""
        raise NotImplementedError

    # What happens -----------------------------------------------------------------------------

    @initialize(workers=st.integers(1, 3), dp=topologies, shadows=st.integers(0, 1))
    def begin(self, workers: int, dp: int, shadows: int) -> None:
        self.shadows = shadows
        self.open(workers, dp, None)

    @rule(count=st.integers(1, 6))
    def train(self, count: int) -> None:
        self.take(count)

    @rule(dp=topologies)
    def reshard(self, dp: int) -> None:
        ranks = Ranks([partial(until_resharded, iter(loader)) for loader in self.loaders])
        step = self.service.reshard(md.ClientPlaceTree(dp=dp))
        self.note(ranks.results())
        assert all(key[0] < step for key in self.seen)
        self.connect(dp)

    @rule(source=st.sampled_from(sorted(DATA)), loaders=st.integers(1, 3), meanwhile=st.booleans())
    def scale(self, source: str, loaders: int, meanwhile: bool) -> None:
        self.disturb(partial(self.service.scale, {source: loaders}), meanwhile)

    @rule(meanwhile=st.booleans())
    def spread(self, meanwhile: bool) -> None:
        """Roles move to workers that came later."""
        self.disturb(self.service.spread, meanwhile)

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
                assert part.get("held_bytes", 0) <= self.limits.constructor_bytes + MOST_BYTES
            for part in [*stats["loaders"], *stats["shadows"]]:
                assert part.get("cached_bytes", 0) <= self.limits.loader_bytes

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

    def open(self, workers: int, dp: int, state: dict[str, Any] | None) -> None:
        self.start_cluster(workers)
        self.service = self.life.enter_context(
            md.serve(
                make(dp, loaders=2, shadows=self.shadows, epochs=None),
                self.client,
                checkpoint=self.folder,
                resume=state,
                limits=self.limits,
            )
        )
        self.life.callback(self.leave)
        self.connect(dp)

    def connect(self, dp: int) -> None:
        self.leave()
        self.loaders = [connect(self.service, rank, timeout=WAIT_S) for rank in range(dp)]

    def leave(self) -> None:
        for loader in self.loaders:
            loader.close()
        self.loaders = []

    def close(self) -> None:
        self.life.close()

    def disturb(self, fault: Callable[[], None], meanwhile: bool) -> None:
        """Let a fault come now, or in the middle of a step."""
        if meanwhile:
            self.take(4, fault)
        else:
            fault()

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

        self.note(Ranks([partial(body, loader) for loader in self.loaders]).results(2 * WAIT_S))

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


def origin_with(declared: md.Pipeline, events: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return the state of a pipeline at its beginning, with mixtures from some steps on."""
    state = PlannerState.initial({source.name: source.num_lanes for source in declared.sources})
    for step, by_source in sorted(events.items()):
        state = state.with_event(MixtureEvent(step=step, weights=dict(by_source)))
    return to_saved(declared.components, Point(step=0, state=state.to_json()))


def undisturbed(events: dict[int, dict[str, float]], num_steps: int) -> dict[int, list[Span]]:
    """Return the spans of so many steps, with these mixtures, on one rank."""
    declared = make(dp=1, epochs=None)
    spans: dict[int, list[Span]] = {}
    with (
        make_cluster(processes=False, n_workers=1) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(declared, client, resume=origin_with(declared, events)) as service,
        connect(service, 0) as loader,
    ):
        for step in islice(loader.steps(), num_steps):
            seen = [see(batch) for batch in step]
            spans[step.index] = sorted(span for one in seen for span in one.spans)
    return spans


def try_runs(machine: type[Machine], *, examples: int, rules: int) -> None:
    """Try the same few runs each time, or as many others as `ASKED` says."""
    asked = os.environ.get(ASKED)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(asked or examples),
            stateful_step_count=rules,
            derandomize=asked is None,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate],  # what depends on a race does not shrink
            suppress_health_check=list(HealthCheck),
        ),
    )
