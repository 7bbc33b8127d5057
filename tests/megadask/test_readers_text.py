"""Plain text and CSV: how records are cut, and what is wrong with a bad one."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megadask.planner.errors import ConfigError
from megadask.readers import Csv, Text
from megadask.scheduling.reading import BadRecord

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


def _rows(reader: Any, start: int = 0) -> list[Any]:
    return list(reader.read(0, start))


def _text(path: Path, data: bytes, *arguments: Any, **options: Any) -> list[Any]:
    path.write_bytes(data)
    return [
        row.reason if isinstance(row, BadRecord) else row["text"]
        for row in _rows(Text(path, *arguments, **options))
    ]


class TestText:
    def test_line_ends_marks_and_blank_lines(self, tmp_path: Path) -> None:
        data = b"\xef\xbb\xbfone \r\n\n  \n\ttwo\nthree"
        assert _text(tmp_path / "x", data) == ["one ", "\ttwo", "three"]

    def test_blocks_are_parted_by_any_number_of_blank_lines(self, tmp_path: Path) -> None:
        data = b"\n\none\ntwo\r\n \n\nthree\n\n\n\xff\n"
        assert _text(tmp_path / "x", data, "block") == [
            "one\ntwo",
            "three",
            "line 10: invalid UTF-8 at byte 0 of the record",
        ]

    @pytest.mark.parametrize("data", [b"", b"\n\n a \n", b"no end"])
    def test_a_file_is_a_record_as_it_is(self, tmp_path: Path, data: bytes) -> None:
        assert _text(tmp_path / "x", data, "file") == [data.decode()]
        assert [shard.rows for shard in Text(tmp_path / "x", "file").shards()] == [1]

    @pytest.mark.parametrize("suffix", PACKERS)
    @pytest.mark.parametrize(
        ("record", "line"), [("line", "line 3"), ("block", "line 3"), ("file", "line 3")]
    )
    def test_invalid_utf8_names_its_line(
        self, tmp_path: Path, suffix: str, record: Any, line: str
    ) -> None:
        data = PACKERS[suffix]("grün\n\n".encode() + b"b\xffd\n\nlast\n")
        found = _text(tmp_path / f"x{suffix}", data, record)
        reasons = [text for text in found if "UTF-8" in text]
        assert len(reasons) == 1
        assert reasons[0].startswith(line)
        assert found == reasons if record == "file" else [found[0], found[-1]] == ["grün", "last"]

    @pytest.mark.parametrize("record", ["line", "block", "file"])
    def test_a_record_that_is_too_long(self, tmp_path: Path, record: Any) -> None:
        data = b"first\n\n" + b"x" * 100_000 + b"\n\nlast\n"
        found = _text(tmp_path / "x", data, record, max_record_bytes=50_000)
        number = 1 if record == "file" else 3
        assert f"line {number}: longer than max_record_bytes" in found
        assert len(found) == (1 if record == "file" else 3)

    def test_a_block_of_many_lines_that_is_too_long(self, tmp_path: Path) -> None:
        data = b"first\n\n" + b"line\n" * 1000 + b"\nlast\n"
        found = _text(tmp_path / "x", data, "block", max_record_bytes=4998)
        assert found == ["first", "line 3: longer than max_record_bytes", "last"]
        assert len(_text(tmp_path / "x", data, "block", max_record_bytes=4999)[1]) == 4999

    @pytest.mark.parametrize(
        "options", [{"record": "word"}, {"column": ""}, {"max_record_bytes": 0}]
    )
    def test_bad_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="Text"):
            Text("x", **options)


def _csv(path: Path, data: bytes, *arguments: Any, **options: Any) -> list[Any]:
    path.write_bytes(data)
    return [
        row.reason if isinstance(row, BadRecord) else row
        for row in _rows(Csv(path, *arguments, **options))
    ]


class TestCsv:
    @given(
        st.lists(
            st.lists(st.text(st.sampled_from('a ,"\n;é'), max_size=9), min_size=2, max_size=2),
            max_size=9,
        ),
        st.sampled_from([",", ";", "\t"]),
        st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
        st.sampled_from(["\n", "\r\n"]),
    )
    def test_what_the_standard_library_writes(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        rows: list[list[str]],
        delimiter: str,
        quoting: Any,
        line_end: str,
    ) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=line_end)
        writer.writerows([["a", "b"], *rows])
        path = tmp_path_factory.getbasetemp() / "x.csv"
        found = _csv(path, text.getvalue().encode(), delimiter=delimiter)
        assert found == [{"a": a, "b": b} for a, b in rows]
        for start in range(len(rows) + 1):
            assert _rows(Csv(path, delimiter=delimiter), start) == found[start:]

    def test_types(self, tmp_path: Path) -> None:
        types: Any = {"n": "int", "x": "float", "yes": "bool", "text": "str"}
        data = b"n,x,yes,text,more\n-3,1e3,True,,a\n,,,,\n"
        assert _csv(tmp_path / "x", data, types=types) == [
            {"n": -3, "x": 1000.0, "yes": True, "text": "", "more": "a"},
            {"n": None, "x": None, "yes": None, "text": "", "more": ""},
        ]

    def test_files_without_a_header(self, tmp_path: Path) -> None:
        found = _csv(tmp_path / "x", b"1,2\n3,4\n", ["b"], names=["a", "b"])
        assert found == [{"b": "2"}, {"b": "4"}]

    @pytest.mark.parametrize("suffix", PACKERS)
    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            (b"1", "line 4: 1 fields, expected 2"),
            (b"1,2,3", "line 4: 3 fields, expected 2"),
            (b"one,2", "line 4: column 'n': b'one' is not int"),
            (b"1,\xff", "line 4: column 'text': invalid UTF-8 at byte 0 of the field"),
            (b'1,"a"b', "line 4: field 2 goes on behind its closing quote"),
            (b"1," + b"x" * 100_000, "line 4: longer than max_record_bytes"),
            (b'1,"' + b"x\n" * 50_000 + b'"', "line 4: longer than max_record_bytes"),
        ],
    )
    def test_a_bad_row_stands_for_itself_only(
        self, tmp_path: Path, suffix: str, row: bytes, reason: str
    ) -> None:
        data = b'n,text\n0,"a\n\xc3\xa9"\n' + row + b"\n\n2,c\n"
        path = tmp_path / f"x{suffix}"
        found = _csv(path, PACKERS[suffix](data), types={"n": "int"}, max_record_bytes=60_000)
        assert found == [{"n": 0, "text": "a\né"}, reason, {"n": 2, "text": "c"}]

    def test_a_quote_that_is_never_closed_ends_with_the_file(self, tmp_path: Path) -> None:
        found = _csv(tmp_path / "x", b'a\nb\n"c\nd\n')
        assert found == [{"a": "b"}, "line 3: a quoted field is not closed"]

    def test_a_quote_within_a_field_is_a_letter(self, tmp_path: Path) -> None:
        assert _csv(tmp_path / "x", b'a,b\n5" pipe,6"\n') == [{"a": '5" pipe', "b": '6"'}]

    @pytest.mark.parametrize(
        ("data", "match"),
        [
            (b"a,b\n1,2\n", r"x\.csv lacks columns|x\.csv: it lacks columns.*'body'.*'a', 'b'"),
            (b"a,a\n", r"x\.csv: two columns have one name.*'a'"),
            (b"\xff,b\n", r"x\.csv: its first line does not name its columns"),
            (b'"a\n', r"x\.csv: its first line does not name its columns.*not closed"),
        ],
    )
    def test_headers_that_cannot_be(self, tmp_path: Path, data: bytes, match: str) -> None:
        (tmp_path / "x.csv").write_bytes(data)
        with pytest.raises(ConfigError, match=match):
            Csv(tmp_path / "x.csv", ["a", "body"]).shards()

    def test_a_file_that_does_not_decompress(self, tmp_path: Path) -> None:
        (tmp_path / "x.csv.gz").write_bytes(b"a,b\n")
        with pytest.raises(ConfigError, match="not a CSV file"):
            Csv(tmp_path / "x.csv.gz").shards()

    def test_an_empty_file_has_no_rows(self, tmp_path: Path) -> None:
        assert _csv(tmp_path / "x", b"\n", ["a"]) == []
        (tmp_path / "y").touch()
        reader = Csv(tmp_path / "*", ["a"])
        assert [list(reader.read(n)) for n in range(2)] == [[], []]

    @pytest.mark.parametrize(
        "options",
        [
            {"columns": "a"},
            {"names": "a"},
            {"types": {"a": "date"}},
            {"delimiter": ",,"},
            {"delimiter": '"'},
        ],
    )
    def test_bad_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="Csv"):
            Csv("x", **options)
