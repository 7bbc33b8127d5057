"""Who holds a role."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """One life of one role, on one worker."""

    address: str
    incarnation: str
