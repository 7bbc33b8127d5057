"""The journal over s3://, against a server of that API on the loopback device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from distributed import Client

import megadask as md
from megadask.scheduling.journal import Journal
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.restore import make
from tests.megadask.helpers.s3 import s3_server
from tests.megadask.helpers.seen import drain, merge, spans_by_step, take

pytest.importorskip("s3fs", reason="needs the extra test")
pytest.importorskip("moto.server", reason="needs the extra test")

pytestmark = [
    pytest.mark.timeout(120),
    # The sockets of the server's and the client's pools, and what moto's own code warns of.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket on a server of its own."""
    with s3_server() as kind:
        kind().mkdir("runs")
        yield "s3://runs"


def test_objects_are_written_read_and_pruned(bucket: str) -> None:
    path = f"{bucket}/journal"
    journal = Journal(path)
    journal.begin(1, b"one")
    journal.begin(2, b"0")
    for number in range(1, 30):
        if number % 10:
            journal.append("step", b"%d" % number)
        else:
            journal.append("full", b"%d" % number, kept=10)
    assert [entry.body for entry in Journal(path).head()] == [b"%d" % n for n in range(20, 30)]
    journal.prune((2, 10))
    assert Journal(path).generations() == [2]
    assert [entry.body for entry in Journal(path).read(2)] == [b"%d" % n for n in range(10, 30)]
    fs, root = fsspec.core.url_to_fs(path)
    name = f"{root}/generation-000002/000000015.step"
    fs.pipe_file(name, fs.cat_file(name)[:-1])
    with pytest.raises(md.errors.JournalError, match=r"damaged.*000000015"):
        Journal(path).read(2)


def test_a_run_is_checkpointed_and_resumed(local_client: Client, name: str, bucket: str) -> None:
    checkpoint = f"{bucket}/{name}"
    with md.serve(make(), local_client, name=name) as service:
        whole = run(service, drain)

    def begin(loader: md.Loader) -> Any:
        return take(loader, 6), loader.state_dict()

    with md.serve(make(), local_client, name=name, checkpoint=checkpoint) as service:
        parts = run(service, begin)
    with pytest.raises(md.errors.ConfigError, match="resume=state"):
        md.serve(make(), local_client, name=name, checkpoint=checkpoint)
    state = json.loads(json.dumps(parts[0][1]))
    with md.serve(make(4), local_client, name=name, checkpoint=checkpoint, resume=state) as service:
        rest = run(service, drain)
        assert service.audit()["ok"]
    first = [seen for seen, _ in parts]
    assert merge(spans_by_step(first), spans_by_step(rest)) == spans_by_step(whole)
    assert Journal(checkpoint).generations() == [1, 2]
