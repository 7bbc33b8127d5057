"""Best-fit packing of padded sizes: what proves that the spans of a step fit into its packs."""

from __future__ import annotations

import bisect

from megadask.planner.batching import Batching


class Packing:
    """Packs that fill up: each size goes into the fullest pack that takes it, ties by index."""

    def __init__(self, num_packs: int, batching: Batching) -> None:
        self._seq_len = batching.seq_len
        self._documents_limit = batching.documents_limit
        self._num_packs = num_packs
        # Packs that were opened and take more, by room; those behind the last opened are empty.
        self._open: list[tuple[int, int]] = []
        self._left: list[int] = []
        self.room = self._seq_len if num_packs else 0  # largest size that still fits

    def add(self, size: int) -> int:
        """Put a size that fits into the fullest pack that takes it; return the pack."""
        if self._open and self._open[-1][0] >= size:
            room, pack = self._open.pop(bisect.bisect_left(self._open, (size, -1)))
        else:
            room, pack = self._seq_len, len(self._left)
            self._left.append(self._documents_limit)
        self._left[pack] -= 1
        if room > size and self._left[pack]:
            bisect.insort(self._open, (room - size, pack))
        if len(self._left) == self._num_packs:
            self.room = self._open[-1][0] if self._open else 0
        return pack
