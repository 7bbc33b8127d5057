"""Columns that nobody needs are not read: only where transforms say what they need."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megadask as md
from megadask.indexing.length_column import LengthReader
from megadask.planner.state import LaneCursor
from megadask.scheduling.lanes import read_lane
from megadask.scheduling.reading import ProjectableReader
from megadask.transforms.columns import declared_columns
from tests.megadask.helpers.reader_cases import mds_entry, mds_shard

ROWS = [
    {"text": f"document {i}", "n": i, "payload": "x" * 2000, "ids": list(range(i))}
    for i in range(30)
]
TABLE = pa.Table.from_pylist(ROWS)


def _parquet(folder: Path) -> Any:
    pq.write_table(TABLE, folder / "a.parquet", row_group_size=11)
    return md.readers.Parquet(folder / "*.parquet")


def _arrow(new: Callable[..., Any]) -> Callable[[Path], Any]:
    def write(folder: Path) -> Any:
        with new(folder / "a.arrow", TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=11)
        return md.readers.ArrowIpc(folder / "*.arrow")

    return write


def _saved(folder: Path) -> Any:
    _arrow(pa.ipc.new_stream)(folder)
    state = {"_data_files": [{"filename": "a.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    return md.readers.HuggingFace(folder)


def _csv(folder: Path) -> Any:
    lines = ["text,n,payload", *(f"{row['text']},{row['n']},{row['payload']}" for row in ROWS)]
    (folder / "a.csv").write_text("\n".join(lines))
    return md.readers.Csv(folder / "a.csv", types={"n": "int"})


def _mds(folder: Path) -> Any:
    columns: dict[str, Any] = {
        "n": ("int", lambda n: np.int64(n).tobytes(), 8),
        "payload": ("str", str.encode, None),
        "text": ("str", str.encode, None),
    }
    data = mds_shard(ROWS, columns)
    entry = mds_entry(
        "shard.00000.mds",
        data,
        len(ROWS),
        column_names=list(columns),
        column_encodings=[encoding for encoding, _, _ in columns.values()],
        column_sizes=[size for _, _, size in columns.values()],
    )
    (folder / "shard.00000.mds").write_bytes(data)
    (folder / "index.json").write_text(json.dumps({"shards": [entry], "version": 2}))
    return md.readers.Mds(folder)


READERS = {
    "parquet": _parquet,
    "arrow file": _arrow(pa.ipc.new_file),
    "arrow stream": _arrow(pa.ipc.new_stream),
    "hugging face": _saved,
    "csv": _csv,
    "mds": _mds,
}


@pytest.fixture(params=READERS, ids=str)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return READERS[request.param](tmp_path)


def rows(reader: Any, start: int = 0) -> list[Mapping[str, Any]]:
    return [one for shard in range(len(reader.shards())) for one in reader.read(shard, start)]


def keys(reader: Any) -> set[str]:
    return set().union(*rows(reader))


def lean(reader: Any, transform: Any, **options: Any) -> Any:
    """Return the reader that loaders get."""
    source = md.Source("a", reader, transform=transform, **options)
    batching = md.Packed(seq_len=8, global_batch=1)
    return md.Pipeline(sources=[source], batching=batching).source_specs()["a"].reader


def test_a_projection_is_the_same_rows_with_fewer_columns(reader: ProjectableReader) -> None:
    whole = rows(reader)
    for names in (["text"], ["n", "text"], ["text", "no such"], ["no such"], []):
        some = reader.project(names)
        again = pickle.loads(pickle.dumps(some))
        for one in (some, again):
            assert rows(one) == [{k: row[k] for k in names if k in row} for row in whole]
        assert some.columns == sorted(names)
        assert some.fingerprint() == reader.fingerprint()
        assert some.shards() == reader.shards()
        assert rows(some, 3) == rows(some)[3:] or len(some.shards()) > 1
    assert reader.columns is None
    assert rows(reader.project(["n"]).project(["text"])) == rows(reader.project(["text"]))  # type: ignore[attr-defined]


def test_a_transform_that_says_what_it_reads_gets_no_more(reader: Any) -> None:
    text = md.transforms.Bytes("text")
    assert keys(lean(reader, text)) == {"text"}
    assert keys(lean(reader, text, metadata=["n"])) == {"text", "n"}
    assert keys(lean(reader, text, extras=["n", "no such"])) == {"text", "n"}
    assert keys(lean(reader, text, length_column="n")) == {"text", "n"}
    assert keys(lean(reader, md.transforms.Chain(text))) == {"text"}
    whole = keys(reader)
    for transform in (None, lambda record: text(record), md.transforms.Chain(dict, text)):
        assert lean(reader, transform) is reader
        assert keys(lean(reader, transform)) == whole


def test_columns_that_were_chosen_stay(tmp_path: Path) -> None:
    _parquet(tmp_path)
    chosen = md.readers.Parquet(tmp_path / "a.parquet", columns=["text", "payload"])
    text = md.transforms.Bytes("text")
    assert lean(chosen, text) is chosen
    # What lengths are known by is read with the payload: then both end where the file is broken.
    assert keys(lean(chosen, text, length_column="n")) == {"text", "payload", "n"}


def test_what_a_chain_reads() -> None:
    image, text = md.transforms.DecodeImage("image"), md.transforms.Bytes("caption")
    chain = md.transforms.Chain
    assert declared_columns(text) == {"caption"}
    assert declared_columns(image) is None  # it passes all columns on
    assert declared_columns(chain(image, text)) == {"image", "caption"}
    assert declared_columns(chain(chain(image, text))) == {"image", "caption"}
    assert declared_columns(chain(chain(image), text)) is None
    assert declared_columns(chain(text, image)) == {"caption"}
    assert declared_columns(chain(image)) is None
    assert declared_columns(None) is None

    class Own:
        def __init__(self, columns: Any) -> None:
            self.columns = columns

        def __call__(self, record: Any) -> Any:
            return record

    assert declared_columns(Own(["a", "b"])) == {"a", "b"}
    assert declared_columns(Own("a")) == {"a"}
    assert declared_columns(Own(lambda: ("a",))) == {"a"}
    assert declared_columns(Own(None)) is None
    assert declared_columns(Own([1, 2])) is None


Bytes, Chain = md.transforms.Bytes, md.transforms.Chain
NEEDED: dict[str, dict[str, Any]] = {
    "transform": {"transform": Bytes("body")},
    "chat": {"transform": md.transforms.Chat(Bytes(), "body")},
    "pair": {"transform": md.transforms.PromptResponse(Bytes(), "text", "body")},
    "group": {"transform": md.transforms.Group(Bytes(), "text", "body")},
    "preference": {"transform": md.transforms.Preference(Bytes(), "text", "text", "body")},
    "chain": {"transform": Chain(Bytes("body"))},
    "end of a chain": {"transform": Chain(md.transforms.DecodeImage("text"), Bytes("body"))},
    "image": {"transform": md.transforms.DecodeImage("body")},
    "length": {"transform": Bytes("text"), "length_column": "body"},
    "loss": {"transform": Bytes("text"), "length_column": "n", "loss_column": "body"},
    "metadata": {"transform": Bytes("text"), "length_column": "n", "metadata": ["body"]},
    "metadata of samples": {"metadata": ["body"]},
    "extras of samples": {"extras": ["body"]},
}


class Sparing:
    """A transform of somebody's own, which reads a column where there is one."""

    columns = ("body", "text")
    keeps_columns = True

    def __call__(self, record: Any) -> Any:
        return {"body": record.get("body", record["text"])}


