"""Records that are in memory already: for tests, notebooks and small sets."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from megadask.planner.errors import ConfigError
from megadask.scheduling.reading import BadRecord, Shard


class InMemory:
    """Read records from a list, which is pickled to wherever they are read.

    Parameters
    ----------
    records
        The records, in order. They are not copied; each read yields a new dict of the same values.
    shards
        Parts of (nearly) equal length to cut the list into.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]], shards: int = 1) -> None:
        self._records = tuple(records)
        if not 1 <= shards <= max(len(self._records), 1):
            raise ConfigError(
                "InMemory(shards=)",
                got=repr(shards),
                limit=f"1 to {len(self._records)}, the number of records",
            )
        self._bounds = [len(self._records) * i // shards for i in range(shards + 1)]

    def shards(self) -> Sequence[Shard]:
        """Return the shards: neighbouring records, in the order of the list."""
        bounds = pairwise(self._bounds)
        return [Shard(f"memory#{i}", stop - first) for i, (first, stop) in enumerate(bounds)]

    def read(
        self, shard: int, start: int = 0
    ) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        """Yield rows ``start``, ``start + 1``, ... of a shard."""
        if not 0 <= shard < len(self._bounds) - 1 or start < 0:
            raise IndexError(f"no row {start} of shard {shard}")
        return self._read(self._bounds[shard] + start, self._bounds[shard + 1])

    def _read(self, first: int, stop: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        for index in range(first, stop):
            yield dict(self._records[index])

    def fingerprint(self) -> str:
        """Return a hash of the shards and of the records themselves."""
        digest = hashlib.sha256(repr(self.shards()).encode())
        for record in self._records:
            _update(digest, record)
        return digest.hexdigest()[:32]

    def paths(self) -> Sequence[str]:
        """Return nothing: there are no files."""
        return ()

    def __repr__(self) -> str:
        return f"InMemory({len(self._records)} records, shards={len(self._bounds) - 1})"


def _update(digest: Any, value: object) -> None:
    """Hash a value by what it holds, alike in every process."""
    match value:
        case Mapping():
            digest.update(b"{%d" % len(value))
            for key in sorted(value, key=repr):
                _update(digest, key)
                _update(digest, value[key])
        case list() | tuple():
            digest.update(b"[%d" % len(value))
            for item in value:
                _update(digest, item)
        case np.ndarray() if value.dtype != object:
            digest.update(f"a{value.dtype.str}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        case bytes() | str() | int() | float() | None:
            data = value if isinstance(value, bytes) else repr(value).encode()
            digest.update(f"{type(value).__name__}{len(data)}:".encode() + data)
        case _:
            digest.update(b"p" + pickle.dumps(value, protocol=4))
