"""Ready samples of a loader, within a limit of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

#: Calls after which what was served goes, though there be room: only somebody who was lost, or has
#: thrown away what waited too long, asks again, and with hundreds of loaders room is memory.
KEPT_CALLS = 128


class SampleCache:
    """Samples by key. What was served goes first; what does not fit is not kept.

    A cache miss is never an error: samples can be read again by their id. What was served is kept
    for `KEPT_CALLS` more calls, so that a run takes no more memory the longer it lasts.

    Parameters
    ----------
    limit_bytes
        Of all samples together.
    standby
        Whether nothing is served from it for now: then the oldest samples make room for new ones.
    """

    def __init__(self, limit_bytes: int, *, standby: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.standby = standby
        self.bytes = 0
        self._fresh: dict[Hashable, tuple[Mapping[str, Any], int]] = {}
        # With the call that served it last.
        self._served: OrderedDict[Hashable, tuple[Mapping[str, Any], int, int]] = OrderedDict()
        self._num_calls = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._served)

    def begin_call(self) -> None:
        """Note that another call begins, and let go what was last served long before it."""
        self._num_calls += 1
        while self._served:
            _, _, call = next(iter(self._served.values()))
            if call > self._num_calls - KEPT_CALLS:
                break
            self._drop_oldest()

    def put(self, key: Hashable, sample: Mapping[str, Any], size_bytes: int) -> None:
        """Keep a sample if it fits, at the cost of samples that were served."""
        if key in self._fresh or key in self._served or size_bytes > self.limit_bytes:
            return
        while self._served and self.bytes + size_bytes > self.limit_bytes:
            self._drop_oldest()
        while self.standby and self._fresh and self.bytes + size_bytes > self.limit_bytes:
            _, freed = self._fresh.pop(next(iter(self._fresh)))
            self.bytes -= freed
        if self.bytes + size_bytes <= self.limit_bytes:
            self._fresh[key] = (sample, size_bytes)
            self.bytes += size_bytes

    def get(self, key: Hashable) -> Mapping[str, Any] | None:
        """Return a sample, or None, and count it as served."""
        entry = self._fresh.pop(key, None) or self._served.pop(key, None)
        if entry is None:
            return None
        sample, size_bytes, *_ = entry
        self._served[key] = (sample, size_bytes, self._num_calls)
        return sample

    def retain(self, keep: Callable[[Any], bool]) -> None:
        """Forget the samples of all keys but some."""
        for samples in (self._fresh, self._served):
            for key in [key for key in samples if not keep(key)]:
                self.bytes -= samples.pop(key)[1]

    def clear(self) -> None:
        """Forget everything."""
        self._fresh.clear()
        self._served.clear()
        self.bytes = 0

    def _drop_oldest(self) -> None:
        """Forget what was served the longest ago."""
        _, (_, freed, _) = self._served.popitem(last=False)
        self.bytes -= freed
