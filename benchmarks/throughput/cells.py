"""A cell of the comparison: a corpus, ranks, a context. Every system goes through it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from distributed import Client
from throughput import corpora
from throughput.corpora import Corpus
from throughput.ranks import Accelerator, Emulated, Log, Slot
from throughput.steptimes import StepTimes
from throughput.systems import Concatenated, Documents, Feed, Grouped, Ints, Loaded, MegaDask

import megadask as md
from megadask.planner.simulation import Trainer

#: Names of the baselines, in the order of the tables; and those that take far longer.
FIXED, SINGLE, KIND = (
    f"DataLoader, {what}" for what in ("fixed length", "a sample each", "a kind a rank")
)
SLOW = (SINGLE, KIND)
MEGADASK = "MegaDask"
#: What ranks would reach to whom MegaDask's batches came by themselves.
READY = "the same, lying ready"
#: Packs of one rank in a step, each a microbatch.
PACKS_PER_RANK = 2
#: As docs/batches.md advises where steps have few packs.
WINDOW = PATIENCE = 32
#: Samples with images that the planner looks at take more than the default, and what is evicted is
#: decoded again (docs/modalities.md).
LIMITS = md.Limits(loader_bytes=2**30)
#: As docs/deferral.md does.
DEFER_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Variation:
    """What a row of MegaDask does otherwise.

    Attributes
    ----------
    attention
        Factor by which the quadratic term of the planner's cost is off.
    defer
        Whether documents wait for others as long.
    """

    attention: float = 1.0
    defer: bool = False

    def __str__(self) -> str:
        words = [f"attention x {self.attention:g}"] if self.attention != 1 else []
        words += ["deferral"] if self.defer else []
        return ", ".join([MEGADASK, *words])


PLAIN = Variation()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is varied.

    Attributes
    ----------
    data
        "bytes", "bpe", "jpeg" or "equal", see `corpora.make`.
    context
        Tokens of a pack.
    ranks
        Data-parallel ranks.
    steps
        About so many steps of MegaDask.
    step_s
        Seconds that a mean step is scaled to.
    variations
        MegaDask's further rows.
    floor_tokens
        A microbatch takes at least as long as so many tokens, of which the planner does not know.
    engines
        Whether the other engines run, too.
    """

    data: str
    context: int
    ranks: int
    steps: int = 10
    step_s: float = 1.0
    variations: tuple[Variation, ...] = ()
    floor_tokens: int = 0
    engines: bool = False

    def __str__(self) -> str:
        words = [self.data, f"{self.context // 1024}k", f"{self.ranks} ranks"]
        if self.floor_tokens:
            words.append("a floor per launch")
        return ", ".join(words)

    @property
    def global_batch(self) -> int:
        """Packs of a step."""
        return self.ranks * PACKS_PER_RANK


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a system through the corpus of a cell.

    Attributes
    ----------
    seconds
        From when all ranks had their first batch to the end.
    ideal_s
        What the same microbatches take a trainer that waits for nothing but its other ranks.
    even_s
        The same work spread evenly.
    wait_share
        Share of the time in which a mean rank waits for data.
    first_s
        Until all ranks had their first batch.
    lengths
        Of every rank, step and microbatch those of the documents.
    """

    tokens: int
    num_steps: int
    seconds: float
    ideal_s: float
    even_s: float
    wait_share: float
    first_s: float
    lengths: list[list[list[list[int]]]]

    @property
    def of_bound(self) -> float:
        """Share of the time that an ideal trainer takes."""
        return self.ideal_s / self.seconds

    @property
    def imbalance(self) -> float:
        """Time of an ideal trainer over that of an even spread."""
        return self.ideal_s / self.even_s

    @classmethod
    def of(cls, logs: list[Log]) -> Pass:
        """Return what the logs of all ranks amount to."""
        num_steps = {len(log.busy_s) for log in logs}
        assert len(num_steps) == 1, f"ranks made unlike numbers of steps: {num_steps}"
        ideal_s = even_s = 0.0
        for step in zip(*(log.busy_s for log in logs), strict=True):
            done = Trainer().run(np.array(step)[:, :, None])
            ideal_s, even_s = ideal_s + done.step_time, even_s + done.ideal
        seconds = max(log.ended_s for log in logs) - max(log.began_s for log in logs)
        waited_s = float(np.mean([sum(log.wait_s) for log in logs]))
        return cls(
            tokens=sum(log.tokens for log in logs),
            num_steps=num_steps.pop(),
            seconds=seconds,
            ideal_s=ideal_s,
            even_s=even_s,
            wait_share=waited_s / seconds,
            first_s=max(log.first_wait_s for log in logs),
            lengths=[log.lengths for log in logs],
        )


class Prepared:
    """The corpus of a cell on disk, and the feeds of its systems."""

    def __init__(self, cell: Cell, folder: Path, measured: StepTimes) -> None:
        self.cell = cell
        tokens = cell.steps * cell.global_batch * cell.context
        self.corpus: Corpus = corpora.make(cell.data, folder / "corpus", tokens, cell.context)
        self.documents = Documents(self.corpus)
        work_s = float(measured.of_documents(self.documents.length_N).sum())
        scale = cell.step_s * cell.steps * cell.ranks / work_s
        self.times = replace(measured, scale=scale, floor_tokens=cell.floor_tokens)
        self._rng = np.random.default_rng(1)
        self.folder = folder

    def pipeline(self, variation: Variation) -> md.Pipeline:
        """Return what a user declares for such data."""
        cost, corpus = self.times.planned(variation.attention), self.corpus
        counts = {name: len(length_N) for name, length_N in corpus.lengths.items()}

        def strategy(graph: md.DGraph) -> None:
            graph.mix(counts).distribute("dp").cost(cost).balance("assignment")
            if variation.defer:
                graph.defer(steps=DEFER_STEPS, ways=self.cell.ranks)

        return md.Pipeline(
            sources=[
                md.Source(
                    name,
                    md.readers.ArrowIpc(path),
                    corpus.transform,
                    modalities=corpus.modalities,
                )
                for name, path in corpus.files.items()
            ],
            topology=md.ClientPlaceTree(dp=self.cell.ranks),
            strategy=strategy,
            batching=md.Packed(
                seq_len=self.cell.context, global_batch=self.cell.global_batch, overflow="error"
            ),
            epochs=1,
            window=WINDOW,
            patience=PATIENCE,
        )

    def baselines(self) -> Iterator[tuple[str, Feed]]:
        """Yield names and feeds, in the order of the tables."""
        yield FIXED, self.fixed()
        yield SINGLE, self._single()
        yield KIND, self._by_kind()

    def fixed(self) -> Loaded:
        packs = Concatenated(self.documents, self.cell.context, np.random.default_rng(1))
        order = self._rng.permutation(len(packs))
        items = tuple(order[rank :: self.cell.ranks] for rank in range(self.cell.ranks))
        return Loaded(
            data=packs,
            items=items,
            microbatches=PACKS_PER_RANK,
            num_steps=-(-len(packs) // self.cell.global_batch),
        )

    def _single(self) -> Loaded:
        order = self._rng.permutation(len(self.documents))
        items = tuple(order[rank :: self.cell.ranks] for rank in range(self.cell.ranks))
        # Ranks meet after every microbatch: a step is one.
        return Loaded(data=self.documents, items=items, num_steps=len(items[0]))

    def _by_kind(self) -> Loaded:
        """As many documents a step and rank as MegaDask has on average, of one kind a rank."""
        each = max(1, round(len(self.documents) / self.cell.steps / self.cell.ranks))
        groups: list[Ints] = []
        items: list[Ints] = []
        for part_N in self._kinds():
            shuffled_N = self._rng.permutation(part_N)
            mine = [shuffled_N[at : at + each] for at in range(0, len(part_N), each)]
            items.append(np.arange(len(groups), len(groups) + len(mine)))
            groups += mine
        return Loaded(
            data=Grouped(self.documents, groups), items=tuple(items), num_steps=max(map(len, items))
        )

    def _kinds(self) -> list[Ints]:
        """Return the documents of each rank; kinds get ranks by the number of their documents."""
        first_S, ranks = self.documents.first_S, self.cell.ranks
        kinds = [np.arange(a, b) for a, b in pairwise(first_S)]
        if ranks < len(kinds):
            return [np.concatenate(kinds[rank::ranks]) for rank in range(ranks)]
        count_S = np.ones(len(kinds), np.int64)
        while count_S.sum() < ranks:  # to the kind whose ranks have the most documents
            count_S[np.argmax(np.array([len(kind) for kind in kinds]) / count_S)] += 1
        parts = zip(kinds, count_S.tolist(), strict=True)
        return [part for kind, count in parts for part in np.array_split(kind, count)]


@contextmanager
def served(pipeline: md.Pipeline, client: Client) -> Iterator[MegaDask]:
    """Serve a pipeline for one pass, and see that all of it was delivered once."""
    with md.serve(pipeline, client, limits=LIMITS) as service:
        yield MegaDask(address=service.address)
        audit = service.audit()
        assert audit["ok"], f"the audit found: {audit}"


def run_pass(
    slot: Slot, feed: Feed, prepared: Prepared, make: Callable[[], Accelerator] | None = None
) -> Pass:
    """Let all ranks of a cell go through a feed once.

    make: makes what each computes with; it is emulated when None.
    """
    make = make or functools.partial(Emulated, prepared.times)
    done = Pass.of(slot.run(feed, prepared.cell.ranks, make))
    assert done.tokens >= prepared.corpus.tokens, f"{prepared.corpus.tokens} are not {done.tokens}"
    return done


def run_megadask(
    slot: Slot,
    client: Client,
    prepared: Prepared,
    variation: Variation = PLAIN,
    make: Callable[[], Accelerator] | None = None,
) -> Pass:
    """The same, for a service of its own."""
    with served(prepared.pipeline(variation), client) as feed:
        return run_pass(slot, feed, prepared, make)
