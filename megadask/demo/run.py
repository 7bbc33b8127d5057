"""The whole demo: corpus, cluster, service, trainers, and the table at the end."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from distributed import Client, LocalCluster

import megadask as md
from megadask.demo import report
from megadask.demo.cluster import kill_workers, let_end, local_cluster, worker_pids
from megadask.demo.corpus import Corpus, build_corpus
from megadask.demo.progress import Display
from megadask.demo.report import Phase
from megadask.demo.signals import StopOnSignal
from megadask.demo.trainers import TrainerError, Trainers
from megadask.planner.balance import Method
from megadask.planner.errors import ConfigError
from megadask.service import Service

SERVICE = "megadask-demo"
#: Share of the tokens, by source.
MIXTURE = {"code": 0.3, "prose": 0.4, "docstrings": 0.3}
#: What the trainers train, and how its time was measured to grow with the lengths of documents.
HEADS = 2
COST = md.costs.Transformer(hidden=32, layers=1, vocab=264, attention_slowdown=0.3)
LEARNING_RATE = 3e-3
#: Packs of one rank in a step, one a microbatch.
PACKS_PER_RANK = 2
#: Many documents fill a pack alone, and a step has few packs: it takes a few of those that wait for
#: room at a time. With less patience than that takes, steps end before their packs are full.
WINDOW = PATIENCE = 32
NUM_WORKERS = 2
#: After a signal: when what has not ended is killed, and when this process ends come what may.
KILL_S = 6.0
LEAVE_S = 8.0

_PHASE_NAMES = {"none": "arrival order"}


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What can be chosen.

    Parameters
    ----------
    steps
        Steps of each phase.
    dp
        Data-parallel trainers.
    seq_len
        Tokens of a pack.
    balance
        How samples are placed; compared with arrival order.
    workdir
        Where the corpus is built, and kept.
    keep
        Whether the trainers' reports and logs are kept, too.
    """

    steps: int = 20
    dp: int = 2
    seq_len: int = 8192
    balance: Method = "assignment"
    workdir: Path = Path("demo-data")
    keep: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "dp", "seq_len"):
            value = getattr(self, name)
            if value < 1:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(option, got=value, limit="an integer >= 1")
        if self.balance not in get_args(Method):
            limit = f"one of {', '.join(get_args(Method))}"
            raise ConfigError("--balance", got=self.balance, limit=limit)

    def check_workdir(self) -> None:
        """Raise ConfigError unless files can be written in the folder, which is made."""
        try:
            self.workdir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.workdir):
                pass
        except OSError as error:
            raise ConfigError(
                "--workdir",
                got=f"{self.workdir}: {error.strerror}",
                limit="a folder to write in",
            ) from error

    def pipeline(self, corpus: Corpus, balance: Method) -> md.Pipeline:
        """Return the pipeline of one phase; phases differ in nothing but the placement."""
        text = md.transforms.Bytes("text")
        patterns = {name: source.pattern for name, source in corpus.sources.items()}

        def strategy(graph: md.DGraph) -> None:
            graph.mix(MIXTURE, by="tokens")
            graph.distribute("dp").cost(COST).balance(balance)

        return md.Pipeline(
            sources=[
                md.Source("code", md.readers.Parquet(patterns["code"], ["text"]), text),
                md.Source("prose", md.readers.Jsonl(patterns["prose"]), text),
                md.Source("docstrings", md.readers.ArrowIpc(patterns["docstrings"]), text),
            ],
            topology=md.ClientPlaceTree(dp=self.dp),
            strategy=strategy,
            # Of a document the beginning: pieces of equal length would leave little to balance.
            batching=md.Packed(
                seq_len=self.seq_len, global_batch=PACKS_PER_RANK * self.dp, overflow="truncate"
            ),
            window=WINDOW,
            patience=PATIENCE,
        )


