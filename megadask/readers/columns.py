"""Base of readers of files with columns, of which not all need be read."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, Self

from megadask.readers.files import FileReader, Part
from megadask.readers.paths import Paths


class ColumnReader(FileReader):
    """A reader of files with columns: ``columns=`` says which become part of the records."""

    _columns: list[str] | None
    _is_projected = False
    _first: tuple[str, ...] = ()

    def __init__(self, paths: Paths, **options: Any) -> None:
        super().__init__(paths, **options)
        self._found: dict[str, tuple[str, ...]] = {}  # while files are listed: url to columns

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns that are read, None for all."""
        return self._columns

    def column_names(self) -> Sequence[str]:
        """Return the columns of the first file with records, whichever of them are read."""
        self._listing()
        return self._first

    def project(self, columns: Collection[str]) -> Self:
        """Return a reader of the same shards and rows with only these columns, where there are any.

        A column that a file lacks is not in its records.
        """
        made = copy.copy(self)
        made._parts = self._listing()
        made._columns = sorted(columns)
        made._is_projected = True
        made._options = {**self._options, "columns": made._columns}
        return made

    def _listing(self) -> tuple[Part, ...]:
        if self._parts is None:
            first = super()._listing()[0]
            self._first = self._found.get(first.url, ())
            self._found = {}
        return super()._listing()
