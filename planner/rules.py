"""What the draw of every step goes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megadask.planner.batching import Batching
from megadask.planner.checks import check_integer
from megadask.planner.deferral import Deferral
from megadask.planner.errors import ConfigError
from megadask.planner.weights import MixBy

Stop = Literal["first", "all", "repeat"]


@dataclass(frozen=True, kw_only=True)
class DrawRules:
    """What the draw of every step goes by.

    Attributes
    ----------
    batching
        Capacity of a step, and how documents are padded.
    mix_by
        Whether weights are shares of the samples (spans) or of the tokens.
    window
        K, how many readable spans of a source are looked at for one that fits.
    patience
        Steps for which a span may be passed over.
    epochs
        How often every source is read; None for ever.
    stop
        With finite epochs: end when the ``"first"`` source has ended; when ``"all"`` have, those
        that ended dropping out; or ``"repeat"`` those until all have ended.
    deferral
        Which spans wait because they cost too much for a step; None: none do.
    """

    batching: Batching
    mix_by: MixBy = "samples"
    window: int = 64
    patience: int = 4
    epochs: int | None = None
    stop: Stop = "all"
    deferral: Deferral | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.batching, Batching):
            limit = "Packed(...), Padded(...) or Fixed(...)"
            raise ConfigError("batching=", got=repr(self.batching), limit=limit)
        if self.batching.pours and self.deferral is not None:
            raise ConfigError(
                "defer() of Fixed steps",
                got=f"steps={self.deferral.steps}",
                limit="nothing",
                remedy="Packs of Fixed are as long and all full; defer spans of Packed or Padded.",
            )
        for name, value in (("mix_by", self.mix_by), ("stop", self.stop)):
            choices = get_args(MixBy if name == "mix_by" else Stop)
            if value not in choices:
                raise ConfigError(f"{name}=", got=repr(value), limit=f"one of {choices}")
        for name in ("window", "patience", "epochs"):
            value = getattr(self, name)
            if not (name == "epochs" and value is None):
                check_integer(f"{name}=", value, 1)
