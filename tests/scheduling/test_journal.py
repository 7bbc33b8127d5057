"""Laws of the journal: what was written is read, and damage is found or does no harm."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from megadask.scheduling.errors import JournalError
from megadask.scheduling.journal import Journal


@pytest.fixture(params=["local", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder for a journal that does not exist yet."""
    if request.param == "local":
        yield str(tmp_path / "run" / "data")
        return
    root = f"/{uuid.uuid4().hex}"
    yield f"memory:/{root}"
    if fsspec.filesystem("memory").exists(root):
        fsspec.filesystem("memory").rm(root, recursive=True)


def files(path: str, generation: int = 1) -> list[str]:
    fs, root = fsspec.core.url_to_fs(path)
    return sorted(fs.ls(f"{root}/generation-{generation:06d}", detail=False))


def overwrite(path: str, name: str, data: bytes) -> None:
    fs, _ = fsspec.core.url_to_fs(path)
    with fs.open(name, "wb") as file:
        file.write(data)


def content(path: str, name: str) -> bytes:
    data: bytes = fsspec.core.url_to_fs(path)[0].cat_file(name)
    return data


OPENING = b'{"step": 0}'


def written(path: str, generation: int = 1, plans: int = 4) -> Journal:
    """Return a journal of the opening and so many plans; a body may hold anything."""
    journal = Journal(path)
    journal.begin(generation, OPENING)
    for number in range(plans):
        journal.append("step", b"\x00\n{" * number)
    return journal


def bodies(path: str, generation: int = 1) -> list[bytes]:
    return [entry.body for entry in Journal(path).read(generation)]


WHOLE = [OPENING, *(b"\x00\n{" * number for number in range(4))]


def test_what_was_written_is_read(path: str) -> None:
    assert Journal(path).generations() == []
    assert Journal(path).head() == []
    written(path)
    entries = Journal(path).read(1)
    assert [entry.body for entry in entries] == WHOLE
    assert [entry.kind for entry in entries] == ["full"] + ["step"] * 4
    assert [(entry.generation, entry.sequence) for entry in entries] == [(1, n) for n in range(5)]
    assert Journal(path + "/").head() == entries


def test_generations_are_apart(path: str) -> None:
    journal = written(path)
    journal.begin(3, b"7")
    journal.append("marks", b'{"low": [9, 0]}')
    assert Journal(path).generations() == [1, 3]
    assert bodies(path) == WHOLE
    assert bodies(path, 3) == [b"7", b'{"low": [9, 0]}']
    assert [entry.generation for entry in Journal(path).head()] == [3, 3]


def test_a_generation_begins_once(path: str) -> None:
    """Two services on one path would else overwrite each other's objects."""
    written(path)
    with pytest.raises(JournalError, match="has generation 1 already"):
        Journal(path).begin(1, OPENING)
    assert bodies(path) == WHOLE


@pytest.mark.parametrize("left", [0, 1, 20, -1])
def test_a_torn_tail_is_left_out(path: str, left: int) -> None:
    written(path)
    name = files(path)[-1]
    overwrite(path, name, content(path, name)[:left])
    assert bodies(path) == WHOLE[:-1]


def test_a_generation_that_was_torn_at_its_beginning_is_no_head(path: str) -> None:
    journal = written(path)
    journal.begin(2, b"5")
    name = files(path, 2)[0]
    overwrite(path, name, content(path, name)[:-3])
    assert bodies(path, 2) == []
    assert [entry.body for entry in Journal(path).head()] == WHOLE
    assert Journal(path).generations() == [1, 2]


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("damage", ["torn", "empty", "flipped", "missing", "alien"])
def test_damage_in_the_middle_is_an_error(path: str, number: int, damage: str) -> None:
    written(path)
    name = files(path)[number]
    data = content(path, name)
    if damage == "missing":
        fsspec.core.url_to_fs(path)[0].rm(name)
    else:
        changed = {
            "torn": data[:-1],
            "empty": b"",
            "flipped": bytes([data[0] ^ 1]) + data[1:],
            "alien": b'{"version": 2}\nabc',
        }
        overwrite(path, name, changed[damage])
    with pytest.raises(JournalError, match=r"damaged.*0000"):
        Journal(path).read(1)


@pytest.mark.parametrize("number", [1, 3])
def test_an_object_of_another_chain_is_an_error(path: str, number: int) -> None:
    """It is whole in itself, and so is the tail behind it."""
    written(path)
    other = f"{path}-other"
    journal = Journal(other)
    journal.begin(1, b"another")
    for _ in range(number):
        journal.append("step", b"another")
    overwrite(path, files(path)[number], content(other, files(other)[number]))
    with pytest.raises(JournalError, match="damaged in its middle"):
        Journal(path).read(1)
    fsspec.core.url_to_fs(other)[0].rm(other, recursive=True)


def test_an_object_whose_body_was_exchanged_is_an_error(path: str) -> None:
    written(path)
    name = files(path)[1]
    header, _, _ = content(path, name).partition(b"\n")
    overwrite(path, name, header + b"\nsomething else")
    with pytest.raises(JournalError, match="000000001"):
        Journal(path).read(1)


