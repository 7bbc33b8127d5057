"""What the ranks of one bucket get of one microbatch, and how it lies in one piece of memory.

Ranks that get the same arrays have them in common: the targets and positions of ranks along tp, the
starts of documents of all. So memory holds each array once, wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

#: Under which name a share holds its ids; (6, n) int64, see `delivery.span_ids`.
IDS = ".ids"
#: Arrays begin at multiples of as many bytes.
ALIGNED_BYTES = 64


class Share:
    """Arrays of the ranks of one bucket.

    Parameters
    ----------
    arrays_of
        Rank to its arrays by name. Ranks may have arrays in common, or all of them.
    targets_of
        Rank to how many targets of its slice count in the loss.
    own_of
        Rank to the names of what it gets as one that encodes items.

    Attributes
    ----------
    content
        Number by which a `Ring` knows it; None while its arrays lie in memory of this process.
    """

    def __init__(
        self,
        arrays_of: Mapping[int, Arrays],
        targets_of: Mapping[int, int],
        own_of: Mapping[int, tuple[str, ...]],
    ) -> None:
        self.arrays_of = arrays_of
        self.targets_of = targets_of
        self.own_of = own_of
        self.content: int | None = None
        self._offset_of: dict[int, int] = {}  # by the id of an array
        self._told: dict[tuple[int, tuple[str, ...]], list[list[Any]]] = {}
        ids = {id(arrays[IDS]) for arrays in arrays_of.values() if IDS in arrays}
        # Without the ids: those are few, and of another length in every microbatch.
        self.num_bytes = sum(one.nbytes for one in self._distinct() if id(one) not in ids)

    @property
    def laid_out_bytes(self) -> int:
        """Bytes that it takes in one piece of memory."""
        return sum(map(_aligned, self._distinct()))

    def move(self, memory: NDArray[np.uint8], content: int) -> None:
        """Copy the arrays into one piece of memory, and hold them there from now on."""
        views: dict[int, NDArray[Any]] = {}
        offset = 0
        for array in self._distinct():
            raw = memory[offset : offset + array.nbytes]
            view = views[id(array)] = raw.view(array.dtype).reshape(array.shape)
            np.copyto(view, array)
            self._offset_of[id(view)] = offset
            offset += _aligned(array)
        moved = {
            id(arrays): {name: views[id(array)] for name, array in arrays.items()}
            for arrays in self._layouts()
        }
        self.arrays_of = {rank: moved[id(arrays)] for rank, arrays in self.arrays_of.items()}
        self.content = content

    def where(self, rank: int, names: tuple[str, ...]) -> list[list[Any]]:
        """Return name, type, shape, first byte and end of arrays of a rank that were moved."""
        arrays = self.arrays_of[rank]
        told = self._told.get((id(arrays), names))
        if told is None:
            told = self._told[id(arrays), names] = [
                [name, array.dtype.str, array.shape, first, first + array.nbytes]
                for name in names
                for array in [arrays[name]]
                for first in [self._offset_of[id(array)]]
            ]
        return told

    def _layouts(self) -> list[Arrays]:
        """Return the arrays of ranks that differ in any."""
        return list({id(arrays): arrays for arrays in self.arrays_of.values()}.values())

    def _distinct(self) -> Iterator[NDArray[Any]]:
        """Yield every array once, those first that all ranks have."""
        layouts = self._layouts()
        found = {id(array): array for arrays in layouts for array in arrays.values()}
        common = set(found)
        for arrays in layouts[1:]:
            common &= {id(array) for array in arrays.values()}
        yield from (found[key] for key in found if key in common)
        yield from (found[key] for key in found if key not in common)


def _aligned(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def arrays_in(memory: NDArray[np.uint8], told: list[list[Any]]) -> Arrays:
    """Return the arrays that `Share.where` told of, as views of the memory they were moved to."""
    return {
        name: np.ndarray(shape, np.dtype(kind), memory, first)
        for name, kind, shape, first, _ in told
    }


def parts_of(told: list[list[Any]]) -> list[tuple[int, int]]:
    """Return first byte and end of each stretch of memory that the arrays told of lie in."""
    parts: list[tuple[int, int]] = []
    for first, end in sorted((first, end) for *_, first, end in told):
        if parts and first - parts[-1][1] < 4096:
            parts[-1] = (parts[-1][0], max(end, parts[-1][1]))
        else:
            parts.append((first, end))
    return parts
