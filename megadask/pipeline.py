"""Declare what feeds a job: sources, topology, strategy, batching. Checked when it is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import cloudpickle

from megadask.components import components_of, has_grown
from megadask.fingerprints.fingerprint import fingerprint
from megadask.indexing.known import known_reader
from megadask.planner.batching import Batching
from megadask.planner.checks import check_integer
from megadask.planner.draw import DrawRules, Stop
from megadask.planner.errors import ConfigError
from megadask.planner.graph import DGraph, recorded
from megadask.planner.mesh import check_mesh
from megadask.planner.schedule import Schedule, StepSchedule
from megadask.planner.strategy import Strategy
from megadask.planner.topology import ClientPlaceTree
from megadask.saved import another_pipeline, differences
from megadask.scheduling.assemble import ARRAY_KEYS
from megadask.scheduling.items import item_keys
from megadask.scheduling.spec import Limits, RunSpec, SourceSpec
from megadask.source import Source
from megadask.transforms import wants_rng


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
        have (those that ended drop out), ``"repeat"`` too (those that ended start again). Where all
        with a weight have ended and a later stage gives one to others, its weights hold at once.
    window
        Readable spans of every source that the planner looks at for one that fits.
    patience
        Steps for which a span may be passed over because it does not fit: so much later it may come
        than its turn in its source. Where order counts to the letter, take windows of 1.
    collate
        Called with the whole microbatch of a bucket, a dict of numpy arrays, before it is cut for
        context parallelism; returns the dict to deliver. See docs/batches.md.
    restart
        Whether every pass over a loader begins at the beginning, as validation wants it. Pass n of
        a rank meets pass n of the others, and begins when all are done with the one before; a rank
        may break off a pass, and has broken it off when it leaves.

    Raises
    ------
    ConfigError
        Naming what cannot work: at once, before anything is started.
    """

    sources: Sequence[Source]
    topology: ClientPlaceTree = field(default_factory=ClientPlaceTree)
    strategy: Callable[[DGraph], Any] | None = None
    batching: Batching
    seed: int = 0
    epochs: int | None = None
    stop: Stop = "all"
    window: int = 64
    patience: int = 4
    restart: bool = False
    collate: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sources, Source) or not isinstance(self.sources, Iterable):
            raise ConfigError(
                "Pipeline(sources=)", got=type(self.sources).__name__, limit="a list of sources"
            )
        object.__setattr__(self, "sources", tuple(self.sources))
        if not isinstance(self.batching, Batching):
            raise ConfigError(
                "Pipeline(batching=)",
                got=repr(self.batching),
                limit="a Packed, a Padded or a Fixed",
            )
        if self.strategy is not None and not callable(self.strategy):
            raise ConfigError(
                "Pipeline(strategy=)", got=repr(self.strategy), limit="a function of a DGraph"
            )
        self._check_sources()
        self._check_fields()
        check_integer("Pipeline(seed=)", self.seed, 0)
        if self.collate is not None and not callable(self.collate):
            raise ConfigError("Pipeline(collate=)", got=repr(self.collate), limit="a function")
        if self.restart and self.epochs is None:
            raise ConfigError(
                "Pipeline(restart=True)", got="epochs=None", limit="a finite number of epochs"
            )
        _ = self.rules
        check_mesh(self.topology, self.frozen_strategy, self.batching, self.modalities)
        _ = self.mixture
        _ = self.components
        _ = self._specs
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
    def modalities(self) -> tuple[str, ...]:
        """Names of the lists of items that samples of any source may hold."""
        return tuple(sorted({name for source in self.sources for name in source.modalities}))

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
        """Texts of everything that the draw depends on, by name: what a resume compares."""
        return components_of(self)

    @cached_property
    def digest(self) -> str:
        """A hash of the whole pipeline, strategy and topology included."""
        parts = [self.components, fingerprint(self.frozen_strategy), str(self.topology)]
        if self.collate is not None:
            parts.append(fingerprint(self.collate))
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
                "sort behind the old ones, but for those of a shuffled source: they would come "
                "between shards that were read.",
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
            modalities=self.modalities,
            limits=limits,
            extras=tuple(sorted({name for source in self.sources for name in source.extras})),
            has_tokens=self._has_tokens,
            collate=None if self.collate is None else cloudpickle.dumps(self.collate),
        )

    def source_specs(self) -> dict[str, SourceSpec]:
        """Return what the Source Loaders need to know, by source."""
        return dict(self._specs)

    @cached_property
    def _specs(self) -> dict[str, SourceSpec]:
        scalars = sorted({name for source in self.sources for name in source.metadata})
        specs = {
            source.name: SourceSpec(
                name=source.name,
                index=index,
                reader=source.lean_reader,
                transform=source.transform,
                wants_rng=source.transform is not None and wants_rng(source.transform),
                lanes=source.num_lanes,
                seed=self.seed,
                on_error=source.on_error,
                max_consecutive_errors=source.max_consecutive_errors,
                scalars=tuple(scalars),
                modalities=self.modalities,
                batching=self.batching,
                shuffle=source.block_rows,
                extras=source.extras,
                size=source.size,
                counts_samples=not self._has_tokens,
            )
            for index, source in enumerate(self.sources)
        }
        return {
            source.name: replace(spec, known=known_reader(source, spec))
            for source, spec in zip(self.sources, specs.values(), strict=True)
        }

    @property
    def _has_tokens(self) -> bool:
        return any(source.size is None for source in self.sources)

    def _check_sources(self) -> None:
        for source in self.sources:
            if not isinstance(source, Source):
                raise ConfigError(
                    "Pipeline(sources=)", got=f"a {type(source).__name__}", limit="md.Source"
                )
        names = [source.name for source in self.sources]
        if not names:
            raise ConfigError("Pipeline(sources=)", got="no source", limit="at least one")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError("two sources have one name", got=twice, remedy="Rename one of them.")
        owners: dict[str, str] = {}
        for source in self.sources:
            if source.size and not (source.extras or source.modalities or self.batching.aligned):
                raise ConfigError(
                    f"Source({source.name!r}, size=)",
                    got="nothing to deliver: its samples have no tokens",
                    remedy="Name what to deliver in extras=, or modalities=.",
                )
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

    def _check_fields(self) -> None:
        keys = item_keys(self.modalities)
        if bad := sorted({key for key in keys if keys.count(key) > 1 or key in ARRAY_KEYS}):
            raise ConfigError(
                "Source(modalities=): names that would give a batch one key twice",
                got=f"{list(self.modalities)}: {bad}",
                remedy="Give the items another name.",
            )
        if twice := sorted(set(keys) & set(self.batching.aligned)):
            raise ConfigError(
                f"{self.batching.says('aligned')} and Source(modalities=) have one name",
                got=twice,
                remedy="What belongs to items is delivered with them.",
            )

    def _check_pickles(self) -> None:
        parts: dict[str, Any] = {
            f"source {source.name!r}: the reader, the transform or on_error": (
                source.reader,
                source.transform,
                source.on_error,
            )
            for source in self.sources
        }
        for what, value in (parts | {"Pipeline(collate=)": self.collate}).items():
            try:
                cloudpickle.dumps(value)
            except Exception as error:  # any object may fail to pickle in any way
                raise ConfigError(
                    f"{what} does not pickle",
                    got=f"{type(error).__name__}: {error}",
                    remedy="It travels to the workers: open files and connections when called.",
                ) from error

    def _has_grown(self, name: str, was: str) -> bool:
        """Whether a source is what it was, with more shards behind the old ones."""
        source = next((source for source in self.sources if source.name == name), None)
        return source is not None and has_grown(source, was, self.components[f"source {name}"])
