"""Batches in shared memory: the same as in messages, one copy for a group, and nothing is left."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import pytest
import torch
from distributed import Client

import megadask as md
from megadask.scheduling import receiver, segment
from megadask.scheduling.errors import ClaimError
from megadask.scheduling.segment import GoneError, host_identity
from tests.conftest import LeakCheck, make_cluster, wait_until
from tests.faults.helpers import holder
from tests.megadask.helpers.data import Corpus, corpus, pipeline, source
from tests.megadask.helpers.mapper import mappings
from tests.megadask.helpers.opened import open_files
from tests.megadask.helpers.payload import pair, text
from tests.megadask.helpers.photos import PHOTOS, photos
from tests.megadask.helpers.processes import Process, module
from tests.megadask.helpers.ranks import connect, run
from tests.megadask.helpers.seen import digest

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(host_identity() is None, reason="needs memfd and /proc"),
]

NONE = md.Limits(shared_bytes=0)
DATA = corpus({"pairs": 30, "text": 40}, longest=100)
ENDLESS: Corpus = corpus({"a": 50}, longest=60)


def rich(**options: Any) -> md.Pipeline:
    """Return a pipeline whose batches have fields, extras and several sequences."""
    sources = [
        source("pairs", DATA["pairs"], transform=pair, extras=("url", "scores")),
        source("text", DATA["text"], transform=text, extras=("url",)),
    ]
    packed = {"pad_to_multiple": 4, "sequences": 2, "aligned": {"advantages": "float32"}}
    return md.Pipeline(sources=sources, batching=md.Packed(256, 8, **packed), epochs=1, **options)


def with_images(**options: Any) -> md.Pipeline:
    def strategy(graph: md.DGraph) -> None:
        graph.select("image").cost(md.costs.VisionEncoder("image", hidden=64))

    sources = {"transform": photos, "modalities": ("image",)}
    packed = {"pad_to_multiple": 4}
    return pipeline(
        PHOTOS, seq_len=256, packed=packed, strategy=strategy, sources=sources, **options
    )


def everything(loader: md.Loader) -> tuple[list[Any], dict[str, Any]]:
    seen = [
        [digest(batch), sorted(batch), batch["sample_ids"], batch.get("extras", {}).get("url")]
        for batch in loader
    ]
    return seen, loader.stats()


@pytest.mark.parametrize(
    ("make", "tree", "options"),
    [
        pytest.param(rich, md.ClientPlaceTree(cp=2, tp=2, dp=2), {}, id="slices"),
        pytest.param(rich, md.ClientPlaceTree(pp=3, tp=2), {}, id="stages"),
        pytest.param(rich, md.ClientPlaceTree(cp=2), {"keys": ["advantages", "extras"]}, id="keys"),
        pytest.param(with_images, md.ClientPlaceTree(dp=2, cp=2), {}, id="items"),
    ],
)
def test_batches_are_the_same_as_in_messages(
    client: Client, name: str, make: Callable[..., md.Pipeline], tree: Any, options: dict[str, Any]
) -> None:
    results = []
    for limits in (None, NONE):
        label = f"{name}-{limits is None}"
        with md.serve(make(topology=tree), client, name=label, limits=limits) as service:
            results.append(run(service, everything, **options))
            assert service.audit()["ok"]
    for (shared, stats), (sent, sent_stats) in zip(*results, strict=True):
        assert shared == sent
        assert stats["shared_batches"] == stats["batches"] == len(shared)
        assert sent_stats["shared_batches"] == 0


def overwrite(loader: md.Loader) -> list[str]:
    seen = []
    for batch in loader:
        seen.append(digest(batch))
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                value.fill_(7)
    return seen


@pytest.mark.parametrize("kind", ["client", "local_client"])
def test_nobody_sees_what_a_rank_does_to_its_tensors(
    request: pytest.FixtureRequest, name: str, kind: str
) -> None:
    driver = request.getfixturevalue(kind)
    made = pipeline(DATA, topology=md.ClientPlaceTree(tp=2))
    with md.serve(made, driver, name=name) as service:
        first, second = run(service, overwrite)
    with md.serve(made, driver, name=f"{name}-again", limits=NONE) as service:
        undisturbed, _ = run(service, lambda loader: [digest(batch) for batch in loader])
    assert first == second == undisturbed


def test_batches_that_are_kept_stay_right_when_slots_run_out(client: Client, name: str) -> None:
    made = pipeline(ENDLESS, epochs=None, topology=md.ClientPlaceTree())
    with md.serve(made, client, name=f"{name}-alone", limits=NONE) as service:
        [expected] = run(service, lambda loader: [digest(b) for b in islice(loader, 64)])
    limits = md.Limits(constructor_bytes=1, shared_bytes=1)
    with (
        md.serve(made, client, name=name, limits=limits) as service,
        connect(service, 0, prefetch=4) as loader,
    ):
        kept = list(islice(loader, 64))
        stats = loader.stats()
        assert [digest(batch) for batch in kept] == expected
        assert 0 < stats["shared_batches"] <= 6 < stats["batches"]
        [part] = service.stats()["constructors"]
        assert part["shared_slots"] <= 6
        del kept
        for _ in islice(loader, 16):  # slots are there again
            pass
        assert loader.stats()["shared_batches"] > stats["shared_batches"]


def ours() -> int:
    """Return the descriptors and mappings of shared memory that this process has."""
    return len(mappings()) + sum("memfd:megadask" in link for link in open_files())


def test_nothing_grows_with_the_batches(
    no_leaks: LeakCheck, local_client: Client, name: str
) -> None:
    before = ours()
    made = pipeline(ENDLESS, epochs=None, seq_len=64, topology=md.ClientPlaceTree(tp=2))
    with md.serve(made, local_client, name=name, limits=md.Limits(constructor_bytes=20_000)) as one:
        counts: list[int] = []

        def body(loader: md.Loader) -> None:
            for number, _ in enumerate(islice(loader, 300)):
                if number % 30 == 15:
                    counts.append(ours())

        run(one, body, seconds=120, prefetch=4)
        [part] = one.stats()["constructors"]
        assert part["shared_slots"] < 50
    assert max(counts[10:]) <= max(counts[:10]) + 10
    assert wait_until(lambda: ours() == before)
    no_leaks(spare_fds=20)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of this process say that they are on another host."""
    monkeypatch.setattr(receiver, "host_identity", lambda: "another host")


