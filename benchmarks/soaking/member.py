"""A rank in a process of its own: does what each line of its input says, answers in lines of JSON.

``connect`` takes a rank and trains until another line says up to which step, or the service says
that the topology changes. Training is waiting, so that a machine of few cores has room for faults.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import megadask as md

#: A state is told every so many steps.
STATE_EVERY = 5


class Member:
    """Tells of every batch, and how long it waited for it."""

    def __init__(self) -> None:
        self._until: int | None = None
        self._orders: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def listen(self) -> None:
        """Take orders until nobody gives any."""
        for line in sys.stdin:
            order = json.loads(line)
            with self._changed:
                if order["do"] == "stop":
                    self._until = order["step"]
                else:
                    self._until = None
                    self._orders.append(order)
                self._changed.notify_all()
        with self._changed:
            self._orders.append({"do": "end"})
            self._changed.notify_all()

    def run(self) -> None:
        """Carry out orders, one after the other."""
        tell("ready")
        while True:
            with self._changed:
                while not self._orders:
                    self._changed.wait()
                order = self._orders.pop(0)
            if order.pop("do") == "end":
                return
            try:
                self._train(**order)
            except md.errors.ReshardedError:
                tell("resharded")
            except Exception as error:
                tell("error", what=f"{type(error).__name__}: {error}")

    def _train(self, address: str, service: str, rank: int, batch_s: float) -> None:
        with md.connect(address, service, rank=rank, timeout=60, force=True) as loader:
            tell("connected")
            steps, done = loader.steps(), loader.state_dict()["step"]
            while self._until is None or done < self._until:
                asked_s = time.monotonic()
                step = next(steps)
                batches = iter(step)
                while (batch := next(batches, None)) is not None:
                    got_s = time.monotonic()
                    spans = zip(batch["sample_ids"], batch["spans"].tolist(), strict=True)
                    tell(
                        "batch",
                        rank=rank,
                        mark=[batch["step"], batch["microbatch"]],
                        asked_s=asked_s,
                        got_s=got_s,
                        spans=[[*ident, *span] for ident, span in spans],
                    )
                    time.sleep(batch_s)
                    asked_s = time.monotonic()
                done = step.index + 1
                if done % STATE_EVERY == 0:
                    tell("state", rank=rank, step=done, state=loader.state_dict())
        tell("stopped", step=done)


def tell(event: str, **fields: Any) -> None:
    """Print one event."""
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    member = Member()
    threading.Thread(target=member.listen, daemon=True).start()
    member.run()