def run(demo: Demo, display: Display | None = None) -> int:
    """Run the demo; return the exit code of its process."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the demo trains a model with torch, which is not installed",
            remedy="pip install 'megadask[torch]'",
        )
    display = Display() if display is None else display
    leash = _Leash()
    with StopOnSignal(leash.tighten) as stop:
        leash.stop = stop
        try:
            return _Run(demo, display, stop, leash).run()
        except BaseException as error:
            # Not only Stopped, which others may have caught and made something else of.
            if stop.signum is None:
                if isinstance(error, TrainerError):
                    sys.stderr.write(error.output)
                raise
            display.say(f"stopped by {signal.Signals(stop.signum).name}")
            return stop.exit_code


class _Leash:
    """Ends child processes, and this one, some time after a signal if they have not ended yet."""

    def __init__(self) -> None:
        self.stop: StopOnSignal | None = None
        self.cluster: LocalCluster | None = None
        self.trainers: Trainers | None = None

    def tighten(self) -> None:
        logging.disable()  # what is torn down complains
        if self.cluster is not None:
            let_end(self.cluster)  # the signal may have gone to the workers, too
        threading.Thread(target=self._wait, name="megadask-demo-leash", daemon=True).start()

    def _wait(self) -> None:
        time.sleep(KILL_S)
        if self.trainers is not None:
            self.trainers.kill()
        if self.cluster is not None:
            kill_workers(self.cluster)
        time.sleep(LEAVE_S - KILL_S)
        assert self.stop is not None
        os._exit(self.stop.exit_code)


def _listed(pids: list[int]) -> str:
    return ", ".join(map(str, pids))


@dataclass(frozen=True)
class _Run:
    """One run of the demo."""

    demo: Demo
    display: Display
    stop: StopOnSignal
    leash: _Leash

    def run(self) -> int:
        began_s = time.monotonic()
        corpus = build_corpus(self.demo.workdir, progress=self._say_of_corpus)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.demo.workdir))
        try:
            phases = self._phases(corpus, folder)
        finally:
            if self.demo.keep:
                self.display.say(f"reports and logs are in {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
        return self._conclude(phases, time.monotonic() - began_s)

    def _say_of_corpus(self, line: str) -> None:
        self.display.say(f"corpus: {line}")

    def _phases(self, corpus: Corpus, folder: Path) -> list[Phase]:
        methods: list[Method] = ["none"]
        if self.demo.balance != "none":
            methods.append(self.demo.balance)
        with (
            self.stop.guard(local_cluster(NUM_WORKERS, folder)) as cluster,
            self.stop.guard(Client(cluster, set_as_default=False)) as client,
        ):
            self.leash.cluster = cluster
            return [self._phase(method, corpus, folder, cluster, client) for method in methods]

    def _phase(
        self,
        method: Method,
        corpus: Corpus,
        folder: Path,
        cluster: LocalCluster,
        client: Client,
    ) -> Phase:
        name = _PHASE_NAMES.get(method, method)
        own = folder / method
        own.mkdir()
        pipeline = self.demo.pipeline(corpus, method)
        with self.stop.guard(self._served(pipeline, client)) as service:
            trainers = Trainers(self.demo.dp, self._arguments(service.address), own)
            self.leash.trainers = trainers
            with self.display.phase(name, self.demo.steps) as on_event, self.stop.guard(trainers):
                workers, ranks = _listed(worker_pids(cluster)), _listed(trainers.pids)
                self.display.say(
                    f"{name}: workers {workers} (kill -9 one: the run goes on); trainers {ranks}"
                )
                for event in trainers.events():
                    on_event(event)
            # The trainers have closed their loaders, so that all they used is acknowledged.
            return Phase(
                name=name,
                ranks=trainers.reports(),
                audit=service.audit(),
                stats=service.stats(),
            )

    @contextmanager
    def _served(self, pipeline: md.Pipeline, client: Client) -> Iterator[Service]:
        service = md.serve(pipeline, client, name=SERVICE)
        try:
            yield service
        finally:
            if self.stop.signum is None:  # else the cluster goes at once, and the service with it
                service.close()

    def _arguments(self, address: str) -> list[str]:
        options = {
            "address": address,
            "service": SERVICE,
            "steps": self.demo.steps,
            "hidden": COST.hidden,
            "layers": COST.layers,
            "heads": HEADS,
            "learning-rate": LEARNING_RATE,
        }
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]

    def _conclude(self, phases: list[Phase], took_s: float) -> int:
        """Print the table and what it means; return the exit code."""
        print(report.render(report.rows(phases)))
        print()
        if len(phases) > 1:
            print(report.verdict(phases[-1], phases[0]))
        print(f"Took {took_s:.0f} s.")
        found = report.problems(phases)
        for problem in found:
            print(f"error: {problem}", file=sys.stderr)
        return 1 if found else 0
