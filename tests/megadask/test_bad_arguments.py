"""Arguments that cannot work are a ConfigError at once, whatever was given; nothing is started."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import megadask as md
from megadask.planner.checks import LARGEST, LONGEST_S
from megadask.trainer import loader as loader_module
from tests.megadask.helpers.data import corpus, pipeline, source

pytestmark = pytest.mark.timeout(60)

DATA = corpus({"a": 30, "b": 20}, longest=100)
ConfigError = md.errors.ConfigError

#: What no option takes: an object, an array, and numbers and texts that make no sense.
NEVER = [object(), np.array([1, 2]), 1.5, float("nan"), b"bytes", {5}, [5]]
#: What is no time to wait for.
NO_SECONDS = [*NEVER[:2], math.nan, math.inf, 0, -1, 1e12, LONGEST_S + 1, 10**400, "x", True, None]
NO_TEXT = [*NEVER, 5, "", True]
NO_BOOL = [*NEVER, 5, "x", None]


def cases(**bad: list[Any]) -> list[Any]:
    """Return one case for each bad value of each argument."""
    return [
        pytest.param(name, value, id=f"{name}-{str(value)[:20]}-{number}")
        for name, values in bad.items()
        for number, value in enumerate(values)
    ]


# serve ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    cases(
        name=[*NO_TEXT, None, "a/b", "\ud800"],
        checkpoint=NO_TEXT,
        resume=[*NEVER, 5, "x", True],
        constructors=[*NEVER, 0, -1, "2", True, 10**20],
        limits=[*NEVER, 5, {}, {"lead_steps": 2}, "x", True],
        detached=NO_BOOL,
        timeout=NO_SECONDS,
    ),
)
def test_serve(
    local_client: Client, name: str, monkeypatch: pytest.MonkeyPatch, argument: str, value: Any
) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(local_client, "register_plugin", ask)
    with pytest.raises(ConfigError, match=rf"serve\({argument}=\)"):
        md.serve(pipeline(DATA), local_client, **{"name": name, argument: value})


@pytest.mark.parametrize("key", [5, None, "", "a/b", ("a",), b"a", True])
def test_names_of_pipelines(local_client: Client, name: str, key: Any) -> None:
    with pytest.raises(ConfigError, match="name of a pipeline"):
        md.serve({key: pipeline(DATA)}, local_client, name=name)


@pytest.mark.parametrize("state", [{"other": {}}, {5: {}}, {5: {}, "other": {}}])
def test_states_of_pipelines_that_there_are_not(
    local_client: Client, name: str, state: dict[Any, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"serve\(resume=\)"):
        md.serve({"train": pipeline(DATA)}, local_client, name=name, resume=state)


def test_a_checkpoint_may_be_a_path(local_client: Client, name: str, tmp_path: Path) -> None:
    with md.serve(pipeline(DATA), local_client, name=name, checkpoint=tmp_path / "journal"):
        assert any((tmp_path / "journal").iterdir())


# A running service ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(local_client: Client) -> Iterator[md.Service]:
    with md.serve(pipeline(DATA), local_client, name="arguments") as made:
        yield made
        assert made.audit()["ok"]


CALLS: dict[str, tuple[Any, ...]] = {
    "retire": ("0",),
    "reshard": (md.ClientPlaceTree(),),
    "scale": ({"a": 1},),
    "spread": (),
}


@pytest.mark.parametrize("seconds", NO_SECONDS)
@pytest.mark.parametrize("call", CALLS)
def test_timeouts(service: md.Service, call: str, seconds: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{call}\(timeout=\)"):
        getattr(service, call)(*CALLS[call], timeout=seconds)


@pytest.mark.parametrize("worker", [*NEVER, {}, None, "", True, 10**20])
def test_workers_to_retire(service: md.Service, worker: Any) -> None:
    with pytest.raises(ConfigError, match=r"retire\(worker\)"):
        service.retire(worker)


@pytest.mark.parametrize("topology", [*NEVER, None, 2, "dp", {"dp": 2}])
def test_topologies(service: md.Service, topology: Any) -> None:
    with pytest.raises(ConfigError, match=r"reshard\(topology\)"):
        service.reshard(topology)


@pytest.mark.parametrize("at_step", [*NEVER, "x", math.inf, -1, True, 10**20, LARGEST + 1])
def test_steps_of_a_mixture(service: md.Service, at_step: Any) -> None:
    with pytest.raises(ConfigError, match=r"set_mixture\(at_step=\)"):
        service.set_mixture({"a": 1}, at_step)


@pytest.mark.parametrize(
    "weights",
    [
        *(*NEVER, None, "a", 1, {}, {5: 1}, {5: 1, "a": 1}, {"z": 1}, {"a": 0}, {"a": -1}),
        *({"a": None}, {"a": "x"}, {"a": math.nan}, {"a": 10**400}, {"a": True}),
        {"a": np.array([1, 2])},
    ],
)
def test_weights_of_a_mixture(service: md.Service, weights: Any) -> None:
    with pytest.raises(ConfigError):
        service.set_mixture(weights)


@pytest.mark.parametrize("loaders", [*NEVER, None, {}, {"a": 1.5}, {5: 1}, {"a": np.array([1])}])
def test_numbers_of_loaders(service: md.Service, loaders: Any) -> None:
    with pytest.raises(ConfigError, match=r"scale\(loaders\)"):
        service.scale(loaders)


def calls_of(service: md.Service, **options: Any) -> dict[str, Any]:
    """Return every call that is about one pipeline, to be made."""
    return {
        "audit": lambda: service.audit(**options),
        "stats": lambda: service.stats(**options),
        "spread": lambda: service.spread(**options),
        "scale": lambda: service.scale({"a": 1}, **options),
        "reshard": lambda: service.reshard(md.ClientPlaceTree(), **options),
        "set_mixture": lambda: service.set_mixture({"a": 1}, **options),
    }


@pytest.mark.parametrize("key", ["x", "", "train/", [], {}, 0, 5, False, b"train", np.array([1])])
def test_pipelines_that_there_are_not(service: md.Service, key: Any) -> None:
    for call in calls_of(service, pipeline=key).values():
        with pytest.raises(ConfigError, match=r"no such pipeline; got .*one of \['train'\]"):
            call()


@pytest.mark.parametrize("key", [None, "train", "x"])
def test_calls_of_a_closed_service_say_that_it_is(
    local_client: Client, name: str, key: str | None
) -> None:
    service = md.serve(pipeline(DATA), local_client, name=name)
    service.close()
    service.close()
    for call in [*calls_of(service, pipeline=key).values(), lambda: service.retire("0")]:
        with pytest.raises(md.errors.ClosedError, match=f"service '{name}' is closed"):
            call()


# connect ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    cases(
        service=[*NO_TEXT, None],
        pipeline=NO_TEXT,
        rank=[*NEVER, "0", True, ()],
        keys=[*NEVER, 5, True, "tokens", "", ["tokens", 5], [""], [None], {"tokens": 5}],
        prefetch=[*NEVER, 0, -1, "4", True, 10**20],
        timeout=NO_SECONDS,
        force=NO_BOOL,
        security=[*NEVER, 5, "x", True],
        preset=[*NEVER, 5, "x", True],
        names=[*NEVER, 5, "x", True, {"tokens": 5}],
        pin_memory=NO_BOOL,
        group=[*NEVER, 5, "x"],
        confirm=NO_BOOL,
    ),
)
def test_connect(monkeypatch: pytest.MonkeyPatch, argument: str, value: Any) -> None:
    def open_client(*_: Any, **__: Any) -> None:
        raise AssertionError("a client was opened")

    monkeypatch.setattr(loader_module, "open_client", open_client)
    with pytest.raises(ConfigError, match=rf"connect\({argument}=\)"):
        md.connect("tcp://127.0.0.1:1", **{"rank": 0, argument: value})


# Declarations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    cases(
        lanes=[*NEVER, 0, "x", None],
        loaders=[*NEVER, np.array(["auto", "auto"]), 0, "x", None],
        shadows=[*NEVER, -1, "x", None],
        on_error=[*NEVER, np.array(["raise", "raise"]), 5, "x", None],
        max_consecutive_errors=[*NEVER, 0, "x", None],
        shares_files=NO_BOOL,
        shuffle=[*NEVER, -1, "x", None],
    ),
)
def test_source(argument: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Source\('a', {argument}=\)"):
        source("a", DATA["a"], **{argument: value})


@pytest.mark.parametrize("seconds", NO_SECONDS)
@pytest.mark.parametrize(
    "limit", [name for name in md.Limits.__dataclass_fields__ if name.endswith("_s")]
)
def test_limits(limit: str, seconds: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Limits\({limit}=\)"):
        md.Limits(**{limit: seconds})
