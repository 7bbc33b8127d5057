"""Names of what is planned and delivered: sample ids, and the verdicts on samples."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class SampleId(NamedTuple):
    """The name of one record of a source in one epoch; the same in every run.

    Attributes
    ----------
    source
        Name of the source.
    epoch
        How many times the source had been read in full before, from 0.
    lane
        The sub-stream of the source, from 0.
    position
        Count of the lane's records before this one in this epoch, filtered and skipped ones too.
    """

    source: str
    epoch: int
    lane: int
    position: int

    def __str__(self) -> str:
        return f"{self.source}/{self.epoch}/{self.lane}/{self.position}"


class Verdict(IntEnum):
    """What the loader says of a record. Only records that are OK can be planned."""

    OK = 0
    FILTERED = 1  # the transform returned None
    SKIPPED = 2  # the record itself is bad and the source's policy says skip
    TOMBSTONE = 3  # the shard is truncated: stands for all that would have followed
