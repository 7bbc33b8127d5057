"""Make groups of units equally heavy by exchange: the core of the "assignment" balance.

A unit is an item, or a whole pack of items. One round takes one unit out of every group and puts
them back where the resulting loads are the most even. That is a linear assignment problem. With one
cost part and nothing forbidden its optimum is known, the heaviest unit joins the lightest rest and
so on down (rearrangement inequality), and sorting finds it. A group may also put up an empty place,
which turns exchanges into moves. No round makes the slowest group slower.

Axes: R independent problems, G groups of each, K places of a group, U units, P parts of the cost,
S bins of a group, F groups of all problems (R x G).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Ints = NDArray[np.int64]

_BLOCK = 48  # groups of one assignment problem: its time grows with the cube, its use does not
_ENUMERATED = 10  # units that `Exchange.repartition` divides in all 2**10 ways
_MOVES_EVERY = 4  # rounds
_EVEN_BITS = 13  # even enough: the slowest group is within 2**-13 of its bound


@dataclass(kw_only=True, eq=False)
class Room:
    """The bins of limited capacity that units lie in; kept up to date by the exchange.

    size_U: (U,) tokens; bin_U: (U,) flat bin (group * S + bin of the group) of each unit;
    free_FS: tokens left in each bin; spots_FS: how many more units each bin takes.
    """

    size_U: Ints
    bin_U: Ints
    free_FS: Ints
    spots_FS: Ints

    def holes(self, out_F: Ints) -> tuple[Ints, Ints]:
        """Return (F,) the bin that taking ``out_F`` (U: nothing) opens, and its room (-1: none)."""
        num_groups, num_bins = self.free_FS.shape
        room_FS = np.where(self.spots_FS > 0, self.free_FS, -1)
        bin_F = room_FS.argmax(axis=1)
        room_F = room_FS[np.arange(num_groups), bin_F]
        bin_F += np.arange(num_groups) * num_bins
        taken = np.flatnonzero(out_F < len(self.size_U))
        bin_F[taken] = self.bin_U[out_F[taken]]
        room_F[taken] = self.free_FS.reshape(-1)[bin_F[taken]] + self.size_U[out_F[taken]]
        return bin_F, room_F

    def put(self, unit_X: Ints, bin_X: Ints) -> None:
        """Move distinct units to other bins."""
        free, spots = self.free_FS.reshape(-1), self.spots_FS.reshape(-1)
        np.add.at(free, self.bin_U[unit_X], self.size_U[unit_X])
        np.add.at(spots, self.bin_U[unit_X], 1)
        self.bin_U[unit_X] = bin_X
        np.subtract.at(free, bin_X, self.size_U[unit_X])
        np.subtract.at(spots, bin_X, 1)


class Exchange:
    """Groups of units under exchange.

    Parameters
    ----------
    cost_UP
        (U, P) int64 cost of every unit, U >= 1; not modified.
    group_U
        (U,) int64 flat group r * G + g of every unit; not modified. Units stay in their problem.
    shape
        (R, G).
    least, most
        Fewest (one number, or (F,)) and most units of a group; they must hold at the start.
    room
        The bins that the units lie in; None when they have no limits.
    """

    def __init__(
        self,
        cost_UP: Ints,
        group_U: Ints,
        shape: tuple[int, int],
        *,
        least: int | Ints,
        most: int,
        room: Room | None = None,
    ) -> None:
        self.none = len(cost_UP)  # stands for an empty place, and costs nothing
        self.cost_UP = np.vstack([cost_UP, np.zeros_like(cost_UP[:1])])
        self.shape, self.room = shape, room
        num_groups = shape[0] * shape[1]
        self.least_F = np.broadcast_to(np.asarray(least), (num_groups,))
        self.count_F = np.bincount(group_U, minlength=num_groups)
        self.most = min(most, 2 * int(self.count_F.max()) + 1)
        order = np.argsort(group_U, kind="stable")
        place = np.arange(self.none) - np.repeat(
            np.cumsum(self.count_F) - self.count_F, self.count_F
        )
        self.unit_FK = np.full((num_groups, self.most), self.none)
        self.unit_FK[group_U[order], place] = order
        cost_FKP = self.cost_UP[self.unit_FK]
        self.load_FP = cost_FKP.sum(axis=1)
        # No group can be lighter than the mean, nor than the largest unit.
        mean_RP = self.load_FP.reshape(*shape, -1).sum(axis=1) // shape[1]
        largest_RP = cost_FKP.reshape(shape[0], -1, cost_UP.shape[1]).max(axis=1)
        self.floor_R = np.maximum(mean_RP, largest_RP).sum(axis=1)

    @property
    def group_U(self) -> Ints:
        """(U,) flat group of every unit now."""
        group_V = np.empty(self.none + 1, np.int64)
        group_V[self.unit_FK] = np.arange(len(self.unit_FK))[:, None]
        return group_V[:-1]

    def run(self, rounds: int) -> None:
        """Exchange ``rounds`` times, or until there is next to nothing left to gain."""
        draw_NF = _scramble(rounds, len(self.unit_FK))
        for number, draw_F in enumerate(draw_NF):
            if not self._uneven_R().any():
                break
            self._round(draw_F, moves=number % _MOVES_EVERY == _MOVES_EVERY - 1)

    def _uneven_R(self) -> NDArray[np.bool_]:
        gain_R = self._slowest_R(self.load_FP) - self.floor_R
        return np.asarray(gain_R > self.floor_R >> _EVEN_BITS)

    def _slowest_R(self, load_FP: Ints) -> Ints:
        """(R,) the sum over parts of the heaviest group's load."""
        return np.asarray(load_FP.reshape(*self.shape, -1).max(axis=1).sum(axis=1))

    def _round(self, draw_F: Ints, *, moves: bool) -> None:
        place_F = draw_F % np.maximum(self.count_F, 1)
        if moves:
            # A group at its least puts up its empty place, so that it can only gain.
            empty = (self.count_F < self.most) & (
                ((draw_F >> 40) & 1 == 1) | (self.count_F == self.least_F)
            )
            place_F = np.where(empty, self.count_F, place_F)
        out_F = self.unit_FK[np.arange(len(place_F)), place_F]
        rest_FP = self.load_FP - self.cost_UP[out_F]
        if self.room is None and rest_FP.shape[1] == 1:
            in_F = self._sorted(rest_FP, out_F)
            self._put(place_F, out_F, in_F, rest_FP)
            return
        bin_F, hole_F = self.room.holes(out_F) if self.room else (out_F, np.zeros_like(out_F))
        in_F = self._assigned(rest_FP, out_F, hole_F)
        worse_R = self._slowest_R(rest_FP + self.cost_UP[in_F]) > self._slowest_R(self.load_FP)
        in_F = np.where(np.repeat(worse_R, self.shape[1]), out_F, in_F)
        if self.room:
            moved = np.flatnonzero((in_F != out_F) & (in_F != self.none))
            self.room.put(in_F[moved], bin_F[moved])
        self._put(place_F, out_F, in_F, rest_FP)

    def _put(self, place_F: Ints, out_F: Ints, in_F: Ints, rest_FP: Ints) -> None:
        self.unit_FK[np.arange(len(place_F)), place_F] = in_F
        self.load_FP = rest_FP + self.cost_UP[in_F]
        self.count_F += out_F == self.none
        self.count_F -= in_F == self.none
        # The places in use stay in front: the last one fills a place that was left empty.
        left = np.flatnonzero((in_F == self.none) & (out_F != self.none))
        last = self.count_F[left]
        self.unit_FK[left, place_F[left]] = self.unit_FK[left, last]
        self.unit_FK[left, last] = self.none

    def _sorted(self, rest_FP: Ints, out_F: Ints) -> Ints:
        """(F,) the unit that each group gets: the heaviest the lightest, and so on."""
        out_RG = out_F.reshape(self.shape)
        light_RG = rest_FP.reshape(self.shape).argsort(axis=1, kind="stable")
        heavy_RG = (-self.cost_UP[out_RG, 0]).argsort(axis=1, kind="stable")
        in_RG = np.empty_like(out_RG)
        np.put_along_axis(in_RG, light_RG, np.take_along_axis(out_RG, heavy_RG, 1), 1)
        return in_RG.reshape(-1)

    def _assigned(self, rest_FP: Ints, out_F: Ints, hole_F: Ints) -> Ints:
        """(F,) the unit that each group gets, at the least sum of powers of the loads."""
        in_F = out_F.copy()
        top_RP = np.maximum(self.load_FP.reshape(*self.shape, -1).max(axis=1), 1.0)
        need_F = np.zeros_like(out_F)
        if self.room:
            need_F = np.append(self.room.size_U, -1)[out_F]
        num_blocks = -(-self.shape[1] // _BLOCK)
        for problem in np.flatnonzero(self._uneven_R()):
            top_P = top_RP[problem]
            groups = np.arange(self.shape[1]) + problem * self.shape[1]
            # Every block gets heavy and light groups.
            groups = groups[(rest_FP[groups] / top_P).sum(axis=1).argsort(kind="stable")]
            for block in range(num_blocks):
                some = groups[block::num_blocks]
                load_GGP = rest_FP[some][:, None] + self.cost_UP[out_F[some]][None]
                # Powers by multiplication, which every platform rounds alike.
                power_GGP = load_GGP / top_P
                for _ in range(3):
                    power_GGP *= power_GGP
                price_GG = power_GGP @ top_P
                price_GG[need_F[some][None] > hole_F[some][:, None]] = np.inf
                in_F[some] = out_F[some[linear_sum_assignment(price_GG)[1]]]
        return in_F

    def repartition(self, tries: int) -> None:
        """Divide units of the heaviest group and of a lighter one anew, in the best of all ways.

        For one problem (R = 1) whose units lie in no bins. Finds what exchanges of single units
        cannot, and is exact for two groups of few units.
        """
        assert self.room is None
        assert self.shape[0] == 1
        num_parts, failed = self.cost_UP.shape[1], 0
        draw_NV = _scramble(tries, self.none + 1)
        for number, draw_V in enumerate(draw_NV):
            order = self.load_FP[:, number % num_parts].argsort(kind="stable")
            if failed >= len(order) - 1 or not self._uneven_R().any():
                break
            pair = np.array([order[-1], order[failed]])
            failed = 0 if self._divide(pair, draw_V) else failed + 1

    def _divide(self, pair: Ints, draw_V: Ints) -> bool:
        """Divide the units of two groups; return whether that made them more even."""
        both_X = np.sort(self.unit_FK[pair], axis=None)
        both_X = both_X[both_X != self.none]
        side_V = np.empty(self.none + 1, np.int64)
        side_V[self.unit_FK[pair]] = [[0], [1]]
        unit_X = both_X[draw_V[both_X].argsort(kind="stable")[:_ENUMERATED]]
        # W ways; what each of them takes from the first group to the second, net.
        side_WX = (np.arange(1 << len(unit_X))[:, None] >> np.arange(len(unit_X))) & 1
        taken_WX = side_WX - side_V[unit_X]
        cost_WP, count_W = taken_WX @ self.cost_UP[unit_X], taken_WX.sum(axis=1)
        top_WP = np.maximum(self.load_FP[pair[0]] - cost_WP, self.load_FP[pair[1]] + cost_WP)
        others_P = np.delete(self.load_FP, pair, axis=0).max(axis=0, initial=0)
        score_W2 = np.stack([np.maximum(top_WP, others_P).sum(axis=1), top_WP.sum(axis=1)], axis=1)
        count_W2 = self.count_F[pair] + count_W[:, None] * [-1, 1]
        fits_W = ((count_W2 >= self.least_F[pair]) & (count_W2 <= self.most)).all(axis=1)
        best = np.lexsort((score_W2[:, 1], score_W2[:, 0], ~fits_W))[0]
        now = side_V[unit_X] @ (1 << np.arange(len(unit_X)))
        if tuple(score_W2[best]) >= tuple(score_W2[now]):
            return False
        side_V[unit_X] = side_WX[best]
        self.unit_FK[pair] = self.none
        for side, group in enumerate(pair):
            units = both_X[side_V[both_X] == side]
            self.unit_FK[group, : len(units)] = units
            self.count_F[group] = len(units)
        self.load_FP[pair] = self.cost_UP[self.unit_FK[pair]].sum(axis=1)
        return True


def _scramble(rows: int, columns: int) -> Ints:
    """Return (rows, columns) well mixed numbers in [0, 2**62), the same everywhere (splitmix64)."""
    z = np.arange(1, rows * columns + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(2)
    return z.astype(np.int64).reshape(rows, columns)
