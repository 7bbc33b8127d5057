"""What cannot work is an error that says what, got and remedy, at once; nothing hangs."""

from __future__ import annotations

import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import megadask as md
from tests.conftest import LeakCheck, make_cluster, wait_until
from tests.megadask.helpers import faulty
from tests.megadask.helpers.data import (
    corpus,
    pipeline,
    records,
    source,
    unfold,
    write_jsonl,
    write_parquet,
)
from tests.megadask.helpers.processes import Process, module
from tests.megadask.helpers.ranks import connect, run, start
from tests.megadask.helpers.seen import drain, every_token, shape, take, tokens_delivered

pytestmark = pytest.mark.timeout(60)

DATA = corpus({"a": 30, "b": 20}, longest=100)
ROWS = [row for rows in DATA.values() for row in rows]
ConfigError = md.errors.ConfigError


# Declarations -----------------------------------------------------------------------------------


def one_rank(**options: Any) -> md.Pipeline:
    return pipeline(DATA, topology=md.ClientPlaceTree(), **options)


def mixed(weights: Any) -> md.Pipeline:
    def strategy(graph: md.DGraph) -> None:
        graph.mix(weights)

    return one_rank(strategy=strategy)


def closing_over(value: Any) -> Any:
    """Return a transform that carries a value along."""
    return lambda record: (value, unfold(record))[1]


DECLARATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "no source": (lambda: md.Pipeline(sources=[], batching=md.Packed(8, 1)), "no source"),
    "sources no list": (
        lambda: md.Pipeline(sources=source("a", ROWS), batching=md.Packed(8, 1)),  # type: ignore[arg-type]
        "Pipeline(sources=); got Source",
    ),
    "no sources": (
        lambda: md.Pipeline(sources=[md.readers.InMemory(ROWS)], batching=md.Packed(8, 1)),  # type: ignore[list-item]
        "Pipeline(sources=); got a InMemory",
    ),
    "batching": (lambda: one_rank(batching=8), "Pipeline(batching=); got 8"),
    "strategy": (lambda: one_rank(strategy="balance"), "Pipeline(strategy=); got 'balance'"),
    "name that cannot be written": (lambda: source("\ud800", ROWS), "Source(name)"),
    "one name twice": (
        lambda: md.Pipeline(sources=[source("a", ROWS)] * 2, batching=md.Packed(8, 1)),
        "'a'",
    ),
    "name with a slash": (lambda: source("a/b", ROWS), "a/b"),
    "no reader": (lambda: md.Source("a", ROWS), "list"),  # type: ignore[arg-type]
    "no transform": (lambda: source("a", ROWS, transform=3), "'a'"),
    "no lanes": (lambda: source("a", ROWS, lanes=0), "lanes"),
    "no loaders": (lambda: source("a", ROWS, loaders=0), "loaders"),
    "on_error": (lambda: source("a", ROWS, on_error="ignore"), "ignore"),
    "unknown source": (lambda: mixed({"a": 1.0, "z": 1.0}), "z"),
    "negative weight": (lambda: mixed({"a": 1.0, "b": -1.0}), "'b'"),
    "all weights zero": (lambda: mixed({"a": 0.0, "b": 0.0}), "above 0"),
    "no weights": (lambda: mixed({}), "weights"),
    "weight not finite": (lambda: mixed({"a": float("nan"), "b": 1.0}), "'a'"),
    "weight no number": (lambda: mixed({"a": "much", "b": 1.0}), "'a'"),
    "mix by": (lambda: one_rank(strategy=lambda g: g.mix({"a": 1.0}, by="bytes")), "bytes"),
    "unknown axis": (lambda: one_rank(strategy=lambda g: g.distribute("ep")), "ep"),
    "unknown method": (lambda: one_rank(strategy=lambda g: g.balance("best")), "best"),
    "global batch does not divide": (
        lambda: pipeline(DATA, global_batch=6, topology=md.ClientPlaceTree(dp=4)),
        "multiple of 4",
    ),
    "global batch by micro batch": (
        lambda: pipeline(DATA, global_batch=6, micro_batch=2, topology=md.ClientPlaceTree(dp=2)),
        "multiple of 4",
    ),
    "cp without padding": (
        lambda: pipeline(DATA, topology=md.ClientPlaceTree(cp=2)),
        "2 x cp = 4",
    ),
    "cp of packs that cannot be cut": (
        lambda: pipeline(
            DATA,
            seq_len=130,
            topology=md.ClientPlaceTree(cp=2),
            strategy=lambda g: g.context("sequence"),
        ),
        "Packed(seq_len=) under context parallelism by 'sequence'",
    ),
    "max_tokens of a table": (
        lambda: one_rank(strategy=lambda g: g.balance(max_tokens=9)),
        "balance(max_tokens=)",
    ),
    "padding that does not divide": (lambda: one_rank(packed={"pad_to_multiple": 3}), "seq_len"),
    "seq_len": (lambda: one_rank(seq_len=0), "seq_len"),
    "overflow": (lambda: one_rank(packed={"overflow": "cut"}), "cut"),
    "max_documents": (lambda: one_rank(packed={"max_documents": 0}), "max_documents"),
    "epochs": (lambda: one_rank(epochs=0), "epochs"),
    "epochs no integer": (lambda: one_rank(epochs=1.5), "epochs"),
    "stop": (lambda: one_rank(stop="last"), "last"),
    "window": (lambda: one_rank(window=0), "window"),
    "patience": (lambda: one_rank(patience=-1), "patience"),
    "seed no integer": (lambda: one_rank(seed=True), "seed"),
    "seed": (lambda: one_rank(seed=-1), "seed"),
    "endless restart": (lambda: one_rank(epochs=None, restart=True), "finite"),
    "topology": (lambda: md.ClientPlaceTree(dp=0), "dp"),
    "transform does not pickle": (
        lambda: pipeline(DATA, sources={"transform": closing_over(threading.Lock())}),
        "source 'a'",
    ),
    "limits: lead_steps": (lambda: md.Limits(lead_steps=-1), "lead_steps"),
    "limits: no step": (
        lambda: md.Limits(lead_steps=0),
        "lead_steps=); got 0; expected an integer >= 1",
    ),
    "limits: half a step": (lambda: md.Limits(lead_steps=0.5), "lead_steps"),  # type: ignore[arg-type]
    "limits: no seconds": (lambda: md.Limits(lease_s=float("nan")), "lease_s"),
    "limits: bytes": (lambda: md.Limits(constructor_bytes=-1), "constructor_bytes"),
    "limits: seconds": (lambda: md.Limits(reply_s=0.0), "reply_s"),
    "limits: silence outlasts calls": (lambda: md.Limits(reply_s=20.0), "silent_s"),
    "limits: silence outlasts a short call": (lambda: md.Limits(silent_s=60.0), "reply_s=60"),
    "limits: storage outlasts calls": (lambda: md.Limits(journal_s=60.0), "journal_s"),
    "empty list": (lambda: pipeline({"a": []}), "'a'"),
}


@pytest.mark.parametrize("case", DECLARATIONS)
def test_a_declaration_that_cannot_work_is_refused_at_once(case: str) -> None:
    declare, named = DECLARATIONS[case]
    with pytest.raises(ConfigError) as caught:
        declare()
    assert named in str(caught.value)


@pytest.mark.parametrize("reader", ["Parquet", "Jsonl"])
@pytest.mark.parametrize("path", ["missing.file", "empty/*.file", "nowhere/{a,b}.file"])
def test_files_that_are_not_there(tmp_path: Path, reader: str, path: str) -> None:
    def declare() -> None:
        made = md.Source("a", getattr(md.readers, reader)(str(tmp_path / path)), transform=unfold)
        md.Pipeline(sources=[made], batching=md.Packed(8, 1))

    with pytest.raises(ConfigError) as caught:
        declare()
    assert str(tmp_path / path.partition("{")[0]) in str(caught.value)


