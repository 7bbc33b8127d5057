"""Hashes of what was decided, the same on every platform."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def array_digest(head: str, columns: list[NDArray[Any]]) -> str:
    """Return a hash of integer arrays, the same on every platform."""
    digest = hashlib.blake2b(head.encode(), digest_size=16)
    for column in columns:
        digest.update(np.ascontiguousarray(column, "<i8").tobytes())
    return digest.hexdigest()
