"""Which rank this process has."""

from __future__ import annotations

import os
from typing import Any

import torch

from megadask.planner.checks import is_integer
from megadask.planner.errors import ConfigError


def own_rank() -> int:
    """Return the rank of this process: of torch.distributed, RANK or SLURM_PROCID, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    for name in ("RANK", "SLURM_PROCID"):
        if value := os.environ.get(name):
            return integer(
                f"the environment's {name}", value if not value.isdigit() else int(value)
            )
    return 0


def integer(what: str, value: Any) -> int:
    """Return an integer that somebody gave; raises ConfigError for anything else."""
    if not is_integer(value):
        raise ConfigError(what, got=repr(value), limit="an integer")
    return value
