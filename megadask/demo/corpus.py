"""A small corpus of real documents with a heavy tail, built once from this Python's own files.

Source ``code`` is Parquet (columns text, path), ``prose`` Zstandard-compressed JSON lines and
``docstrings`` Arrow files. It is in place only when it is complete: it is built beside its folder,
which a rename then puts there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megadask.demo import documents as docs
from megadask.demo.documents import Document, Root
from megadask.planner.errors import ConfigError

#: Raised whenever the same files would make another corpus.
VERSION = 1

DEFAULT_MAX_BYTES = 120_000_000
#: Parsing is what takes time: docstrings are taken from this part of the code, and not from the
#: largest files, which are tables and generated code with few of them.
_PARSED_PART = 1 / 8
_MAX_PARSED_BYTES = 100_000

_MAX_GROUP_BYTES = 2_000_000
_MIN_GROUPS = 24
_GROUPS_PER_FILE = 4
_PERCENTILES = (1, 10, 50, 90, 99)

_Group = list[Document]


@dataclass(frozen=True, kw_only=True)
class CorpusSource:
    """One source of the corpus.

    Attributes
    ----------
    pattern
        Glob of its files.
    documents
        Number of records.
    size_bytes
        UTF-8 bytes of all texts.
    length_bytes
        Percentiles (``"p50"``, ...) and the maximum (``"max"``) of the bytes of a text.
    """

    pattern: str
    documents: int
    size_bytes: int
    length_bytes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The corpus: its folder, and its sources by name."""

    folder: Path
    sources: Mapping[str, CorpusSource]


def build_corpus(
    workdir: Path,
    *,
    max_bytes: int | None = None,
    progress: Callable[[str], None] | None = None,
    roots: Sequence[Root] | None = None,
) -> Corpus:
    """Return the corpus in ``workdir``, after building it where it is missing or incomplete.

    Parameters
    ----------
    workdir
        Folder to build in; made where it is missing.
    max_bytes
        Most bytes of ``code``; `DEFAULT_MAX_BYTES` when None. The other sources are smaller.
    progress
        Called with a line of text now and then.
    roots
        Folders to take documents from; what is installed when None.
    """
    max_bytes = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
    if max_bytes < 1:
        raise ConfigError("build_corpus(max_bytes=)", got=max_bytes, limit="an integer >= 1")
    roots = docs.installed_roots() if roots is None else tuple(roots)
    folder = workdir.absolute() / f"corpus-v{VERSION}"
    parameters = {
        "version": VERSION,
        "max_bytes": max_bytes,
        "roots": hashlib.sha256(repr(roots).encode()).hexdigest()[:16],
    }
    if (corpus := _load(folder, parameters)) is not None:
        return corpus
    workdir.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        # Nobody else builds now, so what lies about is from a build that was killed.
        partial, old = folder.with_suffix(".partial"), folder.with_suffix(".old")
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            _build(partial, parameters, roots, max_bytes, progress or _ignore)
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    built = _load(folder, parameters)
    assert built is not None
    return built


def _ignore(line: str) -> None:
    """Take a line of progress nowhere."""


