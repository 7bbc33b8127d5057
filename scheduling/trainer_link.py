"""The trainer's end of the line: claims a rank, keeps microbatches on their way, acknowledges.

Knows no torch; `megadask.trainer.loader` turns what it reads into tensors. Nothing here outlives
the process: what a trainer needs to go on is in the supervisor's record and in its own saved state.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from distributed import Client
from numpy.typing import NDArray

from megadask.planner.errors import MegaDaskError
from megadask.scheduling.delivery import Microbatch, StepFacts, read_reply
from megadask.scheduling.desk import GRACE_S, Desk
from megadask.scheduling.errors import ClaimError, DeadlineError, StaleError
from megadask.scheduling.marks import Watermark
from megadask.scheduling.point import Point
from megadask.scheduling.portions import microbatches_of
from megadask.scheduling.turning import Turning

#: How long a constructor or the supervisor holds one call before it says that it still waits.
HOLD_S = 10.0
#: How long to wait for an answer before asking whether the constructor is still the same.
LISTEN_S = 2.0
#: Longest wait for an acknowledgement that nothing depends on but freed memory and the audit.
ACKNOWLEDGE_S = 8.0
#: How long to wait for a lost constructor to be replaced before trying the old one again.
REPLACE_S = 2.0


class TrainerLink:
    """The connection of one rank to a service.

    Parameters
    ----------
    client
        A client with ``direct_to_workers``.
    run
        Name of the pipeline's record.
    rank
        The rank to claim.
    timeout_s
        Longest wait for a microbatch.
    prefetch
        Microbatches that are kept on their way.
    keys
        Arrays to receive; None for all.
    force
        Take the rank even from a living trainer.
    """

    def __init__(
        self,
        client: Client,
        run: str,
        rank: int,
        *,
        timeout_s: float,
        prefetch: int,
        keys: tuple[str, ...] | None,
        force: bool,
    ) -> None:
        self._desk = Desk(client, run, rank)
        self._run = run
        self.rank = rank
        self._timeout_s = timeout_s
        self._prefetch = prefetch
        self._keys = None if keys is None else list(keys)
        self._facts: StepFacts | None = None
        self.wait_s = 0.0
        joined = self._desk.ask("join", client=client.id, process=process_name(), force=force)
        self._token: str = joined["token"]
        self.sources: list[str] = joined["sources"]
        self.components: dict[str, str] = joined["components"]
        self.restarts: bool = joined["restart"]
        self.place: dict[str, Any] = joined["place"]
        beginning = Point.from_json(joined["beginning"])
        self._turning = Turning(self._desk, self._token, joined["pass"], beginning)
        self._num_microbatches = 1
        self._inflight: dict[Watermark, Any] = {}
        self._position: Watermark
        self._begun: Watermark  # where this trainer took its rank up
        self._mark: Watermark
        self._sent: Watermark  # the last mark that was passed on
        self._stand(joined)

    # Reading ----------------------------------------------------------------------------------

    @property
    def position(self) -> Watermark:
        """The next microbatch to read: (step, microbatch)."""
        return self._position

    @property
    def point(self) -> Point:
        """The point behind everything read, or that it is about to go back to; makes no call."""
        if self._turning.target is not None:
            return self._turning.target
        step, microbatch = self._position
        if self._position == (self._start.step, self._start.microbatch):
            return self._start
        if microbatch == 0:
            return Point(step=step, state=self._state_before)
        assert self._facts is not None
        header = self._facts.header
        return Point.of(
            step=step,
            state=self._state_before,
            microbatch=microbatch,
            microbatch_N=microbatches_of(header),
            draw_digest=header["draw_digest"],
            assignment_digest=header["assignment_digest"],
            verdicts=header["verdicts"],
            events=header["events"],
        )

    def facts(self) -> StepFacts | None:
        """Return what is known of the step at the position, waiting for it; None at the end."""
        return None if self._arrived() is None else self._facts

    def read(self) -> Microbatch | None:
        """Return the microbatch at the position and move on; None at the end of the data."""
        arrived = self._arrived()
        if arrived is None:
            return None
        header, arrays = arrived
        facts = self._facts
        assert facts is not None
        step, microbatch = self._position
        del self._inflight[self._position]
        is_last = microbatch == facts.header["num_microbatches"] - 1
        if is_last:
            self._position = (step + 1, 0)
            self._state_before = facts.header["state_after"]
            self._facts = None
        else:
            self._position = (step, microbatch + 1)
        return Microbatch(
            step=step,
            microbatch=microbatch,
            is_last=is_last,
            num_loss_tokens=header["num_loss_tokens"],
            num_loss_tokens_step=facts.num_loss_tokens,
            cp_layout=header["cp_layout"],
            ids=arrays.pop("ids"),
            arrays=arrays,
        )

    def consume(self, mark: Watermark) -> None:
        """Note that everything before ``mark`` was used; the next call passes it on."""
        self._mark = max(self._mark, mark)

    def acknowledge(self) -> None:
        """Pass on now what was used, if a constructor was ever reached; else to its successor."""
        turns = self._turning.target is not None
        if self._desk.known_constructor is None or turns or self._desk.is_over:
            return
        deadline = time.monotonic() + ACKNOWLEDGE_S
        self._look()  # a closed service says so, while a call to its actor might never end
        while True:
            try:
                if self._key is None:
                    raise RuntimeError("the constructor is being replaced")
                call = self._send_mark(self._desk.constructor(self._key))
                self._listen(call, deadline)
                return
            except MegaDaskError:
                raise
            except (OSError, RuntimeError, TimeoutError):
                if time.monotonic() > deadline:
                    raise
                self._find_constructor(REPLACE_S)

    def _send_mark(self, actor: Any) -> Any:
        self._sent = self._mark
        return actor.acknowledge(self.rank, self._token, self._generation, self._mark)

    # Going back -------------------------------------------------------------------------------

    def rewind(self, point: Point) -> None:
        """Ask to go back to a point; the next read waits for it."""
        if (standing := self._turning.load(point)) is not None:
            self._stand(standing)

    def begin_pass(self) -> None:
        """Begin the next pass at the pipeline's beginning; the next read waits until all may."""
        self._turning.begin_pass()

    def end_pass(self) -> None:
        """Say that this rank is done with its pass."""
        self._inflight.clear()
        self._turning.end_pass()

    def close(self) -> None:
        """Acknowledge what was used and give the rank back."""
        try:
            self.acknowledge()
            if not self._desk.is_over:
                self._desk.ask("leave", token=self._token)
        except (OSError, RuntimeError, TimeoutError):
            pass  # the service is gone, and with it all that could be given back
        self._inflight.clear()

    # The wait for a microbatch ----------------------------------------------------------------

    def _arrived(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
        """Return what the constructor sent for the position, None at the end of the data."""
        begin = time.monotonic()
        deadline = begin + self._timeout_s
        waiting_for = "its constructor"
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"rank {self.rank} of {self._run} waited too long for step "
                        f"{self._position[0]}, microbatch {self._position[1]}",
                        got=f"still waiting for {self._holdup(waiting_for)}",
                        limit=f"{self._timeout_s:g} s",
                        remedy="See service.stats(), or raise connect(timeout=).",
                    )
                if self._turning.target is not None:
                    standing, waiting_for = self._turning.ask(min(HOLD_S, left))
                    if standing is not None:
                        self._stand(standing)
                    continue
                try:
                    self._request_ahead()
                    header, arrays = answer = self._answer(left)
                except MegaDaskError:
                    raise
                except (OSError, RuntimeError, TimeoutError) as error:
                    waiting_for = f"its constructor ({type(error).__name__}: {error})"
                    self._find_constructor(min(REPLACE_S, left))
                    continue
                status = header["status"]
                if status == "batch":
                    self._note(header)
                    return answer
                if status == "end":
                    self.consume((header["step"], 0))
                    self.acknowledge()
                    return None
                del self._inflight[self._position]
                if status == "wait":
                    waiting_for = header["waiting_for"]
                elif status == "closed":
                    self._desk.refuse(header["reason"], _error_bytes(arrays))
                elif status == "generation":
                    self._adopt()
                elif status == "moved":
                    self._find_constructor(min(REPLACE_S, left))
                elif status == "behind" and self._position == self._begun:
                    self._stand(self._look())
                elif status == "claim":
                    raise ClaimError(
                        f"rank {self.rank} of {self._run} no longer belongs to this trainer",
                        remedy="Another trainer took it, or its lease lapsed; connect again.",
                    )
                else:
                    raise StaleError(f"{self._run}: unexpected answer", got=header)
        finally:
            self.wait_s += time.monotonic() - begin

    def _answer(self, left_s: float) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return the constructor's answer about the position."""
        held = self._inflight[self._position]
        if isinstance(held, tuple):
            return held
        deadline = time.monotonic() + min(left_s, HOLD_S + GRACE_S)
        answer = self._inflight[self._position] = read_reply(self._listen(held, deadline))
        return answer

    def _listen(self, call: Any, deadline: float) -> Any:
        """Return what a call to the constructor returns, unless that is found to be lost."""
        while True:
            try:
                return call.result(timeout=LISTEN_S)
            except TimeoutError:
                # The call to an actor that was lost may never end; its successor is known sooner.
                before = self._key
                self._look()
                if self._key != before or time.monotonic() > deadline:
                    raise

    def _find_constructor(self, wait_s: float) -> None:
        """Learn who serves this rank in the place of a constructor that does not answer."""
        self._inflight.clear()
        self._desk.forget_constructor()
        self._look(lost=self._key, wait_s=wait_s)

    def _holdup(self, last_heard: str) -> str:
        """Return what this rank waits for, by the supervisor's account."""
        if self._turning.target is not None:
            return last_heard
        try:
            return str(self._look()["holdup"])
        except DeadlineError:
            return last_heard

    def _request_ahead(self) -> None:
        """Keep the next microbatches on their way."""
        step, microbatch = self._position
        furthest = step + self.place["lead_steps"] + 1  # nothing is built further ahead
        for _ in range(self._prefetch):
            if step > furthest:
                break
            if (step, microbatch) not in self._inflight:
                self._inflight[step, microbatch] = self._request(step, microbatch)
            microbatch += 1
            # How many microbatches a later step has is a guess; a wrong one costs an empty answer.
            known = self._facts if self._facts and self._facts.index == step else None
            count = known.header["num_microbatches"] if known else self._num_microbatches
            if microbatch >= count:
                step, microbatch = step + 1, 0
        for slot in [slot for slot in self._inflight if slot < self._position]:
            del self._inflight[slot]
        actor = self._desk.known_constructor
        if self._mark > self._sent and actor is not None:
            # No new request carried the mark; a full constructor waits for it to make room.
            self._send_mark(actor)

    def _request(self, step: int, microbatch: int) -> Any:
        self._sent = self._mark
        with_plan = microbatch == 0 or (step, microbatch) == self._position
        if self._key is None:
            raise RuntimeError("the constructor is being replaced")
        return self._desk.constructor(self._key).fetch(
            self.rank,
            self._token,
            self._generation,
            (step, microbatch),
            self._mark,
            min(HOLD_S, self._timeout_s / 2),
            with_plan,
            self._keys,
        )

    def _note(self, header: dict[str, Any]) -> None:
        """Take up what a microbatch says of its step."""
        if self._facts is not None:
            return
        plan = header["plan"]
        self._num_microbatches = plan["num_microbatches"]
        self._facts = StepFacts(
            index=plan["step"],
            num_microbatches=plan["num_microbatches"],
            num_loss_tokens=plan["num_loss_tokens"],
            imbalance=plan["imbalance"],
            header=plan,
        )

    # Where this rank stands -------------------------------------------------------------------

    def _stand(self, standing: dict[str, Any]) -> None:
        """Begin at the place that the supervisor has on record."""
        self._start = Point.from_json(standing["point"])
        self._position = self._begun = (self._start.step, self._start.microbatch)
        self._mark = self._sent = self._position
        self._state_before = self._start.state
        self._facts = None
        self._inflight.clear()
        self._generation: int = standing["generation"]
        self._origin: str = standing["origin"]
        self._key: str | None = standing["constructor"]

    def _look(self, lost: str | None = None, wait_s: float = 0.0) -> dict[str, Any]:
        """Learn who serves this rank now, waiting for another one than was lost."""
        standing: dict[str, Any] = self._desk.ask(
            "look", token=self._token, step=self._position[0], lost=lost, wait_s=wait_s
        )
        self._key = standing["constructor"]
        return standing

    def _adopt(self) -> None:
        """Go on in a new generation, if it began where this rank's own did."""
        standing = self._look()
        if standing["origin"] != self._origin:
            raise StaleError(
                f"{self._run} went back to another state",
                got=f"rank {self.rank} at step {self._position[0]} of an earlier generation",
                remedy="Load that state on every rank, or connect again.",
            )
        self._generation = standing["generation"]
        self._inflight.clear()


def _error_bytes(arrays: dict[str, NDArray[Any]]) -> bytes | None:
    return arrays["error"].tobytes() if "error" in arrays else None


def process_name() -> str:
    """Return a name of this process for claims."""
    return f"{socket.gethostname()}:{os.getpid()}"
