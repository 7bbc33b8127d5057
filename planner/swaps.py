"""Exchange single units between slow groups and others: what evens out the last per mille.

Every round looks at some of the slow groups, the worst of them and some at random. Each tries to
swap its units for units of nearly the same cost: the neighbours in an order in which units of like
cost, in all parts, follow each other. Nearness is what counts. To lower a group that is a per mille
above the others takes a pair of units that differ by about a per mille, and with several parts in
every part; among pairs at random these are rare. Farther neighbours, at growing distances, are
tried as well, and moves without return. A swap is made where both groups come out faster than the
slow one was.

Axes: as in `refine`; H slow groups, K units of each that are looked at, C candidates for each unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.refine import Exchange, Ints, scramble

Floats = NDArray[np.floating[Any]]

_NEAR = (8, 32, 128)  # neighbours on either side that are all tried, by how many slow groups
_TARGETS = 3  # groups that a unit may move to
_LEAST_LOOKS = 1 << 14  # candidates of one round; more for many units
_LOOKS_PER_UNIT = 4
_MOST_LOOKS = 1 << 18
_SORT_EVERY = 4  # rounds: with several parts, each order has other neighbours
_PLACES = 8  # units of a slow group that are looked at, at least
_CURVE_BITS = 12  # of a cost, in units of the largest
_PATIENCE = 12  # rounds without gain after which there is none to be expected


def swap(groups: Exchange, rounds: int) -> None:
    """Swap units for ``rounds`` rounds, or until there is next to nothing left to gain.

    Changes ``groups``. Its slowest group, as `Exchange.slowest_R` has it, is never slower after.
    """
    if groups.shape[1] > 1 and rounds:
        _Swaps(groups).run(rounds)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Offers:
    """What a unit can be swapped for (O offers): every unit, and no unit of each group.

    unit_O: the unit or none; group_O: whose it is; size_O: its tokens; hole_O: what would fit into
    its place. Sizes are empty where there is no room to mind.
    """

    unit_O: Ints
    group_O: Ints
    size_O: Ints
    hole_O: Ints


class _Swaps:
    """The state of `swap`: where every unit is, and which units are like it."""

    def __init__(self, groups: Exchange) -> None:
        self.groups = groups
        num_problems, num_groups = groups.shape
        self.problem_F = np.repeat(np.arange(num_problems), num_groups)
        # Parts and problems compare by what the slowest group needs at least. To look for swaps,
        # single precision will do, and takes half the time; to make them, integers count.
        self.scale_RP = 1.0 / np.maximum(groups.floor_RP, 1)
        self.group_V = np.append(groups.group_U, 0)
        self.place_V = np.zeros(groups.none + 1, np.int64)
        self.place_V[groups.unit_FK] = np.arange(groups.most)
        self.problem_U = self.problem_F[self.group_V[:-1]]
        scale_PU = self.scale_RP[self.problem_U].T
        self.cost_PV = np.zeros((len(scale_PU), groups.none + 1), np.float32)
        self.cost_PV[:, :-1] = groups.cost_UP[:-1].T * scale_PU
        self.count_R = np.bincount(self.problem_U, minlength=num_problems)
        self.first_R = np.cumsum(self.count_R) - self.count_R
        most = int(self.count_R.max()) // 2 + 1
        self.steps = [_steps(near, most) for near in _NEAR]
        self.looks = min(max(_LEAST_LOOKS, _LOOKS_PER_UNIT * groups.none), _MOST_LOOKS)
        self._sort(0)

    def run(self, rounds: int) -> None:
        groups, many_parts = self.groups, len(self.cost_PV) > 1
        best, waited = int(groups.slowest_R(groups.time_FP).sum()), 0
        kept = groups.snapshot()
        for number in range(rounds):
            if not groups.uneven_R().any() or waited > _PATIENCE:
                break
            if many_parts and number and number % _SORT_EVERY == 0:
                self._sort(number)
            if not self._round(number):
                break
            now, waited = int(groups.slowest_R(groups.time_FP).sum()), waited + 1
            if now < best:
                best, waited = now, 0
                # With one part, no round makes anything slower.
                kept = groups.snapshot() if many_parts else kept
        if many_parts:
            groups.restore(kept)

    def _sort(self, number: int) -> None:
        """Put units into order, problem by problem, like next to like.

        Like is told by the place on a Z-order curve through the costs (G. M. Morton, 1966), whose
        origin moves from one order to the next, so that other units are cut apart.
        """
        num_parts = len(self.cost_PV)
        bits = min(_CURVE_BITS, 62 // num_parts - 1)
        shift_P = scramble(number, num_parts) >> (62 - bits)
        key_U = np.zeros(self.groups.none, np.int64)
        for part, cost_V in enumerate(self.cost_PV):
            peak = float(cost_V.max()) or 1.0
            cell_U = np.rint(cost_V[:-1] / peak * 2**bits).astype(np.int64)
            cell_U += shift_P[part]
            for bit in range(bits + 1 if num_parts > 1 else 0):
                key_U |= ((cell_U >> bit) & 1) << (bit * num_parts + part)
        if num_parts == 1:
            key_U = self.groups.cost_UP[:-1, 0]
        self.order_U = np.lexsort((key_U, self.problem_U))
        self.rank_U = np.empty_like(self.order_U)
        self.rank_U[self.order_U] = np.arange(len(self.order_U))
        nothing = np.zeros((num_parts, len(self.problem_F)), np.float32)
        self.cost_PO = np.concatenate([self.cost_PV[:, self.order_U], nothing], axis=1)

    def _shares(self, load_F: Ints, part: int) -> Floats:
        return np.asarray(load_F * self.scale_RP[self.problem_F, part], np.float32)

    def _scores(self, time_XP: Ints, problem_X: Ints) -> Floats:
        """(...) how slow groups are: at least 1 for the slowest of a problem."""
        return np.asarray((time_XP * self.scale_RP[problem_X]).max(axis=-1))

    def _round(self, number: int) -> bool:
        """Look for swaps and make them; return whether another round could find any."""
        groups, draw_F = self.groups, scramble(number, len(self.problem_F))
        score_F = self._scores(groups.time_FP, self.problem_F)
        slow = np.flatnonzero((score_F > 1 + 2.0**-groups.even_bits) & (groups.count_F > 0))
        if not len(slow):
            return False
        slow = slow[np.argsort(-score_F[slow], kind="stable")]
        step_C, most_places = self.steps[0], int(groups.count_F.max())
        most = max(2, self.looks // ((len(step_C) + _TARGETS) * min(_PLACES, most_places)))
        rest = slow[most - most // 2 :]
        rest = rest[np.argsort(draw_F[rest], kind="stable")]
        group_H = np.append(slow[: most - most // 2], rest[: most // 2])
        for farther_C in self.steps[1:]:  # the fewer slow groups, the farther each looks
            if (len(farther_C) + _TARGETS) * len(group_H) * most_places <= self.looks:
                step_C = farther_C
        tries = len(step_C) + _TARGETS
        places = min(most_places, max(1, self.looks // (tries * len(group_H))))
        place_HK = (draw_F[group_H, None] + np.arange(places)) % groups.count_F[group_H, None]
        unit_HK = groups.unit_FK[group_H[:, None], place_HK]
        offers = self._offers()
        offer_HKC = self._offered(group_H, unit_HK, step_C, score_F)
        score_HKC = self._scored(group_H, unit_HK, offer_HKC, offers)
        self._forbid(group_H, unit_HK, offer_HKC, offers, score_HKC)
        best_H = score_HKC.reshape(len(group_H), -1).argmin(axis=1)
        index, place, column = np.arange(len(group_H)), best_H // tries, best_H % tries
        found = np.flatnonzero(score_HKC[index, place, column] < np.inf)
        offer_X = offer_HKC[found, place[found], column[found]]
        unit_X = unit_HK[found, place[found]]
        to_X, back_X = offers.group_O[offer_X], offers.unit_O[offer_X]
        made = self._make(group_H[found], unit_X, to_X, back_X, score_F)
        all_seen = len(group_H) == len(slow) and places == most_places
        return made or not all_seen or len(self.cost_PV) > 1

    def _offers(self) -> _Offers:
        """Return what there is to be had now: units in order, and then no unit of each group."""
        groups, room = self.groups, self.groups.room
        group_F = np.arange(len(self.problem_F))
        group_O = np.append(self.group_V[self.order_U], group_F)
        hole_O = size_O = np.zeros(0, np.int64)
        if room is not None:
            hole_U = room.free_FS.reshape(-1)[room.bin_U] + room.size_U
            hole_O = np.append(hole_U[self.order_U], room.roomiest()[1])
            size_O = np.append(room.size_U[self.order_U], np.zeros_like(group_F))
        return _Offers(
            unit_O=np.append(self.order_U, np.full_like(group_F, groups.none)),
            group_O=group_O,
            size_O=size_O,
            hole_O=hole_O,
        )

    def _offered(self, group_H: Ints, unit_HK: Ints, step_C: Ints, score_F: Floats) -> Ints:
        """(H, K, C) offers for each unit: those like it, and then no unit of quick groups."""
        num_groups, problem_H = self.groups.shape[1], self.problem_F[group_H]
        first = self.first_R[problem_H, None, None]
        last = first + self.count_R[problem_H, None, None] - 1
        like_HKC = np.clip(self.rank_U[unit_HK][:, :, None] + step_C, first, last)
        quick_RG = score_F.reshape(-1, num_groups).argsort(axis=1, kind="stable")
        turn_HT = np.arange(len(group_H))[:, None] * _TARGETS + np.arange(_TARGETS)
        quick_HT = quick_RG[problem_H[:, None], turn_HT % max(1, num_groups // 2)]
        quick_HT += problem_H[:, None] * num_groups + self.groups.none
        shape = (*unit_HK.shape, _TARGETS)
        return np.concatenate([like_HKC, np.broadcast_to(quick_HT[:, None], shape)], axis=2)

    def _scored(self, group_H: Ints, unit_HK: Ints, offer_HKC: Ints, offers: _Offers) -> Floats:
        """(H, K, C) the score of the slower one of both groups after each swap."""
        groups, from_HKC = self.groups, group_H[:, None, None]
        slow_F, transfer_UF = groups.slow_F, groups.transfer_UF
        score_HKC = None
        for part, cost_V in enumerate(self.cost_PV):
            load_F = self._shares(groups.load_FP[:, part], part)
            gain_HKC = self.cost_PO[part][offer_HKC]
            gain_HKC -= cost_V[unit_HK][:, :, None]
            from_load = gain_HKC + load_F[from_HKC]
            to_load = load_F[offers.group_O][offer_HKC]
            to_load -= gain_HKC
            if slow_F is not None or (transfer_UF is not None and part == 0):
                to_HKC = offers.group_O[offer_HKC]
                if transfer_UF is not None and part == 0:
                    unit, back_HKC = unit_HK[:, :, None], offers.unit_O[offer_HKC]
                    scale_HKC = self.scale_RP[self.problem_F[from_HKC], 0]
                    came = transfer_UF[back_HKC, from_HKC] - transfer_UF[unit, from_HKC]
                    went = transfer_UF[unit, to_HKC] - transfer_UF[back_HKC, to_HKC]
                    from_load += came * scale_HKC
                    to_load += went * scale_HKC
                if slow_F is not None:
                    from_load *= slow_F[from_HKC]
                    to_load *= slow_F[to_HKC]
            np.maximum(from_load, to_load, out=from_load)
            if score_HKC is None:
                score_HKC = from_load
            else:
                np.maximum(score_HKC, from_load, out=score_HKC)
        assert score_HKC is not None
        return np.asarray(score_HKC)

    def _forbid(
        self, group_H: Ints, unit_HK: Ints, offer_HKC: Ints, offers: _Offers, score_HKC: Floats
    ) -> None:
        """Score what leaves too few or too many units, or a bin without room, as infinite."""
        groups, room = self.groups, self.groups.room
        moves_HKT = score_HKC[:, :, -_TARGETS:]
        moves_HKT[groups.count_F[group_H] <= groups.least_F[group_H]] = np.inf
        full_O = (groups.count_F >= groups.most)[offers.group_O]
        moves_HKT[full_O[offer_HKC[:, :, -_TARGETS:]]] = np.inf
        if room is not None:
            hole_U = room.free_FS.reshape(-1)[room.bin_U] + room.size_U
            score_HKC[room.size_U[unit_HK][:, :, None] > offers.hole_O[offer_HKC]] = np.inf
            score_HKC[offers.size_O[offer_HKC] > hole_U[unit_HK][:, :, None]] = np.inf

    def _make(self, from_X: Ints, unit_X: Ints, to_X: Ints, back_X: Ints, score_F: Floats) -> bool:
        """Make those swaps that gain, the first one of each group; return whether there are any."""
        groups = self.groups
        given_from, given_to = groups.costs(unit_X, from_X), groups.costs(unit_X, to_X)
        taken_from, taken_to = groups.costs(back_X, from_X), groups.costs(back_X, to_X)
        from_XP = groups.load_FP[from_X] - given_from + taken_from
        to_XP = groups.load_FP[to_X] + given_to - taken_to
        problem_X = self.problem_F[from_X]
        score_X = np.maximum(
            self._scores(groups.times(from_XP, from_X), problem_X),
            self._scores(groups.times(to_XP, to_X), problem_X),
        )
        gains = np.flatnonzero(score_X < score_F[from_X])
        first_F = np.full(len(score_F), len(from_X))
        for group_X in (from_X, to_X):
            np.minimum.at(first_F, group_X[gains], gains)
        gains = gains[(first_F[from_X[gains]] == gains) & (first_F[to_X[gains]] == gains)]
        from_X, unit_X, to_X, back_X = from_X[gains], unit_X[gains], to_X[gains], back_X[gains]
        groups.load_FP[from_X], groups.load_FP[to_X] = from_XP[gains], to_XP[gains]
        back = back_X != groups.none
        if groups.room is not None:
            room, bin_X = groups.room, groups.room.roomiest()[0][to_X]
            bin_X[back] = room.bin_U[back_X[back]]
            old_X = room.bin_U[unit_X]
            room.put(np.append(unit_X, back_X[back]), np.append(bin_X, old_X[back]))
        place_X = self.place_V[unit_X]
        self._place(unit_X[back], to_X[back], self.place_V[back_X[back]])
        self._place(back_X[back], from_X[back], place_X[back])
        # A unit that leaves for good: the last one of its group takes its place.
        from_X, unit_X, to_X, place_X = from_X[~back], unit_X[~back], to_X[~back], place_X[~back]
        groups.count_F[from_X] -= 1
        last_X = groups.count_F[from_X]
        self._place(groups.unit_FK[from_X, last_X], from_X, place_X)
        groups.unit_FK[from_X, last_X] = groups.none
        self._place(unit_X, to_X, groups.count_F[to_X])
        groups.count_F[to_X] += 1
        return len(gains) > 0

    def _place(self, unit_X: Ints, group_X: Ints, place_X: Ints) -> None:
        self.groups.unit_FK[group_X, place_X] = unit_X
        self.group_V[unit_X], self.place_V[unit_X] = group_X, place_X


def _steps(near: int, most: int) -> Ints:
    """Return distances in an order, both ways: all near ones, then fewer and fewer to ``most``."""
    steps = list(range(1, near + 1))
    while steps[-1] * 2 <= most:
        steps += [steps[-1] * 3 // 2, steps[-1] * 2]
    step_C = np.array([step for step in steps if step <= most] or [1])
    return np.concatenate([step_C, -step_C])
