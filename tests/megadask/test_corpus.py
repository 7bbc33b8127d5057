"""The demo's corpus: real documents, built once, the same on every build."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megadask.demo import corpus as corpus_module
from megadask.demo.corpus import Corpus, build_corpus
from megadask.demo.documents import File, Root, choose, installed_roots, is_code, is_prose
from megadask.planner.errors import ConfigError
from megadask.readers import ArrowIpc, Jsonl, Parquet

MAX_BYTES = 1_000_000

_METADATA = (
    "Metadata-Version: 2.1\nName: pkg\nVersion: 1\n\n# About pkg\n" + "It does things. " * 20
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree like that of site-packages."""
    root = tmp_path / "root"
    for i in range(60):
        path = root / f"package{i % 4}" / f"module{i:02d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "\n".join(f"    x{j} = {j}" for j in range(i * i // 4))
        path.write_text(
            f'"""Module {i}."""\n\ndef f():\n    """Do {i}."""\n    if f:\n        class C:\n'
            f'            """Hold {i}."""\n{body}\n'
        )
    (root / "package0" / "copy.py").write_text((root / "package0" / "module00.py").read_text())
    (root / "package0" / "latin.py").write_bytes(b"# \xe9\n")
    (root / "package0" / "broken.py").write_text("def (:\n")
    (root / "package0" / "blank.py").write_text("\n")
    info = root / "pkg-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(_METADATA)
    (info / "top_level.txt").write_text("pkg\n" * 100)
    (info / "LICENSE").write_text("You may do as you like. " * 10)
    for i in range(5):
        (root / "package1" / f"notes{i}.rst").write_text(f"Notes {i}. " * (i + 1) * 20)
    return root


def _build(workdir: Path, root: Path, **options: Any) -> Corpus:
    options = {"max_bytes": MAX_BYTES, **options}
    return build_corpus(workdir, roots=[Root("here", root)], **options)


def _records(corpus: Corpus) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, Any] = {"code": Parquet, "prose": Jsonl, "docstrings": ArrowIpc}
    assert corpus.sources.keys() == kinds.keys()
    found = {}
    for name, source in corpus.sources.items():
        reader = kinds[name](source.pattern)
        found[name] = [r for i in range(len(reader.shards())) for r in reader.read(i)]
    return found


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_sources_hold_what_they_say(tmp_path: Path, root: Path) -> None:
    lines: list[str] = []
    corpus = _build(tmp_path / "work", root, progress=lines.append)
    for name, records in _records(corpus).items():
        source = corpus.sources[name]
        lengths = sorted(len(record["text"].encode()) for record in records)
        assert len(records) == source.documents
        assert sum(lengths) == source.size_bytes
        assert source.length_bytes["max"] == lengths[-1]
        assert lengths[0] <= source.length_bytes["p50"] <= source.length_bytes["p99"] <= lengths[-1]
        assert len({record["text"] for record in records}) == len(records)
        assert any(line.startswith(name) for line in lines)


def test_documents(tmp_path: Path, root: Path) -> None:
    records = _records(_build(tmp_path / "work", root))
    code = {record["path"]: record["text"] for record in records["code"]}
    assert "here/package1/module01.py" in code
    assert not {"here/package0/latin.py", "here/package0/blank.py"} & code.keys()
    assert ("here/package0/copy.py" in code) != ("here/package0/module00.py" in code)
    assert list(code) == sorted(code)

    prose = {record["path"]: record["text"] for record in records["prose"]}
    assert prose["here/pkg-1.dist-info/METADATA"].startswith("# About pkg")
    assert "here/pkg-1.dist-info/LICENSE" in prose
    assert "here/package1/notes4.rst" in prose
    assert not any("top_level" in path for path in prose)

    docstrings = {record["name"]: record["text"] for record in records["docstrings"]}
    modules = [name for name in docstrings if ":" not in name]
    assert modules
    for name in modules:
        number = int(name[-5:-3])
        assert docstrings[name] == f"Module {number}."
        assert docstrings[f"{name}:f"] == f"Do {number}."
        assert docstrings[f"{name}:f:C"] == f"Hold {number}."


def test_several_files_and_row_groups(tmp_path: Path, root: Path) -> None:
    corpus = _build(tmp_path / "work", root)
    reader = Parquet(corpus.sources["code"].pattern)
    assert len(reader.paths()) > 2
    assert len(reader.shards()) > 2 * len(reader.paths())
    assert len(Jsonl(corpus.sources["prose"].pattern).paths()) > 1
    assert len(ArrowIpc(corpus.sources["docstrings"].pattern).paths()) > 1