def _build(
    folder: Path,
    parameters: Mapping[str, Any],
    roots: Sequence[Root],
    max_bytes: int,
    progress: Callable[[str], None],
) -> None:
    progress("looking for files")
    code = docs.choose(docs.find(roots, docs.is_code), max_bytes)
    prose = docs.choose(docs.find(roots, docs.is_prose), max_bytes)
    ordinary = [file for file in code if file.size_bytes <= _MAX_PARSED_BYTES]
    parsed = docs.choose(ordinary, int(max_bytes * _PARSED_PART))
    kinds: list[tuple[str, Iterable[Document], str, _Writer]] = [
        ("code", docs.texts(code), ".parquet", _write_parquet),
        ("prose", docs.prose(prose), ".jsonl.zst", _write_jsonl),
        ("docstrings", docs.docstrings(parsed), ".arrow", _write_arrow),
    ]
    manifest: dict[str, Any] = {**parameters, "sources": {}}
    for name, documents, suffix, write in kinds:
        manifest["sources"][name] = _write(
            folder / name, suffix, write, list(docs.distinct(documents)), progress
        )
    text = json.dumps(manifest, indent=1)
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def _write(
    folder: Path,
    suffix: str,
    write: _Writer,
    documents: Sequence[Document],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Write one source, and return what the manifest says of it."""
    folder.mkdir(parents=True)
    length_N = np.array([document.size_bytes for document in documents], np.int64)
    total_bytes = int(length_N.sum())
    groups = _groups(documents, min(_MAX_GROUP_BYTES, total_bytes // _MIN_GROUPS + 1))
    files: dict[str, int] = {}
    while group := next(groups, None):
        path = folder / f"part-{len(files):03d}{suffix}"
        write(path, _chain(group, islice(groups, _GROUPS_PER_FILE - 1)))
        files[path.name] = path.stat().st_size
    progress(
        f"{folder.name}: {len(documents):,} documents, {total_bytes / 1e6:.1f} MB of text "
        f"in {len(files)} files of {sum(files.values()) / 1e6:.1f} MB"
    )
    lengths = {f"p{q}": int(v) for q, v in zip(_PERCENTILES, _percentiles(length_N), strict=True)}
    source = CorpusSource(
        pattern=f"{folder.name}/*{suffix}",
        documents=len(documents),
        size_bytes=total_bytes,
        length_bytes={**lengths, "max": int(length_N.max(initial=0))},
    )
    return {**asdict(source), "files": files}


def _percentiles(length_N: Any) -> Any:
    if not len(length_N):
        return np.zeros(len(_PERCENTILES), np.int64)
    return np.percentile(length_N, _PERCENTILES, method="nearest")


def _chain(first: _Group, others: Iterable[_Group]) -> Iterator[_Group]:
    yield first
    yield from others


def _groups(documents: Iterable[Document], group_bytes: int) -> Iterator[_Group]:
    """Yield the documents in groups of about ``group_bytes``."""
    group: _Group = []
    total_bytes = 0
    for document in documents:
        group.append(document)
        total_bytes += document.size_bytes
        if total_bytes >= group_bytes:
            yield group
            group, total_bytes = [], 0
    if group:
        yield group


_Writer = Callable[[Path, Iterable[_Group]], None]


def _batch(group: _Group, name: str) -> pa.RecordBatch:
    texts = [document.text for document in group]
    return pa.record_batch({"text": texts, name: [document.name for document in group]})


def _write_parquet(path: Path, groups: Iterable[_Group]) -> None:
    schema = pa.schema([("text", pa.string()), ("path", pa.string())])
    # Small pages: a reader holds one page of each column.
    options = {"compression": "zstd", "data_page_size": 64 * 1024, "use_dictionary": False}
    with pq.ParquetWriter(path, schema, write_page_checksum=True, **options) as writer:
        for group in groups:
            writer.write_batch(_batch(group, "path"), row_group_size=len(group))


def _write_jsonl(path: Path, groups: Iterable[_Group]) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        for document in (document for group in groups for document in group):
            record = {"text": document.text, "path": document.name}
            stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def _write_arrow(path: Path, groups: Iterable[_Group]) -> None:
    schema = pa.schema([("text", pa.string()), ("name", pa.string())])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, schema, options=options) as writer,
    ):
        for group in groups:
            writer.write_batch(_batch(group, "name"))


def _load(folder: Path, parameters: Mapping[str, Any]) -> Corpus | None:
    """Return the corpus of a folder, None where it is missing, damaged or another one."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if any(manifest[name] != value for name, value in parameters.items()):
            return None
        sources = {}
        for name, entry in manifest["sources"].items():
            for file, size_bytes in entry.pop("files").items():
                if (folder / name / file).stat().st_size != size_bytes:
                    return None
            sources[name] = CorpusSource(**{**entry, "pattern": str(folder / entry["pattern"])})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return Corpus(folder=folder, sources=sources)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other processes from building the same corpus; the lock ends with the process."""
    path = folder.with_suffix(".lock")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process builds the corpus in {folder.parent}",
                remedy="Wait for it, or choose another folder.",
            ) from error
        yield
    finally:
        os.close(file)
