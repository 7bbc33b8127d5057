"""Units in groups, and how linear assignment makes the groups equally heavy.

A unit is an item, or a whole pack of items. One round takes one unit out of every group and puts
them back where the resulting times are the most even. That is a linear assignment problem. With one
cost part and nothing forbidden its optimum is known, the heaviest unit joins the lightest rest and
so on down (rearrangement inequality), and sorting finds it. A group may also put up an empty place,
which turns exchanges into moves. No round makes the slowest group slower.

Axes: R independent problems, G groups of each, K places of a group, U units, P parts of the cost,
S bins of a group, F groups of all problems (R x G).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_MOST_ASSIGNED = 64  # groups: the time of an assignment problem grows with the cube
_ENUMERATED = 10  # units that `Exchange.repartition` divides in all 2**10 ways
_MOVES_EVERY = 4  # rounds
_PATIENCE = 8  # rounds without gain after which there is little to be expected
_EVEN_BITS = 13


@dataclass(kw_only=True, eq=False)
class Room:
    """The bins of limited capacity that units lie in; kept up to date by whatever moves units.

    size_U: (U,) tokens; bin_U: (U,) flat bin (group * S + bin of the group) of each unit;
    free_FS: tokens left in each bin; spots_FS: how many more units each bin takes.
    """

    size_U: Ints
    bin_U: Ints
    free_FS: Ints
    spots_FS: Ints

    def roomiest(self) -> tuple[Ints, Ints]:
        """Return (F,) the bin of each group with the most room, and its room; -1: no spot."""
        room_FS = np.where(self.spots_FS > 0, self.free_FS, -1)
        bin_F = room_FS.argmax(axis=1)
        groups = np.arange(len(bin_F))
        return bin_F + groups * room_FS.shape[1], room_FS[groups, bin_F]

    def holes(self, out_F: Ints) -> tuple[Ints, Ints]:
        """Return (F,) the bin that taking ``out_F`` (U: nothing) opens, and its room (-1: none)."""
        bin_F, room_F = self.roomiest()
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
    slow_F
        (F,) time of a unit of cost in each group; None: 1.
    transfer_UF
        (U, F) what a unit costs more in a group, in the first part; None: nothing.
    base_FP
        (F, P) load that groups have apart from their units; None: nothing.
    even_bits
        Even enough: the slowest group is within 2**-even_bits of its floor.
    floor_RP
        (R, P) a time that the slowest group of a problem cannot beat; None: the even time, or that
        of the largest unit.
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
        slow_F: Ints | None = None,
        transfer_UF: Ints | None = None,
        floor_RP: Ints | None = None,
        base_FP: Ints | None = None,
        even_bits: int = _EVEN_BITS,
    ) -> None:
        self.even_bits = even_bits
        self.none = len(cost_UP)  # stands for an empty place, and costs nothing
        self.cost_UP = np.vstack([cost_UP, np.zeros_like(cost_UP[:1])])
        self.transfer_UF = (
            None
            if transfer_UF is None
            else np.vstack([transfer_UF, np.zeros_like(transfer_UF[:1])])
        )
        self.shape, self.room, self.slow_F = shape, room, slow_F
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
        self.base_FP = np.zeros((num_groups, cost_UP.shape[1]), np.int64)
        if base_FP is not None:
            self.base_FP += base_FP
        self.load_FP = self._loads()
        self.floor_RP = self._floors() if floor_RP is None else floor_RP

    @property
    def group_U(self) -> Ints:
        """(U,) flat group of every unit now."""
        group_V = np.empty(self.none + 1, np.int64)
        group_V[self.unit_FK] = np.arange(len(self.unit_FK))[:, None]
        return group_V[:-1]

    @property
    def time_FP(self) -> Ints:
        """(F, P) time of every group now."""
        return self.times(self.load_FP, np.arange(len(self.load_FP)))

    def costs(self, unit_X: Ints, group_X: Ints) -> Ints:
        """Return (..., P) the cost of units in groups."""
        if self.transfer_UF is None:
            return np.asarray(self.cost_UP[unit_X])
        unit_X, group_X = np.broadcast_arrays(unit_X, group_X)
        cost_XP = self.cost_UP[unit_X]
        cost_XP[..., 0] += self.transfer_UF[unit_X, group_X]
        return np.asarray(cost_XP)

    def times(self, load_XP: Ints, group_X: Ints) -> Ints:
        """Return (..., P) the times of groups of these loads."""
        return load_XP if self.slow_F is None else load_XP * self.slow_F[group_X][..., None]

    def _loads(self) -> Ints:
        groups = np.arange(len(self.unit_FK))[:, None]
        return np.asarray(self.costs(self.unit_FK, groups).sum(axis=1) + self.base_FP)

    def _floors(self) -> Ints:
        """(R, P) no slowest group beats the even time, nor that of the largest unit alone."""
        (num_problems, num_groups), num_parts = self.shape, self.cost_UP.shape[1]
        cost_RXP = self.cost_UP[self.unit_FK].reshape(num_problems, -1, num_parts)
        total_RP, floor_RP = cost_RXP.sum(axis=1), cost_RXP.max(axis=1)
        total_RP += self.base_FP.reshape(num_problems, num_groups, -1).sum(axis=1)
        if self.slow_F is None:
            return np.asarray(np.maximum(total_RP // num_groups, floor_RP))
        for problem, slow_G in enumerate(self.slow_F.reshape(self.shape)):
            speed = math.fsum(1 / slow for slow in slow_G.tolist())
            even_P = (total_RP[problem] / speed).astype(np.int64)
            floor_RP[problem] = np.maximum(even_P, floor_RP[problem] * slow_G.min())
        return np.asarray(floor_RP)

    def snapshot(self) -> tuple[Ints, Ints, Ints, Room | None]:
        """Return a copy of where all units are, for `restore`."""
        room = self.room and replace(
            self.room,
            bin_U=self.room.bin_U.copy(),
            free_FS=self.room.free_FS.copy(),
            spots_FS=self.room.spots_FS.copy(),
        )
        return self.unit_FK.copy(), self.count_F.copy(), self.load_FP.copy(), room

    def restore(self, kept: tuple[Ints, Ints, Ints, Room | None]) -> None:
        """Put all units back to where they were."""
        self.unit_FK, self.count_F, self.load_FP, self.room = kept

    def run(self, rounds: int) -> None:
        """Exchange ``rounds`` times, or until there is next to nothing left to gain."""
        if not self._by_sorting:
            # Problems that sorting does not solve pay off where there are few groups.
            rounds = rounds // 4 if len(self.unit_FK) <= _MOST_ASSIGNED else 0
        best, waited = int(self.slowest_R(self.time_FP).sum()), 0
        for number in range(rounds):
            if not self.uneven_R().any() or waited > _PATIENCE:
                break
            now, waited = int(self.slowest_R(self.time_FP).sum()), waited + 1
            if now < best:
                best, waited = now, 0
            draw_F = scramble(number, len(self.unit_FK))
            self._round(draw_F, moves=number % _MOVES_EVERY == _MOVES_EVERY - 1)

    @property
    def _by_sorting(self) -> bool:
        plain = self.room is None and self.slow_F is None and self.transfer_UF is None
        return plain and self.cost_UP.shape[1] == 1

    def uneven_R(self) -> NDArray[np.bool_]:
        """(R,) whether there is more than next to nothing left to gain."""
        floor_R = self.floor_RP.sum(axis=1)
        return np.asarray(self.slowest_R(self.time_FP) - floor_R > floor_R >> self.even_bits)

    def slowest_R(self, time_FP: Ints) -> Ints:
        """(R,) the sum over parts of the slowest group's time."""
        return np.asarray(time_FP.reshape(*self.shape, -1).max(axis=1).sum(axis=1))

    def _round(self, draw_F: Ints, *, moves: bool) -> None:
        place_F = draw_F % np.maximum(self.count_F, 1)
        if moves:
            # A group at its least puts up its empty place, so that it can only gain.
            empty = (self.count_F < self.most) & (
                ((draw_F >> 40) & 1 == 1) | (self.count_F == self.least_F)
            )
            place_F = np.where(empty, self.count_F, place_F)
        groups = np.arange(len(place_F))
        out_F = self.unit_FK[groups, place_F]
        rest_FP = self.load_FP - self.costs(out_F, groups)
        if self._by_sorting:
            in_F = self._sorted(rest_FP, out_F)
            self._put(place_F, out_F, in_F, rest_FP)
            return
        bin_F, hole_F = self.room.holes(out_F) if self.room else (out_F, np.zeros_like(out_F))
        in_F = self._assigned(rest_FP, out_F, hole_F)
        new_FP = self.times(rest_FP + self.costs(in_F, groups), groups)
        worse_R = self.slowest_R(new_FP) > self.slowest_R(self.time_FP)
        in_F = np.where(np.repeat(worse_R, self.shape[1]), out_F, in_F)
        if self.room:
            moved = np.flatnonzero((in_F != out_F) & (in_F != self.none))
            self.room.put(in_F[moved], bin_F[moved])
        self._put(place_F, out_F, in_F, rest_FP)

    def _put(self, place_F: Ints, out_F: Ints, in_F: Ints, rest_FP: Ints) -> None:
        groups = np.arange(len(place_F))
        self.unit_FK[groups, place_F] = in_F
        self.load_FP = rest_FP + self.costs(in_F, groups)
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
        """(F,) the unit that each group gets, at the least sum of powers of the times."""
        from scipy.optimize import linear_sum_assignment  # large: see `balance.prepare`

        in_F = out_F.copy()
        top_RP = np.maximum(self.time_FP.reshape(*self.shape, -1).max(axis=1), 1.0)
        need_F = np.zeros_like(out_F)
        if self.room:
            need_F = np.append(self.room.size_U, -1)[out_F]
        for problem in np.flatnonzero(self.uneven_R()):
            group_G = np.arange(self.shape[1]) + problem * self.shape[1]
            out_G = out_F[group_G]
            load_GGP = rest_FP[group_G][:, None] + self.costs(out_G[None], group_G[:, None])
            # Powers by multiplication, which every platform rounds alike.
            power_GGP = self.times(load_GGP, group_G[:, None]) / top_RP[problem]
            for _ in range(3):
                power_GGP *= power_GGP
            price_GG = np.zeros(power_GGP.shape[:2])
            for part, top in enumerate(top_RP[problem].tolist()):
                price_GG += power_GGP[:, :, part] * top
            price_GG[need_F[group_G][None] > hole_F[group_G][:, None]] = np.inf
            in_F[group_G] = out_G[linear_sum_assignment(price_GG)[1]]
        return in_F

    def repartition(self, tries: int) -> None:
        """Divide units of the slowest group and of a faster one anew, in the best of all ways.

        For one problem (R = 1) whose units lie in no bins. Finds what exchanges of single units
        cannot, and is exact for two groups of few units.
        """
        assert self.room is None
        assert self.shape[0] == 1
        num_parts, failed = self.cost_UP.shape[1], 0
        for number in range(tries):
            order = self.time_FP[:, number % num_parts].argsort(kind="stable")
            if failed >= len(order) - 1 or not self.uneven_R().any():
                break
            pair = np.array([order[-1], order[failed]])
            failed = 0 if self._divide(pair, scramble(number, self.none + 1)) else failed + 1

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
        count_W = taken_WX.sum(axis=1)
        from_WP, to_WP = (taken_WX @ self.costs(unit_X, np.full_like(unit_X, f)) for f in pair)
        top_WP = np.maximum(
            self.times(self.load_FP[pair[0]] - from_WP, pair[:1]),
            self.times(self.load_FP[pair[1]] + to_WP, pair[1:]),
        )
        others_P = np.delete(self.time_FP, pair, axis=0).max(axis=0, initial=0)
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
            unit_XP = self.costs(units, np.full_like(units, group))
            self.load_FP[group] = self.base_FP[group] + unit_XP.sum(axis=0)
        return True


def scramble(row: int, columns: int) -> Ints:
    """Return (columns,) well mixed numbers in [0, 2**62), the same everywhere (splitmix64)."""
    first = row * columns + 1
    z = np.arange(first, first + columns, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(2)
    return z.astype(np.int64)
