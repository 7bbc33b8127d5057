"""A thread that runs errands for another one, which has better things to do."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

Errand = Callable[[], object]

#: What the other thread has to itself after handing over an errand. It may be busy with what made
#: it, and let go of the interpreter for a moment, which would then be taken for as long as this
#: errand, and all that follows from it, take. And ranks of one host, which met at the end of a
#: step, are given their batches at the same moment: errands of the first would hold up the last,
#: for which all wait at the next meeting. What is asked for is needed a whole microbatch later.
PAUSE_S = 0.01
#: Longest wait of `Courier.close`, in seconds.
CLOSE_S = 10.0


class Courier:
    """Runs errands one after the other, in a thread of its own.

    Handing one over takes no lock and gives nobody else the interpreter: so it is cheap, and
    allowed where objects end. The thread ends at `close`, or when the courier is no more.
    """

    def __init__(self) -> None:
        self._errands: SimpleQueue[Errand | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._errands,), name="megadask-courier", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._errands.put, None)

    def send(self, errand: Errand) -> None:
        """Let an errand be run soon; after `close` it is run at once, by whoever hands it over."""
        if self._end.alive:
            self._errands.put(errand)
        else:
            errand()

    def close(self) -> None:
        """Run what was handed over, and end the thread; it is left to itself if it takes long."""
        self._end()
        self._thread.join(CLOSE_S)


def _run(errands: SimpleQueue[Errand | None]) -> None:
    pause = True
    while (errand := errands.get()) is not None:
        if pause:
            time.sleep(PAUSE_S)
        try:
            errand()
        except Exception:
            logger.exception("an errand failed")
        del errand  # and with it what it held, which may be a batch's memory
        pause = errands.empty()
