"""Laws of the cache: it stays within its limit, and what it returns is what was put."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megadask.scheduling.cache import KEPT_CALLS, SampleCache
from tests.strategies import laws

operations = st.lists(
    st.tuples(st.sampled_from(["put", "get", "call"]), st.integers(0, 9), st.integers(0, 12)),
    max_size=40,
)


@laws
@given(operations, st.integers(0, 20))
def test_the_cache_is_within_its_limit_and_never_wrong(
    steps: list[tuple[str, int, int]], limit: int
) -> None:
    cache, sizes = SampleCache(limit), dict[int, int]()
    for kind, key, size in steps:
        if kind == "put":
            # A sample has one size, however often it is read.
            cache.put(key, {"key": key}, sizes.setdefault(key, size))
        elif kind == "call":
            cache.begin_call()
        else:
            sample = cache.get(key)
            assert sample is None or sample == {"key": key}
        held = [*cache._fresh, *cache._served]
        assert len(held) == len(set(held)) == len(cache)
        assert cache.bytes == sum(sizes[k] for k in held) <= limit
    cache.clear()
    assert (cache.bytes, len(cache)) == (0, 0)


def test_what_was_served_goes_first_and_the_longest_ago_of_that() -> None:
    cache = SampleCache(30)
    for key in "abc":
        cache.put(key, {"key": key}, 10)
    for key in "cab":
        assert cache.get(key)
    assert cache.get("c")  # served again
    cache.put("d", {}, 10)
    assert cache.get("a") is None
    assert all(cache.get(key) is not None for key in "bcd")


def test_what_was_not_served_is_not_dropped_for_what_comes_later() -> None:
    cache = SampleCache(20)
    cache.put("a", {"key": "a"}, 15)
    cache.put("b", {"key": "b"}, 15)
    assert cache.get("a") is not None
    assert cache.get("b") is None


def test_a_sample_that_never_fits_drops_nothing() -> None:
    cache = SampleCache(20)
    cache.put("a", {"key": "a"}, 15)
    assert cache.get("a")
    cache.put("huge", {}, 21)
    assert cache.get("a")
    assert cache.bytes == 15


def test_a_sample_that_is_put_again_counts_once() -> None:
    cache = SampleCache(20)
    for _ in range(3):
        cache.put("a", {"key": "a"}, 15)
        assert cache.get("a")
    assert (cache.bytes, len(cache)) == (15, 1)


def test_a_sample_of_no_bytes_is_kept() -> None:
    cache = SampleCache(0)
    cache.put("a", {"key": "a"}, 0)
    assert cache.get("a") == {"key": "a"}


def test_what_is_retained_stays_as_it_was() -> None:
    cache = SampleCache(100)
    for number in range(4):
        cache.put(number, {"key": number}, 10)
    cache.get(0)
    cache.get(1)
    cache.retain(lambda number: number % 2 == 0)
    assert (cache.bytes, len(cache)) == (20, 2)
    assert [cache.get(number) for number in range(4)] == [{"key": 0}, None, {"key": 2}, None]


def test_what_was_served_goes_some_calls_later_though_there_is_room() -> None:
    cache = SampleCache(10**9)
    cache.put("ready", {"key": "ready"}, 10)
    for number in range(10 * KEPT_CALLS):
        cache.begin_call()
        cache.put(number, {"key": number}, 10)
        assert cache.get(number)
        assert len(cache) <= KEPT_CALLS + 1
    assert cache.get(10 * KEPT_CALLS - KEPT_CALLS // 2), "the last calls may be made again"
    assert cache.get("ready") == {"key": "ready"}


def test_what_is_served_again_stays() -> None:
    cache = SampleCache(100)
    cache.put("a", {"key": "a"}, 10)
    for _ in range(3 * KEPT_CALLS):
        cache.begin_call()
        assert cache.get("a")