@pytest.mark.usefixtures("elsewhere")
def test_a_trainer_elsewhere_gets_messages(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        for seen, stats in run(service, everything):
            assert len(seen) > 0
            assert stats["shared_batches"] == 0
        assert service.audit()["ok"]


@pytest.mark.parametrize(
    ("failures", "error", "is_shared"),
    [
        pytest.param(1, GoneError("gone"), True, id="gone-once"),
        pytest.param(9, GoneError("gone"), False, id="never-seen"),
        pytest.param(1, PermissionError("not yours"), False, id="forbidden"),
    ],
)
def test_a_trainer_that_cannot_map_a_batch_gets_it_all_the_same(
    local_client: Client,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failures: int,
    error: OSError,
    is_shared: bool,
) -> None:
    made = pipeline(DATA, topology=md.ClientPlaceTree())
    with md.serve(made, local_client, name=f"{name}-sent", limits=NONE) as service:
        [(expected, _)] = run(service, everything)
    left = [error] * failures

    def fails(*told: Any) -> Any:
        if left:
            raise left.pop()
        return segment.map_segment(*told)

    monkeypatch.setattr(receiver, "map_segment", fails)
    with (
        caplog.at_level(logging.WARNING, logger="megadask"),
        md.serve(made, local_client, name=name) as service,
    ):
        [(seen, stats)] = run(service, everything)
    assert seen == expected
    assert (stats["shared_batches"] == stats["batches"]) == is_shared
    told = [record for record in caplog.records if "cannot map" in record.getMessage()]
    assert len(told) == (not is_shared)
    assert bool(stats["why_not_shared"]) == (not is_shared)


def test_a_constructor_without_shared_memory_sends_messages(
    local_client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment.os, "posix_fallocate", is_full)
    before = ours()
    with md.serve(pipeline(DATA), local_client, name=name) as service:
        for seen, stats in run(service, everything):
            assert seen
            assert stats["shared_batches"] == 0
    assert ours() == before


def test_what_a_closed_or_replaced_loader_left_is_not_written_to(
    local_client: Client, name: str
) -> None:
    made = pipeline(ENDLESS, epochs=None, topology=md.ClientPlaceTree())
    with md.serve(made, local_client, name=name, limits=md.Limits(constructor_bytes=1)) as service:
        kept = []
        for is_closed in (True, False):
            loader = connect(service, 0)
            kept += list(islice(loader, 2))
            if is_closed:
                loader.close()
        before = [digest(batch) for batch in kept]
        with connect(service, 0) as successor:
            for _ in islice(successor, 40):
                assert [digest(batch) for batch in kept] == before
        loader.close()


@pytest.fixture
def num_mapped() -> Iterator[Callable[[], int]]:
    """Return how many mappings there are that were not there before; no garbage is collected.

    So do training loops that want no pauses.
    """
    gc.collect()
    before = {one["inode"] for one in mappings()}
    gc.disable()
    yield lambda: sum(one["inode"] not in before for one in mappings())
    gc.enable()


def test_memory_goes_with_the_last_tensor(
    client: Client, name: str, num_mapped: Callable[[], int]
) -> None:
    """Before the loader closes and after, though not in the trainer's own thread."""
    made = pipeline(ENDLESS, epochs=None, topology=md.ClientPlaceTree())
    with md.serve(made, client, name=name) as service:
        loader = connect(service, 0)
        kept = list(islice(loader, 4))
        tensor = kept[1]["tokens"]
        del kept[:2]
        assert num_mapped() >= 3
        del tensor, kept[0]
        assert wait_until(lambda: num_mapped() <= 1 + loader.stats()["prefetch"])
        loader.close()
        assert num_mapped()
        kept.clear()
        assert wait_until(lambda: not num_mapped())


def until_taken(service: md.Service, num_mapped: Callable[[], int]) -> None:
    loader = connect(service, 0)
    kept = list(islice(loader, 2))
    with connect(service, 0):
        with pytest.raises(ClaimError):
            kept += islice(loader, 20)
        assert num_mapped()
        loader.close()


def test_memory_of_a_replaced_loader_goes_with_it(
    client: Client, name: str, num_mapped: Callable[[], int]
) -> None:
    """The error that it got, and Dask has to do with, holds nothing of its frames."""
    made = pipeline(ENDLESS, epochs=None, topology=md.ClientPlaceTree())
    with md.serve(made, client, name=name) as service:
        until_taken(service, num_mapped)
        assert wait_until(lambda: not num_mapped())


def test_memory_of_a_closed_service_goes_with_it(name: str, num_mapped: Callable[[], int]) -> None:
    """Though somebody keeps its actors, as Dask does those of closed workers in this process."""
    made = pipeline(ENDLESS, epochs=None, topology=md.ClientPlaceTree())
    with (
        make_cluster(processes=False, n_workers=1, protocol="inproc") as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(made, client, name=name) as service,
    ):
        loader = connect(service, 0)
        assert len(list(islice(loader, 4))) == 4
        assert num_mapped()
        actors = list(cluster.workers[0].state.actors.values())
        service.close()
        loader.close()
        assert wait_until(lambda: not num_mapped())
        assert actors


# Processes --------------------------------------------------------------------------------------


@pytest.fixture
def service(request: pytest.FixtureRequest, client: Client, name: str) -> Iterator[md.Service]:
    """Ranks of one group, one unless said otherwise, with batches of half a megabyte."""
    rows = corpus({"a": 400}, longest=400)
    tree = md.ClientPlaceTree(tp=getattr(request, "param", 1))
    made = pipeline(rows, epochs=None, seq_len=2**14, global_batch=1, topology=tree)
    with md.serve(made, client, name=name) as one:
        yield one


def told(process: Process, line: str = "") -> dict[str, Any]:
    process.say(line)
    answer: dict[str, Any] = json.loads(process.wait_for("told")[len("told ") :])
    return answer


@pytest.mark.parametrize("service", [8], indirect=True)
def test_one_copy_for_all_ranks_of_a_group(service: md.Service) -> None:
    with ExitStack() as stack:
        ranks: list[Process] = []
        total_kb: dict[int, int] = {}
        for rank in range(8):
            started = module("mapper", service.address, service.name, str(rank))
            ranks.append(stack.enter_context(started))
        for rank in ranks:
            rank.wait_for("reading", seconds=100)
        answers = [told(rank) for rank in ranks]
        for count in (2, 8):
            total_kb[count] = sum(one["Pss"] for part in answers[:count] for one in part["maps"])
        assert all(part["stats"]["shared_batches"] == 2 for part in answers)
        assert len({part["digest"] for part in answers}) == 1
        inodes = [sorted(one["inode"] for one in part["maps"]) for part in answers]
        assert inodes == [inodes[0]] * 8
        size_kb = sum(one["Rss"] for one in answers[0]["maps"])
        assert size_kb >= 2 * 2**14 * 28 / 1024  # both batches are there, each of its pages
        assert total_kb[8] <= size_kb * 1.05
        for rank in ranks[2:]:
            rank.kill()
        alone = [told(rank) for rank in ranks[:2]]
        assert sum(one["Pss"] for part in alone for one in part["maps"]) <= size_kb * 1.05


def test_a_killed_trainer_leaves_nothing(service: md.Service, no_leaks: LeakCheck) -> None:
    with module("mapper", service.address, service.name, "0") as rank:
        rank.wait_for("reading")
        assert told(rank)["stats"]["shared_batches"] == 2
        rank.kill()
    with module("mapper", service.address, service.name, "0") as rank:  # it takes the rank over
        rank.wait_for("reading")
        for _ in range(20):
            answer = told(rank, "next")
        assert answer["stats"]["shared_batches"] == 22
        told(rank, "close")

    def leased() -> int:
        return sum(int(part["leased_bytes"]) for part in service.stats()["constructors"])

    assert wait_until(lambda: leased() == 0)
    no_leaks(spare_fds=20)


def test_batches_outlive_the_constructor(service: md.Service, client: Client) -> None:
    client.wait_for_workers(2)
    pids = client.run(os.getpid)
    with module("mapper", service.address, service.name, "0") as rank:
        rank.wait_for("reading")
        before = told(rank)
        os.kill(pids[holder(service, "constructor")], signal.SIGKILL)
        after = told(rank, "next")
        assert after["digest"] == before["digest"]
        assert after["stats"]["shared_batches"] == 3