SPARED: dict[str, dict[str, Any]] = {
    "extras": {"transform": Bytes("text"), "extras": ["body"]},
    "metadata": {"transform": Bytes("text"), "metadata": ["body"]},
    "own": {"transform": Sparing()},
    "made in a chain": {"transform": Chain(Sparing(), Bytes("body"))},
    "unknown": {"transform": Chain(lambda record: {"body": record["text"]}, Bytes("body"))},
    "after the tokens": {"transform": Chain(Bytes("text"), Bytes("body"))},
}


@pytest.mark.parametrize("options", NEEDED.values(), ids=NEEDED)
def test_a_column_that_is_needed_and_missing_is_an_error_at_once(reader: Any, options: Any) -> None:
    with pytest.raises(
        md.errors.ConfigError, match=r"'a': .* lacks columns; got \['body'\]; .*'n'"
    ):
        lean(reader, **{"transform": None, **options})


@pytest.mark.parametrize("options", SPARED.values(), ids=SPARED)
def test_a_column_that_can_be_done_without_may_be_missing(reader: Any, options: Any) -> None:
    assert "text" in keys(lean(reader, **options))


def test_a_column_that_is_needed_must_be_among_those_that_are_read(tmp_path: Path) -> None:
    _parquet(tmp_path)
    chosen = md.readers.Parquet(tmp_path / "a.parquet", columns=["payload"])
    with pytest.raises(md.errors.ConfigError, match=r"not read; got \['text'\].*columns="):
        lean(chosen, Bytes("text"))
    assert keys(lean(chosen, Bytes("payload"), length_column="n")) == {"payload", "n"}


