"""Views of a topology: a tree of its ranks as text, and one that folds in a notebook.

Axes: R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megadask.planner.topology import Axis, ClientPlaceTree

#: Jobs of more ranks are folded.
WHOLE_RANKS = 32
#: Neighbours along one axis that a folded tree shows: the first two and the last.
SHOWN_NEIGHBOURS = 3

_VERBS = {"payload": "fetches", "shapes": "shapes only"}


@dataclass(frozen=True)
class _Branch:
    """One node of the tree, or a run of nodes that are left out."""

    label: str
    twigs: tuple[_Branch, ...] = ()


def text_tree(tree: ClientPlaceTree, axis: Axis, broadcast_axes: Sequence[str]) -> str:
    """Return the tree in lines; only the first branch of a folded one is followed."""
    root = _Grower(tree, axis, broadcast_axes).grow()
    return "\n".join([root.label, *_lines(root, "", whole=tree.world_size <= WHOLE_RANKS)])


def html_tree(tree: ClientPlaceTree, axis: Axis, broadcast_axes: Sequence[str]) -> str:
    """Return the tree as nested HTML details, open where the text shows them."""
    root = _Grower(tree, axis, broadcast_axes).grow()
    whole = tree.world_size <= WHOLE_RANKS
    return f'<div style="font-family: monospace">{_details(root, whole=whole, is_open=True)}</div>'


def _lines(branch: _Branch, indent: str, *, whole: bool) -> Iterator[str]:
    last = len(branch.twigs) - 1
    for place, twig in enumerate(branch.twigs):
        yield f"{indent}{'└' if place == last else '├'} {twig.label}"
        if whole or not place:
            deeper = f"{indent}{' ' if place == last else '│'} "
            yield from _lines(twig, deeper, whole=whole)


def _details(branch: _Branch, *, whole: bool, is_open: bool) -> str:
    label = escape(branch.label)
    if not branch.twigs:
        return f'<div style="margin-left: 1em">{label}</div>'
    inner = "".join(
        _details(twig, whole=whole, is_open=whole or (is_open and not place))
        for place, twig in enumerate(branch.twigs)
    )
    mark = " open" if is_open else ""
    return f'<details{mark} style="margin-left: 1em"><summary>{label}</summary>{inner}</details>'


class _Grower:
    """Builds the tree of one topology, told for one distributed axis."""

    def __init__(self, tree: ClientPlaceTree, axis: Axis, broadcast_axes: Sequence[str]) -> None:
        self._tree = tree
        self._axis = axis
        self._levels = [name for name in tree.order if getattr(tree, name) > 1]
        self._sizes = [int(getattr(tree, name)) for name in self._levels]
        ranks = range(tree.world_size)
        slices = tree.cp > 1 and "cp" not in tree.axes(axis)
        #: What there is to say of every rank; a node says what holds for all ranks beneath it.
        self._facts: list[list[str]] = [[f"bucket {tree.bucket_of(r, axis)}" for r in ranks]]
        if slices:
            self._facts.append([f"slice {tree.cp_slice(r)[0]} of {tree.cp}" for r in ranks])
        if tree.ep > 1:
            groups = [tree.expert_group(rank) for rank in ranks]
            self._facts.append([f"expert share {groups[r].index(r)} of {tree.ep}" for r in ranks])
        self._facts.append(
            [
                _VERBS.get(tree.delivery(r, broadcast_axes, axis))
                or f"by broadcast from rank {tree.broadcast_root(r, broadcast_axes)}"
                for r in ranks
            ]
        )

    def grow(self) -> _Branch:
        """Return the whole tree."""
        tree = self._tree
        sizes = " x ".join(f"{axis} {getattr(tree, axis)}" for axis in tree.order)
        num_buckets = tree.num_buckets(self._axis)
        along = self._axis if isinstance(self._axis, str) else " x ".join(self._axis)
        told: frozenset[int] = frozenset()
        facts = self._common(0, tree.world_size, told)
        label = (
            f"{_count(tree.world_size, 'rank')} = {sizes} (outermost first); "
            f"{_count(num_buckets, 'bucket')} along {along}, "
            f"each of {_count(tree.world_size // num_buckets, 'rank')}"
        )
        if tree.ep > 1:
            label += f"; experts over {tree.ep} ranks"
        return _Branch(", ".join([label, *facts.values()]), self._twigs(0, 0, told | facts.keys()))

    def _twigs(self, depth: int, first: int, told: frozenset[int]) -> tuple[_Branch, ...]:
        """Return what stands under a node whose lowest rank is ``first``."""
        if depth == len(self._levels):
            return ()
        axis, size = self._levels[depth], self._sizes[depth]
        width = prod(self._sizes[depth + 1 :])
        folds = self._tree.world_size > WHOLE_RANKS and size > SHOWN_NEIGHBOURS + 1
        twigs = []
        for place in range(size):
            low = first + place * width
            if folds and 1 < place < size - 1:
                if place == 2:
                    high = first + (size - 1) * width
                    twigs.append(
                        _Branch(f"{axis} {place} to {size - 2}: {_ranks(low, high)}, alike")
                    )
                continue
            facts = self._common(low, low + width, told)
            label = ", ".join([f"{axis} {place}: {_ranks(low, low + width)}", *facts.values()])
            twigs.append(_Branch(label, self._twigs(depth + 1, low, told | facts.keys())))
        return tuple(twigs)

    def _common(self, low: int, high: int, told: frozenset[int]) -> dict[int, str]:
        """Return the facts, not yet told, that hold for all ranks from low to before high."""
        return {
            kind: facts[low]
            for kind, facts in enumerate(self._facts)
            if kind not in told and len(set(facts[low:high])) == 1
        }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ranks(low: int, high: int) -> str:
    return f"rank {low}" if high == low + 1 else f"ranks {low}-{high - 1}"
