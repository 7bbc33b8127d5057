"""Every error that MegaDask raises on purpose. All say what, got, limit and remedy, and pickle."""

from megadask.planner.errors import ConfigError, CostError, MegaDaskError, PlanError, StateError
from megadask.scheduling.errors import (
    ClaimError,
    ClosedError,
    DeadlineError,
    JournalError,
    LostError,
    ReshardedError,
    ServiceError,
    SourceError,
    StaleError,
    WorkerError,
)
from megadask.scheduling.reading import TruncatedShard
from megadask.transforms import TransformError

__all__ = [
    "ClaimError",
    "ClosedError",
    "ConfigError",
    "CostError",
    "DeadlineError",
    "JournalError",
    "LostError",
    "MegaDaskError",
    "PlanError",
    "ReshardedError",
    "ServiceError",
    "SourceError",
    "StaleError",
    "StateError",
    "TransformError",
    "TruncatedShard",
    "WorkerError",
]
