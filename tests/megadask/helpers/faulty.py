"""Transforms that fail, and errors that do not travel well. Importable by workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.megadask.helpers.data import unfold

#: The record that the transforms below fail at.
BAD = 5


class UserError(Exception):
    """What a user's code may raise."""


class PickyError(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def raise_at_bad(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        raise UserError(f"cannot decode {record['id']}")
    return unfold(record)


def raise_always(record: Mapping[str, Any]) -> Any:
    raise UserError(f"cannot decode {record['id']}")


def raise_picky(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        raise PickyError(code=7)
    return unfold(record)


def raise_stop_iteration(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        next(iter(()))
    return unfold(record)


def raise_system_exit(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        raise SystemExit("a library that ends the program")
    return unfold(record)


def raise_file_not_found(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        Path("no such folder/vocabulary.json").read_text()
    return unfold(record)


def raise_timeout(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        raise TimeoutError("a server of the user's is slow")
    return unfold(record)


def raise_generator_exit(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        raise GeneratorExit("somebody's generator")
    return unfold(record)


def raise_cancelled(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        raise asyncio.CancelledError("somebody's task")
    return unfold(record)


class MuteError(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("it has no text")


def raise_mute(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        raise MuteError
    return unfold(record)


def raise_unicode(record: Mapping[str, Any]) -> Any:
    if record["id"] == BAD:
        "\ud800".encode()
    return unfold(record)


def drop_every_third(record: Mapping[str, Any]) -> Any:
    return None if record["id"] % 3 == 0 else unfold(record)


def drop_all(record: Mapping[str, Any]) -> None:
    return None


def no_dict(record: Mapping[str, Any]) -> Any:
    return unfold(record)["tokens"]


def no_tokens(record: Mapping[str, Any]) -> Any:
    return {"ids": [1, 2]}


def float_tokens(record: Mapping[str, Any]) -> Any:
    return {"tokens": unfold(record)["tokens"].astype(np.float32)}


def square_tokens(record: Mapping[str, Any]) -> Any:
    return {"tokens": np.ones((2, 2), np.int64)}


def long_mask(record: Mapping[str, Any]) -> Any:
    tokens = unfold(record)["tokens"]
    return {"tokens": tokens, "loss_mask": np.ones(len(tokens) + 1)}


def unsteady(record: Mapping[str, Any]) -> Any:
    """Reads differently every time."""
    return {"tokens": np.array([time.monotonic_ns(), record["id"]])}


def wait_for_file(record: Mapping[str, Any]) -> Any:
    """Hangs until a file is there: a source that answers no more."""
    if record["id"] == BAD:
        deadline = time.monotonic() + 60
        while not Path(str(record["gate"])).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    return unfold(record)
