"""What a span costs a training step, and how costs become integers.

A cost is any callable that maps a table of N spans to (N,) or (N, P) numbers >= 0: its time, or
anything proportional to it, by part. Parts run at different times in the step (an encoder, then the
backbone), so that each of them wants its own balance; they are counted in the same unit.

The planner compares integers only. A cost has one unit for all tables, so that what a span costs
never depends on its neighbours: the attribute ``unit`` of the callable, 2**-20 without one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megadask.planner.checks import check_number
from megadask.planner.errors import ConfigError, CostError
from megadask.planner.measured import Measured as Measured
from megadask.planner.metadata import Metadata
from megadask.planner.names import display_name
from megadask.planner.sequences import square_sums

Cost = Callable[[Metadata], ArrayLike]

#: Unit of a cost without one: costs of 1e-6 (a microsecond) up to 1e12 in a step keep their digits.
DEFAULT_UNIT = 2.0**-20
#: Steps in which built-in models count: this many for the linear work of one token.
_STEPS_PER_TOKEN = 2**12
#: No table may cost more units than this, so that sums of loads stay within int64.
_TOTAL_LIMIT = 2**62


@dataclass(frozen=True)
class Tokens:
    """Cost of a span: its tokens."""

    unit: float = 1.0

    def __call__(self, table: Metadata) -> NDArray[np.int64]:
        """Return (N,) tokens."""
        return np.asarray(table["tokens"], np.int64)


@dataclass(frozen=True)
class Transformer:
    """Cost of a span in a decoder: forward FLOPs, with those of attention weighted by their pace.

    The sequences of a span (a preference pair, a group) attend to themselves alone.
    For a span of l tokens and the defaults it is proportional to l + l**2 / (6 hidden). The linear
    part counts 2 FLOPs a parameter and token; the attention part 2 l**2 hidden a layer, half of
    what it is without a causal mask.

    Parameters
    ----------
    hidden
        Width of the model.
    layers
        Number of layers.
    ffn_multiplier
        Width of the feed-forward block over `hidden`, for two matrices; a gated block of three
        matrices counts 1.5 times its own.
    kv_fraction
        Key and value heads over query heads (grouped-query attention).
    active_experts
        Feed-forward blocks that a token passes through (mixture of experts).
    vocab
        Size of the output layer; 0 leaves it out.
    attention_slowdown
        Time of a FLOP of attention over that of a FLOP of a large matrix product.
    causal
        Whether a token attends only to those before it.
    """

    hidden: int
    layers: int = 1
    ffn_multiplier: float = 4.0
    kv_fraction: float = 1.0
    active_experts: int = 1
    vocab: int = 0
    attention_slowdown: float = 2.0
    causal: bool = True

    def __post_init__(self) -> None:
        _check_fields(self, positive=("hidden", "layers", "active_experts"))
        if not isinstance(self.causal, bool):
            raise ConfigError("Transformer(causal=)", got=repr(self.causal), limit="a bool")

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the linear part."""
        attention = 2 + 2 * self.kv_fraction
        ffn = 2 * self.ffn_multiplier * self.active_experts
        per_layer = 2 * self.hidden**2 * (attention + ffn)
        return float(self.layers * per_layer + 2 * self.hidden * self.vocab)

    @property
    def unit(self) -> float:
        """FLOPs of one step of the integer cost."""
        return self.flops_per_token / _STEPS_PER_TOKEN

    def __call__(self, table: Metadata) -> NDArray[np.float64]:
        """Return (N,) weighted FLOPs."""
        length_N = table["tokens"].astype(np.float64)
        per_pair = 2.0 if self.causal else 4.0
        per_square = per_pair * self.layers * self.hidden * self.attention_slowdown
        return length_N * self.flops_per_token + per_square * square_sums(table)


