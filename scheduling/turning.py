"""Where a trainer is going besides straight on: to a saved point, or into its next pass."""

from __future__ import annotations

from typing import Any

from megadask.scheduling.desk import Desk
from megadask.scheduling.point import Point


class Turning:
    """What a rank has asked for and waits to be let go to, together with the other ranks.

    Parameters
    ----------
    desk
        The rank's line to the supervisor.
    token
        Of its claim.
    number
        The pass that it takes up next, where passes begin anew.
    beginning
        Where passes begin.
    """

    def __init__(self, desk: Desk, token: str, number: int, beginning: Point) -> None:
        self._desk = desk
        self._token = token
        self._number = number
        self._beginning = beginning
        self._asked: tuple[Point, int] | None = None  # a point asked for, refusals known
        self._awaits_pass = False

    @property
    def target(self) -> Point | None:
        """Where it is going; None where it stands or reads on."""
        if self._asked is not None:
            return self._asked[0]
        return self._beginning if self._awaits_pass else None

    def load(self, point: Point) -> dict[str, Any] | None:
        """Ask to go to a point. Returns where the rank stands if it may at once."""
        self._asked = (point, -1)
        self._awaits_pass = False
        return self._ask_point(0.0)[0]

    def begin_pass(self) -> None:
        """Ask for the next pass."""
        self._asked = None
        self._awaits_pass = True

    def end_pass(self) -> None:
        """Say that this rank is done with its pass; one that it never got into counts for none."""
        if not self._awaits_pass:
            self._desk.ask("finish", token=self._token, number=self._number)
            self._number += 1
        self._awaits_pass = False

    def ask(self, wait_s: float) -> tuple[dict[str, Any] | None, str]:
        """Wait to be let go. Returns where the rank stands then, or None and what it waits for."""
        return self._ask_pass(wait_s) if self._awaits_pass else self._ask_point(wait_s)

    def _ask_point(self, wait_s: float) -> tuple[dict[str, Any] | None, str]:
        assert self._asked is not None
        point, refusals = self._asked
        told = {"token": self._token, "point": point.packed, "refusals": refusals}
        reply = self._desk.ask("rewind", wait_s=wait_s, **told)
        if reply["status"] == "wait":
            self._asked = (point, reply["refusals"])
            return None, "the other ranks to load the same state"
        self._asked = None
        return reply, ""

    def _ask_pass(self, wait_s: float) -> tuple[dict[str, Any] | None, str]:
        told = {"token": self._token, "number": self._number}
        reply = self._desk.ask("begin_pass", wait_s=wait_s, **told)
        if reply["status"] == "wait":
            return None, f"ranks {list(reply['behind'])} to end an earlier pass"
        self._awaits_pass = False
        return reply, ""
