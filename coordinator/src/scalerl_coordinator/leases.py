"""Deadlines and retries of open leases: the part of their state that a restart may lose.

:class:`~.state.CoordinatorState` records which member holds which lease. The lease book holds the deadlines, in this
process's logical time; after a restart every open lease gets its full time again. Neither a clock jump nor an outage of
the coordinator therefore expires a lease; a lost lease is only detected later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from scalerl_api.wire import PromptRef, Split

_MAX_DELAY_SECONDS = 60.0
REPORTED_ATTEMPTS = 5
"""The status reports a slot after this many failed attempts."""
MAX_FINAL_ATTEMPTS = 10
"""The final evaluation stops waiting for a prompt after this many failed attempts."""
MAX_FAILURES = 5
"""A slot is given up after this many failures (see :meth:`.slot_attempts.SlotAttempts.retry_slot`)."""

SlotKey = tuple[int, Split, int]
"""Task, split, and the training slot or the position in the evaluation set."""


def slot_key(prompt: PromptRef, slot: int) -> SlotKey:
    """The key of a slot. Training slots have task 0 in it, because a slot may be refilled with a prompt of another task."""
    return (prompt.task if prompt.split is Split.HELD_OUT else 0), prompt.split, slot


@dataclass(slots=True)
class _Open:
    holder: str
    """Name of the member."""
    deadline: float
    sent_at: float | None
    """When the response with the lease was sent; None before that."""
    prompt_id: str | None = None
    """The id that the prompt of the pushed group must have; None until the prompt has been read."""
    progress: int = 0
    """Tokens, as last reported by the holder."""


@dataclass(slots=True)
class Retries:
    """Failed attempts of a slot: its groups were rejected, or its leases expired or were released."""

    attempts: int
    not_before: float
    """End of the back-off."""
    reason: str
    """Why the last attempt failed."""
    failures: int = 0
    """Attempts that failed with a healthy member."""
    failed_by: frozenset[str] = frozenset()
    """Names of the healthy members that failed."""
    proven_failures: int = 0
    """Failures with proven members. They served another slot since they registered, so they are not the cause."""
    proven: frozenset[str] = frozenset()
    """Names of the proven members that failed."""


@dataclass(slots=True)
class LeaseBook:
    """Deadlines of open leases, and retries of slots. Times are logical seconds, which never decrease."""

    lease_seconds: float
    """Time from a lease's start, or its last progress, to its deadline."""
    retries: dict[SlotKey, Retries] = field(default_factory=dict)
    """Slots that failed since they were last served."""
    _open: dict[str, _Open] = field(default_factory=dict)
    """Leases by id, in the order in which they expire."""
    _by_holder: dict[str, set[str]] = field(default_factory=dict)

    def add(self, lease_id: str, holder: str, now: float, *, sent: bool = True) -> None:
        """Start a lease's deadline. ``sent``: the holder has the lease already; otherwise call :meth:`mark_sent` later."""
        self._open[lease_id] = _Open(holder, now + self.lease_seconds, now if sent else None)
        self._by_holder.setdefault(holder, set()).add(lease_id)

    def mark_sent(self, lease_ids: Iterable[str], now: float) -> None:
        """Record that the response with these leases is sent now: the holder's heartbeats should list them from now on."""
        for lease_id in lease_ids:
            lease = self._open.get(lease_id)
            if lease is not None:
                lease.sent_at = now

    def extend(self, lease_id: str, holder: str, progress: int, now: float) -> None:
        """Record the progress, in tokens, that ``holder`` reports for a lease. An increase restarts the lease's time."""
        lease = self._open.get(lease_id)
        if lease is not None and lease.holder == holder and progress > lease.progress:
            del self._open[lease_id]
            lease.progress, lease.deadline = progress, now + self.lease_seconds
            self._open[lease_id] = lease

    def remaining_seconds(self, lease_id: str, now: float) -> float | None:
        """Seconds to the deadline; None for a lease that is not open."""
        lease = self._open.get(lease_id)
        return None if lease is None else max(0.0, lease.deadline - now)

    def open_seconds(self, lease_id: str, now: float) -> float:
        """Seconds for which the holder has had the lease; after a restart, seconds since the restart."""
        lease = self._open.get(lease_id)
        return 0.0 if lease is None or lease.sent_at is None else now - lease.sent_at

    def remove(self, lease_id: str) -> None:
        lease = self._open.pop(lease_id, None)
        if lease is not None:
            held = self._by_holder[lease.holder]
            held.discard(lease_id)
            if not held:
                del self._by_holder[lease.holder]

    def of(self, holder: str) -> set[str]:
        """Ids of the open leases of the member named ``holder``."""
        return set(self._by_holder.get(holder, ()))

    def abandoned(self, holder: str, held: Collection[str], older_than: float) -> list[str]:
        """Ids of leases sent to ``holder`` before ``older_than`` that are not in ``held``, the list of its heartbeat."""
        return sorted(
            i
            for i in self.of(holder) - set(held)
            if (sent_at := self._open[i].sent_at) is not None and sent_at < older_than
        )

    def expired(self, now: float) -> list[str]:
        """Ids of leases past their deadline, earliest first. The caller closes them and calls :meth:`remove`."""
        expired = []
        for lease_id, lease in self._open.items():
            if lease.deadline > now:
                break
            expired.append(lease_id)
        return expired

    def set_prompt_id(self, lease_id: str, prompt_id: str) -> None:
        """Set the prompt id that the lease's group must have."""
        if lease_id in self._open:
            self._open[lease_id].prompt_id = prompt_id

    def prompt_id(self, lease_id: str) -> str | None:
        lease = self._open.get(lease_id)
        return None if lease is None else lease.prompt_id

    def add_retry(
        self,
        key: SlotKey,
        reason: str,
        now: float,
        *,
        failed_by: str | None = None,
        proven: bool = False,
    ) -> Retries:
        """Count a failed attempt of ``key``. After the first it may be issued again at once, later only after a back-off.

        Args:
            reason: why the attempt failed.
            failed_by: name of the lease's holder, if it was healthy and still could not serve the slot.
            proven: whether the holder has served other slots.
        """
        before = self.retries.get(key, Retries(0, 0.0, ""))
        attempts = before.attempts + 1
        delay = 0.0 if attempts == 1 else min(2.0 ** min(attempts - 2, 16), _MAX_DELAY_SECONDS)
        names = frozenset[str]() if failed_by is None else frozenset({failed_by})
        self.retries[key] = Retries(
            attempts,
            now + delay,
            reason,
            before.failures + len(names),
            before.failed_by | names,
            before.proven_failures + len(names) * proven,
            before.proven | (names if proven else frozenset()),
        )
        return self.retries[key]

    def attempts(self, key: SlotKey) -> int:
        """Failed attempts of ``key`` since it was last served."""
        retries = self.retries.get(key)
        return 0 if retries is None else retries.attempts

    def waits(self, key: SlotKey, now: float) -> bool:
        """Whether ``key`` is in its back-off."""
        retries = self.retries.get(key)
        return retries is not None and now < retries.not_before

    def wait_over(self, before: float, now: float) -> bool:
        """Whether the back-off of a slot ended in (before, now]."""
        return any(before < s.not_before <= now for s in self.retries.values())

    def resync(self, open_leases: dict[str, str], now: float) -> None:
        """Make the book equal to the state's open leases (id → holder); leases already in the book keep their deadlines."""
        for lease_id in [i for i in self._open if i not in open_leases]:
            self.remove(lease_id)
        for lease_id, holder in open_leases.items():
            if lease_id not in self._open:
                self.add(lease_id, holder, now)
