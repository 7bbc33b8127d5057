"""The user's function on the microbatches of a bucket, before they are cut for its ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.fields import COUNT_KEYS, PLACE_KEYS, WIRE_KEYS, is_deliverable
from megadask.planner.ids import SampleId
from megadask.scheduling.errors import in_user_code
from megadask.scheduling.extras import decode, encode_row, join_rows
from megadask.scheduling.samples import EXTRAS

Arrays = dict[str, NDArray[Any]]

#: Names that batches use otherwise.
TAKEN = (*COUNT_KEYS, *WIRE_KEYS)


class Collator:
    """Calls the function and checks what it returns. Runs in a thread, never on the event loop.

    Parameters
    ----------
    blob
        The pickled function, loaded when it is first used.
    extras
        Names of the extras that batches have.
    """

    def __init__(self, blob: bytes, extras: tuple[str, ...]) -> None:
        self._blob = blob
        self._extras = extras

    @cached_property
    def _function(self) -> Callable[[dict[str, Any]], Any]:
        function: Callable[[dict[str, Any]], Any] = pickle.loads(self._blob)
        return function

    def __call__(
        self,
        arrays: Arrays,
        sample_ids: list[SampleId],
        spans: NDArray[np.int64],
        step: int,
        microbatch: int,
    ) -> Arrays:
        """Return what the function makes of a microbatch, extras as they travel.

        arrays: may be modified. Raises the function's own error, or ConfigError for what is no
        batch; both say where.
        """
        batch: dict[str, Any] = {**arrays}
        batch |= {"sample_ids": sample_ids, "spans": spans, "step": step, "microbatch": microbatch}
        if EXTRAS in arrays:
            batch[EXTRAS] = decode(arrays[EXTRAS])
        where = f"MegaDask: Pipeline(collate=), step {step}, microbatch {microbatch}"
        return in_user_code(
            lambda: self._checked(self._function(batch), len(sample_ids)),
            "Pipeline(collate=)",
            where,
        )

    def _checked(self, returned: Any, num_spans: int) -> Arrays:
        if not isinstance(returned, Mapping):
            raise _no_batch("it returned", type(returned).__name__, "a dict of numpy arrays")
        made: Arrays = {}
        for name, value in returned.items():
            if name in PLACE_KEYS:  # it found them there, and may pass them on
                continue
            if not isinstance(name, str) or not name or name in TAKEN or name.startswith("."):
                raise _no_batch("a key", repr(name), "a text that no fact of a batch has")
            if name == EXTRAS:
                made[name] = self._packed(value, num_spans)
                continue
            if not isinstance(value, np.ndarray) or not is_deliverable(value.dtype):
                kind = f"array of {value.dtype}" if hasattr(value, "dtype") else ""
                raise _no_batch(
                    f"the value of {name!r}",
                    kind or type(value).__name__,
                    "a numpy array of numbers or bools",
                )
            native = value.dtype.newbyteorder("=")
            made[name] = np.require(value, native, ["C"])
        return made

    def _packed(self, extras: Any, num_spans: int) -> NDArray[np.uint8]:
        is_like = isinstance(extras, Mapping) and all(
            isinstance(column, list) and len(column) == num_spans for column in extras.values()
        )
        if not is_like:
            raise _no_batch(
                "'extras'",
                type(extras).__name__,
                f"a dict of lists, each of {num_spans} values: one a span",
            )
        rows = [
            encode_row({name: column[n] for name, column in extras.items()})
            for n in range(num_spans)
        ]
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        return join_rows(list(extras), np.concatenate([np.empty(0, np.uint8), *rows]), offsets)


def _no_batch(what: str, got: str, limit: str) -> ConfigError:
    return ConfigError(f"Pipeline(collate=): {what}", got=got, limit=limit)
