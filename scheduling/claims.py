"""Which trainer every rank belongs to."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from megadask.scheduling.errors import ClaimError, ReshardedError


@dataclass
class Claim:
    """The trainer that a rank belongs to: its Dask client, its process, and its token.

    is_successor: whether another one had the rank before it.
    """

    client: str
    process: str
    token: str
    is_successor: bool = False


class Claims(dict[int, Claim]):
    """Rank to the claim of its trainer; ranks without one are free.

    Parameters
    ----------
    name
        Of the pipeline, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._had_trainers: set[int] = set()
        self.resharded: dict[str, int] = {}  # token of an earlier topology to where that ended

    def take(self, rank: int, client: str, process: str, *, force: bool) -> Claim:
        """Give a rank to a trainer; a process that asks again takes it from its older loader.

        Raises ClaimError if another process has it.
        """
        held = self.get(rank)
        if held is not None and held.process != process and not force:
            raise ClaimError(
                f"rank {rank} of {self._name} belongs to another trainer",
                got=f"process {process}",
                limit=f"process {held.process}",
                remedy="Close that loader, or take the rank with connect(force=True).",
            )
        token = uuid.uuid4().hex
        self[rank] = Claim(client, process, token, is_successor=rank in self._had_trainers)
        self._had_trainers.add(rank)
        return self[rank]

    def check(self, rank: int, token: str) -> None:
        """Raise ClaimError if the rank was taken over, ReshardedError if it is of another mesh."""
        if token in self.resharded:
            raise ReshardedError(
                f"{self._name} has another topology from step {self.resharded[token]} on",
                remedy="Connect again, with the rank that this process has in it.",
            )
        if not self.holds(rank, token):
            raise ClaimError(
                f"rank {rank} of {self._name} no longer belongs to this trainer",
                remedy="Another trainer took it, or its lease lapsed; connect again.",
            )

    def holds(self, rank: int, token: str) -> bool:
        """Whether a rank belongs to the trainer with this token."""
        claim = self.get(rank)
        return claim is not None and claim.token == token

    def of_client(self, client: str) -> list[int]:
        """Return the ranks that a Dask client holds."""
        return [rank for rank, claim in self.items() if claim.client == client]

    def retire(self, step: int) -> None:
        """Take all ranks back: from ``step`` on the mesh is another one."""
        self.resharded |= dict.fromkeys((claim.token for claim in self.values()), step)
        self.clear()
        self._had_trainers.clear()
