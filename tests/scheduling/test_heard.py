"""What a constructor tells the supervisor of watermarks, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megadask.scheduling.heard import Heard
from megadask.scheduling.marks import Watermark

RANKS = 3
ranks = st.integers(0, RANKS - 1)
words = st.lists(st.tuples(ranks, st.tuples(st.integers(0, 3), st.integers(0, 2))))


def begun() -> Heard:
    heard = Heard()
    heard.restart(dict.fromkeys(range(RANKS), (0, 0)))
    return heard


@given(words, st.sets(ranks, max_size=RANKS - 1))
def test_a_step_is_due_when_all_are_done_with_it_and_a_rank_when_it_leaves_its_beginning(
    said: list[tuple[int, Watermark]], finished: set[int]
) -> None:
    heard, known = begun(), dict.fromkeys(range(RANKS), (0, 0))
    heard.finished = finished
    for rank, mark in said:
        heard.hear(rank, mark)
        steps = [
            min(m[r][0] for r in range(RANKS) if r not in finished) for m in (known, heard.marks)
        ]
        leaves = any(known[r] == (0, 0) < heard.marks[r] for r in range(RANKS))
        assert heard.is_due() == (steps[0] < steps[1] or leaves)
        if heard.is_due():
            heard.told(heard.report())
            known = dict(heard.marks)


@given(words)
def test_marks_only_rise_and_all_of_them_are_told(said: list[tuple[int, Watermark]]) -> None:
    heard, known = begun(), dict.fromkeys(range(RANKS), (0, 0))
    for rank, mark in said:
        before = heard.marks[rank]
        assert heard.hear(rank, mark) == (mark > before)
        assert heard.marks[rank] == max(mark, before)
    news = heard.report()
    assert known | news == heard.marks
    heard.told(news)
    assert not heard.news()


def test_what_somebody_waits_for_is_due() -> None:
    heard = begun()
    heard.hear(0, (0, 1))
    heard.told(heard.report())
    heard.hear(0, (0, 2))
    assert not heard.is_due()
    heard.press()
    assert heard.is_due()
    heard.told(heard.report())
    assert not heard.is_due()


def test_what_comes_while_the_supervisor_is_told_stays_news() -> None:
    heard = begun()
    heard.hear(0, (0, 1))
    news = heard.report()
    heard.hear(0, (0, 2))
    heard.told(news)
    assert heard.news() == {0: (0, 2)}


def test_before_the_first_word_nothing_is_due() -> None:
    heard = Heard()
    assert heard.low() is None
    assert not heard.is_due()
    assert not heard.news()
