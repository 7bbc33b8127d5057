"""Best-fit packing of padded sizes: what proves that the spans of a step fit into its packs."""

from __future__ import annotations

import bisect

from megadask.planner.batching import Packed


class Packing:
    """Packs that fill up: each size goes into the fullest pack that takes it, ties by index."""

    def __init__(self, num_packs: int, batching: Packed) -> None:
        self._room = [(batching.seq_len, pack) for pack in range(num_packs)]
        self._left = [batching.documents_limit] * num_packs

    @property
    def room(self) -> int:
        """Largest size that still fits."""
        return self._room[-1][0] if self._room else 0

    def add(self, size: int) -> int:
        """Put a size that fits into the fullest pack that takes it; return the pack."""
        room, pack = self._room.pop(bisect.bisect_left(self._room, (size, -1)))
        self._left[pack] -= 1
        if room > size and self._left[pack]:
            bisect.insort(self._room, (room - size, pack))
        return pack
