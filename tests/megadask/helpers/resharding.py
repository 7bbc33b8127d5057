"""Give a run another topology while its ranks read, each in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import megadask as md
from megadask.scheduling.record import RunRecord
from tests.conftest import wait_until
from tests.megadask.helpers.ranks import Ranks, run
from tests.megadask.helpers.seen import Seen, see


def until_resharded(batches: Iterator[md.loader.Batch]) -> list[Seen]:
    """Read to the end of the old topology."""
    seen: list[Seen] = []
    with pytest.raises(md.errors.ReshardedError, match="another topology from step"):
        seen.extend(map(see, batches))
    return seen


def resharded(
    service: md.Service,
    record: RunRecord,
    dp: int,
    disturb: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[list[list[Seen]], list[dict[str, Any]], int]:
    """Reshard while rank 0 is at its third batch; return what ranks saw, their states, the step.

    disturb: called while delivery is held.
    """
    asked: list[Ranks] = []

    def body(loader: md.Loader) -> tuple[list[Seen], dict[str, Any]]:
        def batches() -> Iterator[md.loader.Batch]:
            for number, batch in enumerate(loader):
                if loader.rank == 0 and number == 2:
                    asked.append(Ranks([lambda: service.reshard(md.ClientPlaceTree(dp=dp))]))
                    assert wait_until(lambda: record.hold is not None)
                    disturb()
                yield batch

        return until_resharded(batches()), loader.state_dict()

    seen, states = zip(*run(service, body, **options), strict=True)
    [step] = asked[0].results()
    return list(seen), list(states), step
