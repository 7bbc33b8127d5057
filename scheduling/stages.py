"""What a rank is sent of a microbatch, by where it stands in the mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megadask.planner.topology import Axis, ClientPlaceTree
from megadask.scheduling.assemble import SHAPE_KEYS

#: What the first pipeline stage alone reads.
INPUT_KEYS = ("tokens", "position_ids")
#: What the last pipeline stage alone reads.
TARGET_KEYS = ("labels", "loss_mask")
#: What attention reads, on every stage.
ATTENTION_KEYS = (*SHAPE_KEYS, "attention_mask", "lengths")


def keys_sent(
    tree: ClientPlaceTree,
    rank: int,
    broadcast_axes: Sequence[str],
    axis: Axis,
    have: Iterable[str],
    asked: Collection[str] | None,
) -> list[str]:
    """Return the arrays that a rank is sent, of those that its bucket has.

    A rank that is broadcast to is sent none. Any other rank is sent those that it asked for. If it
    asked for nothing in particular: all, or of a pipeline what its stage reads. Arrays that nobody
    here knows go to the first and the last stage.

    Parameters
    ----------
    tree, rank, broadcast_axes, axis
        As in `ClientPlaceTree.delivery`.
    have
        Names of the arrays that there are.
    asked
        Names that the trainer gave to ``connect(keys=)``; None where it gave none.
    """
    way = tree.delivery(rank, broadcast_axes, axis)
    if way == "broadcast":
        return []
    if asked is not None:
        return [key for key in have if key in asked]
    if way == "shapes":
        return [key for key in have if key in ATTENTION_KEYS]
    left_out: tuple[str, ...] = ()
    # Stages that share a bucket and pass nothing on between them.
    if tree.pp > 1 and "pp" not in (*broadcast_axes, *tree.axes(axis)):
        left_out = INPUT_KEYS if tree.coords(rank)["pp"] else TARGET_KEYS
    return [key for key in have if key not in left_out]
