"""The coordinator without its sockets and files: what is known, and the one way to change it.

Calls come in with the (logical) time. A call reads the state, decides, and hands every change to
:meth:`Core.commit`, which applies it and queues it for the journal in ``outbox``. Whoever makes the call journals
the outbox and sends the answer only when that is on disk; so an answer never rests on something that a crash could
take back. If the disk refuses, :meth:`Core.rebase` takes everything back to what the journal holds.

What members do is in :class:`~.rollouts.Rollouts`, what the trainer does in :class:`~.training.Training`.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from scalerl_api.wire import INTERRUPTED, Split
from scalerl_coordinator import records as r
from scalerl_coordinator.curriculum import Curriculum
from scalerl_coordinator.leases import HOPELESS_ATTEMPTS, MOST_FAILURES, NOTABLE_ATTEMPTS, LeaseBook, Place
from scalerl_coordinator.membership import Member, Membership
from scalerl_coordinator.rollout_records import OpenLease
from scalerl_coordinator.settings import FIXED, Settings
from scalerl_coordinator.state import State

log = logging.getLogger(__name__)

_USAGE_SECONDS = 5.0
"""How much use may go unjournaled, and so be lost with the process."""

WORK = "work"
TRAINER = "trainer"

MAX_STEPS = "maxSteps"
"""Why a run ended that used up this part of its budget: the name of the spec's field, as of all budgets."""


