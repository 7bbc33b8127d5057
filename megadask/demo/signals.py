"""What SIGTERM and Ctrl-C do to the processes of the demo."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """A signal asked this process to stop."""


class StopOnSignal:
    """While entered, the first SIGTERM or SIGINT raises `Stopped`; later ones change nothing.

    Attributes
    ----------
    signum
        The signal that came, None while there was none.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._held = False

    @property
    def exit_code(self) -> int:
        """What a process that a signal ended exits with by convention; 0 if none came."""
        return 0 if self.signum is None else 128 + self.signum

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal from raising within the block; it does at the end of the block."""
        before, self._held = self.signum, True
        try:
            yield
        finally:
            self._held = False
        if self.signum != before:
            raise Stopped

    def __enter__(self) -> StopOnSignal:
        self._before = {signum: signal.signal(signum, self._stop) for signum in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
            if not self._held:
                raise Stopped
