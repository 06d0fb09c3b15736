"""Failed attempts at slots: which generator tries next, and when a slot is given up.

The attempts are counted in the :class:`~.leases.LeaseBook`.
"""

from __future__ import annotations

import logging

from scalerl_api.wire import Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import TRAINER, Core
from scalerl_coordinator.evaluators import Evaluators
from scalerl_coordinator.leases import (
    MAX_FAILURES,
    MAX_FINAL_ATTEMPTS,
    REPORTED_ATTEMPTS,
    SlotKey,
    slot_key,
)
from scalerl_coordinator.membership import Member
from scalerl_coordinator.state import OpenLease

log = logging.getLogger(__name__)


class SlotAttempts:
    """Decides on a :class:`~.core.Core` what becomes of slots whose leases brought no group."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._evaluators = Evaluators(core)

    def retry_slot(self, lease: OpenLease, reason: str, now: float, *, failed: bool) -> None:
        """Count a failed attempt for a lease that was closed without a group.

        The slot is given up once two proven members (those that served other slots) failed with it, or after
        ``MAX_FAILURES`` failures if no other member should try it. If those that hold the version under evaluation are exhausted, and
        others have newer weights, the evaluation is released to them instead.

        Args:
            failed: the holder is healthy and still could not serve the slot.
        """
        core = self._core
        key = slot_key(lease.prompt, lease.slot)
        member = core.membership.named(lease.holder)
        proven = member is not None and member.proven
        failed_by = lease.holder if failed else None
        retries = core.book.add_retry(key, reason, now, failed_by=failed_by, proven=proven)
        failures = retries.proven_failures if proven else retries.failures
        exhausted = failures >= MAX_FAILURES and not (
            member is not None and self.others_should_try(key, member, lease.policy_version)
        )
        if exhausted and len(retries.proven) <= 1 and self._only_newer_weights_are_left(key, lease):
            text = "%s failed %d times with the generators that have version %d, last: %s; newer weights will complete the evaluation"
            log.error(text, core.describe(key), retries.failures, lease.policy_version, reason)
            core.commit(r.EvaluationReleased(lease.policy_version, lease.prompt.task))
        elif len(retries.proven) > 1 or exhausted:
            self.give_up(
                lease, r.GiveUpReason.FAILED, f"failed {retries.failures} times, last: {reason}", now
            )
        elif retries.attempts == REPORTED_ATTEMPTS:
            log.error("%s failed %d times, last reason: %s", core.describe(key), retries.attempts, reason)
        if retries.attempts >= MAX_FINAL_ATTEMPTS:
            core.wake.add(TRAINER)

    def give_up(self, lease: OpenLease, cause: r.GiveUpReason, reason: str, now: float) -> None:
        """Stop issuing the slot of a closed lease. The slot's step or evaluation proceeds without it."""
        core = self._core
        core.book.retries.pop(slot_key(lease.prompt, lease.slot), None)
        held_out = lease.split is Split.HELD_OUT
        log.error(
            "gave up %s (prompt %d): %s",
            *(core.describe(slot_key(lease.prompt, lease.slot)), lease.prompt.index, reason),
        )
        if held_out:
            core.flush_usage(now)  # this may complete the evaluation, whose point records the run's time
        core.commit(
            r.GivenUp(
                *(lease.split, lease.slot, lease.policy_version if held_out else -1),
                *(cause, reason[:500]),
                *((lease.prompt.task, core.labels_of(lease.prompt)) if held_out else ()),
            )
        )

    def may_issue(self, key: SlotKey, member: Member, now: float, version: int = -1) -> bool:
        """Whether ``key``, of the evaluation of ``version`` or of training, may be issued to ``member`` now. A slot that failed with a
        member goes to other members first."""
        core = self._core
        return not core.book.waits(key, now) and not self.others_should_try(key, member, version)

    def others_should_try(self, key: SlotKey, member: Member, version: int = -1) -> bool:
        """Whether the slot failed with ``member`` and another healthy member is the better next choice.

        That is a member with weights at least as new that has not failed with the slot, or that is proven while ``member``
        is not. ``version``: the version under evaluation, of a prompt of an evaluation.
        """
        core = self._core
        retries = core.book.retries.get(key)
        if retries is None or member.name not in retries.failed_by:
            return False
        evaluation = core.state.evaluations.get((version, key[0])) if key[1] is Split.HELD_OUT else None
        others = [
            other
            for other in core.membership.members.values()
            if other is not member
            and other.healthy
            and other.version >= member.version
            and (other.name not in retries.failed_by or (other.proven and not member.proven))
        ]
        if not others or evaluation is None or self._evaluators.newer_may_complete(evaluation):
            return bool(others)
        chosen = self._evaluators.of(version)
        return any(m.version == version and self._evaluators.may_evaluate(key, m, chosen) for m in others)

    def _only_newer_weights_are_left(self, key: SlotKey, lease: OpenLease) -> bool:
        """Whether the prompt of a closed lease waits for its version, and members that have not failed with it have newer ones."""
        core = self._core
        evaluation = core.state.evaluations.get((lease.policy_version, key[0]))
        if lease.split is Split.TRAIN or core.settings.evaluation_generators is None:
            return False
        failed_by = core.book.retries[key].failed_by
        return (
            evaluation is not None
            and not self._evaluators.newer_may_complete(evaluation)
            and any(
                m.healthy and m.version > lease.policy_version and m.name not in failed_by
                for m in core.membership.members.values()
            )
        )
