"""Requests of the generators: membership, leases, pushed groups."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass

import msgspec

from scalerl_api import wire
from scalerl_api.wire import PromptRef, PushResult, ReleaseCause, Split
from scalerl_coordinator import journal_records as r
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal
from scalerl_coordinator.evaluation import Evaluation
from scalerl_coordinator.group_checks import GroupSummary, InvalidGroup, check_partials, summarize_group
from scalerl_coordinator.learning import bounded
from scalerl_coordinator.leases import slot_key
from scalerl_coordinator.membership import Member, UnknownMember
from scalerl_coordinator.partials import MAX_ANSWER_BYTES, PartialKey, PartialStore, partial_key
from scalerl_coordinator.rewards import rewards, turn_returns, zero_variance
from scalerl_coordinator.slots import staleness
from scalerl_coordinator.training_leases import TrainingLeases

log = logging.getLogger(__name__)

_MAX_LEASES = 4096
"""Maximum of leases in one response."""

OTHER_SETS_EVERY = 8
"""Every eighth lease goes first to an evaluation set that the forecast does not follow. Such an evaluation therefore completes
even if training could use all generators, and takes at most an eighth of the leases from it."""
NEWER_SHARE = 10
"""Evaluations of such a set do not hold a publish, so newer weights may sample part of them. Their point counts as mixed only
if a token's version is newer by more than ``everySteps`` / ``NEWER_SHARE``; within that, the curve hardly rises."""

Answer = tuple[PushResult, str | None]
"""Result for one pushed group, with the reason of a rejection."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a pushed group must match: its lease, open or expired."""

    prompt: PromptRef
    slot: int
    policy_version: int
    expired: bool
    """Whether the lease expired; the slot is not issued again yet."""

    @property
    def split(self) -> Split:
        return self.prompt.split


