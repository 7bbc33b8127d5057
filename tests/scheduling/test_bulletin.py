"""Laws of what constructors hear: each of what concerns it, and of nothing else."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from megadask.scheduling.bulletin import Bulletin
from tests.strategies import laws

LIVES = ("one", "two", "three")
#: A change for all or for one, or what one constructor does: it takes up everything.
MOVES = st.lists(st.tuples(st.sampled_from(["change", "hear"]), st.sampled_from([None, *LIVES])))
#: Longer than any wait here takes.
LONG_S = 30.0


@laws
@given(MOVES)
def test_there_is_news_since_the_last_change_that_concerns_it(
    moves: list[tuple[str, str | None]],
) -> None:
    bulletin = Bulletin()
    known = dict.fromkeys(LIVES, 0)
    unheard = dict.fromkeys(LIVES, False)
    for what, life in moves:
        if what == "hear" and life is not None:
            known[life] = bulletin.version
            bulletin.hear(life, known[life])
            unheard[life] = False
        elif life is None:
            bulletin.change()
            unheard = dict.fromkeys(LIVES, True)
        else:
            bulletin.change_for(life)
            unheard[life] = True
        for one in LIVES:
            assert bulletin.is_news(one, known[one]) == unheard[one]
            if unheard[one]:
                assert not bulletin.has_heard(one, bulletin.version)
            assert bulletin.is_news(one, -1), "one that comes new hears of everything"


def test_who_waits_for_news_is_woken_by_its_own_and_by_common_ones() -> None:
    async def main() -> None:
        for change in (Bulletin.change, lambda board: board.change_for("one")):
            bulletin = Bulletin()
            looks = 0

            def is_over() -> bool:
                nonlocal looks
                looks += 1
                return False

            waiting = asyncio.create_task(bulletin.wait_for_news("one", 0, is_over, LONG_S))
            await asyncio.sleep(0)
            for _ in range(3):
                bulletin.change_for("two")
                await asyncio.sleep(0)
            assert looks == 1, "it was woken by what concerns another one"
            change(bulletin)
            await asyncio.wait_for(waiting, LONG_S)
            assert bulletin.is_news("one", 0)

    asyncio.run(main())


def test_who_waits_for_a_constructor_is_woken_when_it_has_heard() -> None:
    async def main() -> None:
        bulletin = Bulletin()
        bulletin.change_for("one")
        version = bulletin.version
        waiting = asyncio.create_task(
            bulletin.wait_until_heard("one", version, lambda: False, LONG_S)
        )
        await asyncio.sleep(0)
        bulletin.hear("two", version)
        bulletin.hear("one", version - 1)
        await asyncio.sleep(0)
        assert not waiting.done()
        bulletin.hear("one", version)
        await asyncio.wait_for(waiting, LONG_S)
        bulletin.forget("one")
        assert not bulletin.has_heard("one", version)

    asyncio.run(main())
