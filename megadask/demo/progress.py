"""What the demo shows while it works: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megadask.demo.trainers import Event

#: Without a terminal, a phase tells of its first step and of about this many others, or more.
_NUM_LINES = 4
_MOST_STEPS_A_LINE = 100


class OnEvent(Protocol):
    """Takes what a trainer says."""

    def __call__(self, event: Event) -> None: ...  # noqa: D102


class Display:
    """Tells on standard error how far the demo is; standard output is for its results."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(stderr=True, highlight=False) if console is None else console

    def say(self, line: str) -> None:
        """Show a line."""
        self._console.print(line, markup=False, style="dim", soft_wrap=True)

    @contextlib.contextmanager
    def phase(self, name: str, num_steps: int) -> Iterator[OnEvent]:
        """Show how far the trainers of a phase are, while entered."""
        if not self._console.is_terminal:
            yield _Lines(self, name, num_steps)
            return
        columns: list[Any] = [
            TextColumn("{task.description:>15}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
        ]
        with Progress(*columns, console=self._console, refresh_per_second=4) as progress:
            task = progress.add_task(name, total=num_steps, status="starting trainers")

            def on_event(event: Event) -> None:
                if status := _status(event):
                    progress.update(task, status=status, completed=event.get("step", -1) + 1)

            yield on_event


class _Lines:
    def __init__(self, display: Display, name: str, num_steps: int) -> None:
        self._display, self._name, self._num_steps = display, name, num_steps
        self._every = min(max(1, num_steps // _NUM_LINES), _MOST_STEPS_A_LINE)

    def __call__(self, event: Event) -> None:
        done = event.get("step", -1) + 1
        if (status := _status(event)) and (done == 1 or done % self._every == 0):
            place = f"step {done}/{self._num_steps}, " if done else ""
            self._display.say(f"{self._name}: {place}{status}")


def _status(event: Event) -> str:
    """Return what there is to say of an event; nothing about those of higher ranks."""
    if event.get("rank") != 0:
        return ""
    if event["event"] == "ready":
        return "waiting for data"
    if event["event"] == "step":
        return f"loss {event['loss']:.3f}, {event['step_s'] * 1e3:,.0f} ms"
    return ""
