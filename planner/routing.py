"""Which rank encodes which item of a modality, and for which microbatch.

Axes: I items, N spans, B buckets of the backbone, M its microbatches, E buckets of the encoder,
T turns of the encoder in a step, P parts of the cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megadask.planner import columnar
from megadask.planner.balance import balance, bucket_loads
from megadask.planner.costs import evaluate, unit_of
from megadask.planner.errors import ConfigError
from megadask.planner.metadata import Metadata, Ragged
from megadask.planner.strategy import Selection
from megadask.planner.topology import ClientPlaceTree

VERSION = 1
_COLUMNS = ("span", "item", "length", "encoder", "turn", "bucket", "microbatch")


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """Where the items of one modality are encoded, and who uses the result.

    An encoder takes one turn in a step, or one for each microbatch. All of its ranks enter it in
    every turn, so that collective operations meet: one without items runs a placeholder.

    Attributes
    ----------
    modality
        Name of the items.
    span_I, item_I
        (I,) row of each item's span in the plan's table, and which of the span's items it is.
    length_I
        (I,) patches or frames.
    encoder_I, turn_I
        (I,) who encodes it (bucket along the encoder's axis), and in which turn.
    bucket_I, microbatch_I
        (I,) who uses it: bucket and microbatch of its span.
    loads
        (E, T, P) float64 cost of every turn of every encoder bucket, as the cost counts it.
    bound
        Lowest `imbalance` that any routing could reach: no turn of the slowest rank is shorter than
        the mean, nor than the largest item.
    """

    modality: str
    span_I: NDArray[np.int64]
    item_I: NDArray[np.int64]
    length_I: NDArray[np.int64]
    encoder_I: NDArray[np.int64]
    turn_I: NDArray[np.int64]
    bucket_I: NDArray[np.int64]
    microbatch_I: NDArray[np.int64]
    loads: NDArray[np.float64]
    bound: float

    @property
    def placeholder(self) -> str:
        """Name of what a rank encodes that has no item in a turn; it counts in no loss."""
        return f"{self.modality}:placeholder"

    @cached_property
    def placeholders(self) -> NDArray[np.int64]:
        """(K, 2) the (encoder bucket, turn) pairs without an item."""
        used_ET = np.zeros(self.loads.shape[:2], bool)
        used_ET[self.encoder_I, self.turn_I] = True
        return np.argwhere(~used_ET)

    @property
    def imbalance(self) -> float:
        """Sum over turns of the slowest rank's load over the mean's, of the worst part."""
        slowest_P, mean_P = self.loads.max(axis=0).sum(axis=0), self.loads.mean(axis=0).sum(axis=0)
        costly_P = mean_P > 0
        return float((slowest_P[costly_P] / mean_P[costly_P]).max(initial=1.0))

    def items_of(self, encoder: int, turn: int = 0) -> NDArray[np.int64]:
        """Return the items that an encoder bucket takes in a turn; none: it runs a placeholder."""
        return np.flatnonzero((self.encoder_I == encoder) & (self.turn_I == turn))

    def to_arrow(self) -> bytes:
        """Return an Arrow IPC stream; `from_arrow` inverts it."""
        table = Metadata({name: getattr(self, f"{name}_I") for name in _COLUMNS})
        header = {
            "modality": self.modality,
            "shape": self.loads.shape,
            "loads": self.loads.ravel().tolist(),
            "bound": self.bound,
        }
        return columnar.write("routing", VERSION, table, header)

    @classmethod
    def from_arrow(cls, data: bytes) -> Routing:
        """Read a routing back. Raises StateError for another version."""
        table, header, _ = columnar.read("routing", VERSION, data)
        return cls(
            modality=header["modality"],
            **{f"{name}_I": table[name] for name in _COLUMNS},
            loads=np.array(header["loads"], np.float64).reshape(header["shape"]),
            bound=header["bound"],
        )


def route(
    modality: str,
    selection: Selection,
    topology: ClientPlaceTree,
    table: Metadata,
    bucket_N: NDArray[np.int64],
    microbatch_N: NDArray[np.int64],
    num_microbatches: int,
) -> Routing:
    """Return the routing of one modality of a placed table.

    Parameters
    ----------
    modality, selection
        Which items, and how they are placed. The cost is called with a table of one row an item:
        its length as ``tokens`` and as the only item of its modality, and its span's columns.
    topology
        The job that the step is planned for.
    table
        (N rows) the spans, with ragged lengths of the modality.
    bucket_N, microbatch_N
        Where each span goes; -1 for one that does not, whose items are not routed.
    num_microbatches
        M.

    Raises
    ------
    ConfigError
        The table has no such modality.
    """
    items, span_I, item_I = items_of(modality, table, bucket_N >= 0)
    by_step = selection.encode == "step"
    num_turns = 1 if by_step else num_microbatches
    turn_I = np.zeros_like(span_I) if by_step else microbatch_N[span_I]
    num_encoders = topology.num_buckets(selection.axis)
    num_parts = evaluate(selection.cost, items).shape[1]
    encoder_I = np.empty_like(span_I)
    loads_ETP = np.zeros((num_encoders, num_turns, num_parts), np.int64)
    least_P = np.zeros(num_parts)
    for turn in range(num_turns):
        some = np.flatnonzero(turn_I == turn)
        problem = selection.problem(
            items.take(some), topology, equal_counts=bool(selection.equal_counts)
        )
        placed_I = balance(problem, selection.method, **selection.options)
        loads_EP = bucket_loads(problem, placed_I)[:, 0]
        alike = not selection.speeds and selection.transfer is None
        number_E = _lightest_first(loads_ETP, loads_EP) if alike else np.arange(len(loads_EP))
        encoder_I[some] = number_E[placed_I]
        loads_ETP[number_E, turn] = loads_EP
        largest_P = problem.cost_NP.max(axis=0, initial=0)
        least_P += np.maximum(loads_EP.mean(axis=0), largest_P)
    mean_P = loads_ETP.mean(axis=0).sum(axis=0)
    return Routing(
        modality=modality,
        span_I=span_I,
        item_I=item_I,
        length_I=items["tokens"],
        encoder_I=encoder_I,
        turn_I=turn_I,
        bucket_I=bucket_N[span_I],
        microbatch_I=microbatch_N[span_I],
        loads=loads_ETP * np.float64(unit_of(selection.cost)),
        bound=float((least_P[mean_P > 0] / mean_P[mean_P > 0]).max(initial=1.0)),
    )


def route_all(
    selections: Mapping[str, Selection],
    topology: ClientPlaceTree,
    table: Metadata,
    bucket_N: NDArray[np.int64],
    microbatch_N: NDArray[np.int64],
    num_microbatches: int,
) -> dict[str, Routing]:
    """Return the routing of every modality that was selected, by name; see `route`."""
    return {
        name: route(name, selection, topology, table, bucket_N, microbatch_N, num_microbatches)
        for name, selection in sorted(selections.items())
    }


def digested(routing: Mapping[str, Routing]) -> list[NDArray[np.int64]]:
    """Return what the digest of a plan counts of its routing: who encodes what, and when."""
    return [
        column
        for _, routed in sorted(routing.items())
        for column in (routed.encoder_I, routed.turn_I)
    ]


def items_of(
    modality: str, table: Metadata, taken_N: NDArray[np.bool_]
) -> tuple[Metadata, NDArray[np.int64], NDArray[np.int64]]:
    """Return (table of items, (I,) row of their span, (I,) number within it) of some spans.

    Raises ConfigError where the table has no such modality.
    """
    if modality not in table.ragged:
        raise ConfigError(
            f"select({modality!r})",
            got=f"a table with the modalities {sorted(table.ragged)}",
            limit="a modality whose item lengths are in the metadata",
        )
    rows = np.flatnonzero(taken_N)
    ragged = table.ragged[modality].take(rows)
    count_n = np.diff(ragged.offsets)
    span_I = np.repeat(rows, count_n)
    item_I = np.arange(len(span_I)) - np.repeat(ragged.offsets[:-1], count_n)
    columns = {**table.take(span_I).columns, "tokens": ragged.lengths_I}
    single = Ragged(ragged.lengths_I, np.arange(len(span_I) + 1))
    return Metadata(columns, {modality: single}), span_I, item_I


def _lightest_first(loads_ETP: NDArray[np.int64], loads_EP: NDArray[np.int64]) -> NDArray[np.int64]:
    """(E,) new numbers of the buckets of a turn: the heaviest to who had the least so far."""
    so_far_E = loads_ETP.sum(axis=(1, 2))
    number_E = np.empty(len(so_far_E), np.int64)
    number_E[np.argsort(-loads_EP.sum(axis=1), kind="stable")] = np.argsort(so_far_E, kind="stable")
    return number_E
