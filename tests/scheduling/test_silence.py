"""Which workers are given up for their silence, and taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megadask.scheduling.silence import Silence

#: Time between two looks, in seconds.
PERIOD = 1.0
MOST = 2.0


def looks(silence: Silence, beats: list[dict[str, float]], limit_s: float) -> list[str]:
    """Return everybody that was given up while these heartbeats were looked at."""
    options = {"elapsed_s": PERIOD, "most_s": MOST, "limit_s": limit_s}
    return [one for beat in beats for one in silence.look(beat, **options)]


@given(st.integers(1, 10), st.integers(0, 20), st.integers(0, 5))
def test_a_worker_is_given_up_once_and_only_for_its_silence(
    limit: int, silent: int, lively: int
) -> None:
    silence = Silence()
    beats = [{"a": float(n), "b": float(n)} for n in range(lively)]
    last = float(lively)
    beats += [{"a": last, "b": last + n} for n in range(silent + 1)]
    assert looks(silence, beats, limit) == (["a"] if silent > limit else [])
    assert silence.awake == []


def test_one_that_is_heard_again_is_awake_until_it_is_welcome() -> None:
    silence = Silence()
    assert looks(silence, [{"a": 0.0}] * 5, 3.0) == ["a"]
    assert looks(silence, [{"a": 1.0}], 3.0) == []
    assert silence.awake == ["a"]
    assert looks(silence, [{"a": 1.0}, {"a": 2.0}], 3.0) == []
    assert silence.awake == ["a"]
    silence.welcome("a")
    assert silence.awake == []
    assert looks(silence, [{"a": 2.0}] * 4, 3.0) == ["a"]


def test_one_that_falls_silent_again_before_it_was_welcome_is_not_awake() -> None:
    silence = Silence()
    looks(silence, [*[{"a": 0.0}] * 5, {"a": 1.0}, {"a": 1.0}], 3.0)
    assert silence.awake == []


def test_one_that_is_gone_is_forgotten() -> None:
    silence = Silence()
    looks(silence, [{"a": 0.0}] * 5, 3.0)
    assert looks(silence, [{}, {"a": 0.0}], 3.0) == []
    assert silence.awake == []


def test_nobody_is_given_up_because_the_scheduler_stood_still() -> None:
    silence = Silence()
    silence.look({"a": 0.0}, elapsed_s=PERIOD, most_s=MOST, limit_s=3.0)
    assert silence.look({"a": 0.0}, elapsed_s=3600.0, most_s=MOST, limit_s=3.0) == []
    assert silence.look({"a": 1.0}, elapsed_s=PERIOD, most_s=MOST, limit_s=3.0) == []