class GeneratorRequests:
    """Decides the requests of the actors on a :class:`~.core.Core`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._grading_error_logged = False
        self._unusable_logged = False
        self._partials = PartialStore()
        self._leases = TrainingLeases(core)

    # --- membership -----------------------------------------------------------------------------

    def register(self, request: wire.Register, member_id: str, now: float) -> wire.Registered:
        """Register a generator. It keeps those leases of its name that it still holds; the others are reassigned.

        Raises:
            Refusal: ``task-mismatch``.
        """
        core = self._core
        digest = core.settings.identity.train_digest
        if request.task_digest != digest:
            raise Refusal(
                "task-mismatch",
                f"{request.name} has training prompts {request.task_digest[:16]}…, the coordinator {digest[:16]}…: "
                f"both must read the same run file and the same data, with the same version of the task library",
            )
        grading = tuple(request.grading) if any(request.grading) else ()
        if grading != core.settings.identity.grading:
            raise Refusal(
                "task-mismatch",
                f"{request.name} has other code of the verifier than the coordinator: it was edited during the run, or "
                "differs between nodes. Put it back, or resume the run with the new code, which begins another segment of its curve",
            )
        core.membership.register(member_id, request.name, request.control_url, now)
        for lease_id in sorted(core.book.of(request.name) - set(request.held_leases)):
            core.close_lease(lease_id, r.CloseReason.EXPIRED)
        core.wake.add(TRAINER)
        return wire.Registered(member_id=member_id, heartbeat_seconds=core.settings.heartbeat_seconds)

    def heartbeat(self, request: wire.Heartbeat, now: float) -> None:
        """Record a member's report, extend its leases, and reassign those that it will not deliver.

        Raises:
            UnknownMember
            Refusal: ``bad-request``.
        """
        core = self._core
        member = core.membership.get(request.member_id, now)
        if not (math.isfinite(request.busy_seconds) and request.busy_seconds >= 0):
            raise Refusal("bad-request", f"busy_seconds {request.busy_seconds} is not a number of seconds")
        if core.state.leased and not core.finished:
            core.meter.busy += max(0.0, request.busy_seconds - member.busy_seconds)
            core.meter.tokens += max(0, request.generated_tokens - member.generated_tokens)
        member.busy_seconds, member.generated_tokens = request.busy_seconds, request.generated_tokens
        if core.report_version(member, request.weight_version, now) or request.healthy != member.healthy:
            core.wake |= {WORK, TRAINER}
        member.healthy = request.healthy
        if request.teacher_problem and not member.teacher_problem:
            log.warning("%s: %s; its groups wait for the teacher", member.name, request.teacher_problem)
        member.teacher_problem = request.teacher_problem
        if request.reward_problem and not member.reward_problem:
            log.warning("%s: %s; its groups wait", member.name, request.reward_problem)
        member.reward_problem = request.reward_problem
        if request.environment_problem and not member.environment_problem:
            log.warning("%s: %s; its episodes wait", member.name, request.environment_problem)
        member.environment_problem = request.environment_problem
        member.generated_leases = frozenset(request.generated_leases)
        for lease_id, progress in request.progress.items():
            core.book.extend(lease_id, member.name, progress, now)
        if not member.healthy:
            core.reassign_leases(member.name)
        elif request.held_leases is not None:
            # If a response with leases was lost, no worker has them. A heartbeat may have been sent before the response
            # arrived, so a lease counts as lost only if it is missing two intervals after the response.
            two_intervals_ago = now - 2 * core.settings.heartbeat_seconds
            for lease_id in core.book.abandoned(member.name, request.held_leases, two_intervals_ago):
                core.close_lease(lease_id, r.CloseReason.EXPIRED)

    # --- leases ---------------------------------------------------------------------------------

    def receive_lease_request(self, request: wire.LeaseRequest, now: float) -> None:
        """Record the weight version in a lease request, and that the member waits for leases.

        Raises:
            UnknownMember
            Refusal: ``bad-request``.
        """
        core = self._core
        if request.max_groups < 1:
            raise Refusal("bad-request", f"max_groups is {request.max_groups}, must be at least 1")
        member = core.membership.get(request.member_id, now)
        if core.report_version(member, request.weight_version, now):
            core.wake.add(TRAINER)
        self._leases.begin_request(request.member_id, min(request.max_groups, _MAX_LEASES))

    def end_lease_request(self, member_id: str) -> None:
        """Record that the member's lease request was answered or its client disconnected."""
        self._leases.end_request(member_id)

    def tick(self, now: float) -> None:
        """Update the assignment of training leases. Call it a few times a second."""
        self._leases.tick(now)

    def offer(self, member_id: str, max_groups: int, now: float) -> wire.Leases | None:
        """Issue leases to a member that polls; None while there are none for it.

        The caller calls :meth:`~.leases.LeaseBook.mark_sent` when it sends them.

        Raises:
            UnknownMember
        """
        core = self._core
        member = core.membership.members.get(member_id)
        if member is None:
            raise UnknownMember(f"member {member_id!r} is unknown; register again")
        if core.state.finish_reason and core.end_reason:
            return wire.Leases(leases=[], stop=True)
        if core.interrupted:
            return None
        if core.state.awaits_trainer or not member.healthy or not 0 <= member.version <= core.newest_possible:
            # A version newer than any known one belongs to a lost lineage.
            return None
        wanted = min(max_groups, _MAX_LEASES)
        issues = self._evaluation_issues(member, wanted, now, followed=True)
        others = self._evaluation_issues(member, wanted - len(issues), now, followed=False)
        if not core.end_reason:
            first = core.state.next_lease + len(issues)
            reserved = sum(n % OTHER_SETS_EVERY == 0 for n in range(first, first + wanted - len(issues)))
            issues, others = issues + others[:reserved], others[reserved:]
            slots = self._leases.choose(member, wanted - len(issues), now)
            issues += [(core.state.prompts[slot], slot, member.version) for slot in slots]
        issues += others[: wanted - len(issues)]
        if not issues:
            return None
        self._leases.end_request(member_id)
        numbered = [
            r.Issue(core.state.next_lease + n, prompt, slot, version)
            for n, (prompt, slot, version) in enumerate(issues)
        ]
        core.commit(r.LeasesIssued(member.name, numbered))
        leases, bytes_left = [], MAX_ANSWER_BYTES
        for issue in numbered:
            lease = self._lease(issue, member.name, now)
            key = partial_key(lease.prompt, lease.slot, lease.policy_version)
            partial = self._partials.take(key, lease, self._continued_versions(lease, member), bytes_left)
            if partial is not None:
                bytes_left -= sum(2 * len(c.token_ids) for c in partial.completions)
                lease = msgspec.structs.replace(lease, partial=partial)
            leases.append(lease)
        return wire.Leases(leases=leases)

    def _continued_versions(self, lease: wire.Lease, member: Member) -> range:
        """Weight versions of the tokens that ``lease`` may continue from."""
        state, k = self._core.state, self._core.settings.identity.max_staleness_steps
        if lease.split is Split.HELD_OUT:
            # An evaluation that does not hold a publish may continue with newer weights than those it evaluates.
            return range(max(lease.policy_version, state.lost + 1), member.version + 1)
        # Includes newer weights and lost lineages, as generators that were not killed also continue such completions:
        # restarting unfinished completions would bias the batch towards short ones.
        return range(state.step_of(lease.slot) - k, state.newest + 1)

    def _evaluation_issues(
        self, member: Member, wanted: int, now: float, *, followed: bool
    ) -> list[tuple[PromptRef, int, int]]:
        """Up to ``wanted`` prompts of open evaluations that ``member`` may serve, as (prompt, slot, version).

        ``followed``: of the sets that the forecast follows, whose evaluations hold a publish; otherwise of the other sets.
        """
        issues: list[tuple[PromptRef, int, int]] = []
        core, state = self._core, self._core.state

        def priority(entry: tuple[tuple[int, int], Evaluation]) -> tuple[bool, int, tuple[int, int]]:
            # At the end of the run, evaluations of the last version come first: the run waits for them alone. Then the one
            # with the fewest prompts left, so that a large set does not delay a small one.
            key, evaluation = entry
            return bool(core.end_reason) and key[0] != state.version, len(evaluation.todo), key

        for (version, task), evaluation in sorted(state.evaluations.items(), key=priority):
            if core.settings.follows(task) is not followed:
                continue
            # Those that the forecast follows are of one version, unless they are released.
            chosen = None if core.newer_may_complete(evaluation) else core.evaluators(version)
            if member.version == version or (chosen is None and member.version > version):
                keys = ((task, Split.HELD_OUT, p) for p in evaluation.todo)
                ready = (
                    key[2]
                    for key in keys
                    if chosen is None or core.may_evaluate(key, member, chosen)
                    if core.may_issue(key, member, now, version)
                )
                positions = itertools.islice(ready, wanted - len(issues))
                issues += [(PromptRef(task, evaluation.split, at), at, version) for at in positions]
        return issues

    def _lease(self, issue: r.Issue, holder: str, now: float) -> wire.Lease:
        core, identity = self._core, self._core.settings.identity
        lease_id = core.state.lease_id(issue.number)
        core.book.add(lease_id, holder, now, sent=False)
        held_out = issue.prompt.split is Split.HELD_OUT
        return wire.Lease(
            lease_id=lease_id,
            prompt=issue.prompt,
            slot=issue.slot,
            prompt_id="",
            completions=identity.completions(issue.prompt),
            max_tokens=identity.max_tokens(issue.prompt.task),
            temperature=identity.evaluation_temperature if held_out else core.settings.temperature,
            remaining_seconds=core.book.lease_seconds,
            policy_version=issue.policy_version,
            lost_version=core.state.lost,
            record=core.settings.records(issue.prompt),
        )

    def receive_partials(self, request: wire.Partials, now: float) -> wire.PartialsReply:
        """Keep the unfinished completions of leases for the next leases of their slots. Raises UnknownMember."""
        core, identity = self._core, self._core.settings.identity
        member = core.membership.get(request.member_id, now)
        self._partials.retain(self._is_unserved)
        unstored: dict[str, list[str]] = {"missing": [], "full": []}
        for group in request.groups:
            key = self._key_of(group, member)
            if key is None:
                continue
            try:
                completions, limit = (
                    identity.completions(group.prompt),
                    identity.max_tokens(group.prompt.task),
                )
                check_partials(group, completions, limit, core.state.newest)
            except InvalidGroup as problem:
                log.warning(
                    "lease %s: dropped unfinished completions of %s: %s", group.lease_id, member.name, problem
                )
                self._partials.drop(key)
                continue
            if (outcome := self._partials.put(key, group)) != "stored":
                unstored[outcome].append(group.lease_id)
        return wire.PartialsReply(**unstored)

    def _is_unserved(self, key: PartialKey) -> bool:
        """Whether the slot is leased or will be issued (again)."""
        (task, split, slot), version = key
        state = self._core.state
        if split is Split.TRAIN:
            return slot in state.prompts and slot not in state.groups
        evaluation = state.evaluations.get((version, task))
        return evaluation is not None and slot not in evaluation.results

    @property
    def partial_bytes(self) -> int:
        """Bytes of unfinished completions kept for the next leases."""
        return self._partials.nbytes

    def _key_of(self, group: wire.PartialGroup, member: Member) -> PartialKey | None:
        """The key if the lease is ``member``'s, or expired and its slot is not issued again yet; else None."""
        state = self._core.state
        lease = state.leases.get(group.lease_id)
        if lease is not None and (lease.prompt, lease.slot, lease.holder) == (
            group.prompt,
            group.slot,
            member.name,
        ):
            return partial_key(lease.prompt, lease.slot, lease.policy_version)
        if group.split is Split.TRAIN and state.expired_lease_of.get(group.slot) == group.lease_id:
            return partial_key(group.prompt, group.slot, -1)
        return None

    def release(self, request: wire.Release, now: float) -> None:
        """Close leases that the member will not serve. Unknown ones were reassigned and are ignored. Raises UnknownMember."""
        failed = request.cause is ReleaseCause.FAILED
        core = self._core
        member = core.membership.get(request.member_id, now)
        for lease_id in request.lease_ids:
            lease = core.state.leases.get(lease_id)
            if lease is None:
                continue
            core.close_lease(lease_id, r.CloseReason.RELEASED)
            if failed:  # its unfinished completions may be the cause
                self._partials.drop(partial_key(lease.prompt, lease.slot, lease.policy_version))
            reason = f"released by {member.name}: {request.reason}"
            if request.cause is ReleaseCause.TOO_LONG:
                core.give_up(lease, r.GiveUpReason.TOO_LONG, reason, now)
            else:
                core.retry_slot(lease, reason, now, failed=failed)

    def give_up_prompts(self, failed: dict[str, str], now: float) -> None:
        """Give up leases whose prompts cannot be generated; ``failed`` maps lease ids to reasons."""
        for lease_id, reason in failed.items():
            lease = self._core.state.leases.get(lease_id)
            if lease is not None:
                self._core.close_lease(lease_id, r.CloseReason.RELEASED)
                self._core.give_up(lease, r.GiveUpReason.FAILED, reason, now)

    # --- pushes ---------------------------------------------------------------------------------

    def push(self, member_id: str, group: wire.Group, payload: bytes, now: float) -> Answer:
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
            return PushResult.ACCEPTED, None
        settings = self._core.settings
        identity = settings.identity
        age = staleness(self._core.state.step_of(expected.slot), summary.oldest_version)
        if age > identity.max_staleness_steps:
            reason = f"{member.name}: a token is {age} steps old at its step, {identity.max_staleness_steps} allowed"
            return self._reject(group, expected, PushResult.STALE, reason, now)
        verdicts = group.verdicts
        limit = identity.max_tokens(expected.prompt.task)
        group_rewards = rewards(verdicts, summary.lengths, settings.length, limit)
        turns = [completion.turns for completion in group.completions]
        has_returns = identity.credit != "Episode"
        group_returns, undiscounted = (
            [turn_returns(*of, discount) for of in zip(group_rewards, turns, strict=True) if has_returns]
            for discount in (settings.discount, 1.0)
        )
        self._leases.observe_group(group.generation_seconds, summary.lengths)
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
        self._core.book.remove(group.lease_id)
        self._core.book.retries.pop(slot_key(expected.prompt, expected.slot), None)
        return PushResult.ACCEPTED, None

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

    def _expected(self, group: wire.Group) -> _Expected | Answer:
        """What the group must match, or the answer if it is no longer needed (a duplicate, or late)."""
        state = self._core.state
        lease = state.leases.get(group.lease_id)
        if lease is not None:
            return _Expected(lease.prompt, lease.slot, lease.policy_version, False)
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
            return _Expected(state.prompts[group.slot], group.slot, -1, True)
        self._core.commit(r.Dropped(late=len(group.completions), duplicate=0))
        return PushResult.LATE, "the lease had expired and the slot was reassigned"

    def _check(self, group: wire.Group, expected: _Expected) -> GroupSummary:
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
        self, group: wire.Group, expected: _Expected, result: PushResult, reason: str, now: float
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
        if expected.expired:
            core.commit(r.Dropped(late=rollouts, duplicate=0))
            return PushResult.LATE, reason
        lease = core.state.leases[group.lease_id]
        self._partials.drop(partial_key(lease.prompt, lease.slot, lease.policy_version))
        core.close_lease(group.lease_id, r.CloseReason(result.value), rollouts)
        core.retry_slot(lease, reason, now, failed=result is PushResult.INVALID)
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
        self, group: wire.Group, expected: _Expected, summary: GroupSummary, now: float
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
        core.book.remove(group.lease_id)
        core.book.retries.pop(slot_key(expected.prompt, expected.slot), None)