@dataclass(frozen=True)
class VisionEncoder:
    """Cost of the items of one modality in an encoder: forward FLOPs.

    An item of l patches (or frames) attends to itself only, so that a span costs the sum over its
    items of 4 l**2 hidden FLOPs a layer, and of the linear part.

    Parameters
    ----------
    modality
        Name of the ragged metadata column with the lengths of the items.
    hidden
        Width of the encoder.
    layers
        Number of layers.
    ffn_multiplier
        As in `Transformer`.
    """

    modality: str
    hidden: int
    layers: int = 1
    ffn_multiplier: float = 4.0

    def __post_init__(self) -> None:
        _check_fields(self, positive=("hidden", "layers"))

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the linear part."""
        return float(self.layers * 2 * self.hidden**2 * (4 + 2 * self.ffn_multiplier))

    @property
    def unit(self) -> float:
        """FLOPs of one step of the integer cost."""
        return self.flops_per_token / _STEPS_PER_TOKEN

    def __call__(self, table: Metadata) -> NDArray[np.float64]:
        """Return (N,) FLOPs. Raises CostError if the table lacks the modality."""
        if self.modality not in table.ragged:
            raise CostError(
                f"{self!r}: modality",
                got=repr(self.modality),
                limit=f"among {sorted(table.ragged)}",
            )
        items = table.ragged[self.modality]
        per_square = 4.0 * self.layers * self.hidden
        return items.sum() * self.flops_per_token + items.sum(power=2) * per_square


@dataclass(frozen=True, init=False)
class Parts:
    """Several costs side by side, each a part to be balanced: ``Parts(encoder, backbone)``.

    They must count alike, FLOPs with FLOPs. The unit is that of the coarsest.
    """

    costs: tuple[Cost, ...]

    def __init__(self, *costs: Cost) -> None:
        if len(costs) < 2 or not all(map(callable, costs)):
            raise ConfigError("Parts", got=costs, limit="two or more costs")
        object.__setattr__(self, "costs", costs)

    @property
    def unit(self) -> float:
        """Step of the integer cost."""
        return max(unit_of(cost) for cost in self.costs)

    def __call__(self, table: Metadata) -> NDArray[np.float64]:
        """Return (N, P) the parts of all costs."""
        return np.hstack([_checked(cost, table) for cost in self.costs])


@dataclass(frozen=True)
class InUnits:
    """A cost counted in steps of ``unit``: for functions, whose own steps are 2**-20."""

    cost: Cost
    unit: float

    def __post_init__(self) -> None:
        unit_of(self)

    def __call__(self, table: Metadata) -> ArrayLike:
        """Return what the cost returns."""
        return self.cost(table)


def unit_of(cost: Cost) -> float:
    """Return the step in which a cost is counted."""
    unit = getattr(cost, "unit", DEFAULT_UNIT)
    if not isinstance(unit, int | float) or not 0 < unit < np.inf:
        raise ConfigError(f"unit of cost {name_of(cost)}", got=unit, limit="a number above 0")
    return float(unit)


def name_of(cost: Cost) -> str:
    """Return how messages and reports call a cost."""
    return repr(cost) if hasattr(cost, "__dataclass_fields__") else display_name(cost)


def evaluate(cost: Cost, table: Metadata) -> NDArray[np.int64]:
    """Return (N, P) the cost of every row in whole units, rounded; at least 1 where above 0.

    Raises CostError, naming the cost and the first bad row, for a wrong shape, negative or not
    finite costs, and totals that would not fit into int64.
    """
    cost_NP = _checked(cost, table)
    units_NP = np.rint(cost_NP / unit_of(cost))
    if units_NP.sum() >= _TOTAL_LIMIT:
        raise CostError(
            f"cost {name_of(cost)}: total",
            got=f"{cost_NP.sum():.3g} in units of {unit_of(cost):.3g}",
            limit=f"less than {_TOTAL_LIMIT:.3g} units",
            remedy="Count in larger units: costs.InUnits(cost, unit).",
        )
    return np.asarray(np.maximum(units_NP, cost_NP > 0), np.int64)


def _checked(cost: Cost, table: Metadata) -> NDArray[np.float64]:
    """Return (N, P) float64 costs that are >= 0 and finite."""
    try:
        values = np.asarray(cost(table.read_only()))
    except Exception as error:
        with suppress(Exception):  # a frozen one takes no note
            error.add_note(f"MegaDask: cost {name_of(cost)}")
        raise
    shape = values.shape if values.ndim == 2 else (*values.shape, 1)
    if values.dtype.kind not in "iuf" or shape != (table.num_rows, max(1, shape[-1])):
        raise CostError(
            f"cost {name_of(cost)}",
            got=f"{values.dtype} {values.shape}",
            limit=f"numbers of shape ({table.num_rows},) or ({table.num_rows}, parts)",
        )
    cost_NP = values.astype(np.float64).reshape(shape)
    bad_N = ~((cost_NP >= 0) & (cost_NP < np.inf)).all(axis=1)
    if bad_N.any():
        row = int(bad_N.argmax())
        raise CostError(
            f"cost {name_of(cost)} of row {row}",
            got=cost_NP[row].tolist(),
            limit="finite numbers >= 0",
        )
    return cost_NP


def _check_fields(model: Transformer | VisionEncoder, positive: tuple[str, ...]) -> None:
    """Check that the fields of a model are numbers, at least 1 or at least 0."""
    for name, value in vars(model).items():
        if name in ("causal", "modality"):
            continue
        least = 1 if name in positive else 0
        check_number(f"{type(model).__name__}({name}=)", value, least)