def test_what_else_lies_in_the_folder_does_not_matter(path: str) -> None:
    written(path)
    folder = files(path)[0].rpartition("/")[0]
    overwrite(path, f"{folder}/.note", b"")
    overwrite(path, f"{folder}/000000009.tmp", b"")
    assert bodies(path) == WHOLE


def test_a_journal_of_another_version_is_named(path: str) -> None:
    written(path, plans=0)
    name = files(path)[0]
    header, _, body = content(path, name).partition(b"\n")
    newer = json.dumps({**json.loads(header), "version": 5}).encode()
    overwrite(path, name, newer + b"\n" + body)
    for read in (lambda: Journal(path).read(1), Journal(path).head):
        with pytest.raises(JournalError, match=r"version.*5.*2"):
            read()


def test_a_journal_of_the_version_before_is_named(path: str) -> None:
    """Its objects had names without a kind."""
    folder = f"{path}/generation-000001"
    fs, root = fsspec.core.url_to_fs(folder)
    fs.makedirs(root, exist_ok=True)
    header = {"version": 1, "kind": "open", "previous": "", "body": ""}
    overwrite(path, f"{root}/000000000", json.dumps(header).encode() + b"\n{}")
    with pytest.raises(JournalError, match=r"version.*1.*2.*resume=state"):
        Journal(path).head()


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"cannot write.*file/data"):
        Journal(str(tmp_path / "file" / "data")).begin(1, b"")


def test_what_was_written_does_not_change(path: str) -> None:
    journal = written(path, plans=1)
    before = {name: content(path, name) for name in files(path)}
    journal.append("step", b"more")
    journal.begin(2, OPENING)
    assert {name: content(path, name) for name in before} == before


# From full objects on ---------------------------------------------------------------------------


def long(path: str, *, kept: int = 0) -> Journal:
    """Return a journal with full objects at 0, 3 and 6; the last names the first that is kept."""
    journal = Journal(path)
    journal.begin(1, b"0")
    for number in range(1, 9):
        if number % 3:
            journal.append("step", b"%d" % number)
        else:
            journal.append("full", b"%d" % number, kept=kept if number == 6 else 0)
    return journal


def test_the_head_begins_at_the_last_full_object(path: str) -> None:
    long(path)
    assert [entry.body for entry in Journal(path).head()] == [b"6", b"7", b"8"]
    assert bodies(path) == [b"%d" % number for number in range(9)]


@pytest.mark.parametrize("left", [0, 30, -1])
def test_a_torn_full_object_at_the_tail_is_left_out(path: str, left: int) -> None:
    journal = long(path)
    journal.append("full", b"9", kept=6)
    name = files(path)[-1]
    overwrite(path, name, content(path, name)[:left])
    assert [entry.body for entry in Journal(path).head()] == [b"6", b"7", b"8"]
    assert len(bodies(path)) == 9


def test_a_damaged_full_object_in_the_middle_is_an_error(path: str) -> None:
    long(path)
    name = files(path)[6]
    overwrite(path, name, content(path, name)[:-1])
    for read in (lambda: Journal(path).read(1), Journal(path).head):
        with pytest.raises(JournalError, match=r"damaged.*000000006"):
            read()


def test_pruned_objects_are_gone_and_the_rest_is_verified(path: str) -> None:
    journal = long(path, kept=3)
    journal.prune((1, 3))
    assert [name[-14:-5] for name in files(path)] == [f"{n:09d}" for n in range(3, 9)]
    assert bodies(path) == [b"%d" % number for number in range(3, 9)]
    journal.append("step", b"9")
    assert [entry.body for entry in Journal(path).head()][-1] == b"9"
    name = files(path)[1]
    overwrite(path, name, content(path, files(path)[2]))
    with pytest.raises(JournalError, match=r"damaged.*000000004"):
        Journal(path).read(1)


@pytest.mark.parametrize("left", [[0], [1], [0, 2], [1, 2], []])
def test_pruning_that_was_broken_off_does_no_harm(path: str, left: list[int]) -> None:
    """Object stores delete in any order."""
    long(path, kept=3)
    for number, name in enumerate(files(path)[:3]):
        if number not in left:
            fsspec.core.url_to_fs(path)[0].rm(name)
    assert bodies(path) == [b"%d" % number for number in range(3, 9)]
    Journal(path).head()


def test_older_generations_are_pruned(path: str) -> None:
    journal = written(path)
    journal.begin(2, b"2")
    journal.begin(4, b"4")
    journal.prune((2, 0))
    assert Journal(path).generations() == [2, 4]
    assert bodies(path, 2) == [b"2"]


def test_what_cannot_be_pruned_stays(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = long(path, kept=3)

    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(type(journal._fs), "rm_file", refuse)
    journal.prune((1, 3))
    assert bodies(path) == [b"%d" % number for number in range(3, 9)]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "run")
    journal = written(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    before = files(path)
    with pytest.raises(JournalError, match="No space left"):
        journal.append("step", b"more")
    assert files(path) == before
    assert bodies(path) == WHOLE
