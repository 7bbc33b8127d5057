"""Data sets that Hugging Face ``datasets`` saved to disk, read without that package."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from megadask.planner.errors import ConfigError
from megadask.readers.arrow import ArrowIpc
from megadask.readers.index_file import field, read_index
from megadask.readers.paths import DataFile, Paths, below, expand

_STATE = "state.json"


class HuggingFace(ArrowIpc):
    """Read folders that ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote.

    Saving writes the rows in the order of the data set, so its ``select``, ``shuffle`` and so on
    are in the files. What ``set_format`` and ``set_transform`` asked for is not applied. Records
    hold what Arrow holds: a class label is its number, an image is a dict of ``bytes`` and
    ``path``. A shard is one file of the data set.

    Parameters
    ----------
    paths
        A folder, or several, as paths, globs, brace lists or fsspec URLs.
    split
        Split of a saved ``DatasetDict``, such as ``"train"``.
    columns
        Columns to make records of; all of them when None.
    """

    def __init__(
        self, paths: Paths, split: str | None = None, columns: Sequence[str] | None = None
    ) -> None:
        super().__init__(paths, columns)
        self._split = split
        self._options = {"split": split, "columns": self._columns}

    def _files(self) -> list[DataFile]:
        """Return the Arrow files that the states of the folders name, in their order."""
        states = expand(posixpath.join(p, self._split or "", _STATE) for p in self._folders())
        return [file for state in states for file in _data_files(state)]

    def _folders(self) -> list[str]:
        if self._split is None:
            for pattern in self._patterns:
                listing = posixpath.join(pattern, "dataset_dict.json")
                try:
                    (found, *_) = expand([listing])
                except ConfigError:
                    continue
                raise ConfigError(
                    f"{pattern!r} holds the splits of a data set",
                    got="split=None",
                    limit=f"one of {field(read_index(found.url), 'splits', list, found.url)}",
                )
        return list(self._patterns)


def _data_files(state: DataFile) -> list[DataFile]:
    content = read_index(state.url)
    if content.get("_indices_data_files"):
        raise ConfigError(
            f"{state.url} has a table of indices, as old versions of datasets wrote it",
            remedy="Load and save it with a newer version.",
        )
    sizes = {file.name: file for file in below(posixpath.dirname(state.url))}
    folder = posixpath.dirname(state.name)
    files = []
    for entry in field(content, "_data_files", list, state.url):
        name = field(entry if isinstance(entry, dict) else {}, "filename", str, state.url)
        if name not in sizes:
            raise ConfigError(f"there is no file {name!r}, which {state.url} names")
        found = sizes[name]
        files.append(DataFile(found.url, posixpath.join(folder, name), found.size_bytes))
    if not files:
        raise ConfigError(f"{state.url} names no files")
    return files