def test_two_sources_of_one_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, ROWS)
    made = [md.Source(n, md.readers.Parquet(path), transform=unfold) for n in ("one", "two")]
    with pytest.raises(ConfigError, match=r"'one' and 'two'.*shares_files"):
        md.Pipeline(sources=made, batching=md.Packed(8, 1))


# Serving ----------------------------------------------------------------------------------------


def test_serve_refuses_what_is_no_pipeline_or_client(client: Client, name: str) -> None:
    made = one_rank()
    with pytest.raises(ConfigError, match="pipeline"):
        md.serve(DATA, client, name=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Client"):
        md.serve(made, client.scheduler.address, name=name)
    with pytest.raises(ConfigError, match="name"):
        md.serve(made, client, name="a/b")
    with pytest.raises(ConfigError, match="'/'"):
        md.serve({"a/b": made}, client, name=name)
    with pytest.raises(ConfigError):
        md.serve({}, client, name=name)
    for count in (0, -1):
        with pytest.raises(ConfigError, match="constructors"):
            md.serve(made, client, name=name, constructors=count)
    with Client(client.scheduler.address, set_as_default=False) as closed:
        pass
    with pytest.raises(ConfigError, match="Client"):
        md.serve(made, closed, name=name)


def test_a_second_service_of_one_name(client: Client, name: str) -> None:
    with (
        md.serve(one_rank(), client, name=name) as service,
        Client(client.scheduler.address, set_as_default=False) as other,
    ):
        with pytest.raises(md.errors.ServiceError, match=f"{name}.*another name"):
            md.serve(one_rank(), other, name=name)
        # The first one is as it was.
        assert tokens_delivered(run(service, drain)) == every_token(ROWS)


def test_a_second_service_of_one_name_from_another_process(client: Client, name: str) -> None:
    with (
        md.serve(one_rank(), client, name=name) as service,
        module("driver", client.scheduler.address, name) as driver,
    ):
        line = driver.wait_for("serving", "error")
        assert line.startswith("error ServiceError")
        assert name in line
        assert service.audit()["ok"]


def test_a_checkpoint_that_cannot_be_written(client: Client, name: str) -> None:
    with pytest.raises(md.errors.JournalError, match="/proc/none"):
        md.serve(one_rank(), client, name=name, checkpoint="/proc/none")
    with md.serve(one_rank(), client, name=name):
        pass


def test_a_transform_that_workers_cannot_import(client: Client, name: str) -> None:
    """Its module is on the driver only: the error names the source, and the module."""
    here = types.ModuleType("only_in_the_notebook")
    exec("def tokenize(record):\n    return None\n", here.__dict__)
    sys.modules[here.__name__] = here
    try:
        made = one_rank(sources={"transform": here.tokenize})
        with pytest.raises(Exception, match="only_in_the_notebook") as caught:
            md.serve(made, client, name=name)
    finally:
        del sys.modules[here.__name__]
    message = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "'a'" in message
    with md.serve(one_rank(), client, name=name) as service:
        assert service.audit()["ok"]


def test_a_cluster_without_workers(name: str) -> None:
    with (
        make_cluster(processes=False, n_workers=0) as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(md.errors.WorkerError, match="no running worker"),
    ):
        md.serve(one_rank(), client, name=name)


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[tuple[Client, str]]:
    """A cluster with one worker whose megadask is broken; its name."""
    package = tmp_path / "megadask"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no megadask on this machine')\n")
    with (
        make_cluster(processes=False, n_workers=1) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        worker = Process(
            *("-m", "distributed.cli.dask_worker", client.scheduler.address),
            *("--no-nanny", "--name", "stranger", "--no-dashboard", "--nthreads", "1"),
            *("--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"),
            *("--local-directory", str(tmp_path)),
            environ={"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
        )
        try:
            client.wait_for_workers(2, timeout=30)
            addresses = client.scheduler_info()["workers"]
            (address,) = (a for a, info in addresses.items() if info["name"] == "stranger")
            yield client, address
        finally:
            worker.kill()
            worker._reader.join(5)
            for stream in (worker.popen.stdin, worker.popen.stdout):
                if stream is not None:
                    stream.close()


def test_a_worker_that_cannot_import_megadask(stranger: tuple[Client, str], name: str) -> None:
    client, address = stranger
    with pytest.raises(md.errors.WorkerError) as caught:
        md.serve(one_rank(), client, name=name, timeout=20)
    assert address in str(caught.value)
    assert "no megadask on this machine" in str(caught.value)
    assert "Install" in str(caught.value)


# Connecting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, -1, 99])
def test_a_rank_outside_the_topology(client: Client, name: str, rank: int) -> None:
    with (
        md.serve(pipeline(DATA), client, name=name) as service,
        pytest.raises(ConfigError, match=f"{rank}.*0 to 1"),
    ):
        connect(service, rank)


def test_ranks_are_integers(client: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        for rank in ("0", 0.5, True):
            with pytest.raises(ConfigError, match="rank"):
                connect(service, rank)  # type: ignore[arg-type]
        monkeypatch.setenv("RANK", "first")
        with pytest.raises(ConfigError, match="RANK"):
            md.connect(service.address, name, timeout=10)


def test_two_trainer_processes_of_one_rank(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        with connect(service, 0) as mine, module("trainer", service.address, name, "0") as other:
            line = other.wait_for("connected", "error")
            assert line.startswith("error ClaimError")
            assert "rank 0" in line
            assert "force=True" in line
            assert len(take(mine, 1)) == 1
        # And with the rank free again.
        with module("trainer", service.address, name, "0", "gated") as other:
            other.wait_for("batch 0")
            with pytest.raises(md.errors.ClaimError, match="rank 0"):
                connect(service, 0)
            with connect(service, 0, force=True) as mine:
                assert len(take(mine, 1)) == 1
                lines = ["batch"]
                while lines[-1].startswith("batch"):
                    other.say()
                    lines.append(other.wait_for("batch", "error", "end"))
                assert lines[-1].startswith("error ClaimError")
                assert len(lines) <= 3, "more than one batch was on its way"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prefetch": 0}, "prefetch"),
        ({"prefetch": "4"}, "prefetch"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"keys": ["tokens", "labls"]}, "labls"),
        ({"keys": "tokens"}, "keys"),
    ],
)
def test_options_of_connect(client: Client, name: str, options: dict[str, Any], named: str) -> None:
    with (
        md.serve(one_rank(), client, name=name) as service,
        pytest.raises(ConfigError, match=named),
    ):
        connect(service, 0, **options)


def test_a_dead_address(no_leaks: LeakCheck) -> None:
    with pytest.raises(md.errors.DeadlineError, match=r"127\.0\.0\.1:1\b.*Check the address"):
        md.connect("tcp://127.0.0.1:1", rank=0, timeout=2)


@pytest.mark.parametrize("address", ["nonsense", "missing.json", ""])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        md.connect(address, rank=0, timeout=2)


def test_a_service_that_does_not_exist(client: Client, name: str) -> None:
    with (
        md.serve(one_rank(), client, name=name) as service,
        pytest.raises(md.errors.ServiceError, match=f"other.*{name}"),
    ):
        md.connect(service.address, "other", rank=0, timeout=20)


def test_connect_before_serve(name: str) -> None:
    """On a cluster that has never heard of MegaDask, and on one whose service is over."""
    with (
        make_cluster(processes=False, n_workers=1) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        address = re.escape(cluster.scheduler_address)
        with pytest.raises(md.errors.ServiceError, match=rf"got {address}\. Call md\.serve"):
            md.connect(cluster.scheduler_address, name, rank=0, timeout=20)
        md.serve(one_rank(), client, name=name).close()
        with pytest.raises(md.errors.ServiceError, match=f"{name}.*serve"):
            md.connect(cluster.scheduler_address, name, rank=0, timeout=20)


# Data -------------------------------------------------------------------------------------------


def test_a_long_sample_is_split(client: Client, name: str) -> None:
    rows = records([40, 300, 7])
    with md.serve(pipeline({"a": rows}, seq_len=64), client, name=name) as service:
        ranks = run(service, drain)
        assert service.audit()["ok"]
    assert tokens_delivered(ranks) == every_token(rows)


def test_a_long_sample_is_truncated(client: Client, name: str) -> None:
    rows = records([40, 300, 7])
    made = pipeline({"a": rows}, seq_len=64, packed={"overflow": "truncate"})
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
        audit = service.audit()
    assert tokens_delivered(ranks) == every_token(records([40, 64, 7]))
    # The last token that is kept has no target: what was cut off is not there.
    assert sum(batch.num_loss_tokens for seen in ranks for batch in seen) == 39 + 63 + 6
    assert audit["ok"]
    assert audit["total"]["samples"]["delivered"] == 3


def test_a_long_sample_is_dropped(client: Client, name: str) -> None:
    rows = records([40, 300, 7])
    made = pipeline({"a": rows}, seq_len=64, packed={"overflow": "drop"})
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
        audit = service.audit()
    assert tokens_delivered(ranks) == every_token([rows[0], rows[2]])
    assert audit["ok"]
    assert audit["total"]["samples"]["filtered"] == 1
    assert audit["total"]["samples"]["delivered"] == 2


def fails(service: md.Service, seconds: float = 30.0, **options: Any) -> list[BaseException]:
    """Drain on all ranks, each of which must fail; return their errors."""
    outcomes = start(service, drain, **options).outcomes(seconds)
    assert all(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
    return outcomes


def told(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_a_long_sample_is_an_error(client: Client, name: str) -> None:
    rows = records([40, 300, 7])
    made = pipeline({"a": rows}, seq_len=64, packed={"overflow": "error"})
    with md.serve(made, client, name=name) as service:
        for error in fails(service):
            assert isinstance(error, ConfigError)
            assert "300" in told(error)
            assert "seq_len=64" in told(error)
            assert "'a'" in told(error), "the error does not name the source"
            assert "memory#" in told(error), "the error does not name the shard"


def test_an_error_of_a_transform_reaches_every_trainer(client: Client, name: str) -> None:
    made = pipeline({"a": records([20] * 30)}, sources={"transform": faulty.raise_at_bad})
    with md.serve(made, client, name=name) as service:
        for error in fails(service):
            assert type(error) is faulty.UserError
            assert "cannot decode 5" in str(error)
            assert "source 'a'" in told(error)
            assert "memory#" in told(error)
            assert "row" in told(error)
        # It stays the error for who comes later.
        assert type(fails(service)[0]) is faulty.UserError


def test_steps_before_an_error_are_delivered(client: Client, name: str) -> None:
    """The bad record comes late: what was planned before it is given out first."""
    rows = records([32] * 400)
    rows[399] = {"id": faulty.BAD, "length": 32}
    rows[faulty.BAD] = {"id": 1000, "length": 32}
    made = pipeline(
        {"a": rows}, seq_len=32, sources={"transform": faulty.raise_at_bad, "shards": 1}, window=1
    )

    def body(loader: md.Loader) -> Any:
        seen = []
        try:
            seen.extend(batch["step"] for batch in loader)
        except faulty.UserError:
            return seen
        raise AssertionError("no error")

    with md.serve(made, client, name=name) as service:
        first, second = run(service, body)
    assert first == second
    assert first[-1] >= 1


def test_bad_records_are_skipped_and_counted(client: Client, name: str) -> None:
    rows = records([20] * 10)
    made = pipeline(
        {"a": rows},
        sources={"transform": faulty.raise_at_bad, "on_error": "skip", "shards": 1},
    )
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
        audit, stats = service.audit(), service.stats()
    good = [row for row in rows if row["id"] != faulty.BAD]
    assert tokens_delivered(ranks) == every_token(good)
    assert shape(ranks[0]) == shape(ranks[1])
    samples = audit["sources"]["a"]["samples"]
    assert (samples["skipped"], samples["delivered"], samples["lost"]) == (1, 9, 0)
    assert audit["ok"]
    (reason,) = (r for one in stats["loaders"] for r in one["skip_reasons"])
    assert "UserError: cannot decode 5" in reason
    assert "memory#0, row 5" in reason


def test_too_many_bad_records_in_a_row(client: Client, name: str) -> None:
    made = pipeline(
        {"a": records([20] * 60)},
        sources={
            "transform": faulty.raise_always,
            "on_error": "skip",
            "max_consecutive_errors": 3,
            "shards": 1,
        },
    )
    with md.serve(made, client, name=name) as service:
        for error in fails(service):
            assert isinstance(error, md.errors.SourceError)
            assert "'a'" in str(error)
            assert "max_consecutive_errors=3" in str(error)
            assert "cannot decode" in str(error)


@pytest.mark.parametrize(
    ("transform", "named"),
    [
        (faulty.raise_picky, "PickyError"),
        (faulty.raise_stop_iteration, "StopIteration"),
        # These look like a loader that was lost, or leave what they say behind.
        (faulty.raise_file_not_found, "no such folder/vocabulary.json"),
        (faulty.raise_timeout, "a server of the user's is slow"),
        (faulty.raise_generator_exit, "somebody's generator"),
        (faulty.raise_cancelled, "somebody's task"),
        (faulty.raise_mute, "MuteError"),
        (faulty.raise_unicode, "surrogates not allowed"),
    ],
)
def test_errors_that_do_not_travel_are_told_all_the_same(
    client: Client, name: str, transform: Any, named: str
) -> None:
    made = pipeline({"a": records([20] * 10)}, sources={"transform": transform})
    with md.serve(made, client, name=name) as service:
        for error in fails(service):
            assert named in told(error)
            assert "'a'" in told(error)


def test_a_transform_that_ends_the_program(name: str) -> None:
    """It must not end the workers. On a cluster of its own, for the case that it does."""
    made = pipeline({"a": records([20] * 10)}, sources={"transform": faulty.raise_system_exit})
    with (
        make_cluster(processes=True) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        before = set(client.scheduler_info()["workers"])
        with md.serve(made, client, name=name) as service:
            for error in fails(service, 45.0):
                assert "ends the program" in told(error)
                assert "'a'" in told(error)
        assert set(client.scheduler_info()["workers"]) == before


@pytest.mark.parametrize(
    ("transform", "named"),
    [
        (faulty.no_dict, "ndarray"),
        (faulty.no_tokens, "ids"),
        (faulty.float_tokens, "float32"),
        (faulty.square_tokens, "(2, 2)"),
        (faulty.long_mask, "loss_mask"),
        (None, "tokens"),
    ],
)
def test_samples_of_the_wrong_form(client: Client, name: str, transform: Any, named: str) -> None:
    made = pipeline({"a": records([20] * 10)}, sources={"transform": transform})
    with md.serve(made, client, name=name) as service:
        for error in fails(service):
            assert isinstance(error, ConfigError)
            assert named in told(error)
            assert "'a'" in told(error)


@pytest.mark.parametrize("epochs", [1, None])
def test_nothing_left_of_a_source(client: Client, name: str, epochs: int | None) -> None:
    data = {"a": records([20] * 10), "b": records([20] * 10, first=100)}
    made = md.Pipeline(
        sources=[source("a", data["a"]), source("b", data["b"], transform=faulty.drop_all)],
        batching=md.Packed(64, 4),
        topology=md.ClientPlaceTree(dp=2),
        epochs=epochs,
    )
    with md.serve(made, client, name=name) as service:
        for error in fails(service):
            assert isinstance(error, md.errors.SourceError)
            assert "'b'" in str(error)
            assert "epoch 0" in str(error)


def test_records_that_are_dropped_are_counted(client: Client, name: str) -> None:
    rows = records([20] * 30)
    made = pipeline({"a": rows}, sources={"transform": faulty.drop_every_third}, epochs=2)
    with md.serve(made, client, name=name) as service:
        ranks = run(service, drain)
        samples = service.audit()["sources"]["a"]["samples"]
    kept = [row for row in rows if row["id"] % 3]
    assert tokens_delivered(ranks) == every_token(kept, times=2)
    assert (samples["filtered"], samples["delivered"], samples["lost"]) == (20, 40, 0)


def test_files_without_records(client: Client, name: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [], files=2)
    for file in tmp_path.iterdir():
        file.write_text("\n")  # only who reads it knows
    source = md.Source("a", md.readers.Jsonl(path), transform=unfold)
    made = md.Pipeline(sources=[source], batching=md.Packed(64, 2), epochs=1)
    with md.serve(made, client, name=name) as service:
        for error in fails(service):
            assert isinstance(error, md.errors.SourceError)
            assert "'a' has nothing readable" in str(error)


def test_data_that_changes_under_the_run(client: Client, name: str) -> None:
    """A sample that has to be read again and is another one."""
    made = pipeline({"a": records([2] * 60)}, sources={"transform": faulty.unsteady})
    limits = md.Limits(loader_bytes=0)
    with md.serve(made, client, name=name, limits=limits) as service:
        for error in fails(service):
            assert isinstance(error, md.errors.SourceError)
            assert "'a'" in str(error)
            assert "differently" in str(error)


def test_a_file_that_goes_away(client: Client, name: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, ROWS, files=2)
    made = md.Pipeline(
        sources=[md.Source("a", md.readers.Jsonl(path), transform=unfold)],
        batching=md.Packed(64, 2),
        epochs=1,
    )
    (tmp_path / "1.jsonl").unlink()
    with md.serve(made, client, name=name) as service:
        for error in fails(service):
            assert isinstance(error, md.errors.SourceError)
            assert "'a'" in str(error)
            assert "1.jsonl" in str(error)


def test_a_source_that_answers_no_more(client: Client, name: str, tmp_path: Path) -> None:
    """Its deadline names it; the other ranks and the service go on living."""
    gate = tmp_path / "gate"
    rows: list[Any] = [{**row, "gate": str(gate)} for row in records([20] * 30)]
    made = pipeline({"slow": rows, "b": DATA["b"]}, sources={"transform": faulty.wait_for_file})
    limits = md.Limits(reply_s=2.0, silent_s=1.5, journal_s=1.0)
    try:
        with md.serve(made, client, name=name, limits=limits) as service:
            for error in fails(service):
                assert isinstance(error, md.errors.DeadlineError)
                assert "'slow'" in str(error)
            assert service.stats()["closed"] is None
    finally:
        gate.touch()


def test_a_failed_service_lets_go_of_its_workers(client: Client, name: str) -> None:
    made = pipeline({"a": records([20] * 30)}, sources={"transform": faulty.raise_always})
    with md.serve(made, client, name=name) as service:
        fails(service)
    assert wait_until(lambda: not any(client.run(_num_actors).values()))


def test_a_failed_role_logs_what_it_was_once(
    local_client: Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the group of tasks that it was raised in."""
    caplog.set_level(logging.ERROR)
    made = pipeline({"a": records([20] * 30)}, sources={"transform": faulty.raise_always})
    with md.serve(made, local_client, name=name) as service:
        fails(service)
    told = [one for one in caplog.records if one.msg == "planner of %s failed"]
    assert [one.exc_info[0] for one in told if one.exc_info] == [faulty.UserError]


def _num_actors(dask_worker: Any) -> int:
    return len(dask_worker.state.actors)


def test_the_fixture_cluster_has_two_processes(cluster: LocalCluster) -> None:
    assert len({worker.process.pid for worker in cluster.workers.values()}) == 2
