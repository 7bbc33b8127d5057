"""What SIGTERM and Ctrl-C do to the processes of the demo."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TypeVar

SIGNALS = (signal.SIGTERM, signal.SIGINT)

T = TypeVar("T")


class Stopped(BaseException):
    """A signal asked this process to stop."""


class StopOnSignal:
    """While entered, the first SIGTERM or SIGINT raises `Stopped`; later ones change nothing.

    Parameters
    ----------
    on_signal
        Called when it comes, in the main thread.

    Attributes
    ----------
    signum
        The signal that came, None while there was none.
    """

    def __init__(self, on_signal: Callable[[], object] | None = None) -> None:
        self.signum: int | None = None
        self._on_signal = on_signal
        self._held = False

    @property
    def exit_code(self) -> int:
        """What a process that a signal ended exits with by convention; 0 if none came."""
        return 0 if self.signum is None else 128 + self.signum

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal from raising within the block; it does at the end of the block."""
        outer, self._held = self._held, True
        before = self.signum
        try:
            yield
        finally:
            self._held = outer
        if self.signum != before and not outer:
            raise Stopped

    @contextlib.contextmanager
    def guard(self, context: contextlib.AbstractContextManager[T]) -> Iterator[T]:
        """Enter a context, and leave it, without a signal's raising half-way."""
        with contextlib.ExitStack() as stack:
            with self.held():
                value = stack.enter_context(context)
            try:
                yield value
            finally:
                with self.held():
                    stack.close()

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
            if self._on_signal is not None:
                self._on_signal()
            if not self._held:
                raise Stopped
