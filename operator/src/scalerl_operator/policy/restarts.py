"""Failure: restart what ended, as a kubelet would, and know when to give up.

What has never been ready was probably asked for wrongly: it is given up soon. What has been ready once, as it is asked for
now, can work: as long as it does not start, something around it is in its way, and it gets its whole budget of restarts, with waits that grow
long enough for that to pass. What its machine has ended, or would not begin, is no failure of its own: it is tried again
for as long as it takes, less and less often.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, replace

from scalerl_api.process import BAD_INPUT_EXIT_CODE, DIVERGED_EXIT_CODE


@dataclass(frozen=True)
class RestartPolicy:
    """The n-th consecutive restart waits ``first_delay · 2^(n−1)`` seconds, at most ``max_delay``; after an end before it was
    ready, of a unit that has been ready once, at most ``max_start_delay``.

    reset_after_seconds: after so long without a failure the count starts over.
    max_failed_starts: consecutive ends of a unit that was never ready.
    max_restarts: restarts since the count last started over.
    """

    first_delay_seconds: float = 1.0
    max_delay_seconds: float = 30.0
    reset_after_seconds: float = 600.0
    max_failed_starts: int = 5
    max_restarts: int = 20
    max_start_delay_seconds: float = 30.0


class Cause(enum.StrEnum):
    EXIT = "exit"
    STARTUP_PROBE = "startup probe"
    LIVENESS_PROBE = "liveness probe"


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended.

    exit_code: as ``subprocess`` gives it (negative: the signal); None if it was ended for a probe.
    ready_seconds: how long it had been ready; None if it never was.
    """

    cause: Cause
    exit_code: int | None
    ready_seconds: float | None

    def describe(self) -> str:
        """In words, for a person.

        >>> ProcessEnd(Cause.EXIT, -9, None).describe()
        'was killed by SIGKILL before it was ready'
        """
        if self.exit_code is None or self.cause is not Cause.EXIT:
            how = f"stopped answering its {self.cause}"
        elif self.exit_code < 0:
            how = f"was killed by {_signal_name(-self.exit_code)}"
        else:
            how = f"exited with code {self.exit_code}"
        if self.ready_seconds is None:
            return f"{how} before it was ready"
        return f"{how} after {self.ready_seconds:.0f} s of work"


@dataclass(frozen=True)
class Record:
    """What failures are remembered between restarts.

    diverged: consecutive steps were skipped since the count last started over. A crash in between changes nothing
        about that: the trainer goes through the same batches from the same checkpoint again.
    has_been_ready: once, on this spec.
    disruptions: consecutive ones; they count against nothing, and only make the next wait longer.
    """

    consecutive_failures: int = 0
    failed_starts: int = 0
    diverged: bool = False
    has_been_ready: bool = False
    disruptions: int = 0

    def reset(self) -> Record:
        """Resets all counts, of a unit that is resumed, perhaps with another spec; its checkpoint stays."""
        return Record(diverged=self.diverged)


@dataclass(frozen=True)
class Restart:
    delay_seconds: float
    record: Record


@dataclass(frozen=True)
class GiveUp:
    reason: str
    bad_input: bool = False


def decide(policy: RestartPolicy, record: Record, end: ProcessEnd) -> Restart | GiveUp:
    """What to do about an end that was not asked for.

    >>> decide(RestartPolicy(), Record(), ProcessEnd(Cause.EXIT, 1, ready_seconds=5.0)).delay_seconds
    1.0
    """
    if end.exit_code == BAD_INPUT_EXIT_CODE:
        return GiveUp("its input is wrong", bad_input=True)
    record = _after(policy, record, end.ready_seconds)
    if end.exit_code == DIVERGED_EXIT_CODE and record.diverged:
        # Training from the last checkpoint led there again: no accident of the machine.
        return GiveUp(
            "BROKEN: steps in a row were skipped again after the restart; the last checkpoint is good, see the log for "
            "what to check"
        )
    record = replace(
        record,
        consecutive_failures=record.consecutive_failures + 1,
        failed_starts=0 if end.ready_seconds is not None else record.failed_starts + 1,
        disruptions=0,
        diverged=record.diverged or end.exit_code == DIVERGED_EXIT_CODE,
    )
    if record.failed_starts > policy.max_failed_starts and not record.has_been_ready:
        return GiveUp(f"it failed {record.failed_starts} times in a row before it was ready")
    if record.consecutive_failures > policy.max_restarts:
        quiet = f"{policy.reset_after_seconds / 60:g} minutes of quiet"
        return GiveUp(f"it was restarted {policy.max_restarts} times without {quiet}")
    patient = record.has_been_ready and end.ready_seconds is None
    return Restart(_delay(policy, record.consecutive_failures, patient=patient), record)


def disrupted(policy: RestartPolicy, record: Record, ready_seconds: float | None) -> Restart:
    """What to do about an end that the unit did not cause: its machine or the scheduler ended it, or did not start it.

    >>> disrupted(RestartPolicy(), Record(consecutive_failures=20), ready_seconds=5.0).delay_seconds
    1.0
    """
    record = _after(policy, record, ready_seconds)
    record = replace(record, disruptions=record.disruptions + 1)
    return Restart(_delay(policy, record.disruptions, patient=ready_seconds is None), record)


def _after(policy: RestartPolicy, record: Record, ready_seconds: float | None) -> Record:
    """The record of a unit that was ready for so long."""
    if ready_seconds is None:
        return record
    return (
        Record(has_been_ready=True)
        if ready_seconds >= policy.reset_after_seconds
        else replace(record, has_been_ready=True)
    )


def _delay(policy: RestartPolicy, count: int, *, patient: bool) -> float:
    """Before the restart after the ``count``-th consecutive end of this kind."""
    longest = policy.max_delay_seconds
    if patient:
        longest = max(longest, policy.max_start_delay_seconds)
    # The exponent is bounded so that a long record cannot overflow a float.
    return min(policy.first_delay_seconds * 2.0 ** min(count - 1, 64), longest)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
