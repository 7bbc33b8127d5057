"""Other engines, where they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from throughput.systems import Feed, Loaded


def feeds(fixed: Loaded, folder: Path) -> Iterator[tuple[str, Feed]]:
    """Yield the names and feeds of engines that are installed."""
    yield from ()


def missing() -> list[str]:
    """Return the names of engines that are not installed."""
    return []
