"""What travels to the workers when a pipeline starts, as frozen records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from megadask.planner.batching import Batching
from megadask.planner.checks import LARGEST, check_integer, check_number, check_seconds
from megadask.planner.draw import DrawRules
from megadask.planner.errors import ConfigError
from megadask.planner.schedule import StepSchedule
from megadask.planner.strategy import Strategy
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.assemble import ARRAY_KEYS, TOKEN_KEYS
from megadask.scheduling.items import item_keys
from megadask.scheduling.policy import OnError
from megadask.scheduling.reading import Reader
from megadask.scheduling.samples import Form


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """What a Source Loader needs to know of its source.

    Attributes
    ----------
    name
        Unique in the pipeline.
    index
        Place of the source in the pipeline.
    reader
        Yields the records of a shard.
    transform
        Maps a record, and a generator if `wants_rng`, to a sample; None leaves it as it is.
    wants_rng
        Whether the transform takes a second argument.
    lanes
        Number of ordered sub-streams.
    seed
        Seed of the pipeline.
    on_error
        What becomes of a record that cannot be decoded or transformed.
    max_consecutive_errors
        So many skips in a row are fatal.
    scalars
        Names of the scalars that become metadata columns, over all sources.
    modalities
        Names of the lists of items whose lengths become metadata, over all sources.
    batching
        How documents are cut into spans.
    shuffle
        Rows of a block that is shuffled; 0 keeps the order of shards and rows.
    known
        Yields what is known of each record, an `Entry`, so that payload is read for planned samples
        alone; None where only reading and transforming a record tells.
    extras
        Names of the columns of this source that ride along.
    size
        What counts as the length of its samples, if they have no tokens.
    counts_samples
        Whether each of its samples counts as one target, as no source has tokens.
    """

    name: str
    index: int
    reader: Reader
    transform: Callable[..., Mapping[str, Any] | None] | None
    wants_rng: bool
    lanes: int
    seed: int
    on_error: OnError
    max_consecutive_errors: int
    scalars: tuple[str, ...]
    modalities: tuple[str, ...]
    batching: Batching
    shuffle: int = 0
    known: Reader | None = None
    extras: tuple[str, ...] = ()
    size: str | None = None
    counts_samples: bool = False

    @cached_property
    def form(self) -> Form:
        """What its samples may hold."""
        return Form(
            scalars=self.scalars,
            modalities=self.modalities,
            extras=self.extras,
            fields=self.batching.fields,
            size=self.size,
            num_sequences=self.batching.sequences,
            pad_to_multiple=self.batching.pad_to_multiple,
        )

    def generator(self, epoch: int, lane: int, position: int) -> np.random.Generator:
        """Return the generator of one record in one epoch, the same in every run (rule 4)."""
        key = [self.seed, *self.name.encode(), epoch, lane, position]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of the buffers and waits of a service.

    Attributes
    ----------
    loader_bytes
        Payload that one Source Loader keeps ready.
    constructor_bytes
        Payload that one Data Constructor holds, besides the microbatch that is due.
    shared_bytes
        Shared memory in which one Data Constructor hands batches to trainers of its host, and in
        which they keep them; see docs/data_plane.md. Twice ``constructor_bytes`` when None; 0 for
        none: then batches go in messages. Three batches of each bucket are admitted in any case.
    lead_steps
        Steps that may be planned beyond the slowest rank.
    reply_s
        Deadline of one call between roles.
    recovery_s
        How long a role waits for a lost partner to be re-created.
    lease_s
        How long a trainer or driver may be silent before its claim lapses; the service of a driver
        ends then, unless it is detached.
    silent_s
        How long a worker may be silent before its roles move to others, for one that hangs without
        dying; the least of all services on a cluster counts. Shorter than ``reply_s``, so that
        calls to it find a successor before their own deadline.
    journal_s
        How long storage may fail before that ends the run. Nothing is committed meanwhile. Shorter
        than ``reply_s``, as who commits waits for it.
    """

    loader_bytes: int = 64 * 2**20
    constructor_bytes: int = 256 * 2**20
    shared_bytes: int | None = None
    lead_steps: int = 4
    reply_s: float = 60.0
    recovery_s: float = 60.0
    lease_s: float = 60.0
    silent_s: float = 20.0
    journal_s: float = 30.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            what, value = f"Limits({limit.name}=)", getattr(self, limit.name)
            if value is None and limit.name == "shared_bytes":
                continue
            if limit.name.endswith("_s"):
                check_seconds(what, value)
            elif limit.name.endswith("_bytes"):  # may be written as 1e9
                check_number(what, value, 0)
            else:
                check_integer(what, value, 1, LARGEST)
        for name in ("silent_s", "journal_s"):
            if getattr(self, name) >= self.reply_s:
                raise ConfigError(
                    f"Limits({name}=)",
                    got=f"{getattr(self, name):g}",
                    limit=f"less than reply_s={self.reply_s:g}",
                    remedy="Who waits for an answer waits for that, too; set both.",
                )

    @property
    def most_shared_bytes(self) -> int:
        """`shared_bytes`, or what it is where it was not given."""
        given = self.shared_bytes
        return max(1, int(2 * self.constructor_bytes)) if given is None else int(given)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What the Planner and the Data Constructors need to know of a pipeline.

    Attributes
    ----------
    lanes
        Source name to its number of lanes, in the pipeline's order.
    lane_rows
        Source name to the records of each lane in an epoch, None where the reader does not know.
    mixture
        Weights by step.
    modalities
        Names of the lists of items that its samples may hold.
    extras
        Names of the extras of all sources.
    has_tokens
        Whether any source has tokens.
    collate
        The pickled function on the microbatches of a bucket, if there is one.
    """

    lanes: Mapping[str, int]
    lane_rows: Mapping[str, tuple[int, ...] | None]
    rules: DrawRules
    mixture: StepSchedule
    strategy: Strategy
    topology: ClientPlaceTree
    modalities: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    extras: tuple[str, ...] = ()
    has_tokens: bool = True
    collate: bytes | None = None

    @property
    def batching(self) -> Batching:
        """How samples become batches."""
        return self.rules.batching

    @property
    def array_keys(self) -> list[str]:
        """Names of the arrays of a batch, as far as they are known before there is one."""
        keys = [key for key in ARRAY_KEYS if self.has_tokens or key not in TOKEN_KEYS]
        keys += [one.name for one in self.batching.fields if one.name not in ARRAY_KEYS]
        keys += ["num_sequences"] if self.batching.sequences > 1 else []
        keys += item_keys(self.modalities)
        return [*keys, *(["extras"] if self.extras else [])]

    @property
    def num_buckets(self) -> int:
        """Consumers along the distributed axis."""
        return self.topology.num_buckets(self.strategy.axis)

    @property
    def num_slices(self) -> int:
        """Slices of its packs that the ranks of one bucket take."""
        return self.topology.num_slices(self.strategy.axis)
