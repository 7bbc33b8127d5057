"""A named stream of records, as a pipeline declares it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from megadask.fingerprints.fingerprint import fingerprint
from megadask.indexing.known import check_known
from megadask.planner.checks import check_bool, check_integer, is_name
from megadask.planner.errors import ConfigError
from megadask.planner.fields import RESERVED
from megadask.scheduling.batched import check_batches
from megadask.scheduling.lanes import shards_of
from megadask.scheduling.policy import Action, OnError
from megadask.scheduling.reading import Reader
from megadask.scheduling.shuffle import BLOCK_ROWS
from megadask.transforms import Transform
from megadask.transforms.columns import check_columns, lean, needed_columns, with_columns


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
        Source Loaders that share the lanes. Changes nothing but speed. ``"auto"``: one at first,
        then as many as its weight in the mixture and the time that its records take ask for, at
        most one for each lane and for each worker.
    shadows
        Hot standbys of every Source Loader, each on a worker of its own (on another host, where
        there is one): they read the same, which is compared, and the first one takes over at once
        when its loader is lost, and answers for it where it takes much longer than usual. Each may
        hold ``Limits(loader_bytes=)`` of samples more.
    on_error
        What a record that cannot be decoded or transformed does: ``"raise"`` ends the run with the
        record's own error, ``"skip"`` passes it over and counts it. A function of the error and of
        the place of the record (source, shard and row as text) returns one of these; it has to
        return the same whenever the record is read.
    max_consecutive_errors
        So many skips in a row end the run all the same.
    metadata
        Names of scalars of the samples that cost functions want as columns.
    modalities
        Names of the lists of items (images, audio) in its samples whose lengths costs and
        `DGraph.select` need.
    shares_files
        Allow other sources to read the same files.
    shuffle
        Whether every epoch reads the shards of a lane in another order, and the rows of a shard
        shuffled within blocks: of so many rows, or of 1,000 when True. Belongs to the order of the
        data, as ``lanes`` does.
    length_column
        Column of the records that holds the length of each sample, exactly as the transform makes
        it. Steps are planned from it, and payload is read for planned samples alone. `metadata` are
        then columns of the records, too.
    loss_column
        Column that holds how many targets of each sample count, where not all of them do.
    index
        Path or URL of the file that ``megadask index`` wrote for this source: what is in there need
        not be read to plan steps.
    extras
        Names of what rides along with its samples into ``batch["extras"]``: texts, numbers, lists,
        arrays, of the sample or, where its transform leaves them out, of the record.
    size
        For samples without tokens: the name of what counts as their length, a number, or something
        that has a length. What is delivered of them are `extras`, items, and aligned fields.
    """

    name: str
    reader: Reader
    transform: Transform | Callable[..., Any] | None = None
    lanes: int = 16
    loaders: int | Literal["auto"] = 1
    shadows: int = 0
    on_error: OnError = "raise"
    max_consecutive_errors: int = 100
    metadata: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    shares_files: bool = False
    shuffle: bool | int = False
    length_column: str | None = None
    loss_column: str | None = None
    index: str | os.PathLike[str] | None = None
    extras: tuple[str, ...] = ()
    size: str | None = None

    def __post_init__(self) -> None:
        if not is_name(self.name) or "/" in self.name:
            raise ConfigError("Source(name)", got=repr(self.name), limit="a string without '/'")
        for what in ("lanes", "loaders", "shadows", "max_consecutive_errors"):
            if what == "loaders" and isinstance(self.loaders, str) and self.loaders == "auto":
                continue
            least = int(what != "shadows")
            check_integer(f"Source({self.name!r}, {what}=)", getattr(self, what), least)
        check_bool(f"Source({self.name!r}, shares_files=)", self.shares_files)
        if not isinstance(self.shuffle, int) or self.shuffle < 0:
            raise ConfigError(
                f"Source({self.name!r}, shuffle=)",
                got=repr(self.shuffle),
                limit="True, False, or the rows of a block, an integer >= 1",
            )
        is_action = isinstance(self.on_error, str) and self.on_error in get_args(Action)
        if not is_action and not callable(self.on_error):
            raise ConfigError(
                f"Source({self.name!r}, on_error=)",
                got=repr(self.on_error),
                limit=f"one of {get_args(Action)}, or a function that returns one",
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
        check_batches(self.name, self.transform)
        for what in ("metadata", "modalities", "extras"):
            object.__setattr__(self, what, self._names(what))
        reserved = sorted(RESERVED & set(self.modalities))
        if reserved:
            raise ConfigError(
                f"Source({self.name!r}, modalities=)",
                got=reserved,
                limit="names that no key of a batch has",
            )
        check_known(self)
        if self.size is not None and (not isinstance(self.size, str) or not self.size):
            raise ConfigError(
                f"Source({self.name!r}, size=)", got=repr(self.size), limit="a name, or None"
            )

    def _names(self, what: str) -> tuple[str, ...]:
        names = getattr(self, what)
        is_list = isinstance(names, Iterable) and not isinstance(names, str)
        if not is_list or not all(is_name(name) for name in names):
            raise ConfigError(
                f"Source({self.name!r}, {what}=)", got=repr(names), limit="a list of names"
            )
        return tuple(dict.fromkeys(names))

    @property
    def num_lanes(self) -> int:
        """Lanes that the source is read in, at most one for each shard."""
        return min(self.lanes, len(self.reader.shards()))

    @cached_property
    def transform_text(self) -> str:
        """What tells the transform from others, as it was when a pipeline first had the source.

        Taken once: pipelines are made of their sources again (for another topology) while these
        are in use.
        """
        return fingerprint(self.transform)

    @property
    def first_loaders(self) -> int:
        """Loaders that it begins with."""
        return 1 if self.loaders == "auto" else self.loaders

    @property
    def block_rows(self) -> int:
        """Rows of a block that is shuffled, 0 where the order is kept."""
        return BLOCK_ROWS if self.shuffle is True else int(self.shuffle)

    @property
    def lean_reader(self) -> Reader:
        """The reader, without columns that nobody needs as far as the transform says.

        Raises ConfigError where the first file lacks columns that are needed.
        """
        others = [*self.metadata, *self.extras, self.length_column, self.loss_column]
        names = [name for name in others if name is not None]
        known = self.length_column is not None
        reader = with_columns(self.reader, names) if known else self.reader
        check_columns(self.name, reader, self._needed_columns)
        return lean(reader, self.transform, names)

    @property
    def _needed_columns(self) -> set[str]:
        """Columns that records must have; what a transform may add to its sample is none."""
        needed = {name for name in (self.length_column, self.loss_column) if name is not None}
        if self.transform is None:  # records are samples
            needed |= {*self.metadata, *self.extras}
        if self.length_column is not None:
            needed |= {*self.metadata}
        return needed | needed_columns(self.transform)

    @property
    def size_bytes(self) -> int:
        """Bytes in storage, as far as known."""
        return sum(shard.size_bytes or 0 for shard in self.reader.shards())

    @property
    def lane_rows(self) -> tuple[int, ...] | None:
        """Records of each lane in every epoch, None where the reader does not know."""
        shards = self.reader.shards()
        rows = [shard.rows for shard in shards]
        if any(count is None for count in rows):
            return None
        lanes = range(self.num_lanes)
        return tuple(
            sum(rows[i] or 0 for i in shards_of(lane, self.num_lanes, len(rows))) for lane in lanes
        )
