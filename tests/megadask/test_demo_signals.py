"""A signal stops the demo's processes once, and never half-way through what must be whole."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest

from megadask.demo.signals import SIGNALS, StopOnSignal, Stopped


@pytest.mark.parametrize("signum", SIGNALS)
def test_the_first_signal_stops_and_later_ones_change_nothing(signum: signal.Signals) -> None:
    before, heard = signal.getsignal(signum), []
    with StopOnSignal(lambda: heard.append(signum)) as stop:
        with pytest.raises(Stopped):
            signal.raise_signal(signum)
        signal.raise_signal(signum)
        signal.raise_signal(signal.SIGTERM)
    assert stop.exit_code == 128 + signum
    assert heard == [signum]
    assert signal.getsignal(signum) is before


def test_without_a_signal_the_exit_code_is_0() -> None:
    with StopOnSignal() as stop, stop.held():
        pass
    assert stop.exit_code == 0


def test_a_held_signal_stops_at_the_end_of_the_outermost_block() -> None:
    passed = []

    def hold(stop: StopOnSignal) -> None:
        with stop.held():
            with stop.held():
                signal.raise_signal(signal.SIGINT)
                passed.append("inner")
            passed.append("outer")

    with StopOnSignal() as stop, pytest.raises(Stopped):
        hold(stop)
    assert passed == ["inner", "outer"]


@pytest.mark.parametrize("when", ["enter", "inside", "leave"])
def test_a_guarded_context_is_entered_and_left_as_a_whole(when: str) -> None:
    passed = []

    def signal_at(place: str) -> None:
        if place == when:
            signal.raise_signal(signal.SIGTERM)

    @contextlib.contextmanager
    def context() -> Iterator[int]:
        signal_at("enter")
        passed.append("entered")
        try:
            yield 7
        finally:
            signal_at("leave")
            passed.append("left")

    def use(stop: StopOnSignal) -> None:
        with stop.guard(context()) as value:
            assert value == 7
            signal_at("inside")

    with StopOnSignal() as stop, pytest.raises(Stopped):
        use(stop)
    assert passed == ["entered", "left"]


def test_an_error_inside_a_guarded_context_comes_out_as_it_is() -> None:
    with StopOnSignal() as stop, pytest.raises(KeyError), stop.guard(contextlib.nullcontext()):
        raise KeyError
