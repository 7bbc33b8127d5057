"""What of Dask's logs is kept out: answers that are errors, and nothing else."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import distributed.core
import distributed.scheduler
import pytest

from megadask.scheduling.errors import StaleError
from megadask.scheduling.quiet import keep_quiet
from megadask.scheduling.wire import ACTOR, LOADER_HOST, SUPERVISOR

HANDLING = ("distributed.core", "Exception while handling op %s")
CLOSED = ("distributed.scheduler", "Closed comm %r while trying to write %s")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = {name: list(logging.getLogger(name).filters) for name, _ in (HANDLING, CLOSED)}
    keep_quiet()
    yield
    for name, filters in before.items():
        logging.getLogger(name).filters[:] = filters


def is_logged(what: tuple[str, str], arguments: tuple[object, ...], error: Exception) -> bool:
    name, message = what
    told = (type(error), error, None)
    record = logging.LogRecord(name, logging.ERROR, "", 0, message, arguments, told)
    return bool(logging.getLogger(name).filter(record))


@pytest.mark.parametrize(
    ("what", "arguments", "error", "expected"),
    [
        (HANDLING, (SUPERVISOR,), StaleError("replaced"), False),
        (HANDLING, (SUPERVISOR,), KeyError("a fault of ours"), True),
        (HANDLING, (LOADER_HOST,), ZeroDivisionError("of a transform"), False),
        (HANDLING, ("gather",), StaleError("replaced"), True),
        (HANDLING, ("gather",), OSError(), True),
        (CLOSED, ("comm", {"op": "cancelled-keys", "keys": [f"{ACTOR}1"]}), OSError(), False),
        (CLOSED, ("comm", {"op": "cancelled-keys", "keys": ["sum-1"]}), OSError(), True),
        (("distributed.core", "Lost connection to %r"), ("tcp://",), OSError(), True),
    ],
)
def test_only_answers_are_kept_out(
    what: tuple[str, str], arguments: tuple[object, ...], error: Exception, expected: bool
) -> None:
    assert is_logged(what, arguments, error) is expected


def test_dask_still_says_it_in_these_words() -> None:
    for module, (_, message) in ((distributed.core, HANDLING), (distributed.scheduler, CLOSED)):
        assert message in inspect.getsource(module)


def test_it_is_kept_quiet_once() -> None:
    before = list(logging.getLogger("distributed.core").filters)
    keep_quiet()
    assert logging.getLogger("distributed.core").filters == before
