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
from scalerl_coordinator.batcher import zero_variance
from scalerl_coordinator.core import TRAINER, WORK, Core, Refusal
from scalerl_coordinator.evaluation import Evaluation
from scalerl_coordinator.group_checks import GroupSummary, InvalidGroup, check_partials, summarize_group
from scalerl_coordinator.leases import slot_key
from scalerl_coordinator.membership import Member, UnknownMember
from scalerl_coordinator.partials import MAX_ANSWER_BYTES, PartialKey, PartialStore, partial_key
from scalerl_coordinator.rewards import rewards
from scalerl_coordinator.slots import staleness
from scalerl_coordinator.training_leases import TrainingLeases

log = logging.getLogger(__name__)

_MAX_LEASES = 4096
"""Leases in one answer."""

OTHER_SETS_EVERY = 8
"""Of so many leases, one goes to an evaluation set that the forecast does not follow before training gets the rest: such an
evaluation ends however busy the generators are, and takes an eighth of the leases at most where training needs them."""
NEWER_SHARE = 10
"""Such evaluations hold no publish. A point is mixed once a token is of a version more than this part of ``everySteps`` newer
than the evaluated one: up to there, the curve hardly rises."""

Answer = tuple[PushResult, str | None]
"""To one pushed group."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a pushed group must match."""

    prompt: PromptRef
    slot: int
    policy_version: int
    expired: bool
    """Its lease expired, and the slot is not issued again yet."""

    @property
    def split(self) -> Split:
        return self.prompt.split


