"""Accepts or rejects the groups that generators push: against their leases, the staleness bound and the run's settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from scalerl_api import wire
from scalerl_api.wire import PromptRef, PushResult, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import Core
from scalerl_coordinator.group_checks import GroupSummary, InvalidGroup, summarize_group
from scalerl_coordinator.learning import bounded
from scalerl_coordinator.leases import slot_key
from scalerl_coordinator.membership import Member
from scalerl_coordinator.partials import PartialStore, partial_key
from scalerl_coordinator.rewards import rewards, turn_returns, zero_variance
from scalerl_coordinator.slot_attempts import SlotAttempts
from scalerl_coordinator.slots import staleness
from scalerl_coordinator.state import OpenLease

log = logging.getLogger(__name__)

NEWER_SHARE = 10
"""Evaluations of a set that the forecast does not follow hold no publish, so newer weights may sample part of them. Their point
counts as mixed only if a token's version is newer by more than ``everySteps`` / ``NEWER_SHARE``; within that, the curve hardly
rises."""

Answer = tuple[PushResult, str | None]
"""Result for one pushed group, with the reason of a rejection."""


class PushedGroups:
    """Decides on a :class:`~.core.Core` which pushed groups the run takes.

    Args:
        on_generated: called with the seconds of a training group's generation, and the tokens of each completion.
    """

    def __init__(
        self,
        core: Core,
        attempts: SlotAttempts,
        partials: PartialStore,
        on_generated: Callable[[float, Sequence[int]], None],
    ) -> None:
        self._core, self._attempts, self._partials = core, attempts, partials
        self._on_generated = on_generated
        self._grading_error_logged = False
        self._unusable_logged = False

    def receive(self, member_id: str, group: wire.Group, payload: bytes, now: float) -> Answer:
        """Accept or reject one group; ``payload`` is its encoding as received, for the journal. Raises UnknownMember."""
        member = self._core.membership.get(member_id, now)
        expected = self._expected(group)
        if isinstance(expected, tuple):
            return expected
        try:
            summary = self._check(group, expected)
        except InvalidGroup as problem:
            return self._reject(group, expected, PushResult.INVALID, f"{member.name}: {problem}", now)
        member.proven = True
        self._partials.drop(partial_key(expected.prompt, expected.slot, expected.policy_version))
        self._log_grading_error(member, group, summary)
        if group.unusable_tokens and not self._unusable_logged:
            self._unusable_logged = True
            log.warning(
                "%s gave no finite log-probability for %d of the %d tokens of a group, which are not trained on; later ones are only "
                "counted, in metrics.jsonl",
                *(member.name, group.unusable_tokens, sum(summary.lengths)),
            )
        if expected.split is Split.HELD_OUT:
            self._accept_evaluation(group, expected, summary, now)
            return self._accepted(group, expected)
        identity = self._core.settings.identity
        age = staleness(self._core.state.step_of(expected.slot), summary.oldest_version)
        if age > identity.max_staleness_steps:
            reason = f"{member.name}: a token is {age} steps old at its step, {identity.max_staleness_steps} allowed"
            return self._reject(group, expected, PushResult.STALE, reason, now)
        self._accept_training(group, expected, summary, payload)
        return self._accepted(group, expected)

    def _accepted(self, group: wire.Group, expected: OpenLease) -> Answer:
        self._core.book.remove(group.lease_id)
        self._core.book.retries.pop(slot_key(expected.prompt, expected.slot), None)
        return PushResult.ACCEPTED, None

    def _accept_training(
        self, group: wire.Group, expected: OpenLease, summary: GroupSummary, payload: bytes
    ) -> None:
        settings, identity = self._core.settings, self._core.settings.identity
        verdicts = group.verdicts
        limit = identity.max_tokens(expected.prompt.task)
        group_rewards = rewards(verdicts, summary.lengths, settings.length, limit)
        turns = [completion.turns for completion in group.completions]
        has_returns = identity.credit != "Episode"
        group_returns, undiscounted = (
            [turn_returns(*of, discount) for of in zip(group_rewards, turns, strict=True) if has_returns]
            for discount in (settings.discount, 1.0)
        )
        self._on_generated(group.generation_seconds, summary.lengths)
        graded = [i for i in range(len(turns)) if i not in summary.ungraded]
        is_equal = zero_variance(
            [group_rewards[i] for i in graded],
            [undiscounted[i] for i in graded if has_returns],
            identity.credit,
        )
        next_prompt = self._refill(expected.slot, len(graded), is_equal)
        self._core.commit(
            r.GroupAccepted(
                lease_id=group.lease_id,
                slot=expected.slot,
                prompt_tokens=len(group.prompt_token_ids) // 4,
                lengths=summary.lengths,
                scores=verdicts.scores,
                truncated=summary.truncated,
                oldest_version=summary.oldest_version,
                version_tokens=summary.version_tokens,
                grading_errors=len(summary.ungraded),
                ungraded=summary.ungraded,
                masked_tokens=summary.masked_tokens,
                rewards=group_rewards,
                parts=verdicts.parts,
                next_prompt=next_prompt,
                unusable_tokens=max(0, min(group.unusable_tokens, sum(summary.lengths))),
                sample=group.sample and bounded(group.sample),
                looped=-1 if group.looped is None else max(0, min(group.looped, len(summary.lengths))),
                unanswered=summary.unanswered,
                distinct=len({completion.token_ids for completion in group.completions}),
                turns=[len(of) + 1 for of in turns] if any(turns) else [],
                returns=group_returns,
                message_tokens=sum(turn.end - turn.start for of in turns for turn in of),
                episode_seconds=group.episode_seconds,
                equal_turns=has_returns and is_equal,
            ),
            payload if next_prompt is None else b"",
        )

    def _refill(self, slot: int, graded: int, is_equal: bool) -> PromptRef | None:
        """The next prompt of the slot if the zero-variance filter will drop its group; None if the group stays."""
        core, identity = self._core, self._core.settings.identity
        tries = len(core.state.tries.get(slot, ())) + 1
        # With fewer than two verdicts the verifier failed: another prompt would cost a group and teach no more.
        is_dropped = identity.zero_variance_filter and graded > 1 and is_equal
        if tries >= identity.max_tries or not is_dropped:
            return None
        task = core.state.prompts[slot].task
        history = core.state.histories[task].as_of(core.state.step_of(slot) - identity.max_staleness_steps)
        return PromptRef(task, Split.TRAIN, core.samplers[task].refill(slot, tries, history))

    def _expected(self, group: wire.Group) -> OpenLease | Answer:
        """The lease that the group must match, also if it has expired and its slot is not issued again yet; or the answer if the group is
        no longer needed (a duplicate, or late)."""
        state = self._core.state
        lease = state.leases.get(group.lease_id)
        if lease is not None:
            return lease
        if group.split is Split.HELD_OUT:
            for evaluation in state.evaluations.values():
                result = evaluation.results.get(group.slot)
                if result is not None and result.lease_id == group.lease_id:
                    return PushResult.DUPLICATE, None
            return PushResult.LATE, "the lease had expired, or the evaluation is over"
        accepted = [one.group for one in state.tries.get(group.slot, ())]
        if group.slot in state.groups:
            accepted.append(state.groups[group.slot])
        if any(before.lease_id == group.lease_id for before in accepted):
            self._core.commit(r.Dropped(late=0, duplicate=len(group.completions)))
            return PushResult.DUPLICATE, None
        if state.expired_lease_of.get(group.slot) == group.lease_id:
            return OpenLease(state.prompts[group.slot], group.slot, -1, "")
        self._core.commit(r.Dropped(late=len(group.completions), duplicate=0))
        return PushResult.LATE, "the lease had expired and the slot was reassigned"

    def _check(self, group: wire.Group, expected: OpenLease) -> GroupSummary:
        """Check a group against its lease and summarize it. Raises InvalidGroup."""
        core, identity = self._core, self._core.settings.identity
        for name in ("prompt", "slot"):
            if getattr(group, name) != getattr(expected, name):
                raise InvalidGroup(f"{name} is {getattr(group, name)}, leased {getattr(expected, name)}")
        prompt_id = core.book.prompt_id(group.lease_id)
        if prompt_id is not None and group.prompt_id != prompt_id:
            raise InvalidGroup(f"prompt_id is {group.prompt_id!r}, leased {prompt_id!r}")
        held_out = expected.split is Split.HELD_OUT
        return summarize_group(
            group,
            identity.completions(expected.prompt),
            identity.max_tokens(expected.prompt.task),
            core.state.newest,
            teacher=core.settings.teacher and not held_out,
        )

    def _reject(
        self, group: wire.Group, expected: OpenLease, result: PushResult, reason: str, now: float
    ) -> Answer:
        core = self._core
        rollouts = len(group.completions)
        log.warning(
            "lease %s, %s slot %d, prompt %d (%s): %s: %s",
            *(
                group.lease_id,
                expected.split,
                expected.slot,
                expected.prompt.index,
                group.prompt_id,
                result,
                reason,
            ),
        )
        if group.lease_id not in core.state.leases:
            core.commit(r.Dropped(late=rollouts, duplicate=0))
            return PushResult.LATE, reason
        self._partials.drop(partial_key(expected.prompt, expected.slot, expected.policy_version))
        core.close_lease(group.lease_id, r.CloseReason(result.value), rollouts)
        self._attempts.retry_slot(expected, reason, now, failed=result is PushResult.INVALID)
        return result, reason

    def _log_grading_error(self, member: Member, group: wire.Group, summary: GroupSummary) -> None:
        """Log the process's first grading error; later ones are only counted."""
        if summary.ungraded and not self._grading_error_logged:
            self._grading_error_logged = True
            first = summary.ungraded[0]
            log.error(
                "%s, %s slot %d, prompt %s: the verifier failed on %d of %d completions, first on completions[%d]: %s; later "
                "grading errors are only counted, in the status and in metrics.jsonl",
                *(member.name, group.split, group.slot, group.prompt_id),
                *(len(summary.ungraded), len(group.completions), first, group.verdicts.errors[first]),
            )

    def _accept_evaluation(
        self, group: wire.Group, expected: OpenLease, summary: GroupSummary, now: float
    ) -> None:
        core = self._core
        evaluation = core.state.evaluations[expected.policy_version, expected.prompt.task]
        version, task = evaluation.version, evaluation.task
        newer_allowed = 0 if core.settings.follows(task) else core.settings.every_steps(task) // NEWER_SHARE
        if len(evaluation.results) + 1 == evaluation.prompts:
            core.flush_usage(now)  # this completes the evaluation, whose point records the run's time
        core.commit(
            r.EvaluationAccepted(
                lease_id=group.lease_id,
                scores=group.verdicts.scores,
                tokens=sum(summary.lengths),
                truncated=summary.truncated,
                mixed=summary.oldest_version < version or summary.newest_version > version + newer_allowed,
                grading_errors=len(summary.ungraded),
                parts=group.verdicts.parts,
                labels=core.labels_of(expected.prompt),
            )
        )
