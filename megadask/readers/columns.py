"""Base of readers of files with columns, of which not all need be read."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Self

from megadask.readers.files import FileReader


class ColumnReader(FileReader):
    """A reader of files with columns: ``columns=`` says which become part of the records."""

    _columns: list[str] | None
    _is_projected = False

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns that are read, None for all."""
        return self._columns

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