def _with_another(name: str, folder: Path) -> Any:
    """Return a reader whose last file has the columns "n" and "other" alone."""
    READERS[name](folder)
    other = pa.table({"n": [1], "other": ["x"]})
    if name == "parquet":
        pq.write_table(other, folder / "b.parquet")
        return md.readers.Parquet(folder / "*.parquet")
    if name == "csv":
        (folder / "b.csv").write_text("n,other\n1,x\n")
        return md.readers.Csv(folder / "*.csv")
    with pa.ipc.new_file(folder / "b.arrow", other.schema) as writer:
        writer.write_table(other)
    return md.readers.ArrowIpc(folder / "*.arrow")


@pytest.mark.parametrize("name", [name for name in READERS if name != "mds"])
def test_a_later_file_that_lacks_a_column_names_those_that_it_has(
    name: str, tmp_path: Path
) -> None:
    reader = _with_another(name, tmp_path)
    some = pickle.loads(pickle.dumps(reader)).project(["text", "length"])
    last = rows(some)[-1]
    assert last == {}
    with pytest.raises(md.errors.MegaDaskError, match=r"no column 'text'; got columns \['n', 'oth"):
        Bytes("text")(last)
    known = LengthReader.of(reader, "text", None, (), None)
    assert "got columns ['n', 'other']" in rows(known)[-1].reason  # type: ignore[attr-defined]
    shard = len(reader.shards()) - 1
    source = md.Source("a", reader, transform=Bytes("text"), lanes=1)
    batching = md.Packed(seq_len=64, global_batch=1)
    spec = md.Pipeline(sources=[source], batching=batching).source_specs()["a"]
    with pytest.raises(md.errors.MegaDaskError, match=r"got columns \['n', 'other'\]"):
        next(read_lane(spec, 0, 0, LaneCursor(shard=shard)))


def test_a_column_that_is_not_read_cannot_be_bad(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n\nhello,many\n")
    reader = md.readers.Csv(tmp_path / "a.csv", types={"n": "int"})
    assert rows(lean(reader, md.transforms.Bytes("text"))) == [{"text": "hello"}]


@pytest.mark.parametrize("name", ["parquet", "arrow file"])
def test_bytes_of_other_columns_are_not_read(name: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes
    table = pa.table({"n": range(300), "payload": [noise(20_000) for _ in range(300)]})
    if name == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
        reader: Any = md.readers.Parquet(tmp_path / "a.parquet")
    else:
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
        reader = md.readers.ArrowIpc(tmp_path / "a.arrow")
    some = reader.project(["n"])
    before = _bytes_read()
    assert [row["n"] for row in rows(some)] == list(range(300))
    middle = _bytes_read()
    rows(reader)
    assert middle - before < 300_000
    assert _bytes_read() - middle > 6_000_000


def _bytes_read() -> int:
    """Return the bytes that this process has read by system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])
