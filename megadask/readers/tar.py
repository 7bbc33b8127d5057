"""Tar files of samples in parts, as WebDataset writes them: every tar is a shard."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

from megadask.planner.errors import ConfigError
from megadask.readers.compression import check_suffix
from megadask.readers.files import FileReader, Part, check_positive
from megadask.readers.forward import Forward, open_forward
from megadask.readers.lines import MAX_RECORD_BYTES
from megadask.readers.paths import DataFile, Paths
from megadask.readers.storage import BrokenData
from megadask.readers.tar_members import BLOCK_BYTES, members, parse_header
from megadask.scheduling.reading import BadRecord, Shard


class Tar(FileReader):
    """Read tar files, plain or compressed (``.tar.gz``, ``.tgz``, ``.tar.zst``).

    Neighbouring members whose names are alike up to the first dot of the file name, folders
    included, make one record: ``a/0.jpg`` and ``a/0.cls.txt`` become ``{"__key__": "a/0",
    "jpg": bytes, "cls.txt": bytes}``. Extensions are put in lower case. Passed over are members
    without an extension, hidden ones, and those whose path begins with ``__name__``. This is
    WebDataset's convention: https://github.com/webdataset/webdataset.

    Parameters
    ----------
    paths
        A path, glob, brace list or fsspec URL, or several of them.
    max_record_bytes
        A longer record is a bad one, and is not read.
    """

    def __init__(self, paths: Paths, *, max_record_bytes: int = MAX_RECORD_BYTES) -> None:
        check_positive("Tar", max_record_bytes=max_record_bytes)
        self._max_record_bytes = max_record_bytes
        super().__init__(paths, max_record_bytes=max_record_bytes)

    def _list(self, file: DataFile) -> list[Part]:
        check_suffix(file.name)
        try:
            with open_forward(file.url) as source:
                header = source.read(BLOCK_BYTES)
                if header.strip(b"\0"):
                    parse_header(header)
        except BrokenData as error:
            raise ConfigError(f"{file.url} is not a tar file: {error}") from error
        return [Part(file.url, Shard(file.name, None, file.size_bytes))]

    def _read(self, part: Part, start: int) -> Generator[Mapping[str, Any] | BadRecord, None, None]:
        row = 0
        with open_forward(part.url, part.shard.size_bytes) as source:
            try:
                for record in self._records(source, start):
                    if row >= start:
                        yield record
                    row += 1
            except BrokenData as error:
                raise part.truncated(row, str(error)) from error

    def _records(self, source: Forward, start: int) -> Iterator[dict[str, Any] | BadRecord]:
        """Yield every record; the parts of those before ``start`` are not read."""
        row = -1
        record: dict[str, Any] = {}
        problem: BadRecord | None = None
        size_bytes = 0
        for member in members(source):
            key, extension = split_name(member.name)
            if not extension:
                continue
            if not record or key != record["__key__"]:
                if record:
                    yield problem or record
                row += 1
                record, problem, size_bytes = {"__key__": key}, None, 0
            if row < start or problem:
                continue
            size_bytes += member.size_bytes
            reason = None
            if extension in record:
                reason = f"two members have the extension {extension!r}"
            elif size_bytes > self._max_record_bytes:
                reason = "longer than max_record_bytes"
            elif not _is_utf8(member.name):
                reason = "a name that is not UTF-8"
            if reason:
                problem = BadRecord(f"row {row}: sample {_printable(key)!r}: {reason}")
            else:
                record[extension] = source.read(member.size_bytes)
        if record:
            yield problem or record


def split_name(name: str) -> tuple[str, str]:
    """Return the key of a member and its extension, which is empty where it is passed over."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    first = name.partition("/")[0]
    is_meta = first.startswith("__") and first.endswith("__") and len(first) >= 4
    return folder + slash + stem, extension.lower() if stem and not is_meta else ""


def _is_utf8(name: str) -> bool:
    return name == _printable(name)


def _printable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
