"""Restarts with back-off, as by a kubelet, and when to give up. Pure.

- A unit that was never ready probably has a wrong spec: it is given up soon.
- A unit that has been ready with its present spec can start. If it fails before it is ready again, the cause is probably its
  environment: it gets all its restarts, with delays long enough for the cause to pass.
- A disruption (its machine or the scheduler ended it, or did not start it) is not a failure of the unit: it is restarted
  without limit, with growing delays.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

from scalerl_api.process import BAD_INPUT_EXIT_CODE, DIVERGED_EXIT_CODE, PUBLISH_REFUSED_EXIT_CODE
from scalerl_processes.kernel import describe

MAX_POD_RESTARTS: Final = 20
"""Consecutive restarts of a pod of the coordinator, which end the run, and of a generator, which degrade it: with the back-off of a
kubelet, about 80 minutes."""

RESET_AFTER_SECONDS: Final = 600.0
"""A unit that was ready for so long resets the counts."""


@dataclass(frozen=True)
class RestartPolicy:
    """The n-th consecutive restart waits ``first_delay · 2^(n−1)`` seconds, at most ``max_delay``.

    Attributes:
        max_failed_starts: most consecutive failures of a unit that was never ready.
        max_restarts: most restarts since the last reset.
        max_start_delay_seconds: the longest delay after a failed start of a unit that has been ready before.
    """

    first_delay_seconds: float = 1.0
    max_delay_seconds: float = 30.0
    max_failed_starts: int = 5
    max_restarts: int = 20
    max_start_delay_seconds: float = 30.0


class Cause(enum.StrEnum):
    EXIT = "exit"
    STARTUP_PROBE = "startup probe"
    LIVENESS_PROBE = "liveness probe"


@dataclass(frozen=True)
class ProcessExit:
    """How a process ended.

    Attributes:
        exit_code: as ``subprocess`` gives it (negative: the signal); None if it was ended for a probe.
        ready_seconds: how long it had been ready; None if it never was.
    """

    cause: Cause
    exit_code: int | None
    ready_seconds: float | None

    def describe(self) -> str:
        """Description for messages.

        >>> ProcessExit(Cause.EXIT, -9, None).describe()
        'was killed by SIGKILL before it was ready'
        """
        if self.exit_code is None or self.cause is not Cause.EXIT:
            how = f"stopped answering its {self.cause}"
        else:
            how = describe(self.exit_code)
        if self.ready_seconds is None:
            return f"{how} before it was ready"
        return f"{how} after {self.ready_seconds:.0f} s of work"


@dataclass(frozen=True)
class Record:
    """Counts of a unit's failures between restarts.

    Attributes:
        diverged: the training diverged, and no start was ready for :data:`RESET_AFTER_SECONDS` since. A crash does not clear it:
            the trainer trains the same batches from the same checkpoint again.
        publish_refused: generators could not use the published weights, likewise.
        has_been_ready: at least once with this spec.
        disruptions: consecutive ones; they only lengthen the next delay.
    """

    consecutive_failures: int = 0
    failed_starts: int = 0
    diverged: bool = False
    publish_refused: bool = False
    has_been_ready: bool = False
    disruptions: int = 0

    def reset(self) -> Record:
        """The record of a unit that is resumed, perhaps with another spec; its checkpoint stays, and so does ``diverged``."""
        return Record(diverged=self.diverged)


@dataclass(frozen=True)
class Restart:
    delay_seconds: float
    record: Record


@dataclass(frozen=True)
class GiveUp:
    reason: str
    bad_input: bool = False


def decide(policy: RestartPolicy, record: Record, end: ProcessExit) -> Restart | GiveUp:
    """The decision after an end that was not requested.

    >>> decide(RestartPolicy(), Record(), ProcessExit(Cause.EXIT, 1, ready_seconds=5.0)).delay_seconds
    1.0
    """
    if end.exit_code == BAD_INPUT_EXIT_CODE:
        return GiveUp("its input is wrong", bad_input=True)
    record = _after_ready(record, end.ready_seconds)
    if end.exit_code == DIVERGED_EXIT_CODE and record.diverged:
        # Training diverged again from the last checkpoint, so no fault of the machine caused it.
        return GiveUp(
            "BROKEN: training diverged again after the restart; the last checkpoint is good, see the log for what to check"
        )
    if end.exit_code == PUBLISH_REFUSED_EXIT_CODE and record.publish_refused:
        # Again with new connections, and with the weights of the checkpoint, so nothing transient caused it.
        return GiveUp(
            "PUBLISH REFUSED: again after the restart, generators could not use the weights that the trainer publishes; the "
            "last checkpoint is good, see the log for what to check"
        )
    record = replace(
        record,
        consecutive_failures=record.consecutive_failures + 1,
        failed_starts=0 if end.ready_seconds is not None else record.failed_starts + 1,
        disruptions=0,
        diverged=record.diverged or end.exit_code == DIVERGED_EXIT_CODE,
        publish_refused=record.publish_refused or end.exit_code == PUBLISH_REFUSED_EXIT_CODE,
    )
    if record.failed_starts > policy.max_failed_starts and not record.has_been_ready:
        return GiveUp(f"it failed {record.failed_starts} times in a row before it was ready")
    if record.consecutive_failures > policy.max_restarts:
        quiet = f"{RESET_AFTER_SECONDS / 60:g} minutes of quiet"
        return GiveUp(f"it was restarted {policy.max_restarts} times without {quiet}")
    long_start_delay = record.has_been_ready and end.ready_seconds is None
    return Restart(_delay(policy, record.consecutive_failures, long_start_delay=long_start_delay), record)


def disrupted(policy: RestartPolicy, record: Record, ready_seconds: float | None) -> Restart:
    """The restart after a disruption.

    >>> disrupted(RestartPolicy(), Record(consecutive_failures=20), ready_seconds=5.0).delay_seconds
    1.0
    """
    record = _after_ready(record, ready_seconds)
    record = replace(record, disruptions=record.disruptions + 1)
    return Restart(_delay(policy, record.disruptions, long_start_delay=ready_seconds is None), record)


def _after_ready(record: Record, ready_seconds: float | None) -> Record:
    """The record after a start that was ready for ``ready_seconds``."""
    if ready_seconds is None:
        return record
    if ready_seconds >= RESET_AFTER_SECONDS:
        return Record(has_been_ready=True)
    return replace(record, has_been_ready=True)


def _delay(policy: RestartPolicy, count: int, *, long_start_delay: bool) -> float:
    """Seconds before the restart after the ``count``-th consecutive end."""
    longest = policy.max_delay_seconds
    if long_start_delay:
        longest = max(longest, policy.max_start_delay_seconds)
    # The exponent is bounded so that a long record cannot overflow a float.
    return min(policy.first_delay_seconds * 2.0 ** min(count - 1, 64), longest)