class Refusal(Exception):
    """A request that makes sense and is refused; ``error`` is the constant of :class:`scalerl_api.wire.Problem`."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


@dataclass(slots=True)
class _Meter:
    """Use since the last record of it."""

    last: float
    wall: float = 0.0
    device: float = 0.0
    alive: float = 0.0
    busy: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Core:
    """Everything the decisions share."""

    settings: Settings
    curriculum: Curriculum
    state: State
    membership: Membership
    book: LeaseBook
    meter: _Meter
    outbox: list[tuple[r.AnyRecord, bytes]] = field(default_factory=list)
    """Applied, not yet journaled; with each record its blob."""
    forgotten: set[str] = field(default_factory=set)
    """Leases whose blobs nobody will ask for again."""
    closed_slots: Counter[str] = field(default_factory=Counter)
    """Since the process began, whatever line they are on: training slots served (``""``), or given up, by why."""
    wake: set[str] = field(default_factory=set)
    """Who has a reason to look again: ``WORK`` (actors that poll for leases), ``TRAINER``."""

    @classmethod
    def begin(cls, settings: Settings, curriculum: Curriculum, state: State, nonce: str, now: float) -> Core:
        """Take over ``state`` (an empty one for a new run) as the process called ``nonce``.

        Raises:
            Refusal: ``identity``: the journal belongs to a run with other prompts or another seed.
        """
        check_identity(state, settings)
        before = state.identity
        core = cls(
            settings,
            curriculum,
            state,
            Membership(settings.heartbeat_seconds),
            LeaseBook(settings.lease_seconds),
            _Meter(now),
        )
        core.rebase(state, now)
        core.membership.expect({lease.holder for lease in state.leases.values()}, now)
        core.commit(r.Started(settings.identity, nonce))
        changed = [
            f"{name} {getattr(before, name)} → {getattr(settings.identity, name)}"
            for name in settings.identity.__struct_fields__
            if before is not None and getattr(before, name) != getattr(settings.identity, name)
        ]
        if changed:
            log.info("from step %d on: %s", state.batch_sizes[-1].first_step, ", ".join(changed))
        return core

    def rebase(self, state: State, now: float) -> None:
        """Go on from ``state``: members stay, deadlines of leases that are still open stay."""
        self.state = state
        self.outbox.clear()
        self.book.resync({i: lease.holder for i, lease in state.leases.items()}, now)
        self.wake |= {WORK, TRAINER}

    # --- changes --------------------------------------------------------------------------------

    def commit(self, record: r.AnyRecord, blob: bytes = b"") -> None:
        """Apply one record, and queue it for the journal."""
        state = self.state
        sweeping = isinstance(
            record, r.Started | r.CheckpointCommitted | r.TrainerJoined | r.Restored | r.Published
        )
        before = {g.lease_id for g in state.groups.values()} if sweeping else set()
        state.apply(record)
        self.outbox.append((record, blob))
        if sweeping:
            self.forgotten |= before - {g.lease_id for g in state.groups.values()}
            self.book.resync({i: lease.holder for i, lease in state.leases.items()}, self.meter.last)
        match record:
            case r.GroupAccepted():
                self.closed_slots[""] += 1
                if state.closed(state.step_of(record.slot)):
                    self.wake.add(TRAINER)
            case r.EvaluationAccepted():
                if not state.evaluations:
                    self.wake.add(TRAINER)
            case r.LeaseClosed() | r.EvaluationStarted() | r.EvaluationReleased():
                self.wake.add(WORK)
            case r.LeasesIssued() | r.UsageAdded() | r.Dropped() | r.CheckpointCommitted():
                pass
            case _:
                if isinstance(record, r.GivenUp) and record.split is Split.TRAIN:
                    self.closed_slots[record.why.value] += 1
                self.wake |= {WORK, TRAINER}

    def close_lease(self, lease_id: str, why: r.Why, rollouts: int = 0) -> None:
        self.commit(r.LeaseClosed(lease_id, why, rollouts))
        self.book.remove(lease_id)

    def spoil(self, lease: OpenLease, reason: str, now: float, *, failed: bool) -> None:
        """The lease of a place was closed without a group. ``failed``: its holder was well, and could not serve it.

        A place that failed with two members that serve others, or too often while nobody is better placed to try
        it, is given up.
        """
        place = (lease.split, lease.slot)
        member = self.membership.named(lease.holder)
        proven = member is not None and member.proven
        failed_by = lease.holder if failed else None
        spoiled = self.book.spoil(place, reason, now, failed_by=failed_by, proven=proven)
        failures = spoiled.proven_failures if proven else spoiled.failures
        often = failures >= MOST_FAILURES and not (
            member is not None and self.others_should_try(place, member)
        )
        if len(spoiled.proven) > 1 or often:
            self.give_up(lease, r.GivenUpFor.FAILED, f"failed {spoiled.failures} times, last: {reason}", now)
        elif spoiled.attempts == NOTABLE_ATTEMPTS:
            log.error("%s slot %d came back %d times, last because: %s", *place, spoiled.attempts, reason)
        if spoiled.attempts >= HOPELESS_ATTEMPTS:
            self.wake.add(TRAINER)

    def give_up(self, lease: OpenLease, why: r.GivenUpFor, reason: str, now: float) -> None:
        """The place of a closed lease is not issued again: its step, or its evaluation, goes on without it."""
        self.book.spoiled.pop((lease.split, lease.slot), None)
        held_out = lease.split is Split.HELD_OUT
        log.error(
            "%s %d (prompt %d) is given up: %s",
            *("held-out prompt" if held_out else "slot", lease.slot, lease.prompt_index, reason),
        )
        if held_out:
            self.flush_usage(now)  # the point that may follow carries the time
        self.commit(
            r.GivenUp(lease.split, lease.slot, lease.policy_version if held_out else -1, why, reason[:500])
        )

    def give_away(self, holder: str) -> None:
        """All leases of a member that will not deliver."""
        for lease_id in sorted(self.book.of(holder), key=self._lease_order):
            self.close_lease(lease_id, r.Why.EXPIRED)

    def _lease_order(self, lease_id: str) -> tuple[Split, int]:
        lease = self.state.leases[lease_id]
        return lease.split, lease.slot

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Everything that happens because time passes; call a few times a second."""
        before = self.meter.last
        self._measure(now)
        for name in self.membership.lost(now):
            self.give_away(name)
            self.wake.add(TRAINER)
        for lease_id in self.book.expired(now):
            lease = self.state.leases[lease_id]
            self.close_lease(lease_id, r.Why.TIMED_OUT)
            seconds = self.settings.lease_seconds
            self.spoil(lease, f"{lease.holder} generated nothing for {seconds:g} s", now, failed=True)
        if self.book.wait_over(before, now):
            self.wake.add(WORK)
        if self.membership.backoff_over(before, now):
            self.wake.add(TRAINER)
        if self.meter.wall >= _USAGE_SECONDS:
            self.flush_usage(now)

    def _measure(self, now: float) -> None:
        meter, members = self.meter, len(self.membership.members)
        elapsed = now - meter.last
        meter.last = now
        if not self.state.leased or self.finished:
            return
        meter.wall += elapsed
        meter.alive += elapsed * members
        meter.device += elapsed * (members * self.settings.generator_devices + self.settings.trainer_devices)

    def flush_usage(self, now: float) -> None:
        """Journal the use so far: before anything that carries the run's time."""
        self._measure(now)
        meter = self.meter
        if meter.wall or meter.busy or meter.tokens:
            self.commit(r.UsageAdded(meter.wall, meter.device, meter.alive, meter.busy, meter.tokens))
            self.meter = _Meter(now)

    def others_should_try(self, place: Place, member: Member) -> bool:
        """Whether ``place`` failed with ``member``, and somebody is there who has not tried it, or has served others."""
        spoiled = self.book.spoiled.get(place)
        if spoiled is None or member.name not in spoiled.failed_by:
            return False
        return any(
            other.healthy
            and other.version >= member.version
            and (other.name not in spoiled.failed_by or (other.proven and not member.proven))
            for other in self.membership.members.values()
            if other is not member
        )

    # --- questions ------------------------------------------------------------------------------

    @property
    def ending(self) -> str:
        """Why no further step will be trained; empty while one will."""
        if self.state.stop_reason:
            return self.state.stop_reason
        limit = self.settings.max_steps
        return MAX_STEPS if limit is not None and self.state.version >= limit else ""

    @property
    def interrupted(self) -> bool:
        """Somebody waits for the end: nothing more is generated or measured for this run."""
        return self.state.stop_reason == INTERRUPTED

    @property
    def finished(self) -> bool:
        return self.state.finished and bool(self.ending)

    @property
    def newest_possible(self) -> int:
        """The newest weight version of the present line, or of one that is lost and still in use."""
        return max(self.state.version, self.state.published)

    def stop(self, reason: str, now: float) -> None:
        """End the run in order; an empty reason takes that back."""
        self.flush_usage(now)
        self.commit(r.StopRequested(reason))


def check_identity(state: State, settings: Settings) -> None:
    """Raises Refusal where ``state`` belongs to a run with other prompts or another seed, naming every difference."""
    there, here = state.identity, settings.identity
    differences = ", ".join(
        f"{name} was {getattr(there, name)!r}, is {getattr(here, name)!r}"
        for name in FIXED
        if there is not None and getattr(there, name) != getattr(here, name)
    )
    if differences:
        raise Refusal(
            "identity",
            f"the journal belongs to a run with other settings ({differences}); "
            f"put them back, or start in an empty directory",
        )
