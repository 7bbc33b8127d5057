"""Numbers of a sample's fields as the type that was declared: none becomes another one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError
from megadask.planner.fields import Field


def may_become(array: NDArray[Any], dtype: str) -> bool:
    """Whether numbers may become numbers of another type, if none of them changes."""
    whole = array.dtype.kind in "biu" and np.dtype(dtype).kind in "biu"
    return whole or not array.size or np.can_cast(array.dtype, dtype, "same_kind")


def converted(array: NDArray[Any], field: Field) -> NDArray[Any]:
    """Return an array as a field's type. Raises ConfigError where that does not hold a number.

    Floats are rounded; integers stay what they are.
    """
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(array, field.dtype)
    if made.dtype == array.dtype:
        return made
    if made.dtype.kind == "f":
        lost_N = np.isinf(made) if array.dtype.kind != "f" else np.isinf(made) & np.isfinite(array)
    else:
        # An unsigned number above half of its range equals the negative one that it becomes.
        lost_N = (made != array) | ((made < 0) != (array < 0))
    if lost_N.any():
        raise ConfigError(
            f"a sample's field {field.name!r}",
            got=array[lost_N].flat[0],
            limit=f"numbers that {field.dtype} holds",
        )
    return made
