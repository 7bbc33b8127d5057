"""Declare what feeds a job: sources, topology, strategy, batching. Checked when it is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import cloudpickle

from megadask.planner.batching import Packed
from megadask.planner.draw import DrawRules, Stop
from megadask.planner.errors import ConfigError
from megadask.planner.fingerprint import fingerprint
from megadask.planner.graph import DGraph, recorded
from megadask.planner.mesh import check_mesh
from megadask.planner.schedule import Schedule, StepSchedule
from megadask.planner.strategy import Strategy
from megadask.planner.topology import ClientPlaceTree
from megadask.saved import another_pipeline, differences
from megadask.scheduling.reading import fingerprint_shards
from megadask.scheduling.spec import Limits, RunSpec, SourceSpec
from megadask.source import Source
from megadask.transforms import transform_fingerprint, wants_rng


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What feeds a training job.

    Parameters
    ----------
    sources
        The sources; their order counts.
    topology
        The mesh of the trainers.
    strategy
        Called once with a `DGraph`, whose primitives record how to mix and balance. None: weights
        by size, balanced over "dp" by tokens.
    batching
        How samples become batches.
    seed
        Of everything random.
    epochs
        How often every source is read; None for ever.
    stop
        With finite epochs: ``"first"`` ends when the first source has ended, ``"all"`` when all
        have (those that ended drop out), ``"repeat"`` too (those that ended start again).
    window
        Readable spans of every source that the planner looks at for one that fits.
    patience
        Steps for which a span may be passed over because it does not fit: so much later it may come
        than its turn in its source. Where order counts to the letter, take windows of 1.
    restart
        Whether every pass over a loader begins at the beginning, as validation wants it. All ranks
        have to end a pass before any begins the next.

    Raises
    ------
    ConfigError
        Naming what cannot work: at once, before anything is started.
    """

    sources: Sequence[Source]
    topology: ClientPlaceTree = field(default_factory=ClientPlaceTree)
    strategy: Callable[[DGraph], Any] | None = None
    batching: Packed
    seed: int = 0
    epochs: int | None = None
    stop: Stop = "all"
    window: int = 64
    patience: int = 4
    restart: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        self._check_sources()
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError("Pipeline(seed=)", got=repr(self.seed), limit="an integer >= 0")
        if self.restart and self.epochs is None:
            raise ConfigError(
                "Pipeline(restart=True)", got="epochs=None", limit="a finite number of epochs"
            )
        _ = self.rules
        modalities = {name for source in self.sources for name in source.modalities}
        check_mesh(self.topology, self.frozen_strategy, self.batching, modalities)
        _ = self.mixture
        _ = self.components
        self._check_pickles()

    def __str__(self) -> str:
        shape = ", ".join(f"{s.name} ({s.num_lanes} lanes)" for s in self.sources)
        return f"Pipeline of {shape}; {self.topology}; {self.batching}; digest {self.digest}"

    @classmethod
    def from_yaml(cls, path: str) -> Pipeline:
        """Return the pipeline that a YAML file declares; docs/pipeline_file.md has the form.

        Parameters
        ----------
        path
            Local, or any that fsspec opens. Paths in the file are relative to the working folder.

        Raises
        ------
        ConfigError
            Naming the place in the file, and what is wrong there.
        """
        from megadask import pipeline_file

        return pipeline_file.call(path, cls, pipeline_file.load(path))  # type: ignore[no-any-return]

    @cached_property
    def frozen_strategy(self) -> Strategy:
        """What the strategy recorded."""
        names = [source.name for source in self.sources]
        return recorded(self.strategy, names, self.topology)

    @cached_property
    def mixture(self) -> StepSchedule:
        """Weights of the sources by step."""
        if self.frozen_strategy.mix is not None:
            return self.frozen_strategy.mix
        return Schedule.constant(
            {source.name: max(1, source.size_bytes) for source in self.sources}
        )

    @cached_property
    def rules(self) -> DrawRules:
        """What the draw goes by."""
        return DrawRules(
            batching=self.batching,
            mix_by=self.frozen_strategy.mix_by,
            window=self.window,
            patience=self.patience,
            epochs=self.epochs,
            stop=self.stop,
            deferral=self.frozen_strategy.deferral,
        )

    @cached_property
    def components(self) -> dict[str, str]:
        """Digests of everything that the draw depends on, by name: what a resume compares."""
        parts: dict[str, str] = {
            "batching": fingerprint(self.batching),
            "mixture": f"{self.mixture.fingerprint()} by {self.frozen_strategy.mix_by}",
            "reading": f"epochs={self.epochs}, stop={self.stop}, window={self.window}, "
            f"patience={self.patience}",
            "seed": str(self.seed),
            "deferral": self._deferral_text,
        }
        for source in self.sources:
            shards = source.reader.shards()
            parts[f"source {source.name}"] = json.dumps(
                {
                    "transform": transform_fingerprint(source.transform),
                    "lanes": source.num_lanes,
                    "on_error": source.on_error,
                    "num_shards": len(shards),
                    "shards": fingerprint_shards(shards),
                }
            )
        return parts

    @cached_property
    def digest(self) -> str:
        """A hash of the whole pipeline, strategy and topology included."""
        parts = [self.components, self.frozen_strategy.fingerprint(), str(self.topology)]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def check_resumable(self, saved: Mapping[str, str]) -> None:
        """Raise StateError naming both sides if a saved state belongs to another pipeline.

        Sources may have been added, and shards behind the old ones; then the mixture may differ.
        """
        found = differences(saved, self.components)
        grown = [
            name
            for name in found
            if name.startswith("source ")
            and (name not in saved or self._has_grown(name.removeprefix("source "), saved[name]))
        ]
        for name in [*grown, *(["mixture"] if grown else [])]:
            found.pop(name, None)
        if found:
            raise another_pipeline(
                found,
                "Resume with the pipeline that saved it. Sources may be added, and shards that "
                "sort behind the old ones.",
            )

    def run_spec(self, limits: Limits) -> RunSpec:
        """Return what the Planner and the Data Constructors need to know."""
        return RunSpec(
            lanes={source.name: source.num_lanes for source in self.sources},
            lane_rows={source.name: source.lane_rows for source in self.sources},
            rules=self.rules,
            mixture=self.mixture,
            strategy=self.frozen_strategy,
            topology=self.topology,
            limits=limits,
        )

    def source_specs(self) -> dict[str, SourceSpec]:
        """Return what the Source Loaders need to know, by source."""
        scalars = sorted({name for source in self.sources for name in source.metadata})
        modalities = sorted({name for source in self.sources for name in source.modalities})
        return {
            source.name: SourceSpec(
                name=source.name,
                index=index,
                reader=source.reader,
                transform=source.transform,
                wants_rng=source.transform is not None and wants_rng(source.transform),
                lanes=source.num_lanes,
                seed=self.seed,
                on_error=source.on_error,
                max_consecutive_errors=source.max_consecutive_errors,
                scalars=tuple(scalars),
                modalities=tuple(modalities),
                batching=self.batching,
            )
            for index, source in enumerate(self.sources)
        }

    @property
    def _deferral_text(self) -> str:
        deferral = self.rules.deferral
        if deferral is None:
            return "none"
        cost = fingerprint(deferral.cost)
        return f"steps={deferral.steps}, ways={deferral.ways}, cost {cost}"

    def _check_sources(self) -> None:
        names = [source.name for source in self.sources]
        if not names:
            raise ConfigError("Pipeline(sources=)", got="no source", limit="at least one")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError("two sources have one name", got=twice, remedy="Rename one of them.")
        owners: dict[str, str] = {}
        for source in self.sources:
            if not source.reader.shards():
                raise ConfigError(f"source {source.name!r} has nothing to read", got="no shards")
            if source.lane_rows is not None and not sum(source.lane_rows):
                raise ConfigError(f"source {source.name!r} has nothing to read", got="no records")
            for path in source.reader.paths():
                other = owners.setdefault(path, source.name)
                if other != source.name and not source.shares_files:
                    raise ConfigError(
                        f"sources {other!r} and {source.name!r} read the same file",
                        got=path,
                        remedy="Samples would come twice. If that is meant: "
                        "Source(shares_files=True).",
                    )

    def _check_pickles(self) -> None:
        for source in self.sources:
            try:
                cloudpickle.dumps((source.reader, source.transform))
            except Exception as error:  # any object may fail to pickle in any way
                raise ConfigError(
                    f"source {source.name!r}: the reader or the transform does not pickle",
                    got=f"{type(error).__name__}: {error}",
                    remedy="It travels to the workers: open files and connections when called.",
                ) from error

    def _has_grown(self, name: str, was: str) -> bool:
        """Whether a source is what it was, with more shards behind the old ones."""
        source = next((source for source in self.sources if source.name == name), None)
        if source is None:
            return False
        old = json.loads(was)
        shards = source.reader.shards()
        same = {"transform", "lanes", "on_error"}
        now = json.loads(self.components[f"source {name}"])
        return (
            all(old[key] == now[key] for key in same)
            and old["num_shards"] <= len(shards)
            and old["shards"] == fingerprint_shards(shards[: old["num_shards"]])
        )
