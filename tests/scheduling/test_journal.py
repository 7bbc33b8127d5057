"""Laws of the journal: what was written is read, and damage is found or does no harm."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from megadask.scheduling.errors import JournalError
from megadask.scheduling.journal import Journal, acknowledged_step, events_of
from megadask.scheduling.point import Point


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


def opening(step: int = 0, events: list[object] | None = None) -> bytes:
    origin = Point(step=step, state="").to_json()
    return json.dumps({"origin": origin, "events": events or []}).encode()


def written(path: str, generation: int = 1, plans: int = 4) -> Journal:
    """Return a journal of the opening and so many plans; a body may hold anything."""
    journal = Journal(path)
    journal.begin(generation, opening())
    for number in range(plans):
        journal.append("plan", b"\x00\n{" * number)
    return journal


def bodies(path: str, generation: int = 1) -> list[bytes]:
    return [entry.body for entry in Journal(path).read(generation)]


WHOLE = [opening(), *(b"\x00\n{" * number for number in range(4))]


def test_what_was_written_is_read(path: str) -> None:
    assert Journal(path).generations() == []
    assert Journal(path).head() == []
    written(path)
    entries = Journal(path).read(1)
    assert [entry.body for entry in entries] == WHOLE
    assert [entry.kind for entry in entries] == ["open"] + ["plan"] * 4
    assert [(entry.generation, entry.sequence) for entry in entries] == [(1, n) for n in range(5)]
    assert Journal(path + "/").head() == entries


def test_generations_are_apart(path: str) -> None:
    journal = written(path)
    journal.begin(3, opening(7))
    journal.append("marks", b'{"low": [9, 0]}')
    assert Journal(path).generations() == [1, 3]
    assert bodies(path) == WHOLE
    assert bodies(path, 3) == [opening(7), b'{"low": [9, 0]}']
    assert [entry.generation for entry in Journal(path).head()] == [3, 3]


def test_a_generation_begins_once(path: str) -> None:
    """Two services on one path would else overwrite each other's objects."""
    written(path)
    with pytest.raises(JournalError, match="has generation 1 already"):
        Journal(path).begin(1, opening())
    assert bodies(path) == WHOLE


@pytest.mark.parametrize("left", [0, 1, 20, -1])
def test_a_torn_tail_is_left_out(path: str, left: int) -> None:
    written(path)
    name = files(path)[-1]
    overwrite(path, name, content(path, name)[:left])
    assert bodies(path) == WHOLE[:-1]


def test_a_generation_that_was_torn_at_its_beginning_is_no_head(path: str) -> None:
    journal = written(path)
    journal.begin(2, opening(5))
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
            "alien": b'{"version": 1}\nabc',
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
        journal.append("plan", b"another")
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
    with pytest.raises(JournalError, match=r"version.*5.*1"):
        Journal(path).read(1)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"cannot write.*file/data"):
        Journal(str(tmp_path / "file" / "data")).begin(1, b"")


def test_what_was_written_does_not_change(path: str) -> None:
    journal = written(path, plans=1)
    before = {name: content(path, name) for name in files(path)}
    journal.append("plan", b"more")
    journal.begin(2, opening())
    assert {name: content(path, name) for name in before} == before


def test_the_acknowledged_step_is_the_lowest_watermark_or_where_it_began(path: str) -> None:
    assert acknowledged_step([]) == 0
    journal = written(path)
    assert acknowledged_step(journal.read(1)) == 0
    journal.append("marks", b'{"low": [3, 1]}')
    journal.append("marks", b'{"low": [5, 0]}')
    journal.append("plan", b"")
    assert acknowledged_step(journal.read(1)) == 5
    journal.begin(2, opening(5))  # resumed, and nothing acknowledged since
    assert acknowledged_step(journal.read(2)) == 5


def test_events_of_a_chain_are_those_it_began_with_and_those_since(path: str) -> None:
    journal = Journal(path)
    journal.begin(1, opening(2, [[4, {"a": 0.5}]]))
    journal.append("event", b'{"step": 9, "weights": {"b": 1.0}}')
    journal.append("plan", b"")
    found = [(event.step, event.weights) for event in events_of(Journal(path).head())]
    assert found == [(4, {"a": 0.5}), (9, {"b": 1.0})]
