"""Which loader gets which lanes, and which worker bears which role.

Pure: custody acts on what these functions return.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from megadask.scheduling.errors import ServiceError

#: Lanes of one source that one loader owns.
Part = tuple[int, ...]


def resplit(parts: Sequence[Part], count: int) -> list[tuple[Part | None, Part]]:
    """Split the lanes of a source over another number of loaders, moving as few as that takes.

    Parameters
    ----------
    parts
        The lanes of each present loader; of two with as many lanes, the first is kept.
    count
        Loaders that there shall be, at most one for each lane.

    Returns
    -------
    list of (Part or None, Part)
        For each loader to be, what it owns now (None for a new one), and what it will own: even to
        one lane. A present part that is not among them has to go.
    """
    base, extra = divmod(sum(map(len, parts)), count)
    kept: list[Part | None] = [*sorted(parts, key=len, reverse=True)[:count]]
    kept += [None] * (count - len(kept))
    quotas = [base + (number < extra) for number in range(count)]  # those with most keep most
    stay = [(part or ())[:quota] for part, quota in zip(kept, quotas, strict=True)]
    homeless = iter(sorted({lane for part in parts for lane in part}.difference(*stay)))
    split = []
    for old, lanes, quota in zip(kept, stay, quotas, strict=True):
        more = [next(homeless) for _ in range(quota - len(lanes))]
        split.append((old, tuple(sorted([*lanes, *more]))))
    return split


def spread(weights: Sequence[int], workers: Sequence[str], used: Mapping[str, int]) -> list[str]:
    """Return a worker for each of some roles: heaviest first, onto the least loaded.

    weights: what each role weighs; used: worker to the weight it bears already.
    """
    if not workers:
        raise ServiceError(
            "the cluster has no running worker",
            remedy="Start workers, or wait for them: client.wait_for_workers(n).",
        )
    load = {worker: used.get(worker, 0) for worker in workers}
    placed = [""] * len(weights)
    for role in sorted(range(len(weights)), key=lambda r: (-weights[r], r)):
        worker = min(workers, key=lambda w: (load[w], w))
        load[worker] += weights[role]
        placed[role] = worker
    return placed


def level(places: Sequence[str], workers: Sequence[str], apart: Sequence[Hashable]) -> list[str]:
    """Return where roles should be, so that no worker bears two roles more than another.

    As few move as that takes; where it cannot be had without putting together what has to be apart,
    it is had as far as can be.

    Parameters
    ----------
    places
        The worker of each role; of two on the same worker, the first one moves.
    workers
        Those that there are.
    apart
        Of each role, a mark; two of the same mark are not put on one worker.
    """
    placed = list(places)
    while (move := _next_move(placed, workers, apart)) is not None:
        role, worker = move
        placed[role] = worker
    return placed


def _next_move(
    placed: Sequence[str], workers: Sequence[str], apart: Sequence[Hashable]
) -> tuple[int, str] | None:
    """Return a role and where it should go, from the worker that bears most to one with least."""
    load = {worker: placed.count(worker) for worker in workers}
    for heavy in sorted(workers, key=lambda w: (-load[w], w)):
        for light in sorted(workers, key=lambda w: (load[w], w)):
            if load[heavy] - load[light] < 2:
                break
            there = {apart[role] for role, worker in enumerate(placed) if worker == light}
            for role, worker in enumerate(placed):
                if worker == heavy and apart[role] not in there:
                    return role, light
    return None