def test_another_build_is_the_same_to_the_byte(tmp_path: Path, root: Path) -> None:
    first, second = _build(tmp_path / "a", root), _build(tmp_path / "b", root)
    assert _bytes(first.folder) == _bytes(second.folder)


def test_the_data_holds_no_absolute_path(tmp_path: Path, root: Path) -> None:
    corpus = _build(tmp_path / "work", root)
    for records in _records(corpus).values():
        assert not any(str(tmp_path) in json.dumps(record) for record in records)
    assert str(tmp_path) not in (corpus.folder / "manifest.json").read_text()


def test_max_bytes_is_kept(tmp_path: Path, root: Path) -> None:
    corpus = _build(tmp_path / "work", root, max_bytes=40_000)
    assert 20_000 < corpus.sources["code"].size_bytes <= 40_000
    assert _build(tmp_path / "work", root).sources["code"].size_bytes > 40_000


def test_it_is_built_once(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _build(tmp_path / "work", root)
    monkeypatch.setattr(corpus_module, "_build", None)
    assert _build(tmp_path / "work", root) == first


@pytest.mark.parametrize("damage", ["cut", "gone", "no manifest", "torn manifest", "old version"])
def test_a_damaged_corpus_is_built_again(tmp_path: Path, root: Path, damage: str) -> None:
    corpus = _build(tmp_path / "work", root)
    intact = _bytes(corpus.folder)
    part = next(iter(sorted((corpus.folder / "code").iterdir())))
    manifest = corpus.folder / "manifest.json"
    if damage == "cut":
        os.truncate(part, 100)
    elif damage == "gone":
        part.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "torn manifest":
        os.truncate(manifest, 50)
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 0}))
    assert _build(tmp_path / "work", root) == corpus
    assert _bytes(corpus.folder) == intact


def test_a_build_that_fails_leaves_nothing_in_place(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("full disk")

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_write_arrow", fail)
        with pytest.raises(RuntimeError, match="full disk"):
            _build(tmp_path / "work", root)
    assert [path.suffix for path in (tmp_path / "work").iterdir()] == [".lock"]
    assert _build(tmp_path / "work", root).folder.is_dir()


def test_what_a_killed_build_left_is_swept_up(tmp_path: Path, root: Path) -> None:
    leftover = tmp_path / "work" / f"corpus-v{corpus_module.VERSION}.partial" / "code"
    leftover.mkdir(parents=True)
    (leftover / "part-999.parquet").touch()
    corpus = _build(tmp_path / "work", root)
    assert not leftover.exists()
    assert "code/part-999.parquet" not in _bytes(corpus.folder)


def test_two_builds_at_once_are_refused(tmp_path: Path, root: Path) -> None:
    seen: list[str] = []

    def build_another(line: str) -> None:
        if not seen:
            seen.append(line)
            with pytest.raises(ConfigError, match="another process"):
                _build(tmp_path / "work", root)

    _build(tmp_path / "work", root, progress=build_another)
    assert seen


def test_max_bytes_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        build_corpus(tmp_path, max_bytes=0)


FILES = [File(f"f{i:03d}", Path("x"), 1 + i * i) for i in range(100)]


class TestChoose:
    @pytest.mark.parametrize("max_bytes", [0, 1, 1000, 20_000, 100_000, 300_000])
    def test_it_keeps_within_the_limit(self, max_bytes: int) -> None:
        chosen = choose(FILES, max_bytes)
        assert sum(file.size_bytes for file in chosen) <= max_bytes
        assert chosen == sorted(chosen, key=lambda file: file.name)

    def test_it_keeps_all_that_fit(self) -> None:
        assert choose(FILES, 10**6) == FILES

    def test_the_largest_stay_and_small_ones_too(self) -> None:
        chosen = choose(FILES, 100_000)
        assert FILES[-1] in chosen
        assert sum(file.size_bytes < 2000 for file in chosen) > 10

    def test_it_does_not_hang_on_the_order(self) -> None:
        backwards = choose(FILES[::-1], 50_000)
        assert backwards == choose(FILES, 50_000)[::-1]


def test_what_is_installed_is_found() -> None:
    labels = [root.label for root in installed_roots()]
    assert labels[:2] == ["stdlib", "site-packages"]


@pytest.mark.parametrize(
    ("name", "code", "prose"),
    [
        ("a.py", True, False),
        ("README", False, True),
        ("LICENSE.md", False, True),
        ("license.py", True, False),
        ("guide.rst", False, True),
        ("METADATA", False, True),
        ("entry_points.txt", False, False),
        ("data.json", False, False),
    ],
)
def test_kinds_of_files(name: str, code: bool, prose: bool) -> None:
    assert (is_code(name), is_prose(name)) == (code, prose)
