"""What a checkpoint folder of `megadask.serve` holds, read without a cluster."""

from __future__ import annotations

from typing import Any

from megadask.planner.errors import StateError
from megadask.saved import to_saved
from megadask.scheduling.journal import Journal
from megadask.scheduling.kept import acknowledged, before, reach
from megadask.scheduling.point import Point


def state_at(checkpoint: str, step: int | None = None) -> dict[str, Any]:
    """Return the state before a step, as `Loader.state_dict` would have, from a service's journal.

    For a model checkpoint whose loader state was lost: the step is that of the model. The journal
    reaches back to the oldest full object, 100 to 300 steps.

    Parameters
    ----------
    checkpoint
        Folder that was given to ``serve(checkpoint=)``; with several pipelines, with ``/NAME``.
    step
        The step to begin with. None: the first that some rank has not acknowledged; what was
        trained on is not known from that, see docs/checkpoints.md.

    Returns
    -------
    dict
        For ``serve(resume=)``.

    Raises
    ------
    StateError
        The journal does not reach to that step; the error says how far it does.
    JournalError
        It is damaged, or of another version.
    """
    journal = Journal(checkpoint)
    head = journal.head()
    entries = journal.read(head[0].generation) if head else []
    if not entries:
        raise StateError("there is no journal here", got=checkpoint)
    wanted = acknowledged(entries)[0] if step is None else step
    kept = before(entries, wanted)
    if kept is None:
        raise StateError(
            f"the journal at {checkpoint} does not hold that state",
            got=f"step {wanted}",
            limit="steps {} to {}".format(*reach(entries)),
        )
    point = kept.point
    if step is not None and point.microbatch:  # the generation began inside of it
        point = Point(step=step, state=point.state)
    return to_saved(kept.components, point)
