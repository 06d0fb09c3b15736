"""The core with its journal: every decision is on disk before it is answered, and a change that cannot be written is rolled back."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal
from scalerl_coordinator.frames import CorruptJournal
from scalerl_coordinator.http import ErrorResponse
from scalerl_coordinator.journal import Journal
from scalerl_coordinator.membership import UnknownMember
from scalerl_coordinator.state import CoordinatorState
from scalerl_coordinator.trace import Trace
from scalerl_coordinator.transitions import apply

log = logging.getLogger(__name__)

_MAX_POLL_SECONDS = 60.0
_ROTATE_AT_CHECKPOINT_BYTES = 2**20
"""Size of a segment from which on a committed checkpoint starts a new one."""

T = TypeVar("T")


class LogicalClock:
    """Converts readings of a monotonic clock into seconds in which the coordinator was running.

    A member can meet a deadline only if the coordinator receives its requests. While the process is stopped or swapped out, or
    its machine suspended, it receives none. Therefore a gap between two readings counts as at most ``max_gap_seconds``, so that
    a pause does not expire leases. A reading that goes backwards counts as zero.

    >>> clock = LogicalClock(100.0, max_gap_seconds=1.0)
    >>> clock.read(100.5), clock.read(4000.0), clock.read(3999.0), clock.read(3999.25)
    (0.5, 1.5, 1.5, 1.75)
    """

    def __init__(self, reading: float, max_gap_seconds: float = 2.0) -> None:
        self._last = reading
        self._now = 0.0
        self._max_gap = max_gap_seconds

    def read(self, reading: float, *, awake: bool = True) -> float:
        """Logical seconds since construction; never decreases, and does not advance while not ``awake``."""
        gap = reading - self._last
        self._last = reading
        if awake and gap > 0:
            self._now += min(gap, self._max_gap)
        return self._now


class JournaledCore:
    """Runs decisions of a core, journals their records in order, and wakes the long polls.

    Args:
        trace: gets the records too, or None.
        on_rollback: called once the state is what the journal holds.
    """

    def __init__(
        self, core: Core, journal: Journal, trace: Trace | None, on_rollback: Callable[[], None]
    ) -> None:
        self._core, self._journal, self._trace, self._on_rollback = core, journal, trace, on_rollback
        self._clock = LogicalClock(time.monotonic() - core.meter.last)
        self._events = {WORK: asyncio.Event(), TRAINER: asyncio.Event()}
        self.closing = False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the coordinator cannot continue."""
        journal.on_refusal = self._roll_back
        journal.on_failure = self.fail

    def fail(self, problem: BaseException) -> ErrorResponse:
        """Set ``failure``, which ends the process with ``problem``. Returns the response for the current request."""
        if not self.failure.done():
            log.error("the coordinator cannot continue: %s", problem)
            self.failure.set_exception(problem)
        return ErrorResponse(500, "failed", f"the coordinator cannot continue and exits: {problem}")

    @property
    def refusing(self) -> bool:
        """Whether the journal cannot be written at present, so that no decision is made."""
        return self._journal.refusing is not None

    def now(self) -> float:
        # Deadlines do not advance while the disk cannot be written, because no request is served then.
        return self._clock.read(time.monotonic(), awake=not self.refusing)

    def flush(self) -> None:
        """Queue the outbox for the journal, and wake the long polls."""
        core, journal = self._core, self._journal
        checkpoint = False
        for record, blob in core.outbox:
            key = record.lease_id if isinstance(record, r.GroupAccepted) else None
            journal.append(r.encode(record), key, blob)
            checkpoint |= isinstance(record, r.CheckpointCommitted)
            if self._trace is not None:
                self._trace.record(record, blob, self.now())
        core.outbox.clear()
        if core.forgotten:
            journal.blobs.forget(core.forgotten)
            core.forgotten.clear()
        if journal.wants_rotation or (checkpoint and journal.segment_size > _ROTATE_AT_CHECKPOINT_BYTES):
            journal.rotate(core.state.encode())
        for topic in core.wake:
            self._events[topic].set()
            self._events[topic] = asyncio.Event()
        core.wake.clear()

    def decide(self, decision: Callable[[float], T]) -> T:
        """Run one decision of the core, and queue its records for the journal.

        Raises:
            Refusal, UnknownMember: the decision refused the request.
            ErrorResponse: the coordinator has failed, or the decision raised anything else. That may leave the state half
                changed, so the process ends and writes none of it.
        """
        if self.failure.done():
            raise ErrorResponse(500, "failed", "the coordinator exits after a failure; see its log")
        self._journal.check()
        try:
            try:
                result = decision(self.now())
            except (Refusal, UnknownMember):
                self.flush()
                raise
            self.flush()
        except (Refusal, UnknownMember):
            raise
        except Exception as problem:
            log.exception("a decision raised an exception")
            raise self.fail(problem) from problem
        return result

    async def decided(self, decision: Callable[[float], T]) -> T:
        """Run one decision and wait until its records, and all earlier ones, are on disk.

        Nothing awaits between the decision and ``durable()``, so no failed write goes unnoticed.
        """
        result = self.decide(decision)
        await self._journal.durable()
        return result

    def _roll_back(self) -> None:
        """Return the state to what the journal holds, after a write to disk failed."""
        try:
            state = load_state(self._journal)
        except (CorruptJournal, OSError) as problem:
            self.fail(problem)
            return
        self._core.rebase(state, self.now())
        self._core.journal_start()
        self._on_rollback()

    async def poll(self, topic: str, wait_seconds: float, attempt: Callable[[float], T | None]) -> T | None:
        """Call ``attempt`` now and at every event of ``topic``, until it returns a result or ``wait_seconds`` have passed.

        A result is on disk when this returns; None means that the time is over.
        """
        if not (math.isfinite(wait_seconds) and wait_seconds >= 0):
            raise Refusal("bad-request", f"wait_seconds is {wait_seconds}, must be a number of seconds")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_seconds, _MAX_POLL_SECONDS)
        while True:
            event = self._events[topic]
            result = self.decide(attempt)
            if result is not None or self.closing or loop.time() >= deadline:
                await self._journal.durable()
                return result
            try:
                async with asyncio.timeout_at(deadline):
                    await event.wait()
            except TimeoutError:
                return None

    def stop_polls(self) -> None:
        """Answer every long poll now, with an empty result."""
        self.closing = True
        for event in self._events.values():
            event.set()


def load_state(journal: Journal) -> CoordinatorState:
    """The state after all records on disk. Also loads the journal's index of the groups' tokens.

    Raises:
        CorruptJournal: acknowledged bytes are damaged, or cannot be decoded.
        OSError: they cannot be read.
    """
    recovery = journal.recover()
    try:
        state = (
            CoordinatorState() if recovery.snapshot is None else CoordinatorState.decode(recovery.snapshot)
        )
    except msgspec.DecodeError as error:
        raise CorruptJournal(
            str(journal.directory), 0, f"the snapshot's state cannot be decoded: {error}"
        ) from error
    for header, at in recovery:
        try:
            record = r.decode(header)
        except msgspec.DecodeError as error:
            raise CorruptJournal(
                f"{journal.directory}, segment {at.segment}",
                at.offset,
                f"a record cannot be decoded: {error}",
            ) from error
        apply(state, record)
        if isinstance(record, r.GroupAccepted):
            recovery.blobs[record.lease_id] = at
    recovery.retain(group.lease_id for group in state.groups.values() if not group.given_up)
    return state
