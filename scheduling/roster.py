"""Which constructor serves which buckets, found from either side without a look at all of them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from megadask.scheduling.life import Owner


class Roster(MutableMapping[tuple[int, ...], Owner]):
    """Buckets to the constructor that serves them."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, ...], Owner] = {}
        self._part_of_bucket: dict[int, tuple[int, ...]] = {}
        self._part_of_life: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, part: tuple[int, ...]) -> Owner:
        return self._owners[part]

    def __setitem__(self, part: tuple[int, ...], owner: Owner) -> None:
        before = self._owners.get(part)
        if before is not None:
            del self._part_of_life[before.incarnation]
        self._owners[part] = owner
        self._part_of_bucket |= dict.fromkeys(part, part)
        self._part_of_life[owner.incarnation] = part

    def __delitem__(self, part: tuple[int, ...]) -> None:
        del self._part_of_life[self._owners.pop(part).incarnation]
        for bucket in part:
            del self._part_of_bucket[bucket]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def buckets_of(self, incarnation: str) -> tuple[int, ...] | None:
        """Return the buckets that a constructor serves, None if this is not its present life."""
        return self._part_of_life.get(incarnation)

    def of_bucket(self, bucket: int) -> Owner | None:
        """Return the constructor that serves a bucket, None while there is none."""
        part = self._part_of_bucket.get(bucket)
        return None if part is None else self[part]
