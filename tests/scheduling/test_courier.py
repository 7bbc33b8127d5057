"""Errands are run by another thread, in order, and no thread is left behind."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator

import pytest

from megadask.scheduling.courier import Courier
from tests.conftest import wait_until


def couriers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "megadask-courier"]


@pytest.fixture
def courier() -> Iterator[Courier]:
    made = Courier()
    yield made
    made.close()


def test_errands_are_run_in_order_by_another_thread(courier: Courier) -> None:
    seen: list[tuple[int, int]] = []
    for number in range(20):
        courier.send(lambda number=number: seen.append((number, threading.get_ident())))
    courier.close()
    assert [number for number, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1
    assert not couriers()


def test_one_that_fails_is_logged_and_the_next_is_run(
    courier: Courier, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    with caplog.at_level(logging.ERROR):
        courier.send(lambda: 1 // 0)
        courier.send(done.set)
        assert done.wait(20)
    assert "ZeroDivisionError" in caplog.text


def test_after_closing_errands_are_run_at_once(courier: Courier) -> None:
    courier.close()
    courier.close()
    seen: list[int] = []
    courier.send(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]


def test_what_an_errand_held_is_let_go_of(courier: Courier) -> None:
    class Held:
        pass

    gone, held = threading.Event(), Held()
    weakref.finalize(held, gone.set)
    courier.send(lambda held=held: None)
    del held
    assert gone.wait(20)


def test_the_thread_ends_with_its_courier() -> None:
    made = Courier()
    made.send(lambda: None)
    assert couriers()
    del made
    gc.collect()
    assert wait_until(lambda: not couriers())
