"""Which rank this process has, and of how many."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from megadask.planner.checks import is_integer
from megadask.planner.errors import ConfigError

#: Where a launcher says which rank a process has, and beside each where it says of how many.
_VARIABLES = {
    "RANK": ("WORLD_SIZE",),
    "SLURM_PROCID": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The rank of a trainer, and where it was taken from.

    Attributes
    ----------
    number
        The rank.
    source
        What said so; None where the caller of `connect` did, or nobody.
    num_ranks
        How many ranks there are by the same account; None where it is not known.
    num_ranks_source
        What said so.
    """

    number: int
    source: str | None = None
    num_ranks: int | None = None
    num_ranks_source: str = ""

    @classmethod
    def of(cls, given: Any) -> Rank:
        """Return the rank that was given; where that is None, the one of this process."""
        return own_rank() if given is None else cls(number=integer("connect(rank=)", given))

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError if the job has another number of ranks than the mesh."""
        if self.num_ranks in (None, world_size):
            return
        raise ConfigError(
            f"connect(rank=None) took rank {self.number} from {self.source}",
            got=f"{self.num_ranks} ranks by {self.num_ranks_source}",
            limit=f"{world_size} ranks, which the topology of the pipeline has",
            remedy="Start as many trainers as the topology has ranks, or serve the topology of the "
            "job; where ranks of the mesh are not those of the job, pass connect(rank=).",
        )


def own_rank() -> Rank:
    """Return the rank of this process: of torch.distributed, RANK or SLURM_PROCID, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Rank(
            number=torch.distributed.get_rank(),
            source="torch.distributed",
            num_ranks=torch.distributed.get_world_size(),
            num_ranks_source="torch.distributed",
        )
    for name, of_how_many in _VARIABLES.items():
        if (rank := _variable(name)) is not None:
            known = (one for one in of_how_many if os.environ.get(one))
            world = next(known, None)
            return Rank(
                number=rank,
                source=f"the environment's {name}",
                num_ranks=None if world is None else _variable(world),
                num_ranks_source=f"the environment's {world}",
            )
    return Rank(number=0)


def integer(what: str, value: Any) -> int:
    """Return an integer that somebody gave; raises ConfigError for anything else."""
    if not is_integer(value):
        raise ConfigError(what, got=repr(value), limit="an integer")
    return value


def _variable(name: str) -> int | None:
    """Return a number of the environment, None where there is none."""
    value = os.environ.get(name)
    if not value:
        return None
    return integer(f"the environment's {name}", int(value) if value.isdigit() else value)
