"""Keeps out of Dask's logs what looks like a fault there and is none.

An error with which a handler answers is for whoever asked, and reaches them; Dask logs it with its
traceback, too, in the process that answers. And when roles end, trainers may be leaving: Dask logs
at its highest level that it could not tell one of them of an actor's key.
"""

from __future__ import annotations

import logging

from megadask.planner.errors import MegaDaskError
from megadask.scheduling.wire import ACTOR, LOADER_HOST, SUPERVISOR


class _Known(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        if record.msg == "Exception while handling op %s":
            error = record.exc_info[1] if record.exc_info else None
            is_answer = arguments == (SUPERVISOR,) and isinstance(error, MegaDaskError)
            # What a reader or transform raises is logged by the role that asked, whatever it is.
            return not (is_answer or arguments == (LOADER_HOST,))
        if record.msg == "Closed comm %r while trying to write %s":
            return ACTOR not in str(arguments)
        return True


_KNOWN = _Known()


def keep_quiet() -> None:
    """Begin with it, in this process."""
    for name in ("distributed.core", "distributed.scheduler"):
        logging.getLogger(name).addFilter(_KNOWN)  # once, however often
