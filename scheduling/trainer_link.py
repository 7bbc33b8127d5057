"""The trainer's end of the line: claims a rank, keeps microbatches on their way, acknowledges.

Knows no torch; `megadask.trainer.loader` turns what it reads into tensors. Nothing here outlives
the process: what a trainer needs to go on is in the supervisor's record and in its own saved state.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Any

from distributed import Client

from megadask.planner.errors import MegaDaskError
from megadask.scheduling.courier import Courier
from megadask.scheduling.delivery import PLAN, Microbatch, Reply, StepFacts, packed_error
from megadask.scheduling.desk import GRACE_S, Desk, process_name
from megadask.scheduling.errors import ClaimError, DeadlineError, StaleError
from megadask.scheduling.line import Line
from megadask.scheduling.marks import Watermark
from megadask.scheduling.point import Point
from megadask.scheduling.prefetch import Prefetch
from megadask.scheduling.receiver import Answer, Receiver
from megadask.scheduling.share import IDS
from megadask.scheduling.track import Track
from megadask.scheduling.turning import Turning

#: What was asked of the constructor.
Call = Future[Answer]

#: How long a constructor or the supervisor holds one call before it says that it still waits.
HOLD_S = 10.0
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
        Microbatches that are kept on their way; None for a number that adapts.
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
        prefetch: int | None,
        keys: tuple[str, ...] | None,
        force: bool,
    ) -> None:
        self._desk = Desk(client, run, rank)
        self._run = run
        self.rank = rank
        self._timeout_s = timeout_s
        self._prefetch = Prefetch(prefetch)
        self._keys = None if keys is None else list(keys)
        self.wait_s = 0.0
        joined = self._desk.ask("join", client=client.id, process=process_name(), force=force)
        self._courier = Courier()
        self.receiver = Receiver(rank, self._courier)
        self._desk.ident = joined["ident"]
        self._token: str = joined["token"]
        self.sources: list[str] = joined["sources"]
        self.components: dict[str, str] = joined["components"]
        self.restarts: bool = joined["restart"]
        self.place: dict[str, Any] = joined["place"]
        beginning = Point.unpack(joined["beginning"])
        self._turning = Turning(self._desk, self._token, joined["pass"], beginning)
        self._inflight: dict[Watermark, Call | Answer] = {}
        self._track: Track
        self._mark: Watermark
        self._sent: Watermark  # the last mark that was passed on
        self._stand(joined)

    # Reading ----------------------------------------------------------------------------------

    @property
    def position(self) -> Watermark:
        """The next microbatch to read: (step, microbatch)."""
        return self._track.position

    @property
    def point(self) -> Point:
        """The point behind everything read, or that it is about to go back to; makes no call."""
        if self._turning.target is not None:
            return self._turning.target
        return self._track.point

    def facts(self) -> StepFacts | None:
        """Return what is known of the step at the position, waiting for it; None at the end."""
        return None if self._arrived() is None else self._track.facts

    def read(self) -> Microbatch | None:
        """Return the microbatch at the position and move on; None at the end of the data."""
        arrived = self._arrived()
        if arrived is None:
            return None
        header, arrays = arrived
        facts = self._track.facts
        assert facts is not None
        step, microbatch = self.position
        del self._inflight[self.position]
        is_last = self._track.advance()
        is_shared = "shared" in header
        self.receiver.num_shared += is_shared
        return Microbatch(
            step=step,
            microbatch=microbatch,
            is_last=is_last,
            num_loss_tokens=header["num_loss_tokens"],
            num_loss_tokens_step=facts.num_loss_tokens,
            cp_layout=header["cp_layout"],
            ids=arrays.pop(IDS),
            arrays=arrays,
            is_private=is_shared,
            made=header.get("made"),
        )

    def ask_ahead(self) -> None:
        """Ask for what follows what was read; what fails here fails again at the next read."""
        others = self._prefetch.count - 1  # the one that was read is no more on its way
        if others and self._turning.target is None:
            courier = None if self._prefetch.is_late else self._courier  # who waits loses no time
            with suppress(OSError, RuntimeError, TimeoutError):
                self._request_ahead(others, courier)

    def stats(self) -> dict[str, Any]:
        """Return how long this rank waited, and in which way batches came."""
        ahead = self._prefetch.count
        return {"wait_s": self.wait_s, "prefetch": ahead, **self.receiver.stats()}

    def consume(self, mark: Watermark) -> None:
        """Note that everything before ``mark`` was used; the next call passes it on."""
        self._mark = max(self._mark, mark)

    def acknowledge(self) -> None:
        """Pass on now what was used, if a constructor was ever reached; else to its successor."""
        turns = self._turning.target is not None
        if self._desk.line is None or turns or self._desk.is_over:
            return
        deadline = time.monotonic() + ACKNOWLEDGE_S
        self._look()  # a closed service says so, while a call to its actor might never end
        while True:
            try:
                if self._key is None:
                    raise RuntimeError("the constructor is being replaced")
                call = self._send_mark(self._desk.line_to(self._key))
                self._listen(call, deadline)
                return
            except MegaDaskError:
                raise
            except (OSError, RuntimeError, TimeoutError):
                if time.monotonic() > deadline:
                    raise
                self._find_constructor(REPLACE_S)

    def _send_mark(self, line: Line, courier: Courier | None = None) -> Call:
        self._sent = self._mark
        told = (self.rank, self._token, self._generation, self._mark, self.receiver.use())
        return line.call("acknowledge", *told, then=self.receiver.take, courier=courier)

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
        with suppress(OSError, RuntimeError):  # then the service is gone with it
            self.acknowledge()
            if not self._desk.is_over:
                self._desk.ask("leave", token=self._token)
        self._inflight.clear()
        self._courier.close()
        self._desk.close()

    # The wait for a microbatch ----------------------------------------------------------------

    def _arrived(self) -> Answer | None:
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
                        f"{self.position[0]}, microbatch {self.position[1]}",
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
                    if not self._has_come():
                        self._request_ahead(self._prefetch.count)
                    header, arrays = self._answer(left)
                except MegaDaskError:
                    raise
                except (OSError, RuntimeError, TimeoutError) as error:
                    waiting_for = f"its constructor ({type(error).__name__}: {error})"
                    self._find_constructor(min(REPLACE_S, left))
                    continue
                status = header["status"]
                if status == "batch":
                    if (opened := self._open(header, arrays)) is None:
                        continue
                    return opened
                if status == "end":
                    self.consume((header["step"], 0))
                    self.acknowledge()
                    return None
                del self._inflight[self.position]
                if status == "wait":
                    waiting_for = header["waiting_for"]
                elif status == "closed":
                    self._desk.refuse(header["reason"], packed_error(arrays))
                elif status == "generation":
                    self._adopt()
                elif status == "moved":
                    self._find_constructor(min(REPLACE_S, left))
                elif status == "behind" and self._track.is_at_start:
                    self._stand(self._look(with_point=True))
                elif status == "claim":
                    self._look()  # says why, as another service may have taken the name
                    raise ClaimError(f"rank {self.rank} of {self._run} belongs to another trainer")
                else:
                    raise StaleError(f"{self._run}: unexpected answer", got=header)
        finally:
            self.wait_s += time.monotonic() - begin

    def _answer(self, left_s: float) -> Answer:
        """Return the constructor's answer about the position."""
        held = self._inflight[self.position]
        if isinstance(held, tuple):
            return held
        deadline = time.monotonic() + min(left_s, HOLD_S + GRACE_S)
        waited = not held.done()
        answer = self._inflight[self.position] = self._listen(held, deadline)
        if "was_built" in answer[0]:
            facts = {name: answer[0][name] for name in ("was_built", "num_bytes")}
            self._prefetch.note(waited=waited, **facts)
        return answer

    def _listen(self, call: Call, deadline: float) -> Answer:
        """Return what a call to the constructor returns, unless that is found to be lost."""
        while True:
            try:
                return call.result(timeout=self.place["listen_s"])
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

    def _has_come(self) -> bool:
        """Whether the position's answer is there; RuntimeError if the constructor is lost.

        All ranks see that before the same batch, however many they have on their way.
        """
        self._desk.check_line()
        held = self._inflight.get(self.position)
        return isinstance(held, tuple) or (held is not None and held.done())

    def _request_ahead(self, count: int, courier: Courier | None = None) -> None:
        """Keep the next microbatches on their way, so many from the position on."""
        furthest = self.position[0] + self.place["lead_steps"] + 1  # nothing is built beyond that
        for slot in islice(self._track.ahead(), count):
            if slot[0] > furthest:
                break
            if slot not in self._inflight:
                self._inflight[slot] = self._request(slot, courier)
        for slot in [slot for slot in self._inflight if slot < self.position]:
            del self._inflight[slot]
        line = self._desk.line
        if self._mark > self._sent and line is not None:
            # No new request carried the mark; a full constructor waits for it to make room.
            self._send_mark(line, courier)

    def _request(self, slot: Watermark, courier: Courier | None) -> Call:
        self._sent = self._mark
        with_plan = slot[1] == 0 or (slot == self.position and self._track.facts is None)
        if self._key is None:
            raise RuntimeError("the constructor is being replaced")
        return self._desk.line_to(self._key).call(
            "fetch",
            self.rank,
            self._token,
            self._generation,
            slot,
            self._mark,
            min(HOLD_S, self._timeout_s / 2),
            with_plan,
            self._keys,
            self.receiver.use(),
            then=self.receiver.take,
            courier=courier,
        )

    def _open(self, header: dict[str, Any], arrays: Reply) -> Answer | None:
        """Return what came for the position; None to ask for it again."""
        if IDS not in arrays:
            self.receiver.miss(header.get("missed"))
            self._inflight.clear()
            self._look()
            return None
        text = arrays.pop(PLAN, None)
        if self._track.facts is None:
            assert text is not None
            self._track.learn(StepFacts(**header["facts"], text=text.tobytes()))
        return header, arrays

    # Where this rank stands -------------------------------------------------------------------

    def _stand(self, standing: dict[str, Any]) -> None:
        """Begin at the place that the supervisor has on record."""
        self._track = Track(Point.unpack(standing["point"]))
        self._mark = self._sent = self.position
        self._inflight.clear()
        self._generation: int = standing["generation"]
        self._origin: str = standing["origin"]
        self._key: str | None = standing["constructor"]

    def _look(
        self, lost: str | None = None, wait_s: float = 0.0, *, with_point: bool = False
    ) -> dict[str, Any]:
        """Learn who serves this rank now, waiting for another one than was lost."""
        asked = {"step": self.position[0], "lost": lost, "with_point": with_point}
        standing: dict[str, Any] = self._desk.ask("look", token=self._token, wait_s=wait_s, **asked)
        self._key = standing["constructor"]
        return standing

    def _adopt(self) -> None:
        """Go on in a new generation, if it began where this rank's own did."""
        standing = self._look()
        if standing["origin"] != self._origin:
            raise StaleError(
                f"{self._run} went back to another state",
                got=f"rank {self.rank} at step {self.position[0]} of an earlier generation",
                remedy="Load that state on every rank, or connect again.",
            )
        self._generation = standing["generation"]
        self._inflight.clear()