class GeneratorRequests:
    """The actors' endpoints, on a :class:`~.core.Core`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._grading_error_logged = False
        self._partials = PartialStore()
        self._training = TrainingLeases(core)

    # --- membership -----------------------------------------------------------------------------

    def register(self, request: wire.Register, member_id: str, now: float) -> wire.Registered:
        """Register a generator. It keeps the leases of its name that it still holds; the others are reassigned.

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
        core.membership.register(member_id, request.name, request.control_url, now)
        for lease_id in sorted(core.book.of(request.name) - set(request.held_leases)):
            core.close_lease(lease_id, r.CloseReason.EXPIRED)
        core.wake.add(TRAINER)
        return wire.Registered(member_id=member_id, heartbeat_seconds=core.settings.heartbeat_seconds)

    def heartbeat(self, request: wire.Heartbeat, now: float) -> None:
        """Raises UnknownMember."""
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
            log.warning("%s: %s; its groups wait", member.name, request.teacher_problem)
        member.teacher_problem = request.teacher_problem
        member.generated_leases = frozenset(request.generated_leases)
        for lease_id, progress in request.progress.items():
            core.book.extend(lease_id, member.name, progress, now)
        if not member.healthy:
            core.reassign_leases(member.name)
        elif request.held_leases is not None:
            # A lease answer that was lost leaves leases without a worker; two heartbeats after it reveal them.
            older = now - 2 * core.settings.heartbeat_seconds
            for lease_id in core.book.abandoned(member.name, request.held_leases, older):
                core.close_lease(lease_id, r.CloseReason.EXPIRED)

    # --- leases ---------------------------------------------------------------------------------

    def receive_lease_request(self, request: wire.LeaseRequest, now: float) -> None:
        """Record the version in a lease request. Raises UnknownMember."""
        core = self._core
        if request.max_groups < 1:
            raise Refusal("bad-request", f"max_groups is {request.max_groups}, must be at least 1")
        member = core.membership.get(request.member_id, now)
        if core.report_version(member, request.weight_version, now):
            core.wake.add(TRAINER)
        self._training.begin_request(request.member_id, min(request.max_groups, _MAX_LEASES))

    def end_lease_request(self, member_id: str) -> None:
        """The member's lease request has its answer, or nobody waits for it any more."""
        self._training.end_request(member_id)

    def tick(self, now: float) -> None:
        """Call it a few times a second."""
        self._training.tick(now)

    def offer(self, member_id: str, max_groups: int, now: float) -> wire.Leases | None:
        """Leases for a member that polls, or None while there are none. Raises UnknownMember.

        The caller reports to the lease book when it sends them (:meth:`~.leases.LeaseBook.mark_sent`).
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
            # A version newer than any known one is of a lost lineage.
            return None
        wanted = min(max_groups, _MAX_LEASES)
        issues = self._evaluation_issues(member, wanted, now, holds=True)
        others = self._evaluation_issues(member, wanted - len(issues), now, holds=False)
        if not core.end_reason:
            first = core.state.next_lease + len(issues)
            reserved = sum(n % OTHER_SETS_EVERY == 0 for n in range(first, first + wanted - len(issues)))
            issues, others = issues + others[:reserved], others[reserved:]
            slots = self._training.choose(member, wanted - len(issues), now)
            issues += [(core.state.prompts[slot], slot, member.version) for slot in slots]
        issues += others[: wanted - len(issues)]
        if not issues:
            return None
        self._training.end_request(member_id)
        numbered = [
            r.Issue(core.state.next_lease + n, prompt, slot, version)
            for n, (prompt, slot, version) in enumerate(issues)
        ]
        core.commit(r.LeasesIssued(member.name, numbered))
        leases, room = [], MAX_ANSWER_BYTES
        for issue in numbered:
            lease = self._lease(issue, member.name, now)
            key = partial_key(lease.prompt, lease.slot, lease.policy_version)
            partial = self._partials.take(key, lease, self._continued_versions(lease, member), room)
            if partial is not None:
                room -= sum(2 * len(c.token_ids) for c in partial.completions)
                lease = msgspec.structs.replace(lease, partial=partial)
            leases.append(lease)
        return wire.Leases(leases=leases)

    def _continued_versions(self, lease: wire.Lease, member: Member) -> range:
        """The versions of tokens that ``lease`` may continue."""
        state, k = self._core.state, self._core.settings.identity.max_staleness_steps
        if lease.split is Split.HELD_OUT:
            # One that does not hold a publish is continued with newer weights than those that it measures.
            return range(max(lease.policy_version, state.lost + 1), member.version + 1)
        # Also of newer weights, and of a lost lineage, as generators that were not killed continue them: to begin again what
        # has not ended favors short completions.
        return range(state.step_of(lease.slot) - k, state.newest + 1)

    def _evaluation_issues(
        self, member: Member, wanted: int, now: float, *, holds: bool
    ) -> list[tuple[PromptRef, int, int]]:
        """Prompts of the evaluations of the forecast's set (``holds``: a publish waits for them), or of the other sets."""
        issues: list[tuple[PromptRef, int, int]] = []
        state = self._core.state

        def turn(entry: tuple[tuple[int, int], Evaluation]) -> tuple[bool, int, tuple[int, int]]:
            # A large set does not delay a small one, and a run waits at its end for evaluations of its last version alone.
            key, evaluation = entry
            return bool(self._core.end_reason) and key[0] != state.version, len(evaluation.todo), key

        for (version, task), evaluation in sorted(state.evaluations.items(), key=turn):
            if self._core.settings.follows(task) is not holds:
                continue
            if member.version == version or ((evaluation.released or not holds) and member.version > version):
                ready = (
                    p
                    for p in evaluation.todo
                    if self._core.may_issue((evaluation.task, Split.HELD_OUT, p), member, now)
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
        )

    def receive_partials(self, request: wire.Partials, now: float) -> wire.PartialsReply:
        """Keep what leases have sampled so far, for the next lease of their slots. Raises UnknownMember."""
        core, identity = self._core, self._core.settings.identity
        member = core.membership.get(request.member_id, now)
        self._partials.retain(self._is_unserved)
        unstored: dict[str, list[str]] = {"missing": [], "full": []}
        for group in request.groups:
            key = self._key_of(group, member)
            if key is None:
                continue
            try:
                completions, most = identity.completions(group.prompt), identity.max_tokens(group.prompt.task)
                check_partials(group, completions, most, core.state.newest)
            except InvalidGroup as problem:
                log.warning(
                    "lease %s: unfinished completions of %s dropped: %s", group.lease_id, member.name, problem
                )
                self._partials.drop(key)
                continue
            if (outcome := self._partials.put(key, group)) != "stored":
                unstored[outcome].append(group.lease_id)
        return wire.PartialsReply(**unstored)

    def _is_unserved(self, key: PartialKey) -> bool:
        """Whether the slot is leased, or will be."""
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
        """The key of a lease of ``member``, or of one that expired and whose slot is not issued again; None for others."""
        state = self._core.state
        lease = state.leases.get(group.lease_id)
        of_lease = (group.prompt, group.slot, member.name)
        if lease is not None and (lease.prompt, lease.slot, lease.holder) == of_lease:
            return partial_key(lease.prompt, lease.slot, lease.policy_version)
        if group.split is Split.TRAIN and state.expired_lease_of.get(group.slot) == group.lease_id:
            return partial_key(group.prompt, group.slot, -1)
        return None

    def release(self, request: wire.Release, now: float) -> None:
        """Close leases that the member does not serve. Unknown ones are ignored: they were reassigned. Raises UnknownMember."""
        failed = request.cause is ReleaseCause.FAILED
        core = self._core
        member = core.membership.get(request.member_id, now)
        for lease_id in request.lease_ids:
            lease = core.state.leases.get(lease_id)
            if lease is None:
                continue
            core.close_lease(lease_id, r.CloseReason.RELEASED)
            if failed:  # its completions may be why
                self._partials.drop(partial_key(lease.prompt, lease.slot, lease.policy_version))
            reason = f"released by {member.name}: {request.reason}"
            if request.cause is ReleaseCause.TOO_LONG:
                core.give_up(lease, r.GiveUpReason.TOO_LONG, reason, now)
            else:
                core.retry_slot(lease, reason, now, failed=failed)

    def give_up_prompts(self, failed: dict[str, str], now: float) -> None:
        """Give up leases whose prompts cannot be generated; ``failed`` has the reason of each."""
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
        most = identity.max_tokens(expected.prompt.task)
        given = rewards(verdicts, summary.lengths, settings.length, most)
        self._training.observe_group(group.generation_seconds, summary.lengths)
        next_prompt = self._refill(
            expected.slot, [g for at, g in enumerate(given) if at not in summary.ungraded]
        )
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
                rewards=given,
                parts=verdicts.parts,
                next_prompt=next_prompt,
            ),
            payload if next_prompt is None else b"",
        )
        self._core.book.remove(group.lease_id)
        self._core.book.retries.pop(slot_key(expected.prompt, expected.slot), None)
        return PushResult.ACCEPTED, None

    def _refill(self, slot: int, graded_rewards: list[float]) -> PromptRef | None:
        """The prompt that the slot is issued again with if the filter will drop its group; None if it keeps the group."""
        core, identity = self._core, self._core.settings.identity
        tries = len(core.state.tries.get(slot, ())) + 1
        # Without two verdicts the verifier failed: another prompt would cost as much, and say no more.
        drops = identity.zero_variance_filter and len(graded_rewards) > 1 and zero_variance(graded_rewards)
        if tries >= identity.max_tries or not drops:
            return None
        task = core.state.prompts[slot].task
        known = core.state.histories[task].as_of(core.state.step_of(slot) - identity.max_staleness_steps)
        return PromptRef(task, Split.TRAIN, core.samplers[task].refill(slot, tries, known))

    def _expected(self, group: wire.Group) -> _Expected | Answer:
        """What the group's lease asked for, or the answer if the group is no longer needed."""
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
        """Raises BadGroup where the group is not what its lease asked for."""
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
        """Log the first grading error; later ones are only counted."""
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
        measured, task = evaluation.version, evaluation.task
        holds = core.settings.follows(task)
        slack = 0 if holds else core.settings.every_steps(task) // NEWER_SHARE
        if len(evaluation.results) + 1 == evaluation.prompts:
            core.flush_usage(now)  # the point that follows records the time
        core.commit(
            r.EvaluationAccepted(
                lease_id=group.lease_id,
                scores=group.verdicts.scores,
                tokens=sum(summary.lengths),
                truncated=summary.truncated,
                mixed=summary.oldest_version < measured or summary.newest_version > measured + slack,
                grading_errors=len(summary.ungraded),
                parts=group.verdicts.parts,
                labels=core.labels_of(expected.prompt),
            )
        )
        core.book.remove(group.lease_id)
        core.book.retries.pop(slot_key(expected.prompt, expected.slot), None)
