"""What a step changes in the planner state: small, and exact to the byte.

A state is text of many integers of which a step moves few, by little. Whole numbers are kept as
what is added to them, outstanding spans as which of them stay and which come new.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from megadask.planner.errors import StateError
from megadask.planner.state import narrow, widen

#: Marks in a delta: a value instead, integers added, keys changed, runs of rows.
_WHOLE, _ADDED, _KEYS, _ROWS = "=", "+", "k", "r"


def difference(before: str, after: str) -> list[Any]:
    """Return plain JSON that makes ``after`` of ``before``, both JSON as `PlannerState` writes it.

    `Replayed` inverts it. The last item is a checksum of ``after``.
    """
    old, new = json.loads(before), json.loads(after)
    change = _difference(old, new)
    if _dumped(_applied(old, change)) != after:  # equal values that read otherwise: 1 and 1.0
        change = {_WHOLE: new}
    return [change, zlib.crc32(after.encode())]


class Replayed:
    """A state that steps are replayed on, one after the other: it is parsed once.

    Parameters
    ----------
    state
        JSON as `PlannerState` writes it.
    """

    def __init__(self, state: str) -> None:
        self._data = json.loads(state)
        self._checksum: Any = None  # what the last step says of the state behind it

    def apply(self, delta: Sequence[Any]) -> None:
        """Go on behind a step. Raises StateError for what is no delta, or of another state.

        Where a delta fits by its form alone, only `to_json` tells that it is of another state.
        """
        try:
            change, self._checksum = delta
            self._data = _applied(self._data, change)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise StateError("a step cannot be replayed on this state", got=repr(error)) from error

    def to_json(self) -> str:
        """Return the state. Raises StateError if it is not the one that was written."""
        text = _dumped(self._data)
        found = zlib.crc32(text.encode())
        if self._checksum not in (None, found):
            raise StateError(
                "steps were replayed to another state", got=found, limit=self._checksum
            )
        return text


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _difference(old: Any, new: Any) -> Any:
    """Return what makes ``new`` of ``old``; None where they are equal."""
    if type(old) is type(new) and old == new and not isinstance(old, dict):
        return None
    numbers = _integers(old), _integers(new)
    if None not in numbers and _shape(old) == _shape(new):
        return {_ADDED: _sparse(*numbers)}  # type: ignore[arg-type]
    if isinstance(old, dict) and isinstance(new, dict):
        rows = _row_difference(old, new)
        return _key_difference(old, new) if rows is None else rows
    return {_WHOLE: new}


def _applied(old: Any, change: Any) -> Any:
    """Return what a change makes of a value, which is modified where it is a list or a dict."""
    if change is None:
        return old
    if _WHOLE in change:
        return change[_WHOLE]
    if _ADDED in change:
        return _add(old, change[_ADDED])
    return _apply_rows(old, change) if _ROWS in change else _apply_keys(old, change)


# Integers: one, a list, or a list of lists -------------------------------------------------------


def _integers(value: Any) -> list[int] | None:
    """Return the integers of a value, in order; None where there is anything else."""
    if type(value) is int:
        return [value]
    if not isinstance(value, list):
        return None
    found = list(chain.from_iterable(value)) if _is_nested(value) else value
    return found if set(map(type, found)) <= {int} else None


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {list}


def _shape(value: Any) -> Any:
    if not isinstance(value, list):
        return None
    return list(map(len, value)) if _is_nested(value) else len(value)


def _add(old: Any, added: Sequence[int]) -> Any:
    """Return integers to which some is added, as `_sparse` says it."""
    rows = old if _is_nested(old) else [old if isinstance(old, list) else [old]]
    row, place = 0, -1
    pairs = iter(added)
    for gap, amount in zip(pairs, pairs, strict=True):
        place += gap
        while place >= len(rows[row]):
            place -= len(rows[row])
            row += 1
        rows[row][place] += amount
    return old if isinstance(old, list) else rows[0][0]


def _sparse(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """Return how far the next integer that changed is, and what is added to it, alternately."""
    found, last = [], -1
    for place, (was, now) in enumerate(zip(old, new, strict=True)):
        if was != now:
            found += [place - last, now - was]
            last = place
    return found


# Keys --------------------------------------------------------------------------------------------


def _key_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """Return the changes by key, and the order of the keys where there are others."""
    changes = {}
    for key, value in new.items():
        change = _difference(old[key], value) if key in old else {_WHOLE: value}
        if change is not None:
            changes[key] = change
    if list(old) == list(new):
        return {_KEYS: changes} if changes else None
    return {_KEYS: changes, "order": list(new)}


def _apply_keys(old: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    for key, changed in change[_KEYS].items():
        old[key] = _applied(old.get(key), changed)
    return {key: old[key] for key in change["order"]} if "order" in change else old


# Rows of a span table ----------------------------------------------------------------------------


def _row_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """Return which rows of a table stay and which are new; None for what is no table of columns.

    Rows keep their order in canonical tables, so those that stay are runs of the old ones.
    """
    if not {"position", "start"} <= old.keys() or list(old) != list(new):
        return None
    if any(":" in name for name in new):
        return None  # lists of items have offsets
    if old == new:
        return None if list(old.items()) == list(new.items()) else {_WHOLE: dict(new)}
    old_N = {row: n for n, row in enumerate(zip(*widen(old).values(), strict=True))}
    runs: list[list[int]] = []  # [first row, how many], first -1 for new ones
    added = []
    for row in zip(*widen(new).values(), strict=True):
        place = old_N.get(row, -1)
        if place < 0:
            added.append(row)
        if runs and (place < 0) == (runs[-1][0] < 0) and (place < 0 or place == sum(runs[-1])):
            runs[-1][1] += 1
        else:
            runs.append([place, 1])
    columns = [list(column) for column in zip(*added, strict=True)]
    rows = narrow(dict(zip(new, columns, strict=True))) if added else {}
    return {_ROWS: [n for run in runs for n in run], "new": rows}


def _apply_rows(old: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    rows = list(zip(*widen(old).values(), strict=True))
    added = iter(zip(*widen(change["new"]).values(), strict=True) if change["new"] else ())
    found: list[tuple[Any, ...]] = []
    pairs = iter(change[_ROWS])
    for first, count in zip(pairs, pairs, strict=True):
        if first < 0:
            found += [next(added) for _ in range(count)]
        else:
            found += rows[first : first + count]
    columns = [list(column) for column in zip(*found, strict=True)]
    return narrow(dict(zip(old, columns, strict=True)))
