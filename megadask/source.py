"""A named stream of records, as a pipeline declares it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from megadask.planner.errors import ConfigError
from megadask.scheduling.lanes import shards_of
from megadask.scheduling.reading import Reader
from megadask.scheduling.spec import OnError
from megadask.transforms import Transform


@dataclass(frozen=True)
class Source:
    """A named, ordered, re-readable stream of records, with a transform.

    Parameters
    ----------
    name
        Unique in the pipeline; weights and sample ids use it.
    reader
        Yields the records; see `megadask.readers`.
    transform
        Maps a record to a sample, a dict with ``tokens``; None drops the record. With a second
        parameter ``rng`` it gets a generator keyed by the sample. Without a transform the records
        must be samples.
    lanes
        Ordered sub-streams that the source is read in; fewer where there are fewer shards. Belongs
        to the order of the data: changing it changes what a step consists of.
    loaders
        Source Loaders that share the lanes. Changes nothing but speed.
    shadows
        Hot standbys of every Source Loader, each on a worker of its own (on another host, where
        there is one): they read the same, which is compared, and the first one takes over at once
        when its loader is lost. Each may hold ``Limits(loader_bytes=)`` of samples more.
    on_error
        What a record that cannot be decoded or transformed does: ``"raise"`` ends the run with the
        record's own error, ``"skip"`` passes it over and counts it.
    max_consecutive_errors
        So many skips in a row end the run all the same.
    metadata
        Names of scalars of the samples that cost functions want as columns.
    modalities
        Names of the lists of items (images, audio) in its samples whose lengths costs and
        `DGraph.select` need.
    shares_files
        Allow other sources to read the same files.
    """

    name: str
    reader: Reader
    transform: Transform | Callable[..., Any] | None = None
    lanes: int = 16
    loaders: int = 1
    shadows: int = 0
    on_error: OnError = "raise"
    max_consecutive_errors: int = 100
    metadata: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    shares_files: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise ConfigError("Source(name)", got=repr(self.name), limit="a string without '/'")
        for what in ("lanes", "loaders", "shadows", "max_consecutive_errors"):
            value, least = getattr(self, what), int(what != "shadows")
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(
                    f"Source({self.name!r}, {what}=)",
                    got=repr(value),
                    limit=f"an integer >= {least}",
                )
        if self.on_error not in get_args(OnError):
            raise ConfigError(
                f"Source({self.name!r}, on_error=)",
                got=repr(self.on_error),
                limit=f"one of {get_args(OnError)}",
            )
        if not isinstance(self.reader, Reader):
            raise ConfigError(
                f"Source({self.name!r}, reader)",
                got=type(self.reader).__name__,
                limit="an object with shards(), read(), fingerprint() and paths()",
                remedy="See megadask.readers.",
            )
        if self.transform is not None and not callable(self.transform):
            raise ConfigError(f"Source({self.name!r}, transform=)", got=repr(self.transform))
        object.__setattr__(self, "metadata", tuple(self.metadata))
        object.__setattr__(self, "modalities", tuple(self.modalities))

    @property
    def num_lanes(self) -> int:
        """Lanes that the source is read in, at most one for each shard."""
        return min(self.lanes, len(self.reader.shards()))

    @property
    def size_bytes(self) -> int:
        """Bytes in storage, as far as known."""
        return sum(shard.size_bytes or 0 for shard in self.reader.shards())

    @property
    def lane_rows(self) -> tuple[int, ...] | None:
        """Records of each lane in an epoch, None where the reader does not know."""
        shards = self.reader.shards()
        rows = [shard.rows for shard in shards]
        if any(count is None for count in rows):
            return None
        lanes = range(self.num_lanes)
        return tuple(
            sum(rows[i] or 0 for i in shards_of(lane, self.num_lanes, len(rows))) for lane in lanes
        )
